"""torchdata's `StatefulDataLoader`: what its state tells, and what it must not be made of for that to be enough.

torchdata is not imported: it may not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.iterated import why_not_again as why_no_dataset
from txstore.train.rehearsal import MOVES, Places, gives_its_state, places, put_back, why_not_again

_SETTINGS = ("num_workers", "batch_size", "drop_last")
_ORDER = ("batch_size", "drop_last", "num_replicas", "replacement", "seed", "shuffle")
"""Attributes of samplers that say which order they draw. Epochs and cursors move: they are state."""

_VOUCH = "if you know that each epoch comes in the same order again, say so: data=repeatable(loader)"
_METHODS = "give it, or its iterator, state_dict and load_state_dict"
IS_OVER = "_iterator_finished"
"""In a loader's state: the next iteration begins a new epoch."""

_NEXT_STEPS = {
    "RandomSampler": "use shuffle=True, or torchdata.stateful_dataloader.sampler.RandomSampler, which has a state",
    "SubsetRandomSampler": "give it a generator= and wrap it in ReplayedSampler, or read a Subset with shuffle=True",
    "WeightedRandomSampler": "give it a generator= and wrap it in ReplayedSampler",
}


class ReplayedSampler(Sampler[Any]):
    """A sampler whose order is drawn from a generator, with a state: how the generator stood when the epoch began.

    For samplers of torch and of your own, as ``sampler=`` or ``batch_sampler=`` of a `StatefulDataLoader`::

        generator = torch.Generator().manual_seed(seed)
        sampler = ReplayedSampler(WeightedRandomSampler(weights, count, generator=generator))

    Args:
        sampler: Gives indices, or batches of them. Must be drawn from nothing but the generator: `TrainState` asks it.
        generator: That generator, which nobody else draws from; the sampler's own attribute ``generator`` if None.

    Raises:
        ConfigError: There is no generator.
    """

    def __init__(self, sampler: Any, generator: torch.Generator | None = None) -> None:
        found = generator if generator is not None else getattr(sampler, "generator", None)
        if not isinstance(found, torch.Generator):
            raise ConfigError(
                f"a {type(sampler).__name__} without a generator of its own",
                next_step="give the sampler a torch.Generator as generator=, or pass the one that it draws from",
            )
        self.sampler = sampler
        self.generator = found

    def __len__(self) -> int:
        """As the sampler says."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """The sampler's next order; the iterator has the state."""
        return _Replay(self.sampler, self.generator)


class _Replay(Iterator[Any]):
    """One epoch."""

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self._sampler = sampler
        self._generator = generator
        self._items: Iterator[Any] | None = None
        self._began = generator.get_state()
        self._given = 0

    def __next__(self) -> Any:
        if self._items is None:
            self._began = self._generator.get_state()
            self._items = iter(self._sampler)
        item = next(self._items)
        self._given += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """How the generator stood, and how much was given since."""
        began = self._generator.get_state() if self._items is None else self._began
        return {"began": began, "given": self._given}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Draw the same order again, and skip what was given."""
        self._generator.set_state(state_dict["began"])
        self._items, self._given = None, 0
        for _ in range(state_dict["given"]):
            next(self)


def is_stateful_loader(item: Any) -> bool:
    """Whether this is torchdata's `StatefulDataLoader`."""
    return from_torchdata(item, "StatefulDataLoader") is not None


def batches_given(state: Mapping[str, Any]) -> int:
    """How many batches of its epoch a loader has given to training, by its state."""
    if "_num_yielded" in state:
        return int(state["_num_yielded"])
    return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])


def facts_of(item: Any) -> dict[str, str]:
    """What gives a loader's cursor its meaning, by name, as text."""
    facts = {name: str(getattr(item, name)) for name in _SETTINGS}
    # A batch sampler that the loader has made itself says nothing that the loader does not.
    where = ("sampler",) if item.batch_size is not None else ("sampler", "batch_sampler")
    for place in where:
        sampler = getattr(item, place, None)
        if sampler is not None:
            named = {name: getattr(sampler, name, None) for name in _ORDER}
            settings = ", ".join(f"{name}={value}" for name, value in named.items() if isinstance(value, int))
            # Not the module: torchdata puts its own class of the same name in torch's place.
            facts[place] = f"{type(sampler).__qualname__}({settings})"
    return facts


