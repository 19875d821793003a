"""How many requests one process has in flight: one cap, shared by all stores of all backends.

A rank that loads a large checkpoint opens as many streams as it has threads and parts; a node has eight ranks. Without
a cap the network, the file descriptors or the store's throttle would be the limit, and a decision would wait behind
shards. A store that throttles (429, 503) halves what is in flight, and each answer after that lets it grow
again. Set ``TXSTORE_MAX_REQUESTS`` in the environment to change it; it is read when a process sends its first request.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from txstore.errors import ConfigError

log = logging.getLogger(__name__)

VARIABLE = "TXSTORE_MAX_REQUESTS"
"""Environment variable that sets the cap."""

DEFAULT = 64
"""The cap without it."""

_MOST = 4096


THROTTLED = frozenset({429, 503})
"""HTTP statuses by which a store says that it is asked for too much."""


class Slot:
    """The permission to have one request in flight."""

    def __init__(self, cap: _Cap, round_: int) -> None:
        self._cap = cap
        self._round = round_
        self.was_throttled = False

    def throttled(self) -> None:
        """The store said that it is asked for too much: from now on half as many requests are in flight.

        Requests that were in flight together are told so together, and halve it once.
        """
        self.was_throttled = True
        self._cap.halve(self._round)


class _Cap:
    """Additive increase, multiplicative decrease: as TCP shares a line among senders who do not talk."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allowed = float(limit)
        self._in_flight = 0
        self._round = 0
        self._changed = threading.Condition()
        self._mine = threading.local()

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        # A source may read from another store while its own request is sent: waiting here for a second slot,
        # `limit` such threads would wait for each other for ever.
        held: Slot | None = getattr(self._mine, "held", None)
        if held is not None:
            yield held
            return
        slot = self._mine.held = self._enter()
        answered = False
        try:
            yield slot
            answered = not slot.was_throttled
        finally:
            self._mine.held = None
            self._leave(answered=answered)

    def _enter(self) -> Slot:
        with self._changed:
            while self._in_flight >= int(self.allowed):
                self._changed.wait()
            self._in_flight += 1
            return Slot(self, self._round)

    def _leave(self, *, answered: bool) -> None:
        with self._changed:
            self._in_flight -= 1
            if answered and self.allowed < self.limit:
                self.allowed = min(self.limit, self.allowed + 1 / self.allowed)
            self._changed.notify(2)  # two, where one more is allowed now

    def halve(self, round_: int) -> None:
        """Halve what is in flight, unless that was done since the request of that round began."""
        with self._changed:
            if round_ != self._round:
                return
            self._round += 1
            # Of what is in flight, not of what was allowed: the store has only seen the former.
            self.allowed = max(1.0, min(self.allowed, self._in_flight) / 2)
            log.info("throttled by the store: %d requests in flight allowed now", int(self.allowed))


_lock = threading.Lock()
_cap: _Cap | None = None


def max_requests() -> int:
    """The cap of this process: most requests in flight, and the size of a backend's connection pool.

    Raises:
        ConfigError: The environment variable is not a number from 1 to 4096.
    """
    return _get().limit


@contextmanager
def request_slot() -> Iterator[Slot]:
    """Wait until fewer requests are in flight than are allowed; one more is, as long as the block runs.

    Allowed are `max_requests`, and fewer after `Slot.throttled`; each block that ends well lets the number grow again.

    A thread that is inside already has its slot. Do not yield to a caller of a generator from within the block: who
    stops in the middle of a listing would keep the slot.

    Raises:
        ConfigError: As `max_requests`.
    """
    with _get().slot() as slot:
        yield slot


def requests_allowed() -> int:
    """How many requests may be in flight now: `max_requests`, unless a store has throttled this process."""
    return int(_get().allowed)


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
