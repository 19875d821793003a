"""How many requests one process has in flight: one cap, shared by all stores of all backends.

A rank that loads a large checkpoint opens as many streams as it has threads and parts; a node has eight ranks. Without
a cap the network, the file descriptors or the store's throttle would be the limit, and a decision would wait behind
shards. Set ``TXSTORE_MAX_REQUESTS`` in the environment to change it; it is read when a process sends its first request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from txstore.errors import ConfigError

VARIABLE = "TXSTORE_MAX_REQUESTS"
"""Environment variable that sets the cap."""

DEFAULT = 64
"""The cap without it."""

_MOST = 4096


class _Cap:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = threading.BoundedSemaphore(limit)
        self._mine = threading.local()

    @contextmanager
    def slot(self) -> Iterator[None]:
        # A source may read from another store while its own request is sent: waiting here for a second slot,
        # `limit` such threads would wait for each other for ever.
        if getattr(self._mine, "held", False):
            yield
            return
        with self._free:
            self._mine.held = True
            try:
                yield
            finally:
                self._mine.held = False


_lock = threading.Lock()
_cap: _Cap | None = None


def max_requests() -> int:
    """The cap of this process: most requests in flight, and the size of a backend's connection pool.

    Raises:
        ConfigError: The environment variable is not a number from 1 to 4096.
    """
    return _get().limit


@contextmanager
def request_slot() -> Iterator[None]:
    """Wait until fewer than `max_requests` requests are in flight; one more is, as long as the block runs.

    A thread that is inside already has its slot. Do not yield to a caller of a generator from within the block: who
    stops in the middle of a listing would keep the slot.

    Raises:
        ConfigError: As `max_requests`.
    """
    with _get().slot():
        yield


def forget() -> None:
    """Begin anew: no request is in flight, and the environment is read again. For a forked child, and for tests."""
    global _lock, _cap  # noqa: PLW0603 - a process has one cap
    _lock = threading.Lock()
    _cap = None


def _get() -> _Cap:
    global _cap  # noqa: PLW0603 - a process has one cap
    found = _cap
    if found is None:
        with _lock:
            if _cap is None:
                _cap = _Cap(_limit())
            found = _cap
    return found


def _limit() -> int:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return DEFAULT
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST:
        raise ConfigError(
            f"{VARIABLE}={text[:20]!r} is not a number of requests",
            next_step=f"set it to 1 to {_MOST}, or unset it for {DEFAULT}",
        )
    return int(text)


# A lock or a slot that another thread held at the fork would never be given back in the child.
os.register_at_fork(after_in_child=forget)
