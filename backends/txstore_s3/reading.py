"""Ranged reads that survive a broken body: resumed from the last good byte, pinned to one version of the object."""

from __future__ import annotations

import re

from txstore.errors import AlreadyExistsError, StoreError, TransientError
from txstore.lean_http import read_into as read_into_memory
from txstore.retry import RETRIED, Retrier
from txstore_s3.client import Clients
from txstore_s3.errors import Call, code_of
from txstore_s3.wire import Answer, Request

_CHUNK_BYTES = 512 << 10  # what a break in the middle of a body costs at most: the beginning of a chunk is dropped
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")
_NOT_SATISFIABLE = 416


class _Reader:
    """One read: where it stands, and what version of the object it began with."""

    def __init__(self, clients: Clients, name: str, key: str, start: int, buffer: memoryview | None = None) -> None:
        self._clients = clients
        self._name = name
        self._call = Call("GetObject", key)
        self._start = start
        self._etag: str | None = None
        self._given = buffer
        self.done = 0
        self.buffer = buffer

    def attempt(self, size: int | None) -> None:
        """Read on from `done` up to `size` bytes after the start, or to the object's end."""
        if self.buffer is not None and self.done == self.buffer.nbytes:
            return
        first = self._start + self.done
        want: dict[str, str] = {}
        if size is not None:
            want["Range"] = f"bytes={first}-{self._start + size - 1}"
        elif first:
            want["Range"] = f"bytes={first}-"
        if self._etag is not None:
            want["If-Match"] = self._etag
        request = Request(operation="GetObject", method="GET", name=self._name, headers=want)
        try:
            with self._clients.answer(self._call, request) as answer:
                self._fill(answer, first, size, ranged="Range" in want)
        except AlreadyExistsError as error:  # 412: another object has taken its place
            self._etag, self.done, self.buffer = None, 0, self._given
            raise TransientError("the object was replaced while it was read", key=self._call.key).because(
                "412 replaced"
            ) from error
        except StoreError as error:
            if code_of(error.__cause__)[0] != _NOT_SATISFIABLE:
                raise

    def _fill(self, answer: Answer, first: int, size: int | None, *, ranged: bool) -> None:
        told = answer.headers.get("Content-Length", "")
        etag = answer.headers.get("ETag")
        if not told.isdigit() or not etag:  # every object has one: this is not an answer about an object
            raise TransientError("the reply was cut off", key=self._call.key).because("cut reply")
        length = int(told)
        if ranged and answer.status != 200:
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != first or int(found[2]) - first + 1 != length:
                raise TransientError("the store answered with another range", key=self._call.key).because("wrong range")
        elif ranged and first:
            raise StoreError("the store ignores ranges", key=self._call.key, next_step="see docs/compatibility.md")
        self._etag = etag
        if self.buffer is None:
            self.buffer = memoryview(bytearray(length if size is None else min(length, size)))
        room = self.buffer.nbytes - self.done
        left = min(length, room)
        while left:
            with self.buffer[self.done : self.done + min(left, _CHUNK_BYTES)] as piece:
                count = read_into_memory(answer.raw, piece)
            if not count:
                raise TransientError("the body ended early", key=self._call.key).because("short body")
            self.done += count
            left -= count
        if length <= room:
            answer.raw.read()  # nothing is left: the connection is free again


def read_into(clients: Clients, retrier: Retrier, name: str, key: str, *, start: int, buffer: memoryview) -> int:
    """Fill `buffer` from `start`; how many bytes there were. See `Store.read_into`."""
    reader = _Reader(clients, name, key, start, buffer)
    _run(reader, retrier, buffer.nbytes)
    return reader.done


def read(clients: Clients, retrier: Retrier, name: str, key: str, *, start: int, size: int | None) -> bytes:
    """See `Store.read`."""
    reader = _Reader(clients, name, key, start)
    _run(reader, retrier, size)
    return bytes(reader.buffer[: reader.done]) if reader.buffer is not None else b""


def _run(reader: _Reader, retrier: Retrier, size: int | None) -> None:
    """Only what breaks after good bytes is resumed here; a read that never began is repeated above, as a whole."""
    try:
        reader.attempt(size)
    except RETRIED as error:
        if not reader.done:
            raise
        first: list[StoreError] = [error]

        def again() -> None:
            if first:
                raise first.pop()
            reader.attempt(size)

        retrier.call(again)
