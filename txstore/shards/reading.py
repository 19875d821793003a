"""Verified ranged reads: every byte that leaves this module has passed its block's CRC32C.

Ranges are cut at block boundaries. The blocks inside a large range are read straight into the caller's
memory and verified there; the blocks at its ends, and small ranges, share reads through a scratch
buffer, so that a block which several tensors share is read once.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.decisions import gone
from txstore.errors import IntegrityError, NotFoundError
from txstore.index import FileRecord, Index
from txstore.manifest import Decision
from txstore.store import Store

WINDOW_BYTES = 8 * BLOCK_BYTES
"""Largest read through scratch memory; times the number of workers it bounds that memory."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes `start` to `stop` of a shard file.

    `into`, if given, is writable memory of exactly that size. Otherwise `deliver` is called once, from
    any worker thread, with a view that is valid during the call only.
    """

    file: int
    start: int
    stop: int
    into: memoryview | None = None
    deliver: Callable[[memoryview], None] | None = None


@dataclass(slots=True)
class _Job:
    """One read of whole blocks: straight into `into`, or through scratch to several `parts`."""

    file: int
    start: int
    stop: int
    into: memoryview | None = None
    parts: list[Wanted] = field(default_factory=list)


class BlockReader:
    """Reads the shard files of one committed checkpoint.

    Attributes:
        bytes_read: Bytes asked of the store so far.
    """

    def __init__(self, store: Store, decision: Decision, index: Index, *, workers: int = 2) -> None:
        self._store = store
        self._decision = decision
        self._files = index.files
        self._workers = workers
        self._lock = threading.Lock()
        self.bytes_read = 0

    def read_all(self, wanted: Sequence[Wanted]) -> None:
        """Serve all requests; on return every `into` is filled and every `deliver` has run.

        Raises:
            IntegrityError: A block differs from what was committed, or an object is missing.
            CheckpointRetired: It was removed by retention meanwhile.
        """
        jobs = plan_reads(wanted, [file.size for file in self._files], self._store.read_bytes)
        if len(jobs) < 2 or self._workers < 2:
            for job in jobs:
                self._run(job)
            return
        with ThreadPoolExecutor(min(self._workers, len(jobs)), thread_name_prefix="txstore-read") as pool:
            futures = [pool.submit(self._run, job) for job in jobs]
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
            for future in pending:
                future.cancel()
            for future in done:
                future.result()

    def _run(self, job: _Job) -> None:
        buffer = job.into if job.into is not None else memoryview(bytearray(job.stop - job.start))
        self.read_blocks(job.file, job.start, buffer)
        serve(job.parts, job.start, buffer)

    def read_blocks(self, number: int, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with whole blocks of file `number` and verify them; `start` is on a block boundary.

        Raises:
            IntegrityError, CheckpointRetired: As `read_all`.
        """
        file = self._files[number]
        try:
            count = self._store.read_into(file.key, start, buffer)
        except NotFoundError as error:
            raise gone(self._store, self._decision, file.key) from error
        if count != buffer.nbytes:
            raise IntegrityError(
                f"the object has at most {start + count} bytes, {file.size} were committed", key=file.key
            )
        with self._lock:
            self.bytes_read += count
        verify_blocks(file, start, buffer, self._store.url)

    def verify(self, number: int, start: int, buffer: memoryview) -> None:
        """As `read_blocks`, for whole blocks that came another way.

        Raises:
            IntegrityError: They differ from what was committed.
        """
        verify_blocks(self._files[number], start, buffer, self._store.url)


def serve(parts: Iterable[Wanted], start: int, data: memoryview) -> None:
    """Give each of `parts` its bytes from `data`, which lies in the file from `start` and holds all of them."""
    for part in parts:
        view = data[part.start - start : part.stop - start]
        if part.into is not None:
            part.into[:] = view
        elif part.deliver is not None:
            part.deliver(view)


def verify_blocks(file: FileRecord, start: int, data: memoryview, root: str) -> None:
    """Check whole blocks against the index; `start` is the file offset of `data`, on a block boundary; `root` is told.

    Raises:
        IntegrityError: Names the shard and the first damaged block.
    """
    first = start // BLOCK_BYTES
    count = -(-data.nbytes // BLOCK_BYTES)
    known = struct.unpack_from(f"<{count}I", file.blocks, 4 * first)
    for number in range(count):
        if crc32c(data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]) != known[number]:
            raise IntegrityError(
                f"block {first + number} (bytes from {(first + number) * BLOCK_BYTES}) fails its checksum",
                key=file.key,
                next_step=f"txstore verify {root} --all --depth full names all damage; load an earlier checkpoint",
            )


def plan_reads(wanted: Sequence[Wanted], sizes: Sequence[int], read_bytes: int | None = None) -> list[_Job]:
    """Cut requests into reads of whole blocks; pure.

    Args:
        wanted: What is asked for.
        sizes: The files' lengths.
        read_bytes: Longest read straight into the caller's memory, in whole blocks; default `WINDOW_BYTES`.
    """
    read_bytes = read_bytes or WINDOW_BYTES
    jobs: list[_Job] = []
    small: list[Wanted] = []
    for want in wanted:
        low = -(-want.start // BLOCK_BYTES) * BLOCK_BYTES
        high = want.stop if want.stop == sizes[want.file] else want.stop // BLOCK_BYTES * BLOCK_BYTES
        if want.into is None or low >= high:
            small.append(want)
            continue
        for start in range(low, high, read_bytes):
            stop = min(start + read_bytes, high)
            jobs.append(_Job(want.file, start, stop, want.into[start - want.start : stop - want.start]))
        for start, stop in ((want.start, low), (high, want.stop)):
            if start < stop:
                small.append(Wanted(want.file, start, stop, want.into[start - want.start : stop - want.start]))
    return jobs + _coalesce(small, sizes)


def _coalesce(small: Sequence[Wanted], sizes: Sequence[int]) -> list[_Job]:
    jobs: list[_Job] = []
    for want in sorted(small, key=lambda want: (want.file, want.start)):
        start = want.start // BLOCK_BYTES * BLOCK_BYTES
        stop = min(-(-want.stop // BLOCK_BYTES) * BLOCK_BYTES, sizes[want.file])
        last = jobs[-1] if jobs else None
        if last and start < last.start:  # it overlaps a range that was cut below: the last read does not hold its start
            last = None
        # Joined when the blocks touch; never across an unneeded block, never beyond the window.
        if last and last.file == want.file and start <= last.stop and max(stop, last.stop) - last.start <= WINDOW_BYTES:
            last.stop = max(stop, last.stop)
            last.parts.append(want)
            continue
        if last and last.file == want.file and start < last.stop < stop and want.into is not None:
            # The window ends inside this range: its first block is read already, and is not read again.
            cut = last.stop - want.start
            last.parts.append(Wanted(want.file, want.start, last.stop, want.into[:cut]))
            want = Wanted(want.file, last.stop, want.stop, want.into[cut:])  # noqa: PLW2901 - what is left of it
            start = last.stop
        jobs.append(_Job(want.file, start, stop, parts=[want]))
    return jobs
