"""Loaders that a loop has left inside their epoch: what they give next is a new epoch, and not the rest of that one.

A loader does not know it: its cursor stands where the loop broke off. Nobody but the loader holds its iterator then,
but so it is, too, where a time limit ended the loop, and there a resume must read the rest. What tells the two apart:
``progress.epoch`` was counted after the loop; or training has gone on without that iterator, or with a new one.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from txstore.errors import UnsupportedValue
from txstore.train.loader import IS_OVER, from_torchdata, has_state, index_sampler
from txstore.train.progress import TrainProgress

log = logging.getLogger(__name__)


class _Alone:
    """Holds an object that nobody else does."""

    def __init__(self) -> None:
        self._iterator = object()


def _references(owner: Any) -> int:
    return sys.getrefcount(owner._iterator)  # noqa: SLF001 - torchdata has no other name for it


_ONLY_ITS_OWN = _references(_Alone())


def is_held(item: Any) -> bool:
    """Whether somebody beside the loader holds its iterator: a loop that reads it, or a variable."""
    return _references(item) > _ONLY_ITS_OWN


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a loader was left, among all epochs that it has begun.

    Attributes:
        order: Gives what the epoch's own order holds; each epoch has a new one, also where workers persist.
        given: Batches of it.
    """

    order: Callable[[], Any]
    given: int

    @classmethod
    def of(cls, item: Any) -> _Place | None:
        """None if the loader is being read, has ended its epoch, or has not begun one since a resume."""
        iterator = item._iterator  # noqa: SLF001 - as above
        if iterator is None or iterator._finished or item._initial_iter_for_state_dict:  # noqa: SLF001 - as above
            return None
        order, given = iterator._sampler_iter, iterator._num_yielded  # noqa: SLF001 - as above
        del iterator
        if is_held(item):
            return None
        return cls(_reference(order), given)

    def is_same(self, other: _Place | None) -> bool:
        """Whether no batch was read in between."""
        return other is not None and self.order() is other.order() is not None and self.given == other.given


def _reference(order: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(order)
    except TypeError:  # some iterators of Python's own; kept until the next one
        return lambda: order


@dataclass(frozen=True, slots=True)
class _Seen:
    """A loader that a save found left, and nothing told why."""

    place: _Place
    epoch: int
    global_step: int


class LeftLoaders:
    """Which of some loaders were left.

    Args:
        loaders: Stateful loaders by name.
        progress: The loop's counters; kept for as long as they are.
    """

    def __init__(self, loaders: Mapping[str, Any], progress: TrainProgress) -> None:
        self._loaders = dict(loaders)
        self._progress = progress
        self._left: dict[str, _Place] = {}
        self._seen: dict[str, _Seen] = {}
        self._always: set[str] = set()
        self._restored: dict[str, Callable[[], Any]] = {}
        if loaders:
            progress.on_epoch(self._epoch_moves)

    def _epoch_moves(self) -> None:
        """An epoch is counted: who left a loader before has done with it."""
        for name, item in self._loaders.items():
            place = _Place.of(item)
            if place is not None:
                self._left[name] = place

    def restored(self, name: str, *, is_left: bool) -> None:
        """A loader has taken a state; whether it is that of one that was left."""
        self._left.pop(name, None)
        self._seen.pop(name, None)
        order = self._loaders[name]._iterator._sampler_iter  # noqa: SLF001 - as above
        self._restored[name] = _reference(order) if is_left else lambda: self

    def is_left(self, name: str) -> bool:
        """Whether the next batch of this loader is the first of a new epoch; asked at a save, where it has a state."""
        item = self._loaders[name]
        restored = self._restored.get(name)
        if restored is not None and restored() is item._iterator._sampler_iter:  # noqa: SLF001 - as above
            return True
        place = _Place.of(item)
        if place is None:
            return False
        if name not in self._always and not place.is_same(self._left.get(name)) and not self._shows(name, place):
            return False
        self._left[name] = place
        return True

    def _shows(self, name: str, place: _Place) -> bool:
        """Whether the save before shows it. The first one that finds a loader so cannot know."""
        seen, now = self._seen.get(name), self._progress
        if seen is None:
            log.warning(
                "data %r was left at batch %d of its epoch, and progress.epoch was not counted after that: a resume of "
                "this save reads the rest of that epoch. That is right for a time limit. If the loop begins a new "
                "epoch instead, count progress.epoch before the save",
                name,
                place.given,
            )
        elif place.is_same(seen.place):
            return now.global_step > seen.global_step  # training has gone on without it
        elif seen.epoch == now.epoch:
            self._always.add(name)  # a new epoch began after one that was left and not counted
            return True
        self._seen[name] = _Seen(place, now.epoch, now.global_step)
        return False


def at_its_end(name: str, item: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a loader that was left, such that it begins a new epoch: as torchdata does it after a whole one.

    Raises:
        UnsupportedValue: Its sampler has a state of its own, and might begin the new epoch where it left the old one.
    """
    kept = _kept_sampler(item)
    if kept is not None and not _waits(kept):
        raise UnsupportedValue(
            f"data {name!r} was left inside its epoch, and its {type(kept).__name__} has a state, of which nobody can "
            "tell whether its next epoch would begin there",
            key=f"data.{name}",
            next_step="read the loader to its end, use num_workers above 0, or give the two methods to the sampler's "
            "iterator and not to the sampler",
        )
    return {**state, IS_OVER: True}


def _kept_sampler(item: Any) -> Any:
    """The sampler with a state that nothing asks between a resume and the next epoch; workers fetch ahead, and do."""
    sampler = index_sampler(item)
    found = [one for one in (sampler, getattr(sampler, "sampler", None)) if has_state(one)]
    return found[0] if found and not item.num_workers else None


def _waits(sampler: Any) -> bool:
    """Whether it is torchdata's distributed one: it keeps a state for whichever order begins first."""
    return from_torchdata(sampler, "StatefulDistributedSampler") is not None


def end_order(item: Any, state: Mapping[str, Any], *, is_left: bool) -> None:
    """Let an order that is over take its sampler's state: it waits there for the first order that is asked for."""
    sampler = _kept_sampler(item) if state.get(IS_OVER) else None
    if sampler is not None and _waits(sampler):
        sampler.next_yielded = None
    elif sampler is not None and not is_left and next(item._iterator._sampler_iter, item) is not item:  # noqa: SLF001 - as above
        item.load_state_dict(state)  # one whose state was that of the next order
        item.state_dict()
