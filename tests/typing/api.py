"""The public names as users write them, checked by mypy --strict and never run."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Iterator

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader as DcpReader
from torch.distributed.checkpoint.storage import StorageWriter as DcpWriter

import txstore
from txstore import Store, open_store
from txstore.dcp import StorageReader, StorageWriter, StrictLoadPlanner
from txstore.errors import Conflict, StoreError, TxStoreError
from txstore.event_log import EventLog, UnknownEvent, read_events
from txstore.events import Event, Observer, Observers, SaveFailed, SaveSkipped, error_fields, restore_reason
from txstore.metrics import Metrics
from txstore.store import BytesSource, ObjectInfo, Source


def stores(path: pathlib.Path) -> None:
    """open_store takes a URL or a path, and gives a Store."""
    store: Store = open_store("file:///checkpoints/run-1")
    store = open_store(path)
    with open_store("file:///checkpoints/run-1") as opened:
        same: Store = opened
    source: Source = BytesSource(b"bytes")
    info: ObjectInfo = store.put("data/key", source)
    size: int = info.size
    crc: int | None = info.crc32c
    found: Iterator[ObjectInfo] = same.list("commits/", start_after="commits/a")
    data: bytes = store.read("data/key", 0, 10)
    count: int = store.read_into("data/key", 0, memoryview(bytearray(4)))
    version: str = txstore.__version__
    print(size, crc, found, data, count, version)


def misuse(store: Store) -> None:
    """What must not type-check; mypy reports an ignore that is not needed."""
    store.put("data/key", b"bytes")  # type: ignore[arg-type]
    store.create("data/key", "text")  # type: ignore[arg-type]
    open_store(5)  # type: ignore[arg-type]
    Store()  # type: ignore[abstract]
    TxStoreError("message", "key")  # type: ignore[call-arg]


def errors(error: TxStoreError) -> None:
    """Each class of the tree is caught by the classes above it, and keeps its fields."""
    root: TxStoreError = StoreError("message", key="data/key", rank=1, next_step="again")
    winner: str = Conflict("message").winner
    same: Conflict = Conflict("message").at_rank(0)
    fields: tuple[str, str, int | None, str] = (error.message, error.key, error.rank, error.next_step)
    print(root, winner, same, fields, pickle.dumps(error))


def pair(state: dict[str, object], store: Store, path: pathlib.Path) -> None:
    """The DCP pair takes a URL, a path or a store, and goes where DCP's own classes go."""
    writer: DcpWriter = StorageWriter("file:///checkpoints/run-1", overwrite=True)
    reader: DcpReader = StorageReader(store)
    save(state, checkpoint_id="step-100", storage_writer=writer)
    load(state, storage_reader=reader, planner=StrictLoadPlanner())
    load(state, checkpoint_id="step-100", storage_reader=StorageReader(path, strict=False))
    StorageWriter("file:///checkpoints/run-1", True)  # type: ignore[call-arg]
    StorageWriter()  # type: ignore[call-arg]


def events(path: pathlib.Path, error: TxStoreError) -> None:
    """An observer is any callable that takes an event; the log and the metrics are two of them."""

    def mine(event: Event) -> None:
        print(event.checkpoint, event.step)
        if isinstance(event, SaveFailed):
            print(event.phase, event.failed_rank)

    log: Observer = EventLog(path, fsync=True)
    metrics = Metrics(labels={"run": "run-1"}, textfile=path)
    tell: Observer = Observers(log, metrics, mine, print)
    tell(SaveSkipped(at_s=0.0, rank=0, world_size=1, checkpoint="step-1", step=1, reason="in_flight"))
    facts = error_fields(error)
    tell(SaveFailed(at_s=0.0, rank=0, world_size=1, checkpoint="", step=None, phase="copy", consecutive=1, **facts))
    known: list[Event] = [event for event in read_events(path) if not isinstance(event, UnknownEvent)]
    port: int = metrics.serve()
    metrics.progress(5)
    metrics.close(remove_textfile=False)
    print(known, port, restore_reason(error))
    SaveSkipped(at_s=0.0, rank=0, world_size=1, checkpoint="", step=1, reason="tired")  # type: ignore[arg-type]
    Observers("events.jsonl")  # type: ignore[arg-type]