def attributes_of(item: Any) -> Places:
    """Numbers in what gives the order and has no state of its own, such as the epoch of a distributed sampler."""
    dataset = getattr(item, "dataset", None)
    iterates = isinstance(dataset, IterableDataset)
    root = dataset if iterates else index_sampler(item)
    if iterates and has_state(dataset):
        return {}
    found = {}
    for path, part in places(root).items():
        # A sampler with a state may leave its epoch out, as torchdata's distributed one does.
        is_stateful = has_state(_at(root, path))
        numbers = {name: value for name, value in part.items() if not isinstance(value, str)}
        found[path] = {name: value for name, value in numbers.items() if name == "epoch" or not is_stateful}
    return found


def settings_of(item: Any) -> dict[str, str]:
    """Those attributes as text: what the code chose, where no fact tells it already."""
    return {
        f"{path}.{name}".removeprefix("."): repr(value)
        for path, part in attributes_of(item).items()
        for name, value in part.items()
        if name not in _ORDER
    }


def put_attributes_back(item: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Before the loader takes its state: from then on its order stands."""
    dataset = getattr(item, "dataset", None)
    put_back(dataset if isinstance(dataset, IterableDataset) else index_sampler(item), found)


def refuse_unrepeatable(name: str, item: Any) -> None:
    """Refuse a loader that would go on in another order than the one in which it stopped.

    Raises:
        ConfigError: Names the sampler or the dataset, and says what to do.
    """
    dataset = getattr(item, "dataset", None)
    if isinstance(dataset, IterableDataset):
        why = "" if has_state(dataset) else why_no_dataset(dataset)
        # An iterator that is made by a plain function may have a state: the first save tells.
        if why and _is_generator(type(dataset).__iter__):
            raise ConfigError(
                f"data {name!r} reads a {type(dataset).__name__} without a state, which {why}: nobody can tell whether "
                "a resumed run would read on where it stopped",
                next_step=f"{_METHODS}; {_VOUCH}",
            )
        return
    sampler = index_sampler(item)
    if not has_state(sampler) and _keeps_inner_state(sampler, "BatchSampler"):
        sampler = sampler.sampler
    if has_state(sampler) or _keeps_inner_state(sampler, "RandomSampler"):
        return
    fetched_ahead = bool(item.num_workers)
    if isinstance(sampler, ReplayedSampler):
        why = why_not_again(sampler.sampler, fetched_ahead=fetched_ahead, drawn_from=sampler.generator)
    else:
        why = "" if gives_its_state(sampler) else why_not_again(sampler, fetched_ahead=fetched_ahead)
    if why:
        raise ConfigError(
            f"data {name!r} reads in the order of a {_told(sampler)}, which {why}: a resumed run would go on in "
            "another order",
            next_step=_next_step(sampler, is_moved=why.startswith(MOVES)),
        )


def refuse_unheld(name: str, item: Any, state: Mapping[str, Any], made: Mapping[str, str]) -> None:
    """Refuse a state that says nothing of a dataset that nobody has proved to come again.

    Args:
        name: Of the data, for messages.
        item: The loader.
        state: Its state.
        made: Its `settings_of`, as the code made it.

    Raises:
        UnsupportedValue: Names the dataset, and says what to do.
    """
    dataset = getattr(item, "dataset", None)
    if not isinstance(dataset, IterableDataset) or holds_dataset(state):
        return
    why, step = why_no_dataset(dataset), f"{_METHODS}; {_VOUCH}"
    if not why and item.num_workers and item.persistent_workers and settings_of(item) != made:
        why = "has changed, and the workers were started before or after it, as it happened"
        step = "use persistent_workers=False: then every epoch is read as the dataset is when it begins"
    if why:
        raise UnsupportedValue(
            f"data {name!r} reads a {type(dataset).__name__} without a state, which {why}",
            key=f"data.{name}",
            next_step=step,
        )


def refuse_incomplete(name: str, item: Any, state: Any) -> None:
    """Refuse a loader's state that some worker has not contributed to: its samples would be repeated or lost."""
    if not item.num_workers:
        return
    snapshot = state.get("_snapshot") or {}
    workers = snapshot.get("_worker_snapshots") or {}
    held = [key for key, value in workers.items() if value]
    if len(held) != item.num_workers or not snapshot.get("_main_snapshot"):
        raise UnsupportedValue(
            f"data {name!r} tells the state of {len(held)} of its {item.num_workers} workers",
            key=f"data.{name}",
            next_step="save after the next batch",
        )


def holds_dataset(state: Mapping[str, Any]) -> bool:
    """Whether a loader's state holds that of its dataset, or of the dataset's iterator."""
    workers = (state.get("_snapshot") or {}).get("_worker_snapshots")
    parts = [state] if workers is None else list(workers.values())
    return any(
        part.get("dataset_state") is not None or (part.get("fetcher_state") or {}).get("dataset_iter_state") is not None
        for part in parts
    )


def give(name: str, item: Any, state: Mapping[str, Any], *, is_left: bool) -> None:
    """Give a loader its state, and let it take it now.

    A loader would take it when it is next iterated, and draw from the global random stream, which by then has
    been restored: a resumed run would be one draw ahead. So it makes its iterator here.

    Raises:
        StateMismatch: It stands elsewhere afterwards.
    """
    if isinstance(getattr(item, "dataset", None), IterableDataset) and not holds_dataset(state):
        _read_again(item, batches_given(state), is_over=bool(state.get(IS_OVER)), is_left=is_left)
    else:
        item.load_state_dict(state)
    there = batches_given(item.state_dict())
    if there != batches_given(state):
        raise StateMismatch(
            f"data {name!r} stands at batch {there} after it took its state, {batches_given(state)} was saved",
            key=f"data.{name}",
            next_step="look whether its dataset still has all samples, or begin it anew: fresh={'data'}",
        )


def _read_again(item: Any, batches: int, *, is_over: bool, is_left: bool) -> None:
    """Begin anew and read as much as was read. torchdata would do it, too, and count each of these batches twice."""
    item.load_state_dict({})
    item.state_dict()  # makes the iterator, which the next iteration takes up
    for at in range(batches + (is_over and not is_left)):
        if next(item._iterator, item) is item and at < batches:  # noqa: SLF001 - iter() would take it out
            break
    if is_left:
        item._iterator._finished = True  # noqa: SLF001 - what a state sets that torchdata takes


def index_sampler(item: Any) -> Any:
    """What the loader asks for its order."""
    found = getattr(item, "batch_sampler", None)
    return found if found is not None else getattr(item, "sampler", None)


def has_state(item: Any) -> bool:
    """Whether a sampler, dataset or iterator has the two methods."""
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _at(sampler: Any, path: str) -> Any:
    for name in path.split(".") if path else []:
        sampler = getattr(sampler, name, None)
    return sampler


def from_torchdata(item: Any, name: str) -> type | None:
    """The class of that name in torchdata which an object is of."""
    bases = (base for base in type(item).__mro__ if base.__module__.startswith("torchdata.") and base.__name__ == name)
    return next(bases, None)


def _keeps_inner_state(sampler: Any, name: str) -> bool:
    """Whether it iterates as torchdata's class of that name does, with a state."""
    base: Any = from_torchdata(sampler, name)
    return base is not None and type(sampler).__iter__ is base.__iter__


def _is_generator(function: Any) -> bool:
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x20)


