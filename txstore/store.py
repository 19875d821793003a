"""The contract that a backend fulfils.

A store maps keys to immutable or replaceable byte objects. It is not a filesystem: there is no
rename, no exists, no open, no mkdir, and no partial visibility. Eight verbs, all abstract: nothing
that safety rests on has a default.

What every implementation guarantees:

* **Whole or nothing.** `put` and `create` make the complete object visible or none of it, whatever
  fails, and whenever the process dies.
* **Durable on return.** When `put` or `create` returns, the object survives a crash of the machine.
* **One winner.** Of any number of concurrent `create` calls for one key exactly one succeeds; the
  others raise `AlreadyExistsError`; a successful `create` never replaces anything.
* **Read your writes.** `head`, `read` and `list` see every write that returned before they began.
* **One attempt.** `create` sends one request and never repeats it (SDK retries off). Repetition and
  read-back live in one place, `txstore.retry`.
* **Thread-safe, synchronous, picklable.** Clients are made lazily, survive pickling and are rebuilt
  after fork.
* **Honest errors.** Each failure is one class of `txstore.errors`: `TransientError` only when the
  request surely had no effect; `OutcomeUnknownError` when it may have had one. Messages hold no
  secret. The original exception is chained (``raise ... from``), never stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import get_ident
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from txstore.checksum import BLOCK_BYTES, Buffer, combine, crc32c
from txstore.errors import PlanMismatch


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of one object.

    Attributes:
        key: The object's key.
        size: Length in bytes.
        crc32c: Checksum of the whole object as the store reports it, or None if it keeps none.
        modified_s: Seconds since the epoch by the store's clock, or None. Never used to order
            checkpoints; the sweep uses it as one of two ages.
    """

    key: str
    size: int
    crc32c: int | None = None
    modified_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What an interrupted write left in the store: invisible to `list`, but not free.

    Attributes:
        key: Where it lies; under the attempt that it was written for. Not an object's key.
        size: Bytes that it occupies.
        modified_s: Seconds since the epoch by the store's clock.
    """

    key: str
    size: int
    modified_s: float


@runtime_checkable
class KeepsUnfinished(Protocol):
    """An optional power of a backend whose interrupted writes leave something behind (files, uploaded parts)."""

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """What interrupted, or still running, writes hold below `prefix`, in ascending order of key."""

    def discard(self, unfinished: Unfinished) -> None:
        """Free it. A write that still goes on fails cleanly; an absent one is success."""


class Source(ABC):
    """Bytes to be stored: of known size, replayable, readable by range, in any order, from any thread."""

    size: int
    """Length in bytes."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Buffer:
        """Bytes `start` to `stop`; no copy where that is possible. Valid until the next read by this thread."""

    def pieces(self, start: int, stop: int) -> Sequence[Buffer]:
        """The bytes that `read` gives, where they lie: for who needs no single buffer. As long valid."""
        return (self.read(start, stop),)

    @abstractmethod
    def crc32c(self, start: int, stop: int) -> int:
        """CRC32C of a range that `read` or `pieces` has produced; block-aligned unless it ends the source.

        A backend that sends checksums reads a range first and asks afterwards, so that the bytes
        are passed over once.
        """


class BytesSource(Source):
    """A document held in memory."""

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data).cast("B")
        self.size = self._view.nbytes

    def read(self, start: int, stop: int) -> Buffer:
        """A view of the bytes."""
        return self._view[start:stop]

    def crc32c(self, start: int, stop: int) -> int:
        """CRC32C of the range."""
        return crc32c(self._view[start:stop])


