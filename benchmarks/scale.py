"""Documents of 1,000 and 10,000 ranks: what planning, commit and discovery cost: ``python -m benchmarks scale``.

No shard is written: the coordinator's own code runs on results as so many ranks would report them, over a store in
memory that counts requests. Times are of this machine's CPU; requests are exact; seconds at a service's limit and money
are arithmetic from them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.prices import SERVICES, Requests
from txstore.catalog import newest
from txstore.checksum import BLOCK_BYTES, combine_blocks
from txstore.columns import column_bytes
from txstore.dcp.metadata import Placed, build_index, build_metadata
from txstore.dcp.results import items_of, match
from txstore.dcp.saved import LazyTensorMetadata
from txstore.decisions import read_index, read_manifest
from txstore.index import FileRecord, Index
from txstore.keys import shard_key
from txstore.memory import MemoryStore
from txstore.shards.layout import SHARD_BYTES
from txstore.shards.reading import Wanted, plan_reads
from txstore.store import ObjectInfo, Source, Store
from txstore.transaction import Shard, Ticket, begin

TOTAL_BYTES = 4 << 40
"""Of the whole checkpoint, as of a model of some 300 billion parameters with AdamW's state in mixed precision."""

CHUNK_BYTES_MAX = 64 << 20
"""So a small number of chunks makes a small checkpoint."""

PAGE_KEYS = 1000
"""Keys of one page of a listing, on every service."""


