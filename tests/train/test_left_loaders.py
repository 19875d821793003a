"""A loop that leaves a loader before its end begins a new epoch with the next one, and so does a resumed run."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from tests.train.trainings import resume, save
from txstore.errors import UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.loader import ReplayedSampler
from txstore.train.progress import TrainProgress
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.worker_streams import WorkerStreams

pytestmark = pytest.mark.filterwarnings("ignore:Neither dataset nor iter")


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    before = capture_streams()
    torch.manual_seed(1)
    yield
    restore_streams(before)


class Noisy(Dataset):
    """Augmented samples."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, at: int) -> torch.Tensor:
        return at + torch.rand(1) / 2


class Plain(IterableDataset):
    """Numbers without a state."""

    def __iter__(self) -> Iterator[int]:
        yield from range(24)


class Kept(IterableDataset):
    """Goes on, in its next epoch, where the last one was left."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 30:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Own(IterableDataset):
    """Its iterator has the state."""

    def __iter__(self) -> Iterator[int]:
        return OwnIterator()


class OwnIterator(Iterator[int]):
    at = 0

    def __next__(self) -> int:
        self.at += 1
        if self.at > 30:
            raise StopIteration
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


NUMBERS = list(range(24))


def sampled(sampler: Any, **more: Any) -> dict[str, Any]:
    return {"dataset": NUMBERS, "sampler": sampler, **more}


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"dataset": NUMBERS, "shuffle": True},
    "in order": lambda: {"dataset": NUMBERS},
    "alone": lambda: {"dataset": NUMBERS, "shuffle": True, "batch_size": None},
    "generator": lambda: {"dataset": NUMBERS, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "replacement": lambda: sampled(RandomSampler(NUMBERS, replacement=True, num_samples=70)),
    "replayed": lambda: sampled(
        ReplayedSampler(WeightedRandomSampler([1.0] * 24, 24, generator=torch.Generator().manual_seed(3)))
    ),
    "distributed": lambda: sampled(DistributedSampler(NUMBERS, 2, 1)),
    "stateful distributed": lambda: sampled(StatefulDistributedSampler(NUMBERS, 2, 1)),
    "noisy": lambda: {"dataset": WorkerStreams(Noisy()), "shuffle": True},
    "plain": lambda: {"dataset": Plain()},
    "kept": lambda: {"dataset": Kept()},
    "own": lambda: {"dataset": Own()},
}


class Loop:
    """Epochs of a few batches each, with a number drawn beside each as dropout does."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.loader: Any = StatefulDataLoader(**{"batch_size": 3, **LOADERS[kind](), **options})
        self.state = TrainState(nn.Linear(1, 1), data=self.loader)

    def run(self, epochs: int, length: int = 3) -> list[Any]:
        seen = []
        for _ in range(epochs):
            for number, batch in enumerate(self.loader):
                seen.append((torch.as_tensor(batch).tolist(), torch.rand(1).item()))
                self.state.progress.global_step += 1
                if number == length - 1:
                    break
            self.state.progress.epoch += 1
        return seen