class ChecksummedSource(Source):
    """Adds the block checksums of what passes through; nothing else in a save computes any.

    Reads must begin on a block boundary and end on one or at the end of the source. A block that
    is read again (a retry) must have the same checksum. And what a thread has read is looked at once more
    when it reads on or asks for `blocks`, by when it has been sent: memory that changed between checksum
    and write would make a committed block that nobody can read.

    Raises (from `read` and `blocks`):
        PlanMismatch: The bytes changed, as when training goes on while a tensor that was not staged is
            being written.
    """

    def __init__(self, inner: Source, name: str = "") -> None:
        self._inner = inner
        self._name = name
        self.size = inner.size
        self._blocks: list[int | None] = [None] * -(-inner.size // BLOCK_BYTES)
        self._sending: dict[int, tuple[int, list[memoryview]]] = {}  # by thread: what it read last

    def read(self, start: int, stop: int) -> Buffer:
        """The inner source's bytes, their blocks checksummed."""
        return self._checked(start, stop, lambda: (self._inner.read(start, stop),))[0]

    def pieces(self, start: int, stop: int) -> Sequence[Buffer]:
        """The inner source's pieces, their blocks checksummed."""
        return self._checked(start, stop, lambda: self._inner.pieces(start, stop))

    def _checked(self, start: int, stop: int, read: Callable[[], Sequence[Buffer]]) -> list[memoryview]:
        self._look_again(get_ident())
        data = [memoryview(piece).cast("B") for piece in read()]
        size = sum(piece.nbytes for piece in data)
        if start % BLOCK_BYTES or size != stop - start or (stop % BLOCK_BYTES and stop != self.size):
            raise ValueError(f"read of {start}:{stop} is not aligned to blocks of {BLOCK_BYTES} bytes")
        self._check(start, data)
        self._sending[get_ident()] = start, data
        return data

    def _look_again(self, thread: int) -> None:
        start, data = self._sending.pop(thread, (0, []))
        self._check(start, data)

    def _check(self, start: int, data: list[memoryview]) -> None:
        for number, value in enumerate(_block_crcs(data), start // BLOCK_BYTES):
            known = self._blocks[number]
            if known is not None and known != value:
                raise PlanMismatch(
                    "the state changed while it was being written",
                    key=self._name,
                    next_step="stage the state first (dcp.async_save does), or do not train during dcp.save",
                )
            self._blocks[number] = value

    def crc32c(self, start: int, stop: int) -> int:
        """Combined from the blocks; no byte is read again."""
        crc = 0
        for offset in range(start, stop, BLOCK_BYTES):
            block = self._blocks[offset // BLOCK_BYTES]
            if block is None:
                raise ValueError(f"block at {offset} has not been read yet")
            crc = combine(crc, block, min(BLOCK_BYTES, stop - offset))
        return crc

    @property
    def blocks(self) -> tuple[int, ...]:
        """CRC32C of every block.

        Raises:
            ValueError: Some block was never read, so the object cannot have been written.
        """
        for thread in list(self._sending):
            self._look_again(thread)
        done = tuple(block for block in self._blocks if block is not None)
        if len(done) != len(self._blocks):
            raise ValueError(f"{len(self._blocks) - len(done)} blocks of {self._name!r} were never read")
        return done


def _block_crcs(data: Sequence[memoryview]) -> Iterator[int]:
    """CRC32C of each block of bytes that lie in pieces."""
    crc, left = 0, BLOCK_BYTES
    for piece in data:
        at = 0
        while at < piece.nbytes:
            taken = piece[at : at + left]
            crc = crc32c(taken, crc)
            at, left = at + taken.nbytes, left - taken.nbytes
            if not left:
                yield crc
                crc, left = 0, BLOCK_BYTES
    if left < BLOCK_BYTES:
        yield crc


class Store(ABC):
    """One root on one backend. See the module docstring for what all verbs guarantee.

    Every verb may raise `AccessDeniedError`, `TransientError` and `OutcomeUnknownError` besides the
    errors it names.
    """

    url: str
    """Canonical URL of the root, without secrets. Ranks compare it to make sure that they share one store."""

    needs_probe: bool = True
    """Whether exclusive create must be seen to work here before the first write (`txstore.probe`).

    False only where this package's own code and the kernel give the guarantee. A service is probed: some
    endpoints ignore the condition and overwrite silently.
    """

    distant: bool = True
    """Whether a read is a request to a service: ranks that need the same bytes then do better to pass them on.

    False where the page cache answers, which copies faster than any rank sends.
    """

    streams: int = 2
    """How many reads one process should have in flight: more where each spends its time waiting for a network.

    `txstore.request_cap` bounds all stores together.
    """

    read_bytes: int = 8 * BLOCK_BYTES
    """Largest read straight into its place, a multiple of the block size: larger where each request has its price."""

    @abstractmethod
    def put(self, key: str, source: Source) -> ObjectInfo:
        """Store `source` under `key`, replacing what was there; whole or nothing, durable on return.

        Sends and verifies the service's own checksum where it has one. Reads the source in
        block-aligned ranges, possibly several times and in parallel. If the source raises, nothing
        is visible and its error propagates.

        Raises:
            StoreFullError: No space or quota.
        """

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Store `data` (at most 4 KiB) under `key` if and only if the key is free. One attempt.

        Raises:
            AlreadyExistsError: The key is taken, perhaps by our own earlier attempt: compare bytes.
            OutcomeUnknownError: The object may or may not exist now.
            CapabilityError: This store cannot create exclusively.
            StoreFullError: No space or quota.
        """

    @abstractmethod
    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """Up to `size` bytes from `start` (to the end if None); short only at the end of the object.

        Raises:
            NotFoundError: No such object.
        """

    @abstractmethod
    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes from `start`; returns how many were there: short only at the end.

        Raises:
            NotFoundError: No such object.
        """

    @abstractmethod
    def head(self, key: str) -> ObjectInfo:
        """Size (and checksum) of one object, never cached.

        Raises:
            NotFoundError: No such object.
        """

    @abstractmethod
    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """All objects whose key begins with the string `prefix`, in ascending order of key.

        A string prefix, not a folder: ``commits/a`` finds ``commits/ab``. Keys up to and including
        `start_after` are left out. Objects in flight are never shown. Never cached.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; an absent one is success."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. The store may be used again: clients are made lazily."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
