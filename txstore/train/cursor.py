"""Where training stands in its data.

A data loader is each rank's own. `ElasticBatchSampler` is one order of samples for all ranks together, so that
their number may change. Both count what training has consumed, and not what was fetched ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Sampler

from txstore.checksum import crc32c
from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.progress import TrainProgress
from txstore.train.stateful import Scoped, StatefulPiece, scoped

_SETTINGS = ("num_workers", "batch_size", "drop_last")
_ORDER = ("batch_size", "drop_last", "num_replicas", "replacement", "seed", "shuffle")
"""Attributes of samplers that say which order they draw. Epochs and cursors move: they are state."""
_ORDER_CHECKED = 1024


class ElasticBatchSampler(Sampler[list[int]]):
    """One global order of samples, of which each rank takes its part of every batch.

    Pass it as ``batch_sampler=`` of a ``DataLoader``, and to `TrainState` as ``data=``. Its cursor is
    ``progress.consumed_samples``, which the training loop moves by `global_batch` when it has trained on a batch:
    workers may fetch ahead, and another number of ranks goes on at the same sample. Samples that do not fill a
    last batch of an epoch are left out of it.

    Give the ``DataLoader`` a ``generator=`` of its own: it draws a number for every iterator, and from the global
    stream a resumed run would draw one more than an untouched run.

    Args:
        samples: How many samples the data has.
        global_batch: Samples in a batch of all ranks together; a multiple of `world_size`.
        progress: The loop's counters.
        rank: This rank among those that share the data.
        world_size: How many ranks share the data.
        seed: Of the order; each epoch has an order of its own.
        shuffle: False for the data's own order.

    Raises:
        ConfigError: The numbers do not fit each other.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int,
        progress: TrainProgress,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size}")
        if global_batch < 1 or global_batch % world_size:
            raise ConfigError(
                f"a global batch of {global_batch} cannot be shared equally by {world_size} ranks",
                next_step="choose a global batch that every number of ranks you may run with divides",
            )
        if samples < global_batch:
            raise ConfigError(f"{samples} samples do not fill a batch of {global_batch}")
        self._samples = samples
        self._global_batch = global_batch
        self._progress = progress
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._ended_at: int | None = None

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._samples // self._global_batch

    def next_batch_id(self) -> str:
        """Names the global batch at the cursor: the same whatever the number of ranks.

        Record it with the step that trains on it, and a resume is checked to begin with the right one.
        """
        epoch, number = divmod(self._progress.consumed_samples // self._global_batch, len(self))
        return f"epoch-{epoch}.batch-{number}"

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's indices of each batch, from the cursor to the end of its epoch.

        Raises:
            ConfigError: The cursor stands inside a batch, or has not moved since the last iteration ended.
        """
        start = self._progress.consumed_samples
        if start % self._global_batch:
            raise ConfigError(f"{start} consumed samples are no whole number of batches of {self._global_batch}")
        if start == self._ended_at:
            raise ConfigError(
                "an epoch has ended and progress.consumed_samples has not moved",
                next_step="add the global batch to it after each batch",
            )
        return self._batches(start)

    def _batches(self, start: int) -> Iterator[list[int]]:
        epoch, first = divmod(start // self._global_batch, len(self))
        order = self._order(epoch)
        part = self._global_batch // self._world_size
        for batch in range(first, len(self)):
            at = batch * self._global_batch + self._rank * part
            yield order[at : at + part].tolist()
        self._ended_at = start

    def _order(self, epoch: int) -> Any:
        if not self._shuffle:
            return np.arange(self._samples)
        return np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._samples)

    def state_dict(self) -> dict[str, Any]:
        """The cursor, and what it means: the order's parameters and a check of the order itself."""
        consumed = self._progress.consumed_samples
        epoch = consumed // self._global_batch // len(self)
        order = self._order(epoch)[:_ORDER_CHECKED].astype("<i8").tobytes()
        return {
            "samples": self._samples,
            "global_batch": self._global_batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "consumed_samples": consumed,
            "order_check": crc32c(order),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a saved cursor.

        Raises:
            StateMismatch: It was saved under other settings, or this numpy shuffles in another order.
        """
        before = self._progress.consumed_samples
        self._progress.consumed_samples = state_dict["consumed_samples"]
        now = self.state_dict()
        wrong = [
            f"{name} is {now[name]}, {state_dict.get(name)} was saved"
            for name in now
            if now[name] != state_dict.get(name)
        ]
        if wrong:
            self._progress.consumed_samples = before
            raise StateMismatch(f"the order of the samples is another: {'; '.join(wrong)}", key="data")
        self._ended_at = None


class CursorPiece(StatefulPiece):
    """The piece of state that holds all cursors.

    Raises:
        ConfigError: An object that does not know what training has consumed.
    """

    def __init__(self, data: Any) -> None:
        named = scoped(data, "data", is_shared=False)
        for name, one in named.items():
            if isinstance(one.item, ElasticBatchSampler):
                named[name] = Scoped(one.item, is_shared=True)
            _refuse_unknowing(name, one.item)
        super().__init__("data", named, verify=False)

    def state_of(self, name: str) -> Any:
        """The state of one loader.

        Raises:
            UnsupportedValue: The state lacks some of the loader's workers.
        """
        item = self._items[name].item
        state = item.state_dict()
        _refuse_incomplete(name, item, state)
        return state

    def facts(self, item: Any) -> dict[str, str]:
        """Its class, and of a loader what gives its cursor its meaning: how much it reads at once, in whose order."""
        facts = super().facts(item)
        return {**facts, **_facts_of_loader(item)} if _is_stateful_loader(item) else facts

    def facts_now(self, name: str) -> dict[str, str]:
        """Also how many samples there are: data may grow under a loader."""
        dataset = getattr(self._items[name].item, "dataset", None)
        # A dataset that iterates may tell any length, and another one as it goes.
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            return super().facts_now(name)
        return {**super().facts_now(name), "samples": str(len(dataset))}

    def give(self, name: str, state: Any) -> None:
        """Give a loader its state, and let it take it now.

        A loader would take it when it is next iterated, and draw from the global random stream, which by then has
        been restored: a resumed run would be one draw ahead. So it makes its iterator here.
        """
        item = self._items[name].item
        item.load_state_dict(state)
        if _is_stateful_loader(item):
            there = _batches_given(item.state_dict())
            if there != _batches_given(state):
                raise StateMismatch(
                    f"data {name!r} stands at batch {there} after it took its state", key=f"data.{name}"
                )


def _is_stateful_loader(item: Any) -> bool:
    """Whether this is torchdata's `StatefulDataLoader`, which is not imported: it may not be installed."""
    return any(
        base.__module__.startswith("torchdata.") and base.__name__ == "StatefulDataLoader"
        for base in type(item).__mro__
    )


def _batches_given(state: Mapping[str, Any]) -> int:
    """How many batches of its epoch a loader has given to training, by its state."""
    if "_num_yielded" in state:
        return int(state["_num_yielded"])
    return int(state["_snapshot"]["_snapshot_step"]) + int(state["_steps_since_snapshot"])


def _facts_of_loader(item: Any) -> dict[str, str]:
    """By name, as text."""
    facts = {name: str(getattr(item, name)) for name in _SETTINGS}
    # A batch sampler that the loader has made itself says nothing that the loader does not.
    places = ("sampler",) if item.batch_size is not None else ("sampler", "batch_sampler")
    for place in places:
        sampler = getattr(item, place, None)
        if sampler is not None:
            named = {name: getattr(sampler, name, None) for name in _ORDER}
            settings = ", ".join(f"{name}={value}" for name, value in named.items() if isinstance(value, int))
            # Not the module: torchdata puts its own class of the same name in torch's place.
            facts[place] = f"{type(sampler).__qualname__}({settings})"
    return facts


def _refuse_unknowing(name: str, item: Any) -> None:
    if isinstance(item, Dataset):
        raise ConfigError(
            f"data {name!r} is a dataset: with workers, each holds a copy, and this one stays at the beginning",
            next_step="pass the StatefulDataLoader that reads it",
        )
    if _is_stateful_loader(item):
        if not getattr(item, "in_order", True):
            raise ConfigError(f"data {name!r} has in_order=False, under which its state is not exact")
        if isinstance(getattr(item, "batch_sampler", None), ElasticBatchSampler):
            raise ConfigError(
                f"data {name!r} reads in the order of an ElasticBatchSampler", next_step="pass the sampler"
            )


def _refuse_incomplete(name: str, item: Any, state: Any) -> None:
    """Refuse a loader's state that some worker has not contributed to: its samples would be repeated or lost."""
    if not _is_stateful_loader(item) or not item.num_workers:
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
