"""Where training and its recovery points stand, followed from event to event: numbers alone, no export."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeVar

from txstore.events import Committed, Restored, SaveRequested

_KEPT_STEPS = 64
"""Requests, commits and verified steps that are remembered; older ones are forgotten, not wrong."""

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True)
class Standing:
    """Until the first commit all work since the start is at risk: so both times begin at the start of the process.

    Attributes:
        training_step: The step that training has reached.
        committed_step: The newest committed step.
        committed_at_s: When training stood at it, seconds since the epoch.
        verified_step: The newest step that was committed and found sound.
        verified_at_s: When training stood at it.
        consecutive_failures: Failed saves since the last commit.
        saves_since_commit: Saves that were asked for since the newest committed one was.
        in_flight: Checkpoints that were asked for, and neither committed, failed nor skipped.
    """

    training_step: int = 0
    committed_step: int = 0
    committed_at_s: float = field(default_factory=time.time)
    verified_step: int = 0
    verified_at_s: float = field(default_factory=time.time)
    consecutive_failures: int = 0
    saves_since_commit: int = 0
    in_flight: set[str] = field(default_factory=set)
    _requests: int = 0
    _request_of: dict[str, int] = field(default_factory=dict)
    _stood_at_s: dict[int, float] = field(default_factory=dict)
    _verified: dict[int, float] = field(default_factory=dict)
    _started_at_s: float = field(default_factory=time.time)

    def requested(self, event: SaveRequested) -> None:
        """A save was asked for."""
        self._requests += 1
        self.saves_since_commit += 1
        _remember(self._request_of, event.checkpoint, self._requests)
        self.in_flight.add(event.checkpoint)
        if event.step is not None:
            self.training_step = max(self.training_step, event.step)

    def committed(self, event: Committed) -> None:
        """A recovery point exists."""
        self.in_flight.discard(event.checkpoint)
        self.consecutive_failures = 0
        # Requests that came while this save was on its way have no commit yet: only those before it are made good.
        newer = self._requests - self._request_of.get(event.checkpoint, self._requests)
        self.saves_since_commit = min(self.saves_since_commit, newer)
        if event.step is None:
            return
        _remember(self._stood_at_s, event.step, event.at_s - event.lag_s)
        if event.step >= self.committed_step:
            self.committed_step = event.step
            self.committed_at_s = event.at_s - event.lag_s

    def restored(self, event: Restored) -> None:
        """Training stands at the restored step now, whatever stood before: after a fallback it is an older one."""
        self.saves_since_commit = self.consecutive_failures = 0
        if event.step is not None:
            self.training_step = self.committed_step = event.step
            self.committed_at_s = event.at_s
            _remember(self._stood_at_s, event.step, event.at_s)

    def verified(self, step: int | None, stood_at_s: float | None, *, ok: bool) -> None:
        """A step was found sound, or damaged: then it does not count any more, and an older one does."""
        if step is None:
            return
        if ok:
            known_s = self._stood_at_s.get(step, self._started_at_s)
            _remember(self._verified, step, known_s if stood_at_s is None else stood_at_s)
        else:
            self._verified.pop(step, None)
        self.verified_step = max(self._verified, default=0)
        self.verified_at_s = self._verified.get(self.verified_step, self._started_at_s)


def _remember(kept: dict[_K, _V], key: _K, value: _V) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _KEPT_STEPS:
        del kept[next(iter(kept))]
