"""FaultyStore: a store whose N-th operation fails, for sweeps over every operation of a larger action.

::

    total = len(run_once(FaultyStore(inner)).log)
    for at in range(total):
        run_once(FaultyStore(inner, at=at, mode="after"))
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from txstore.errors import OutcomeUnknownError, TransientError
from txstore.store import ObjectInfo, Source, Store

Mode = Literal["before", "unknown", "after", "crash-before", "crash-after"]
MODES: tuple[Mode, ...] = ("before", "unknown", "after", "crash-before", "crash-after")

_T = TypeVar("_T")


class Crashed(BaseException):
    """The process is dead as far as the store goes: no `except Exception` may see it and go on."""


class FaultyStore(Store):
    """Counts operations and makes some of them fail.

    Args:
        inner: The store that does the work.
        at: Index of the first operation to fail, from 0; None for none.
        mode: ``before``: not applied, `TransientError`. ``unknown``: not applied, `OutcomeUnknownError`.
            ``after``: applied, then `OutcomeUnknownError`. ``crash-before`` and ``crash-after``: not
            applied or applied, then `Crashed`, now and from every later call.
        times: How many operations in a row fail; more than the retry budget makes the failure final.
        verb: Count only this verb.

    Attributes:
        log: The verb and key (for `list`, the prefix) of every counted operation, in order.
    """

    def __init__(
        self, inner: Store, at: int | None = None, mode: Mode = "before", *, times: int = 1, verb: str = ""
    ) -> None:
        self.url = inner.url
        self.needs_probe = inner.needs_probe
        self.distant = inner.distant
        self.streams = inner.streams
        self.read_bytes = inner.read_bytes
        self.log: list[tuple[str, str]] = []
        self._inner = inner
        self._at = at
        self._mode = mode
        self._times = times
        self._verb = verb
        self._crashed = False
        self._lock = threading.Lock()

    def put(self, key: str, source: Source) -> ObjectInfo:
        """`Store.put`, unless it is the one to fail."""
        return self._do("put", key, lambda: self._inner.put(key, source))

    def create(self, key: str, data: bytes) -> None:
        """`Store.create`, unless it is the one to fail."""
        return self._do("create", key, lambda: self._inner.create(key, data))

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """`Store.read`, unless it is the one to fail."""
        return self._do("read", key, lambda: self._inner.read(key, start, size))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """`Store.read_into`, unless it is the one to fail."""
        return self._do("read_into", key, lambda: self._inner.read_into(key, start, buffer))

    def head(self, key: str) -> ObjectInfo:
        """`Store.head`, unless it is the one to fail."""
        return self._do("head", key, lambda: self._inner.head(key))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """`Store.list`, read to its end as one operation when it begins to be read."""
        yield from self._do("list", prefix, lambda: builtins.list(self._inner.list(prefix, start_after)))

    def delete(self, key: str) -> None:
        """`Store.delete`, unless it is the one to fail."""
        return self._do("delete", key, lambda: self._inner.delete(key))

    def close(self) -> None:
        """Close the inner store; never fails and is not counted."""
        self._inner.close()

    def _do(self, verb: str, key: str, call: Callable[[], _T]) -> _T:
        mode = self._next(verb, key)
        if mode == "before":
            raise TransientError(f"injected before {verb}", key=key)
        if mode == "unknown":
            raise OutcomeUnknownError(f"injected instead of {verb}", key=key)
        if mode == "crash-before":
            raise Crashed(f"before {verb} {key}")
        result = call()
        if mode == "after":
            raise OutcomeUnknownError(f"injected after {verb}", key=key)
        if mode == "crash-after":
            raise Crashed(f"after {verb} {key}")
        return result

    def _next(self, verb: str, key: str) -> Mode | None:
        with self._lock:
            if self._crashed:
                raise Crashed(f"{verb} {key} after the crash")
            if self._verb and verb != self._verb:
                return None
            number = len(self.log)
            self.log.append((verb, key))
            if self._at is None or not self._at <= number < self._at + self._times:
                return None
            self._crashed = self._mode.startswith("crash")
            return self._mode
