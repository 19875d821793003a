"""Raw writes and reads of a state's bytes on POSIX: the limit that the others are compared with.

Plain: one thread, window by window, one fsync. Best, as far as known: preallocated, two threads, each window's
write-back begun at once (``sync_file_range``), so that the fsync finds little left.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.states import buffers

WINDOW_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2
_IOV_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def write(path: Path, state: dict[str, Any], *, best: bool) -> None:
    """Write, sync the file and its directory."""
    pieces = _Pieces(state)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def one(start: int) -> None:
        for offset, vector in pieces.window(start):
            _exactly(os.pwritev, fd, vector, offset)
        if best:
            length = min(WINDOW_BYTES, pieces.size - start)
            _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)

    try:
        if best:
            os.posix_fallocate(fd, 0, pieces.size)
        _run(one, pieces.size, threads=2 if best else 1)
        os.fsync(fd)
    finally:
        os.close(fd)
    sync(path.parent)


def read(path: Path, state: dict[str, Any], *, best: bool) -> None:
    """Read into the state's memory; a partial state must come first in the file."""
    pieces = _Pieces(state)
    fd = os.open(path, os.O_RDONLY)

    def one(start: int) -> None:
        for offset, vector in pieces.window(start):
            _exactly(os.preadv, fd, vector, offset)

    try:
        _run(one, pieces.size, threads=2 if best else 1)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _run(one: Callable[[int], None], size: int, *, threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(0, size, WINDOW_BYTES)))


def _exactly(call: Callable[[int, list[memoryview], int], int], fd: int, vector: list[memoryview], offset: int) -> None:
    wanted = sum(map(len, vector))
    if call(fd, vector, offset) != wanted:
        raise OSError(f"short transfer at {offset}")


class _Pieces:
    """The state's buffers as one run of bytes."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._buffers = buffers(state)
        self._ends = list(accumulate(map(len, self._buffers)))
        self.size = self._ends[-1]

    def window(self, start: int) -> Iterator[tuple[int, list[memoryview]]]:
        """Vectors of at most as many pieces as the kernel takes, each with its offset in the file."""
        stop = min(start + WINDOW_BYTES, self.size)
        vector: list[memoryview] = []
        offset = start
        number = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[number] - len(self._buffers[number])
            end = min(stop, self._ends[number])
            vector.append(self._buffers[number][start - begin : end - begin])
            start = end
            number += 1
            if len(vector) == _IOV_MAX:
                yield offset, vector
                vector, offset = [], start
        if vector:
            yield offset, vector
