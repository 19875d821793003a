"""Where training stands in its data.

A data loader is each rank's own. `ElasticBatchSampler` is one order of samples for all ranks together, so that
their number may change. Both count what training has consumed, and not what was fetched ahead of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sized
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler

from txstore.checksum import crc32c
from txstore.errors import ConfigError, StateMismatch
from txstore.train import loader
from txstore.train.left_loaders import LeftLoaders, at_its_end, end_order
from txstore.train.progress import TrainProgress
from txstore.train.read_by_workers import ReadDataset
from txstore.train.rng import Generator
from txstore.train.stateful import Scoped, StatefulPiece, scoped
from txstore.train.worker_streams import tell_of_draws

log = logging.getLogger(__name__)

_ORDER_CHECKED = 1024


class ElasticBatchSampler(Sampler[list[int]]):
    """One global order of samples, of which each rank takes its part of every batch.

    Pass it as ``batch_sampler=`` of a ``DataLoader``, and to `TrainState` as ``data=``. Its cursor is
    ``progress.consumed_samples``, which the training loop moves by `global_batch` when it has trained on a batch:
    workers may fetch ahead, and another number of ranks goes on at the same sample. Samples that do not fill a
    last batch of an epoch are left out of it.

    The first pass after a resume is the rest of the one that was interrupted. At the end of an epoch that is nothing,
    if ``progress.epoch`` has not counted that epoch yet: count the epochs that have ended.

    Args:
        samples: How many samples the data has.
        global_batch: Samples in a batch of all ranks together; a multiple of `world_size`.
        progress: The loop's counters.
        rank: This rank among those that share the data.
        world_size: How many ranks share the data.
        seed: Of the order; each epoch has an order of its own.
        shuffle: False for the data's own order.

    Attributes:
        latest_pass: The iterator that was begun last; None if none was since the last restore.

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
            raise ConfigError(f"rank {rank} of {world_size}", next_step="pass a rank from 0 to world_size - 1")
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
        self.latest_pass: ref[_Pass] | None = None
        self._is_resumed = False
        self._before: torch.Tensor | None = None  # the global stream, before a loader made its iterator

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
        if self._is_resumed and self._before is None:
            self._before = torch.get_rng_state()
        batches = _Pass(self._batches(start))
        self.latest_pass = ref(batches)
        return batches

    def _batches(self, start: int) -> Iterator[list[int]]:
        epoch, first = divmod(start // self._global_batch, len(self))
        if self._goes_on(epoch, first) and not first:
            log.warning("epoch %d had ended when it was saved, and was not counted: its rest is empty", epoch - 1)
            return
        order = self._order(epoch)
        part = self._global_batch // self._world_size
        for batch in range(first, len(self)):
            at = batch * self._global_batch + self._rank * part
            yield order[at : at + part].tolist()
        self._ended_at = start

    def _goes_on(self, epoch: int, first: int) -> bool:
        """Whether this pass was begun before the checkpoint; asked when it begins, once."""
        before, self._before = self._before, None
        resumed, self._is_resumed = self._is_resumed, False
        goes_on = resumed and (first > 0 or self._progress.epoch == epoch - 1)
        if goes_on and before is not None:
            _take_back(before)
        return goes_on

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
        self._ended_at = self.latest_pass = None
        self._is_resumed, self._before = True, None


class _Pass(Iterator[list[int]]):
    """What an iteration gives. A loader with workers asks it again at each batch, even when it has come to its end."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __next__(self) -> list[int]:
        return self._next_data()

    def _next_data(self) -> list[int]:  # the name that `OldLoops` knows
        return next(self._batches)


def _take_back(before: torch.Tensor) -> None:
    """Put the global stream back, if all that was drawn is the one number that a ``DataLoader`` draws for an iterator.

    An untouched run drew that when the epoch began: a resumed run would be one draw ahead.
    """
    drawn = torch.Generator()
    drawn.set_state(before)
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=drawn)
    if torch.equal(drawn.get_state(), torch.get_rng_state()):
        torch.set_rng_state(before)


class CursorPiece(StatefulPiece):
    """The piece of state that holds all cursors.

    Args:
        data: A loader or sampler, or several by name.
        saved: Generators that are saved beside them.
        progress: The loop's counters.

    Raises:
        ConfigError: An object that does not know what training has consumed, or whose order would not come back.
    """

    def __init__(self, data: Any, saved: Collection[Generator], progress: TrainProgress) -> None:
        named = scoped(data, "data", is_shared=False)
        for name, one in named.items():
            if isinstance(one.item, ElasticBatchSampler):
                named[name] = Scoped(one.item, is_shared=True)
            loader.refuse_unknowing(name, one.item, ElasticBatchSampler)
        super().__init__("data", named, verify=False)
        self._loaders = {name: one for name, one in named.items() if loader.is_stateful_loader(one.item)}
        self._datasets = {name: ReadDataset(name, one.item) for name, one in self._loaders.items()}
        for name, one in self._loaders.items():
            if not one.is_vouched_for:
                loader.refuse_unrepeatable(name, one.item)
                tell_of_draws(name, one.item, saved)
        self._left = LeftLoaders({name: one.item for name, one in self._loaders.items()}, progress)

    across_ranks = "as many ranks as saved it; with an ElasticBatchSampler all ranks share one cursor, for any number"

    def state_of(self, name: str) -> Any:
        """The state of one loader.

        Raises:
            UnsupportedValue: The state lacks some of the loader's workers, or says nothing of its dataset.
        """
        item = self._items[name].item
        state = item.state_dict()
        if name in self._loaders:
            loader.refuse_incomplete(name, item, state)
            if not self._items[name].is_vouched_for:
                loader.refuse_unheld(name, item, state, self._set[name])
            if self._left.is_left(name):
                state = at_its_end(name, item, state)
        return state

    def more(self, name: str, state: Any) -> dict[str, Any]:  # noqa: ARG002 - the signature of a piece
        """What no state of a loader holds: attributes of its samplers and dataset, and whether it was left early."""
        if name not in self._loaders:
            return {}
        item = self._items[name].item
        more = {"attributes": loader.attributes_of(item), "dataset": self._datasets[name].saved()}
        return {**more, "left": self._left.is_left(name)}

    def settings(self, item: Any) -> dict[str, str]:
        """Those attributes, as the code chose them."""
        return loader.settings_of(item) if loader.is_stateful_loader(item) else {}

    def facts(self, item: Any) -> dict[str, str]:
        """Its class, and of a loader what gives its cursor its meaning: how much it reads at once, in whose order."""
        facts = super().facts(item)
        return {**facts, **loader.facts_of(item)} if loader.is_stateful_loader(item) else facts

    def facts_now(self, name: str) -> dict[str, str]:
        """Also how many samples there are: data may grow under a loader."""
        dataset = getattr(self._items[name].item, "dataset", None)
        # A dataset that iterates may tell any length, and another one as it goes.
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            return super().facts_now(name)
        return {**super().facts_now(name), "samples": str(len(dataset))}

    def give(self, name: str, saved: Mapping[str, Any]) -> None:
        """Give a loader its state, and let it take it now."""
        item = self._items[name].item
        if name not in self._loaders:
            item.load_state_dict(saved["state"])
            return
        loader.put_attributes_back(item, saved.get("attributes", {}))
        self._datasets[name].put_back(saved.get("dataset", {}))
        is_left = saved.get("left", False)
        loader.give(name, item, saved["state"], is_left=is_left)
        end_order(item, saved["state"], is_left=is_left)
        self._left.restored(name, is_left=is_left)
