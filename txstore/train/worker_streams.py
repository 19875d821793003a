"""`WorkerStreams`: the random numbers that a data loader's dataset draws, as part of the loader's state.

The workers of a loader are processes with random streams of their own. No state holds those: the workers of a resumed
run begin with other streams, and what they draw for the rest of the epoch, as augmentations do, is other than it was.
So it is without workers for generators of the dataset's own, which no state holds either unless they are named.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, default_convert, get_worker_info

from txstore.errors import ConfigError, StateMismatch
from txstore.train.generators import generators_in
from txstore.train.python_state import flatten, unflatten
from txstore.train.rng import Generator, Stream, own_streams, process_streams

log = logging.getLogger(__name__)


class WorkerStreams(Dataset[Any]):
    """A map-style dataset that may draw random numbers, and goes on with them after a resume, bit for bit.

    For a `StatefulDataLoader`, which asks each worker's copy for its state after every batch::

        loader = StatefulDataLoader(WorkerStreams(dataset), batch_size=32, shuffle=True, num_workers=4)

    Kept are the worker's streams of Python, NumPy and torch, generators among the dataset's attributes and those of
    datasets in it (``dataset``, ``datasets``), and the dataset's own state if it has the two methods. Without workers
    the streams of Python, NumPy and torch are those of the training, which `TrainState` saves. The state is of 10 KiB
    and travels with each batch of a worker.

    Args:
        dataset: Anything with ``__getitem__`` and ``__len__``. Its other attributes are there as before.

    Raises:
        ConfigError: It iterates: its own iterator has to have the state.
    """

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"a {type(dataset).__name__} is no map-style dataset",
                next_step="give it, or its iterator, state_dict and load_state_dict, which keep what it draws from",
            )
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        """As the dataset."""
        return self.dataset[index]

    def __len__(self) -> int:
        """As the dataset."""
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        """Other attributes, such as ``classes`` or ``__getitems__``, are the dataset's."""
        if name == "dataset":  # not unpickled yet
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def state_dict(self) -> dict[str, Any]:
        """The streams of this process, if it is a worker, and what the dataset keeps itself."""
        streams = {name: stream.get() for name, stream in self._streams().items()}
        inner = self.dataset.state_dict() if _has_state(self.dataset) else None
        # Packed: torchdata sends what has changed of a state, and looks at every number for that.
        return {"streams": flatten(streams, "streams")[0], "dataset": inner}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken.

        Raises:
            StateMismatch: It was taken with other streams: with workers, or without, or of other generators.
        """
        saved = unflatten(state_dict["streams"], {})
        here = self._streams()
        if here.keys() != saved.keys():
            raise StateMismatch(
                f"the random streams of a worker were {sorted(saved)}, and are {sorted(here)}",
                key="data",
                next_step="give the dataset the generators that it had, or begin the data anew: fresh={'data'}",
            )
        if _has_state(self.dataset):
            self.dataset.load_state_dict(state_dict["dataset"])
        for name, stream in here.items():
            stream.set(saved[name])

    def _streams(self) -> dict[str, Stream]:
        found = own_streams(dict(_generators(self.dataset)))
        return found if get_worker_info() is None else process_streams() | found


def tell_of_draws(name: str, loader: Any, saved: Collection[Generator]) -> None:
    """Warn of a loader whose dataset or ``collate_fn`` may draw random numbers that no state holds.

    Args:
        name: Of the data, for the message.
        loader: A `StatefulDataLoader`.
        saved: Generators that `TrainState` saves.
    """
    if not loader.num_workers:
        _tell_of_generators(name, loader, saved)
    elif isinstance(loader.dataset, WorkerStreams):
        _tell_of_generators(name, loader, ())  # a worker draws from copies, wherever they are named
    else:
        _tell_of_workers(name, loader)


def _tell_of_workers(name: str, loader: Any) -> None:
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset | TensorDataset | list | tuple | range) and not _has_state(dataset):
        log.warning(
            "data %r: what its %d workers draw at random, as augmentations do, is not saved, and would differ after a "
            "resume in the middle of an epoch: give the loader WorkerStreams(dataset)",
            name,
            loader.num_workers,
        )
    elif loader.collate_fn not in (default_collate, default_convert):
        log.warning(
            "data %r: what its collate_fn draws at random in %d workers, as mixup and masking do, is not saved and "
            "would differ after a resume in the middle of an epoch: %s",
            name,
            loader.num_workers,
            "draw from a generator in the state of the dataset's iterator"
            if isinstance(dataset, IterableDataset)
            else "give the loader WorkerStreams(dataset)",
        )


def _tell_of_generators(name: str, loader: Any, saved: Collection[Generator]) -> None:
    dataset, kept = loader.dataset, [*saved]
    if isinstance(dataset, WorkerStreams):
        kept += [one for _, one in _generators(dataset)]
        dataset = dataset.dataset
    if isinstance(dataset, IterableDataset) or _has_state(dataset):
        kept += generators_in(dataset=dataset).values()  # what it draws from is for its own state, or was asked for
    reached = generators_in(dataset=dataset, collate_fn=loader.collate_fn)
    own = [place for place, one in reached.items() if all(one is not known for known in kept)]
    if own:
        log.warning(
            "data %r: what is drawn from generators of its dataset or collate_fn (%s) is not saved, and would differ "
            "after a resume: %s",
            name,
            ", ".join(own),
            "make them attributes of the dataset, whose generators WorkerStreams keeps, or draw from the global ones "
            "of Python, NumPy or torch"
            if loader.num_workers
            else "name them in generators=; attributes of the dataset WorkerStreams(dataset) keeps as well",
        )


def _generators(dataset: Any, deepest: int = 8) -> Iterator[tuple[str, Generator]]:
    """Those among the attributes of a dataset, and of the datasets in it, such as in a ``Subset``, by name."""
    held = getattr(dataset, "__dict__", {})
    yield from ((name, one) for name, one in held.items() if isinstance(one, Generator))
    several = held.get("datasets")
    inner = {"dataset": held.get("dataset")}
    inner |= {f"datasets-{at}": one for at, one in enumerate(several if isinstance(several, list | tuple) else ())}
    for place, one in inner.items() if deepest else ():
        yield from ((f"{place}-{name}", generator) for name, generator in _generators(one, deepest - 1))


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
