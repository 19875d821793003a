"""Samplers: the order goes on where it stopped, in this epoch and the next, or the loader is refused before a step."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader import sampler as torchdata

from tests.train.trainings import resume, save
from txstore.errors import ConfigError
from txstore.train.checkpointer import Checkpointer
from txstore.train.loader import ReplayedSampler
from txstore.train.rehearsal import why_not_again
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.stateful import repeatable

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

DATA: Any = list(range(24))
EPOCH = 6  # batches; half of it where two ranks share


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


class Mine(Sampler[int]):
    """Draws from random numbers of its own."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = rng or random.Random(random.random())

    def __len__(self) -> int:
        return len(DATA)

    def __iter__(self) -> Iterator[int]:
        order = list(DATA)
        self.rng.shuffle(order)
        return iter(order)


HIDDEN = random.Random()


class Hidden(Mine):
    """Draws from random numbers that none of its attributes holds."""

    def __iter__(self) -> Iterator[int]:
        return iter(HIDDEN.sample(DATA, len(DATA)))


class Drawing(Mine):
    """Draws from the global stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(len(DATA)).tolist())


class Initial(Mine):
    """Draws nothing, and reads how the global stream was seeded."""

    def __iter__(self) -> Iterator[int]:
        own = torch.Generator().manual_seed(torch.initial_seed())
        return iter(torch.randperm(len(DATA), generator=own).tolist())


class Calls(Mine):
    """Counts its epochs itself."""

    epoch = 0

    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        return iter(np.random.default_rng(self.calls).permutation(len(DATA)).tolist())


class Shuffling(Mine):
    """Shuffles a list of its own, again and again."""

    def __init__(self) -> None:
        self.order = list(DATA)

    def __iter__(self) -> Iterator[int]:
        random.Random(5).shuffle(self.order)
        return iter(self.order)


class Continuing(Mine):
    """Makes its generator when it first needs it."""

    def __init__(self) -> None:
        self.rng = None

    def __iter__(self) -> Iterator[int]:
        self.rng = self.rng or random.Random(1)
        return super().__iter__()


class Slotted(Mine):
    """Hides its attributes."""

    __slots__ = ("rng",)


class Failing(Mine):
    """Cannot be asked."""

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no process group")


class Seeded(Mine):
    """Its order follows from a seed and the epoch."""

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(24, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()


class Prepared(Seeded):
    """Its order is made when the epoch is told to it."""

    def __init__(self) -> None:
        super().__init__()
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.order = list(super().__iter__())

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Reseeding(Seeded):
    """Seeds the global stream, which is no draw from it."""

    def __iter__(self) -> Iterator[int]:
        random.seed(self.seed + self.epoch)
        return iter(random.sample(DATA, len(DATA)))


class Stateful(Mine):
    """Has the two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.state: tuple[Any, int] | None = None

    def __iter__(self) -> Iterator[int]:
        begin, skip = self.state or (self.rng.getstate(), 0)
        self.state = None
        self.rng.setstate(begin)
        self.begin, self.given = begin, 0
        for index in super().__iter__():
            self.given += 1
            if self.given > skip:
                yield index

    def state_dict(self) -> Any:
        return {"begin": getattr(self, "begin", self.rng.getstate()), "given": getattr(self, "given", 0)}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["begin"], state["given"]


class Own(Mine):
    """Its iterator has the two methods."""

    def __iter__(self) -> Iterator[int]:
        rng: Any = self.rng
        return iter(ReplayedSampler(SubsetRandomSampler(DATA, generator=rng), rng))


