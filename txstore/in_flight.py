"""What a store is doing at this moment, so that an error about something stuck can name the object."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that has begun and not ended. `started_s` is of the monotonic clock."""

    verb: str
    key: str
    started_s: float

    def __str__(self) -> str:
        return f"{self.verb} of {self.key}, for {time.monotonic() - self.started_s:.1f} s"


class InFlight:
    """The operations in flight. Thread-safe; another process has its own."""

    def __init__(self) -> None:
        self._running: dict[int, Operation] = {}
        self._lock = threading.Lock()

    @contextmanager
    def running(self, verb: str, key: str) -> Iterator[None]:
        """Mark an operation for the length of the block."""
        operation = Operation(verb, key, time.monotonic())
        with self._lock:
            self._running[id(operation)] = operation
        try:
            yield
        finally:
            with self._lock:
                del self._running[id(operation)]

    def operations(self) -> list[Operation]:
        """What is running, the longest first."""
        with self._lock:
            return sorted(self._running.values(), key=lambda operation: operation.started_s)

    def __reduce__(self) -> tuple[object, ...]:
        return InFlight, ()
