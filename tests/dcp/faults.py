"""Stores that count, fail, tamper or kill, for one rank of a save. Importable in every process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from txstore.errors import AccessDeniedError, OutcomeUnknownError, StoreFullError
from txstore.registry import open_store
from txstore.store import ObjectInfo, Source, Store


class LockedError(Exception):
    """Holds a lock, as live SDK errors do: it cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class PickyError(Exception):
    """Its constructor cannot be replayed from `args`: pickles, and fails to unpickle on the other rank."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class LockedStoreError(StoreFullError):
    """A third-party backend's class that holds more than text."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class BareError(BaseException):
    """Not an Exception, and not picklable either."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


@dataclass
class Fault:
    """What happens at the `at`-th call (from 0) of `verb` on a key that contains `part`.

    Attributes:
        action: Gets the store, the key and a function that performs the call; its result is the call's.
    """

    action: Callable[[Store, str, Callable[[], Any]], Any]
    verb: str = ""
    part: str = ""
    at: int = 0
    forever: bool = False


class FaultyStore(Store):
    """A store that goes wrong where it is told to, and counts.

    Attributes:
        calls: Every call as (verb, key), in order.
        bytes_read: Bytes that reads returned.
    """

    def __init__(self, url: str | Store, *faults: Fault) -> None:
        self.inner = url if isinstance(url, Store) else open_store(url)
        self.url = self.inner.url
        self.faults = faults
        self.calls: list[tuple[str, str]] = []
        self.reads: list[tuple[str, int, int]] = []
        self._seen: dict[int, int] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @property
    def bytes_read(self) -> int:
        return sum(size for _, _, size in self.reads)

    def _do(self, verb: str, key: str, call: Callable[[], Any]) -> Any:
        hit: Fault | None = None
        with self._lock:
            self.calls.append((verb, key))
            for number, fault in enumerate(self.faults):
                if fault.verb in {"", verb} and fault.part in key:
                    count = self._seen.get(number, 0)
                    self._seen[number] = count + 1
                    if count == fault.at or (fault.forever and count > fault.at):
                        hit = fault
        return hit.action(self.inner, key, call) if hit else call()

    def put(self, key: str, source: Source) -> ObjectInfo:
        return self._do("put", key, lambda: self.inner.put(key, source))

    def create(self, key: str, data: bytes) -> None:
        return self._do("create", key, lambda: self.inner.create(key, data))

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        data = self._do("read", key, lambda: self.inner.read(key, start, size))
        with self._lock:
            self.reads.append((key, start, len(data)))
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        count = self._do("read_into", key, lambda: self.inner.read_into(key, start, buffer))
        with self._lock:
            self.reads.append((key, start, count))
        return count

    def head(self, key: str) -> ObjectInfo:
        return self._do("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        yield from self._do("list", prefix, lambda: self.inner.list(prefix, start_after))

    def delete(self, key: str) -> None:
        return self._do("delete", key, lambda: self.inner.delete(key))

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Raise:
    """An action that raises one of `ERRORS` instead of calling; picklable, whatever it raises."""

    name: str

    def __call__(self, store: Store, key: str, call: Callable[[], Any]) -> Any:
        error = ERRORS[self.name]()
        raise error


@dataclass(frozen=True)
class Kill:
    """An action that kills this process before or after the call."""

    after: bool

    def __call__(self, store: Store, key: str, call: Callable[[], Any]) -> Any:
        try:
            if self.after:
                call()
        finally:  # also after an answer that is an error: "exists", "no such object"
            os.kill(os.getpid(), signal.SIGKILL)


def path_of(url: str, key: str) -> str:
    """The file of an object of a POSIX store."""
    return f"{url.removeprefix('file://')}/{key}"


ERRORS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: RuntimeError("planted"),
    "locked": lambda: LockedError("planted"),
    "picky": lambda: PickyError(7, reason="planted"),
    "locked-store": lambda: LockedStoreError("planted"),
    "bare": lambda: BareError("planted"),
    "oserror": lambda: OSError(5, "planted"),
    "full": lambda: StoreFullError("planted: no space left"),
    "denied": lambda: AccessDeniedError("planted: read-only"),
    "lost": lambda: OutcomeUnknownError("planted: no reply"),
}