def _told(sampler: Any) -> str:
    inner = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    name = type(sampler).__name__
    return name if inner is None else f"{name} of a {_told(inner)}"


def _next_step(sampler: Any, *, is_moved: bool) -> str:
    """For the sampler that gives the indices."""
    inner = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    keeps = has_state(inner) or isinstance(inner, ReplayedSampler) or _keeps_inner_state(inner, "RandomSampler")
    if keeps:
        return f"pass the {type(inner).__name__} as sampler= with batch_size=: then the loader asks it for its state"
    if inner is not None:
        return _next_step(inner, is_moved=is_moved)
    known = _NEXT_STEPS.get(type(sampler).__name__) if type(sampler).__module__.startswith("torch.") else None
    # A generator would not hold what it moves.
    replayed = "" if is_moved else ", or draw its order from a torch.Generator and wrap it in ReplayedSampler"
    own = f"{_METHODS}{replayed}, or let its order follow from a seed and the epoch that set_epoch sets"
    return f"{known or own}; {_VOUCH}"


def refuse_unknowing(name: str, item: Any, elastic: type) -> None:
    """Refuse data that does not know what training has consumed.

    Raises:
        ConfigError: Says what to pass instead.
    """
    if isinstance(item, Dataset):
        raise ConfigError(
            f"data {name!r} is a dataset: with workers, each holds a copy, and this one stays at the beginning",
            next_step="pass the StatefulDataLoader that reads it",
        )
    if is_stateful_loader(item):
        if not getattr(item, "in_order", True):
            raise ConfigError(
                f"data {name!r} has in_order=False, under which its state is not exact", next_step="leave it True"
            )
        if isinstance(getattr(item, "batch_sampler", None), elastic):
            raise ConfigError(
                f"data {name!r} reads in the order of an ElasticBatchSampler", next_step="pass the sampler"
            )
