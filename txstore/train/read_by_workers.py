"""Attributes of map-style datasets, such as the epoch that seeds augmentations: no state of a loader holds them.

A loop sets one between epochs, and the workers of an epoch are started with it. A resumed loader starts its workers
before the loop can set it again, so the rest of the epoch would be read with what the constructor sets. Numbers that
have moved are therefore saved and put back, and what else has moved is told.

Not so without workers: the dataset that the loop sets is the one that is read, so what the loop sets in each epoch is
there in time; and a flag such as ``opened`` must not come back without what it stands for. Nor with persistent workers,
which keep the numbers with which the first epoch began. There all that has moved is told.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from txstore.train.attributes import ANY, LOOKS, mark_of
from txstore.train.rehearsal import Places, numbers_of, set_numbers

log = logging.getLogger(__name__)

_INNER = frozenset({"dataset", "datasets"})
_DEEPEST = 8
_MOST_TOLD = 5


class ReadDataset:
    """The attributes of one loader's dataset, and of datasets in it (``dataset``, ``datasets``).

    Args:
        name: Of the data, for messages.
        loader: A `StatefulDataLoader`, as the code has made it.
    """

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        self._made = self._numbers()
        self._marks = self._others()
        self._looks = LOOKS
        self._read: tuple[weakref.ref[Any], Places] | None = None

    def _parts(self) -> dict[str, object]:
        dataset = getattr(self._loader, "dataset", None)
        return {} if isinstance(dataset, IterableDataset) else dict(_parts(dataset, "", _DEEPEST))

    def _numbers(self) -> Places:
        return {path: _kept(part, numbers_of(part)) for path, part in self._parts().items()}

    def _others(self) -> dict[str, object]:
        """Marks of public attributes that are no numbers."""
        found = {}
        for path, part in self._parts().items():
            numbers = numbers_of(part)
            for name, value in _kept(part, vars(part)).items():
                if name not in numbers and name not in _INNER and not name.startswith("_"):
                    mark = mark_of(value, ())
                    if mark is not ANY:
                        found[f"{path}.{name}"] = mark
        return found

    def _moved(self) -> Places:
        moved = {}
        for path, numbers in self._numbers().items():
            made = self._made.get(path, {})
            part = {name: one for name, one in numbers.items() if name not in made or _differ(made[name], one)}
            if part:
                moved[path] = part
        return moved

    def saved(self) -> Places:
        """Numbers that have moved since the code made them, by path; tells, once, of what cannot be saved."""
        moved = self._moved()
        is_saved = bool(self._loader.num_workers) and not self._loader.persistent_workers
        if self._looks:
            self._looks -= 1
            self._tell(moved, is_saved=is_saved)
        return moved if is_saved else {}

    def _tell(self, moved: Places, *, is_saved: bool) -> None:
        others = self._others()
        names = [name for name, mark in others.items() if self._marks.get(name, self) != mark]
        # What `set_epoch` derives from the epoch it derives again.
        by_method = {path for path, part in self._parts().items() if callable(getattr(part, "set_epoch", None))}
        names = [one for one in names if one.rpartition(".")[0] not in by_method & moved.keys()]
        if not is_saved:
            numbers = [(path, one) for path, part in moved.items() for one in part]
            again = set() if self._loader.num_workers else {(path, "epoch") for path in by_method}
            names += [f"{path}.{one}" for path, one in numbers if (path, one) not in again]
        if names:
            self._looks = 0
            log.warning(
                "data %r: not saved: training changes %s of its dataset. A resume reads with what the constructor "
                "sets, unless you set it before resume(), or, without workers, before the next batch. Numbers that "
                "workers read are saved, under persistent_workers=False",
                self._name,
                ", ".join(sorted(one.removeprefix(".") for one in names)[:_MOST_TOLD]),
            )
        elif is_saved and self._in_between(moved):
            self._looks = 0
            log.warning(
                "data %r: training changes %s of its dataset in the middle of an epoch. Its workers see that in the "
                "next one, and a resume would read the rest of this one with it: change it between epochs",
                self._name,
                ", ".join(sorted(f"{path}.{one}".removeprefix(".") for path, part in moved.items() for one in part)),
            )

    def _in_between(self, moved: Places) -> bool:
        """Whether numbers moved since the last save, which the same iterator had seen."""
        iterator = getattr(self._loader, "_iterator", None)
        before, self._read = self._read, None if iterator is None else (weakref.ref(iterator), moved)
        return before is not None and iterator is not None and before[0]() is iterator and before[1] != moved

    def put_back(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what `saved` gave, before the loader starts its workers."""
        parts = self._parts()
        for path, values in found.items():
            if path in parts:
                set_numbers(parts[path], values)


def _parts(dataset: Any, path: str, left: int) -> Iterator[tuple[str, object]]:
    held = getattr(dataset, "__dict__", None)
    if held is None:
        return
    yield path, dataset
    several = held.get("datasets")
    inner = {"dataset": held.get("dataset")}
    inner |= {f"datasets.{at}": one for at, one in enumerate(several if isinstance(several, list | tuple) else ())}
    for name, one in inner.items() if left else ():
        yield from _parts(one, f"{path}.{name}".removeprefix("."), left - 1)


def _kept(part: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataset with a state of its own tells there, but for an epoch: such a state may leave it out."""
    has_state = "state_dict" in dir(type(part)) and "load_state_dict" in dir(type(part))
    return {name: one for name, one in values.items() if name == "epoch" or not has_state}


def _differ(left: object, right: object) -> bool:
    return type(left) is not type(right) or left != right