def frameworks() -> dict[str, Callable[[], Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
        from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
        from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler, _IndexBatchSamplerWrapper
    share = {"num_replicas": 2, "rank": 0}
    return {
        "seedable": lambda: SeedableRandomSampler(DATA),
        "shard": lambda: BatchSamplerShard(batches(SeedableRandomSampler(DATA, data_seed=5)), 2, 0),
        "shard of a sequence": lambda: BatchSamplerShard(batches(SequentialSampler(DATA)), 2, 0),
        "shard drawing": lambda: BatchSamplerShard(batches(RandomSampler(DATA)), 2, 0),
        "wrapper": lambda: DistributedSamplerWrapper(SequentialSampler(DATA), **share),
        "wrapper of an epoch": lambda: DistributedSamplerWrapper(Seeded(), **share),
        "wrapper drawing": lambda: DistributedSamplerWrapper(RandomSampler(DATA), **share),
        "wrapper of mine": lambda: DistributedSamplerWrapper(Mine(), **share),
        "unrepeated": lambda: UnrepeatedDistributedSampler(DATA, shuffle=True, **share),
        "indices": lambda: _IndexBatchSamplerWrapper(batches(SequentialSampler(DATA))),
        "indices drawing": lambda: _IndexBatchSamplerWrapper(batches(RandomSampler(DATA))),
    }


def batches(sampler: Any) -> Any:
    return BatchSampler(sampler, 4, drop_last=False)


def weighted() -> Any:
    return WeightedRandomSampler([1.0, 2.0] * 12, 24, generator=generator())


KEPT: dict[str, Callable[[], Any]] = {
    "list": lambda: [3, 1, 2, 0] * 6,
    "sequence": lambda: SequentialSampler(DATA),
    "batches": lambda: batches(SequentialSampler(DATA)),
    "torchdata": lambda: torchdata.RandomSampler(DATA),
    "torchdata's batches": lambda: torchdata.BatchSampler(torchdata.RandomSampler(DATA), 4, drop_last=False),
    "distributed": lambda: DistributedSampler(DATA, 2, 0),
    "batches distributed": lambda: batches(DistributedSampler(DATA, 2, 0)),
    "torchdata's distributed": lambda: torchdata.StatefulDistributedSampler(DATA, 2, 0),
    "batches of torchdata's distributed": lambda: batches(torchdata.StatefulDistributedSampler(DATA, 2, 0)),
    "replayed": lambda: ReplayedSampler(weighted()),
    "replayed subset": lambda: ReplayedSampler(SubsetRandomSampler(DATA, generator=generator())),
    "replayed batches": lambda: ReplayedSampler(batches(RandomSampler(DATA, generator=(g := generator()))), g),
    "seeded": Seeded,
    "prepared": Prepared,
    "reseeding": Reseeding,
    "batches seeded": lambda: batches(Seeded()),
    "stateful": Stateful,
    "stateful iterator": lambda: Own(generator()),
    **{name: make for name, make in frameworks().items() if "drawing" not in name and "mine" not in name},
}


class Loop:
    """Reads batches over epochs, and draws a number beside each as dropout does."""

    def __init__(self, make: Callable[[], Any], seed: int, workers: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.sampler = make()
        gives_batches = not isinstance(next(iter(make())), int)
        how: dict[str, Any] = (
            {"batch_sampler": self.sampler} if gives_batches else {"sampler": self.sampler, "batch_size": 4}
        )
        self.loader = StatefulDataLoader(DATA, num_workers=workers, **how)
        self.state = TrainState(nn.Linear(1, 1), data=self.loader)
        self._batches: Iterator[Any] | None = None

    def run(self, count: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < count:
            if self._batches is None:
                self._set_epoch(self.sampler)
                self._batches = iter(self.loader)
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                self.state.progress.epoch += 1
            else:
                seen.append((batch.tolist(), torch.rand(1).item()))
                self.state.progress.global_step += 1
        return seen

    def _set_epoch(self, sampler: Any) -> None:
        if isinstance(sampler, DistributedSampler | Seeded):
            sampler.set_epoch(self.state.progress.epoch)
        elif isinstance(sampler, BatchSampler):
            self._set_epoch(getattr(sampler, "sampler", None))


@pytest.mark.parametrize("before", [0, 2, EPOCH, EPOCH + 2])
@pytest.mark.parametrize("kind", KEPT)
def test_an_order_goes_on_where_it_stopped(kind: str, before: int, store_url: str) -> None:
    make = KEPT[kind]
    loop = Loop(make, 1)
    loop.run(before)
    save(loop.state, store_url, before)
    wanted = loop.run(8)
    found = []
    for step, count in ((1, 1), (2, 7)):
        loop = Loop(make, 99)
        resume(loop.state, store_url)
        found += loop.run(count)
        save(loop.state, store_url, before + step)
    assert found == wanted


@pytest.mark.parametrize("kind", ["distributed", "torchdata's distributed", "replayed", "seeded", "stateful iterator"])
def test_so_it_does_with_workers_that_fetch_ahead(kind: str, store_url: str) -> None:
    loop = Loop(KEPT[kind], 1, workers=2)
    loop.run(EPOCH + 2)
    save(loop.state, store_url, 1)
    wanted = loop.run(4)
    loop = Loop(KEPT[kind], 99, workers=2)
    resume(loop.state, store_url)
    assert loop.run(4) == wanted


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mine": (Mine, "of a Mine, which draws its order .*give it, or its iterator, state_dict and load_state_dict, or"),
    "mine of torch": (
        lambda: SubsetRandomSampler(DATA, generator=generator()),
        "give it a generator= and wrap it in R",
    ),
    "hidden": (Hidden, "of a Hidden, which gives another order when it is asked again, by random"),
    "system": (lambda: Mine(random.SystemRandom()), "of a Mine, which gives another order when it is asked again"),
    "global": (Drawing, r"of a Drawing, which draws its order from random numbers \(numpy\)"),
    "initial seed": (Initial, "of a Initial, which gives another order when it is asked again"),
    "lazily": (Continuing, "of a Continuing, which moves its own 'rng', which is no number"),
    "shuffling": (Shuffling, "of a Shuffling, which moves its own 'order', which is no number"),
    "calls": (Calls, "of a Calls, which moves its own 'calls' while it gives an order"),
    "slots": (Slotted, r"of a Slotted, which keeps \['rng'\] in __slots__"),
    "failing": (Failing, r"which does not give its order .*\(RuntimeError: no process group\)"),
    "batches": (lambda: batches(Mine()), "of a BatchSampler of a Mine, which draws"),
    "torch": (lambda: RandomSampler(DATA), r"of a RandomSampler, .*\(torch\).*use shuffle=True"),
    "torch, seeded": (lambda: RandomSampler(DATA, generator=generator()), r"\(generator.g0\).*use shuffle=True"),
    "batches of torch": (
        lambda: batches(RandomSampler(DATA)),
        "of a BatchSampler of a RandomSampler.*use shuffle=True",
    ),
    "subset": (lambda: SubsetRandomSampler(DATA), "read a Subset with shuffle=True"),
    "weighted": (weighted, "give it a generator= and wrap it in ReplayedSampler"),
    "a state that nobody asks for": (lambda: batches(Stateful()), "pass the Stateful as sampler= with batch_size="),
    "torchdata's in torch's": (
        lambda: batches(torchdata.RandomSampler(DATA)),
        "pass the RandomSampler as sampler= with",
    ),
    "replayed in torch's": (lambda: batches(ReplayedSampler(weighted())), "pass the ReplayedSampler as sampler= with"),
    "replayed from elsewhere": (
        lambda: ReplayedSampler(Mine(), generator()),
        "of a ReplayedSampler of a Mine, which d",
    ),
    **{name: (make, "draws its order") for name, make in frameworks().items() if "drawing" in name or "mine" in name},
}


def loader(sampler: Any, workers: int = 0) -> StatefulDataLoader[Any]:
    gives_batches = isinstance(sampler, BatchSampler) or hasattr(sampler, "_batch_sampler")
    how: dict[str, Any] = {"batch_sampler": sampler} if gives_batches else {"sampler": sampler, "batch_size": 4}
    return StatefulDataLoader(DATA, num_workers=workers, **how)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_order_that_would_not_come_back_is_refused_before_a_step(kind: str) -> None:
    make, text = REFUSED[kind]
    data, module = loader(make()), nn.Linear(1, 1)
    before = capture_streams()
    with pytest.raises(ConfigError, match=text) as caught:
        TrainState(module, data={"train": data})
    assert "data 'train' reads in the order of a" in str(caught.value)
    assert repr(capture_streams()) == repr(before), "asked without a trace"
    TrainState(module, data=repeatable(data))


def test_a_generator_object_can_be_gone_through_once() -> None:
    with pytest.raises(ConfigError, match="once only"):
        TrainState(nn.Linear(1, 1), data=loader(index for index in DATA))


def test_two_samples_that_happen_to_come_in_the_same_order_are_no_proof() -> None:
    for _ in range(20):
        assert "draws its order" in why_not_again(RandomSampler([0, 1]), fetched_ahead=False)
        assert "draws its order" in why_not_again(RandomSampler([0]), fetched_ahead=False)


def test_an_epoch_that_a_sampler_counts_itself_is_told_where_workers_come_too_early() -> None:
    make = KEPT["seedable"]
    TrainState(nn.Linear(1, 1), data=loader(make()))
    with pytest.raises(ConfigError, match="moves its own 'epoch' at the end of an order, where workers come too early"):
        TrainState(nn.Linear(1, 1), data=loader(make(), workers=2))


def test_asking_leaves_the_sampler_as_it_is() -> None:
    sampler = Seeded()
    order = list(sampler)
    replayed = ReplayedSampler(weighted())
    state = replayed.generator.get_state()
    for one in (sampler, replayed):
        TrainState(nn.Linear(1, 1), data=loader(one))
    assert list(sampler) == order
    assert torch.equal(replayed.generator.get_state(), state)
    counting: Any = KEPT["seedable"]()
    TrainState(nn.Linear(1, 1), data=loader(counting))
    assert (counting.epoch, counting.generator) == (0, None)
    shuffling = Shuffling()
    assert why_not_again(shuffling, fetched_ahead=False)
    assert shuffling.order == DATA


def test_a_number_of_a_sampler_that_the_code_changed_is_told_and_loses(store_url: str) -> None:
    class Windowed(Seeded):
        def __init__(self, window: int) -> None:
            super().__init__()
            self.window = window

    with Checkpointer(store_url, TrainState(nn.Linear(1, 1), data=loader(Windowed(4)))) as saves:
        saves.save()
    changed = Windowed(5)
    with Checkpointer(store_url, TrainState(nn.Linear(1, 1), data=loader(changed))) as saves:
        notes = [note for note in saves.resume().notes if "window" in note]
    assert notes == ["state data '0' sampler.window, as the code sets it: saved 4, now 5; the saved one is in force"]
    assert changed.window == 4


def test_a_replayed_sampler_needs_a_generator() -> None:
    with pytest.raises(ConfigError, match=r"a RandomSampler without a generator.*give the sampler a torch.Generator"):
        ReplayedSampler(RandomSampler(DATA))
    assert len(ReplayedSampler(weighted())) == 24
    assert functools.reduce(lambda count, _: count + 1, ReplayedSampler(weighted()), 0) == 24