KINDS = [
    *((kind, {}) for kind in LOADERS),
    *((kind, {"num_workers": 1}) for kind in ("replacement", "noisy")),
    ("shuffled", {"num_workers": 2, "snapshot_every_n_steps": 2}),
    ("noisy", {"num_workers": 1, "persistent_workers": True}),
    ("plain", {"num_workers": 1, "persistent_workers": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_an_epoch_that_was_left_and_counted_is_over(kind: str, options: dict[str, Any], store_url: str) -> None:
    loop = Loop(kind, **options)
    loop.run(2)
    save(loop.state, store_url, 6)
    wanted = loop.run(2)
    torch.manual_seed(99)
    other = Loop(kind, **options)
    resume(other.state, store_url)
    save(other.state, f"{store_url}-again", 6)
    assert other.run(2) == wanted
    third = Loop(kind, **options)
    resume(third.state, f"{store_url}-again")
    assert third.run(2) == wanted


def test_an_epoch_of_a_sampler_that_waits_ends(store_url: str) -> None:
    """torchdata's distributed sampler keeps its state for the order that begins first: the next one would be empty."""
    loop = Loop("stateful distributed")
    loop.run(2, length=99)
    save(loop.state, store_url, 8)
    wanted = loop.run(2, length=99)
    other = Loop("stateful distributed")
    resume(other.state, store_url)
    assert other.run(2, length=99) == wanted


class Waiting:
    """A sampler that keeps its state until it is asked for an order, or has taken it at once."""

    def __init__(self, *, at_once: bool) -> None:
        self.given, self.skipped, self.at_once = 0, 0, at_once

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        first, self.skipped = self.skipped, 0
        for index in range(self.given if self.at_once else first, 24):
            self.given = index + 1
            yield index
        self.given = 0 if self.at_once else 24

    def state_dict(self) -> Any:
        return {"given": self.given}

    def load_state_dict(self, state: Any) -> None:
        self.given, self.skipped = state["given"], state["given"]


@pytest.mark.parametrize("at_once", [False, True])
def test_samplers_with_a_state_end_their_epoch_or_are_refused(at_once: bool, store_url: str) -> None:
    def made() -> Loop:
        return Loop("in order", sampler=Waiting(at_once=at_once))

    loop = made()
    loop.run(1, length=99)
    save(loop.state, store_url, 8)
    wanted = loop.run(1, length=99)
    other = made()
    resume(other.state, store_url)
    assert other.run(1, length=99) == wanted
    other.run(1)
    with pytest.raises(UnsupportedValue, match=r"data '0' was left inside its epoch, and its Waiting has a state"):
        other.state.capture()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage().split(" of its")[0] for one in caplog.records if one.name.endswith("left_loaders")]


def test_a_time_limit_is_no_new_epoch(store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loop is left, and no epoch is counted: what was not read yet is not lost."""
    loop = Loop("shuffled")
    with Checkpointer(store_url, loop.state) as saves:
        last: Any = None
        for number, _ in enumerate(loop.loader):
            loop.state.progress.global_step += 1
            last = saves.save()
            if number == 2:
                break
        assert saves.save() is last
        assert saves.save() is last
    assert told(caplog) == ["data '0' was left at batch 3"]
    wanted = [batch.tolist() for batch in StatefulRest(loop.loader)]
    other = Loop("shuffled")
    resume(other.state, store_url)
    assert [batch.tolist() for batch in other.loader] == wanted
    assert len(wanted) == 5


class StatefulRest:
    """The rest of the epoch that a loader has begun, from the iterator that it keeps."""

    def __init__(self, loader: Any) -> None:
        self._iterator = loader._iterator

    def __iter__(self) -> Iterator[Any]:
        yield from self._iterator


def test_what_still_is_read_is_not_left(store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Epochs that are counted by steps, inside one loop."""
    loop = Loop("shuffled")
    batches = iter(loop.loader)
    first = [next(batches).tolist() for _ in range(3)]
    loop.state.progress.epoch += 1
    save(loop.state, store_url, 3)
    wanted = [batch.tolist() for batch in batches]
    other = Loop("shuffled")
    resume(other.state, store_url)
    assert [batch.tolist() for batch in other.loader] == wanted
    assert len(first + wanted) == 8
    assert told(caplog) == []


@pytest.mark.parametrize("every", [1, 2])
def test_a_validation_that_breaks_off_is_known_from_the_second_save_on(
    every: int, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No epoch is counted after it: that training went on without it, or began it anew, tells."""

    class Both(Loop):
        def __init__(self) -> None:
            super().__init__("in order")
            self.validation: Any = StatefulDataLoader(NUMBERS, batch_size=3, shuffle=True)
            self.state = TrainState(nn.Linear(1, 1), data={"train": self.loader, "val": self.validation})

        def steps(self, url: str) -> list[Any]:
            seen = []
            for _ in self.loader:
                self.state.progress.global_step += 1
                if self.state.progress.global_step % every == 0:
                    for checked in self.validation:
                        seen.append((self.state.progress.global_step, checked.tolist()))
                        break
                if url and self.state.progress.global_step < 4:
                    save(self.state, f"{url}-{self.state.progress.global_step}", 1)
            return seen

    untouched = Both().steps(store_url)
    assert told(caplog) == ["data 'val' was left at batch 1"]
    for step in range(1, 4):
        other = Both()
        resume(other.state, f"{store_url}-{step}")
        rest = [one for one in untouched if one[0] > step]
        assert (other.steps("") == rest) == (step != every), "the first save after it is told"


def test_what_began_a_new_epoch_once_does_so_in_later_ones(store_url: str) -> None:
    """The epoch is counted between two saves, and says nothing of a loader that was left after it."""
    loop = Loop("shuffled")
    for epoch in (0, 0, 1):
        loop.state.progress.epoch = epoch
        next(iter(loop.loader))
        loop.state.progress.global_step += 1
        save(loop.state, f"{store_url}-{loop.state.progress.global_step}", 1)
    wanted = next(iter(loop.loader)).tolist()
    other = Loop("shuffled")
    resume(other.state, f"{store_url}-3")
    assert next(iter(other.loader)).tolist() == wanted


def test_a_resume_in_between_is_no_new_epoch(store_url: str) -> None:
    """What a save had found before tells nothing of the iterator that the resume has made."""
    loop = Loop("shuffled")
    for _ in range(2):
        for _batch in loop.loader:
            loop.state.progress.global_step += 1
            break
        save(loop.state, f"{store_url}-{loop.state.progress.global_step}", 1)
        resume(loop.state, f"{store_url}-{loop.state.progress.global_step}")
    assert len(list(loop.loader)) == 6


def test_copies_of_the_counters_tell_nobody() -> None:
    loop = Loop("shuffled")
    for made in (copy.deepcopy(loop.state.progress), pickle.loads(pickle.dumps(loop.state.progress))):
        assert made == loop.state.progress == TrainProgress()
        made.epoch += 1
        assert not made._watching()
    assert len(loop.state.progress._watching()) == 1
    progress = loop.state.progress
    del loop
    gc.collect()
    progress.epoch += 1
    assert not progress._watching()
