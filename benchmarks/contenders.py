"""Who is compared: each saves and loads a state under a name. Imported by rank processes of either environment.

Every contender keeps its writer and reader for all its saves, as a training run would; all that take a number of
threads get two, and DCP's own writers run once with their default of one besides.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import raw

State = dict[str, Any]
Place = dict[str, Any]
"""Where checkpoints go: ``url`` of an empty root, and ``options`` of its server."""

THREADS = 2


class Contender(ABC):
    """One way to save and load."""

    def __init__(self, place: Place) -> None:
        self.url: str = place["url"]
        self.options: dict[str, Any] = place["options"]

    read_bytes: int | None = None
    """Bytes of data that loads have read so far, where the contender can tell."""

    @abstractmethod
    def save(self, state: State, name: str) -> None:
        """Save; on return the checkpoint is durable."""

    @abstractmethod
    def load(self, state: State, name: str) -> None:
        """Load into the tensors of `state`, which may be a part of what was saved."""


class TxStore(Contender):
    """The pair of this project: committed, verified."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from txstore.dcp import StorageReader, StorageWriter

        self._writer = StorageWriter(self.url, **self.options)
        self._reader = StorageReader(self.url, strict=False, share=self._group(), **self.options)
        self._count_reads()

    def _group(self) -> dist.ProcessGroup | None:
        """Over which reads are shared."""
        return None

    def _count_reads(self) -> None:
        from txstore.shards.reading import BlockReader

        self.read_bytes = 0
        read_blocks, lock = BlockReader.read_blocks, threading.Lock()

        def counted(reader: BlockReader, number: int, start: int, buffer: memoryview) -> None:
            read_blocks(reader, number, start, buffer)
            with lock:
                self.read_bytes = (self.read_bytes or 0) + buffer.nbytes

        BlockReader.read_blocks = counted

    def save(self, state: State, name: str) -> None:
        dcp.save(state, storage_writer=self._writer, checkpoint_id=name)

    def load(self, state: State, name: str) -> None:
        dcp.load(state, storage_reader=self._reader, checkpoint_id=name)


class Shared(TxStore):
    """The same with each byte read by one rank and passed on to the others that need it."""

    def _group(self) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo") if dist.is_initialized() else None


class Unverified(TxStore):
    """The same with the checks of a load taken out, to know what they cost. Not a mode that txstore has."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from txstore.shards import reading

        reading.verify_blocks = lambda *_: None


class Dcp(Contender):
    """A pair of DCP's kind: one folder a checkpoint, the pair kept and told the folder at each save."""

    def __init__(self, place: Place, writer: Any, reader: Any) -> None:
        super().__init__(place)
        self._writer, self._reader = writer, reader

    def save(self, state: State, name: str) -> None:
        dcp.save(state, storage_writer=self._writer, checkpoint_id=f"{self.url}/{name}")

    def load(self, state: State, name: str) -> None:
        dcp.load(state, storage_reader=self._reader, checkpoint_id=f"{self.url}/{name}")


def dcp_files(place: Place, threads: int) -> Contender:
    """DCP's own pair for folders, files synced."""
    place = {**place, "url": place["url"].removeprefix("file://")}
    root = place["url"]
    return Dcp(place, dcp.FileSystemWriter(root, thread_count=threads, sync_files=True), dcp.FileSystemReader(root))


def dcp_fsspec(place: Place, threads: int) -> Contender:
    """DCP's pair over fsspec: s3fs, gcsfs or adlfs by the URL."""
    import fsspec
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    # The pair has no way to hand options on, other than fsspec's own configuration.
    fsspec.config.conf[place["url"].partition("://")[0]] = place["options"]
    url = place["url"]
    # sync_files would call os.sync() for want of a file descriptor, and flush the disks of everybody.
    writer = FsspecWriter(url, thread_count=threads, sync_files=False)
    reader = FsspecReader(url)
    if url.startswith("gs:"):
        _know_bucket(writer.fs.fs, url)
        _know_bucket(reader.fs.fs, url)
    return Dcp(place, writer, reader)


def _know_bucket(filesystem: Any, url: str) -> None:
    """What Cloud Storage would answer once, and an emulator never does.

    gcsfs asks for the kind of the bucket by gRPC, waits up to a minute for an answer, and asks again at every file.
    """
    from gcsfs.extended_gcsfs import BucketType

    # It tells a page of traceback for each call that the emulator lacks, and then does without.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

    filesystem._storage_layout_cache[url.split("/")[2]] = BucketType.NON_HIERARCHICAL


def s3_torch(place: Place, threads: int) -> Contender:
    """s3torchconnector's DCP pair, with its reader that is made for DCP."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    options, region = place["options"], "us-east-1"
    os.environ.update(AWS_ACCESS_KEY_ID=options["key"], AWS_SECRET_ACCESS_KEY=options["secret"])
    writer = S3StorageWriter(region, place["url"], thread_count=threads)
    reader = S3StorageReader(region, place["url"])
    # The pair takes no endpoint; its client does.
    client = S3Client(region, endpoint=options["endpoint_url"], s3client_config=S3ClientConfig(force_path_style=True))
    writer.fs = S3FileSystem(region, s3_client=client)
    reader.fs = S3FileSystem(region, s3_client=client, reader_constructor=reader._reader_constructor)
    return Dcp(place, writer, reader)


class TorchCheckpointing(Contender):
    """Meta's torch_checkpointing, saving synchronously. One rank; it does not sync its files, so that is done here."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._root = Path(self.url.removeprefix("file://"))
        self._root.mkdir(parents=True, exist_ok=True)
        config = CheckpointManager.Config.with_sync_save()
        # Its default, O_DIRECT, fails with EINVAL on this kernel's ext4: its buffers are not aligned.
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = config.build()

    def save(self, state: State, name: str) -> None:
        folder = self._root / name
        self._manager.save(str(folder), state)
        for path in [*folder.rglob("*"), folder]:
            raw.sync(path)

    def load(self, state: State, name: str) -> None:
        self._manager.load(str(self._root / name), into=state)


class Raw(Contender):
    """The same bytes with nothing around them: what the disk and one copy allow."""

    def __init__(self, place: Place, *, best: bool) -> None:
        super().__init__(place)
        self._root = Path(self.url.removeprefix("file://"))
        self._best = best

    def _file(self, name: str) -> Path:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return self._root / name / f"{rank}.bin"

    def save(self, state: State, name: str) -> None:
        self._file(name).parent.mkdir(parents=True, exist_ok=True)
        raw.write(self._file(name), state, best=self._best)
        if dist.is_initialized():
            dist.barrier()

    def load(self, state: State, name: str) -> None:
        raw.read(self._file(name), state, best=self._best)


MAKERS: dict[str, Callable[[Place], Contender]] = {
    "txstore": TxStore,
    "txstore, reads shared": Shared,
    "txstore, load unverified": Unverified,
    "DCP FileSystem, 1 thread": lambda place: dcp_files(place, 1),
    "DCP FileSystem, 2 threads": lambda place: dcp_files(place, THREADS),
    "torch_checkpointing": TorchCheckpointing,
    "raw: plain": lambda place: Raw(place, best=False),
    "raw: best": lambda place: Raw(place, best=True),
    "s3torchconnector, 1 thread": lambda place: s3_torch(place, 1),
    "s3torchconnector, 2 threads": lambda place: s3_torch(place, THREADS),
    "DCP Fsspec": lambda place: dcp_fsspec(place, THREADS),
}
