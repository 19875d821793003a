"""A loop over data that a restore has moved: it would go on with what it holds, and training would be that of no run.

`resume` inside ``for batch in loader:`` gives the loader another iterator. The loop still has the old one.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from weakref import ref

from txstore.errors import NotProved
from txstore.train.progress import TrainProgress


class OldLoops:
    """Knows the iterators that were in use at the last restore. They give no batch any more.

    Args:
        data: Loaders and samplers by name. Of one that is no `StatefulDataLoader` and no `ElasticBatchSampler` nothing
            can be told.
        progress: The loop's counters.
    """

    def __init__(self, data: Mapping[str, Any], progress: TrainProgress) -> None:
        self._data = data
        self._progress = progress
        self._old: dict[str, ref[Any]] = {}
        self._restored = replace(progress)

    def leave(self) -> None:
        """Before a restore: what is in use now will be old."""
        self._old |= {name: found for name, item in self._data.items() if (found := _latest(item)) is not None}

    def left(self) -> None:
        """After a restore."""
        self._restored = replace(self._progress)
        self._forget()  # also data that was left as it was, on purpose
        for name, old in self._old.items():
            iterator = old()
            if iterator is not None:
                iterator._next_data = partial(self._stop, name)  # noqa: SLF001 - what each batch is asked of

    def refuse(self) -> None:
        """Refuse to go on with the last batch of a loop from before the restore.

        Raises:
            NotProved: Something was counted since, a loop of before is alive, and no other was begun.
        """
        self._forget()
        if not self._old or self._progress == self._restored:
            return
        if any(_latest(item) for item in self._data.values()):
            return  # a new loop was begun; one of before would be stopped at its next batch
        gc.collect()  # a loop that was left may be held by a cycle
        self._forget()
        for name in self._old:
            self._stop(name)

    def _stop(self, name: str) -> NoReturn:
        raise NotProved(
            f"data {name!r}: the loop that was running at the resume goes on, and its batches are those of before; "
            f"the state stood at step {self._restored.global_step} then",
            key=f"data.{name}",
            next_step="leave the loop (`break`) right after resume(), and begin a new one; an iterator that you make "
            "yourself: make it after resume()",
        )

    def _forget(self) -> None:
        """Those that nobody has any more, and those whose data was begun anew, or was not restored."""
        self._old = {
            name: old for name, old in self._old.items() if old() is not None and not _latest(self._data[name])
        }


def _latest(item: Any) -> ref[Any] | None:
    """The iterator that was begun last, alive or not; None if none was since a restore, or if that cannot be told."""
    made_for_a_state = getattr(item, "_initial_iter_for_state_dict", None)  # by torchdata, and no loop has it yet
    if made_for_a_state is None:
        found: ref[Any] | None = getattr(item, "latest_pass", None)
        return found
    return None if made_for_a_state or item._iterator is None else ref(item._iterator)  # noqa: SLF001 - nothing else tells
