"""Where training stands in its data.

A data loader is each rank's own. `ElasticBatchSampler` is one order of samples for all ranks together, so that
their number may change. Both count what training has consumed, and not what was fetched ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from txstore.checksum import crc32c
from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.piece import Loaded
from txstore.train.progress import TrainProgress
from txstore.train.stateful import Scoped, StatefulPiece, scoped

_SETTINGS = ("num_workers", "batch_size", "drop_last")
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
        """The state of one loader, with the settings that change what it means.

        Raises:
            UnsupportedValue: The state lacks some of the loader's workers.
        """
        item = self._items[name].item
        state = item.state_dict()
        _refuse_incomplete(name, item, state)
        return {"state": state, "settings": _settings(item)}

    def problems(self, loaded: Loaded) -> list[str]:
        """As for all objects; and settings under which the cursor means something else."""
        problems = super().problems(loaded)
        for name, one in self._items.items():
            saved = (loaded.shared if one.is_shared else loaded.own or {}).get(name)
            if saved is not None:
                now = _settings(one.item)
                problems += [
                    f"data {name!r}: {field} is {now.get(field)}, {value} was saved"
                    for field, value in saved["settings"].items()
                    if now.get(field) != value
                ]
        return problems

    def give(self, name: str, state: Any) -> None:
        """Give a loader its state, and let it take it now.

        A loader would take it when it is next iterated, and draw from the global random stream, which by then has
        been restored: a resumed run would be one draw ahead. So it makes its iterator here.
        """
        item = self._items[name].item
        item.load_state_dict(state["state"])
        if _is_stateful_loader(item):
            there = _batches_given(item.state_dict())
            if there != _batches_given(state["state"]):
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


def _settings(item: Any) -> dict[str, Any]:
    if not _is_stateful_loader(item):
        return {}
    return {name: getattr(item, name) for name in _SETTINGS}


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