class CountingStore(Store):
    """A store in memory that counts verbs, and has shards of any size without their bytes."""

    needs_probe = False

    def __init__(self) -> None:
        self._inner = MemoryStore()
        self.url = self._inner.url
        self.shards: dict[str, Shard] = {}
        self.verbs: Counter[str] = Counter()

    def put(self, key: str, source: Source) -> ObjectInfo:
        self.verbs["put"] += 1
        return self._inner.put(key, source)

    def create(self, key: str, data: bytes) -> None:
        self.verbs["put"] += 1
        self._inner.create(key, data)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        self.verbs["get"] += 1
        return self._inner.read(key, start, size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.verbs["get"] += 1
        return self._inner.read_into(key, start, buffer)

    def head(self, key: str) -> ObjectInfo:
        self.verbs["head"] += 1
        if (shard := self.shards.get(key)) is not None:
            return ObjectInfo(key, shard.size, shard.crc32c)
        return self._inner.head(key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        found = list(self._inner.list(prefix, start_after))
        found += [ObjectInfo(key, one.size) for key, one in self.shards.items() if key.startswith(prefix)]
        self.verbs["list"] += max(1, -(-len(found) // PAGE_KEYS))
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        self.verbs["delete"] += 1
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()


def timed(seconds: dict[str, float], name: str, call: Callable[[], Any]) -> Any:
    """Call, and note the CPU time that it took: there is no waiting in it, and a busy machine does not change it."""
    began = time.process_time()
    found = call()
    seconds[name] = time.process_time() - began
    return found


def state(ranks: int, chunks: int) -> tuple[Metadata, list[list[MetadataIndex]]]:
    """What DCP's planner makes of tensors that are sharded over all ranks: the metadata, and each rank's items."""
    tensors = max(1, chunks // ranks)
    rows = torch.Size([max(1, min(TOTAL_BYTES // chunks, CHUNK_BYTES_MAX) // 4)])
    properties = TensorProperties(dtype=torch.float32)
    whole: dict[str, Any] = {}
    items: list[list[MetadataIndex]] = [[] for _ in range(ranks)]
    for tensor in range(tensors):
        name = f"model.layers.{tensor}.mlp.up_proj.weight"
        places = [torch.Size([rank * rows[0]]) for rank in range(ranks)]
        parts = [ChunkStorageMetadata(offsets=place, sizes=rows) for place in places]
        whole[name] = TensorStorageMetadata(properties, torch.Size([ranks * rows[0]]), parts)
        for rank, place in enumerate(places):
            items[rank].append(MetadataIndex(name, place))
    return Metadata(whole), items


def reports(ticket: Ticket, items: Sequence[Sequence[MetadataIndex]], chunk_bytes: int) -> list[list[WriteResult]]:
    """What each rank reports: its chunks one after the other in files of the usual size."""
    found = []
    for rank, mine in enumerate(items):
        a_file = max(1, SHARD_BYTES // chunk_bytes)
        shards = [
            _shard(ticket, rank, number, 4096 + chunk_bytes * len(mine[start : start + a_file]))
            for number, start in enumerate(range(0, len(mine), a_file))
        ]
        found.append(
            [
                WriteResult(
                    index,
                    chunk_bytes,
                    Placed(shards[at // a_file], 4096 + chunk_bytes * (at % a_file), chunk_bytes, 0),
                )
                for at, index in enumerate(mine)
            ]
        )
    return found


def _shard(ticket: Ticket, rank: int, number: int, size: int) -> Shard:
    blocks = (0x12345678,) * -(-size // BLOCK_BYTES)
    return Shard(shard_key(ticket.checkpoint, ticket.txn, rank, number), rank, size, _crc(blocks, size), blocks)


def _crc(blocks: tuple[int, ...], size: int, known: dict[int, int] = {}) -> int:  # noqa: B006 - a cache
    if size not in known:
        known[size] = combine_blocks(blocks, size)
    return known[size]


def load_plan(metadata: Metadata, mine: Sequence[MetadataIndex], chunk_bytes: int, *, narrow: bool) -> int:
    """What a planner does for one rank that loads what it saved; how many reads that makes."""
    sizes = torch.Size([chunk_bytes // 4])
    found = 0
    for index in mine:
        saved = metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, LazyTensorMetadata)
        assert index.offset is not None
        local = [ChunkStorageMetadata(index.offset, sizes)]
        found += len(create_read_items_for_chunk_list(index.fqn, saved.near(local) if narrow else saved, local))
    return found


def measure(ranks: int, chunks: int) -> dict[str, Any]:
    """One checkpoint: seconds of each part of the coordinator's work and of a reader's, requests, sizes, money."""
    metadata, items = state(ranks, chunks)
    chunk_bytes = 4 * next(iter(metadata.state_dict_metadata.values())).chunks[0].sizes[0]
    store, seconds = CountingStore(), dict[str, float]()
    transaction = timed(seconds, "begin", lambda: begin(store, "step-1000", world_size=ranks))
    planned = timed(seconds, "plan", lambda: [items_of(mine) for mine in items])
    results = reports(transaction.ticket, items, chunk_bytes)
    placed = timed(seconds, "match results", lambda: match(transaction.ticket, planned, results))
    index, shards = timed(seconds, "build index", lambda: build_index(metadata, placed))
    store.shards = {shard.key: shard for shard in shards}
    timed(seconds, "commit", lambda: transaction.commit(shards, index))
    saved = Counter(store.verbs)
    store.verbs.clear()
    decision = timed(seconds, "find the newest", lambda: newest(store))
    manifest = timed(seconds, "read manifest", lambda: read_manifest(store, decision))
    found = timed(seconds, "read and check index", lambda: read_index(store, decision, manifest))
    known = timed(seconds, "DCP metadata from index", lambda: build_metadata(found, manifest.index.key))
    mine = items[ranks // 2]
    for name, narrow in (
        ("a rank's load plan, StrictLoadPlanner", True),
        ("a rank's load plan, DefaultLoadPlanner", False),
    ):
        timed(seconds, name, partial(load_plan, known, mine, chunk_bytes, narrow=narrow))
    loaded = Counter(store.verbs)
    return {
        "ranks": ranks,
        "chunks": sum(map(len, items)),
        "bytes": sum(shard.size for shard in shards),
        "shards": len(shards),
        "manifest_bytes": decision.manifest.size if decision.manifest else 0,
        "index_bytes": manifest.index.size,
        "fetched_bytes": ranks * (manifest.index.size + (decision.manifest.size if decision.manifest else 0)),
        "seconds": seconds,
        "coordinator": dict(saved),
        "reader": dict(loaded),
        "services": _at_services(shards, results[0], saved, loaded, ranks),
    }


def _at_services(
    shards: list[Shard], rank_0: list[WriteResult], saved: Counter[str], loaded: Counter[str], ranks: int
) -> list[dict[str, Any]]:
    reads = ranks * _reads(rank_0)
    found = []
    for service in SERVICES:
        uploads = service.uploads([shard.size for shard in shards])
        save = Requests(writes=uploads + saved["put"], reads=saved["get"] + saved["head"], lists=saved["list"])
        documents = loaded["get"] + loaded["head"]
        load = Requests(writes=0, reads=reads + ranks * documents, lists=ranks * loaded["list"])
        found.append(service.estimate(save, load, ranks))
    return found


def _reads(results: list[WriteResult]) -> int:
    """Requests in which a rank reads back what it wrote."""
    places = [result.storage_data for result in results]
    files = {place.shard.key: number for number, place in enumerate(places)}
    memory = memoryview(bytearray(max(place.length for place in places)))
    wanted = [
        Wanted(files[place.shard.key], place.start, place.start + place.length, memory[: place.length])
        for place in places
    ]
    return len(plan_reads(wanted, [place.shard.size for place in places]))


def growth(steps: Sequence[int]) -> list[dict[str, Any]]:
    """Requests and time of a small commit, and of finding the newest, in stores that hold so many steps already."""
    found = []
    store, held = CountingStore(), 0
    for wanted in sorted(steps):
        while held < wanted:
            held += 1
            _commit_small(store, held)
        store.verbs.clear()
        seconds: dict[str, float] = {}
        held += 1
        timed(seconds, "commit", partial(_commit_small, store, held))
        commit = dict(store.verbs)
        store.verbs.clear()
        timed(seconds, "newest", lambda: newest(store))
        found.append({"steps": wanted, "commit": commit, "newest": dict(store.verbs), "seconds": seconds})
    return found


def _commit_small(store: CountingStore, step: int) -> None:
    transaction = begin(store, f"step-{step}", world_size=1)
    shard = _shard(transaction.ticket, 0, 0, BLOCK_BYTES)
    store.shards = {shard.key: shard}
    blocks = column_bytes("I", shard.blocks)
    transaction.commit([shard], Index(files=(FileRecord(shard.key, shard.size, blocks),), items=()))


def show(results: list[dict[str, Any]], grown: list[dict[str, Any]]) -> None:
    """The tables."""
    console = Console(width=128)
    table = Table(title="the coordinator's and a reader's CPU time, s", title_justify="left")
    table.add_column("step")
    for one in results:
        table.add_column(f"{one['ranks']:,} ranks\n{one['chunks']:,} chunks\n{one['shards']:,} files", justify="right")
    for name in results[0]["seconds"]:
        table.add_row(name, *(f"{one['seconds'][name]:.3f}" for one in results))
    table.add_section()
    for name in ("manifest_bytes", "index_bytes"):
        table.add_row(name.replace("_bytes", ", MB"), *(f"{one[name] / 1e6:.1f}" for one in results))
    table.add_row("both, by all ranks, GB", *(f"{one['fetched_bytes'] / 1e9:.0f}" for one in results))
    for who in ("coordinator", "reader"):
        table.add_row(f"requests of the {who}", *(_spelled(one[who]) for one in results))
    console.print(table)
    table = Table(title="against published limits, one key prefix; list prices", title_justify="left")
    for column in (
        "service",
        "ranks",
        "save: requests",
        "at its limit, s",
        "money",
        "load: requests",
        "at its limit, s",
    ):
        table.add_column(column, justify="left" if column == "service" else "right")
    for one in results:
        for service in one["services"]:
            table.add_row(
                service["name"],
                f"{one['ranks']:,}",
                f"{service['save_requests']:,}",
                f"{service['save_s']:.0f}",
                f"${service['save_usd']:.2f}",
                f"{service['load_requests']:,}",
                f"{service['load_s']:.0f}",
            )
        table.add_section()
    console.print(table)
    table = Table(title="cost against steps in the store", title_justify="left")
    for column in ("steps there", "commit: requests", "commit, ms", "find the newest: requests", "newest, ms"):
        table.add_column(column, justify="right")
    for one in grown:
        times = [f"{one['seconds'][name] * 1e3:.1f}" for name in ("commit", "newest")]
        table.add_row(f"{one['steps']:,}", _spelled(one["commit"]), times[0], _spelled(one["newest"]), times[1])
    console.print(table)


def _spelled(verbs: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {verb}" for verb, count in sorted(verbs.items()))


def main(arguments: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--chunks", type=int, nargs="+", default=[100_000, 1_000_000], help="for every number of ranks")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 10, 100, 1000, 5000])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scale.json")
    options = parser.parse_args(arguments)
    results = [measure(ranks, chunks) for ranks in options.ranks for chunks in options.chunks]
    grown = growth(options.steps)
    show(results, grown)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"checkpoints": results, "steps": grown}, indent=1) + "\n")
