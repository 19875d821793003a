"""What workers draw goes on where it stopped, in this epoch and the next."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.trainings import resume, save
from txstore.errors import ConfigError, StateMismatch
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.stateful import repeatable
from txstore.train.worker_streams import WorkerStreams

EPOCH = 4  # batches


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


class Noisy:
    """Draws from every stream of its process, and from its own generator."""

    classes = ("a", "b")

    def __init__(self) -> None:
        self.own: Any = np.random.default_rng(3)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> list[float]:
        return [index, random.gauss(0, 1), np.random.normal(), torch.randn(1).item(), self.own.normal()]


class Plain(Noisy):
    """Without a generator of its own."""

    def __init__(self) -> None:
        pass


class Counting(Noisy):
    """Has a state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __getitem__(self, index: int) -> list[float]:
        self.given += 1
        return [*super().__getitem__(index), self.given]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Together(Noisy):
    """Gives a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        noise = torch.rand(1).item()
        return [[*self[index], noise] for index in indices]


class Loop:
    """Reads batches over epochs, and draws a number beside each as dropout does."""

    def __init__(
        self, dataset: Any, seed: int, workers: int, *, persistent: bool = False, generators: Any = None
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.loader = StatefulDataLoader(
            dataset, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=persistent
        )
        self.state = TrainState(nn.Linear(1, 1), data=self.loader, generators=generators)
        self._batches: Iterator[Any] | None = None

    def run(self, count: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < count:
            self._batches = iter(self.loader) if self._batches is None else self._batches
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
            else:
                seen.append(([column.tolist() for column in batch], torch.rand(1).item()))
        return seen


def goes_on(kind: type[Noisy], before: int, url: str, workers: int, *, wrapped: bool = True, **options: Any) -> bool:
    def make(seed: int) -> Loop:
        return Loop(WorkerStreams(kind()) if wrapped else kind(), seed, workers, **options)

    loop = make(1)
    loop.run(before)
    save(loop.state, url, 1)
    wanted = loop.run(EPOCH + 2)
    loop = make(99)
    resume(loop.state, url)
    found = loop.run(1)
    save(loop.state, url, 2)
    loop = make(98)
    resume(loop.state, url)
    return found + loop.run(EPOCH + 1) == wanted


@pytest.mark.parametrize("before", [1, 3, EPOCH, EPOCH + 1])
def test_what_workers_draw_goes_on(before: int, store_url: str) -> None:
    assert goes_on(Noisy, before, store_url, workers=2)


@pytest.mark.parametrize("kind", [Counting, Together])
def test_so_does_what_a_dataset_keeps_itself(kind: type[Noisy], store_url: str) -> None:
    assert goes_on(kind, 3, store_url, workers=2)


def test_workers_that_live_on_go_on(store_url: str) -> None:
    assert goes_on(Noisy, EPOCH + 1, store_url, workers=2, persistent=True)


@pytest.mark.parametrize("before", [1, EPOCH])
def test_without_workers_the_streams_are_those_of_the_training(before: int, store_url: str) -> None:
    assert goes_on(Noisy, before, store_url, workers=0)


def test_without_it_they_would_not(store_url: str) -> None:
    assert not goes_on(Noisy, 3, store_url, workers=2, wrapped=False)


@pytest.mark.parametrize(
    ("dataset", "workers", "told"),
    [
        (Noisy(), 2, True),
        (Subset(Noisy(), [1, 2]), 2, True),  # type: ignore[arg-type]
        (Noisy(), 0, True),
        (Subset(Noisy(), [1, 2]), 0, True),  # type: ignore[arg-type]
        (ConcatDataset([Plain(), Noisy()]), 0, True),  # type: ignore[list-item]
        (Plain(), 0, False),
        (WorkerStreams(Subset(Noisy(), [1, 2])), 0, False),  # type: ignore[arg-type]
        (WorkerStreams(Noisy()), 2, False),
        (Counting(), 2, False),
        (TensorDataset(torch.ones(3)), 2, False),
        ([1, 2, 3], 2, False),
    ],
    ids=[
        "noisy",
        "subset",
        "own",
        "own-inside",
        "own-beside",
        "global",
        "kept-inside",
        "kept",
        "stateful",
        "tensors",
        "list",
    ],
)
def test_it_is_told_where_it_is_missing(
    dataset: Any, workers: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loader: Any = StatefulDataLoader(dataset, num_workers=workers)
    TrainState(nn.Linear(1, 1), data={"train": loader})
    assert [("train" in text and "WorkerStreams" in text) for text in caplog.messages] == [True] * told
    caplog.clear()
    TrainState(nn.Linear(1, 1), data=repeatable(loader))
    assert caplog.messages == []


def mixed(samples: list[Any]) -> torch.Tensor:
    return torch.stack([torch.as_tensor(sample) for sample in samples]) * torch.rand(())


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


@pytest.mark.parametrize(
    "dataset", [TensorDataset(torch.arange(16)), list(range(16)), range(16), Counting(), Endless()]
)
def test_a_collate_fn_that_may_draw_in_workers_is_told_whatever_the_dataset(
    dataset: Any, caplog: pytest.LogCaptureFixture
) -> None:
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(dataset, num_workers=2, collate_fn=mixed))
    (told,) = caplog.messages
    assert "collate_fn" in told
    assert ("WorkerStreams" in told) != isinstance(dataset, IterableDataset)
    caplog.clear()
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(dataset, collate_fn=mixed))  # draws from the run's own stream
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(dataset, num_workers=2))
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(dataset, num_workers=2, batch_size=None))
    if not isinstance(dataset, IterableDataset):
        wrapped = WorkerStreams(dataset)
        TrainState(nn.Linear(1, 1), data=StatefulDataLoader(wrapped, num_workers=2, collate_fn=mixed))
    assert caplog.messages == []


@pytest.mark.parametrize("own", [random.Random(1), np.random.default_rng(1), torch.Generator()])
def test_a_generator_that_is_saved_is_not_told(own: Any, caplog: pytest.LogCaptureFixture) -> None:
    dataset = Noisy()
    dataset.own = own
    loader: Any = StatefulDataLoader(dataset)
    TrainState(nn.Linear(1, 1), data=loader, generators={"own": own})
    assert caplog.messages == []
    TrainState(nn.Linear(1, 1), data=loader, generators={"other": random.Random(2)})
    assert [
        ("generators of its dataset or collate_fn (dataset.own)" in text and "generators=" in text)
        for text in caplog.messages
    ] == [True]
    caplog.clear()
    TrainState(nn.Linear(1, 1), data=loader, rng=False)
    assert len(caplog.messages) == 1


AT_THE_TOP = np.random.default_rng(4)


class Mixing:
    """A ``collate_fn`` with a generator of its own."""

    def __init__(self) -> None:
        self.numbers: Any = np.random.default_rng(5)

    def __call__(self, samples: list[Any]) -> Any:
        return torch.as_tensor(np.array(samples)) * self.numbers.random()

    def method(self, samples: list[Any]) -> Any:
        return self(samples)


class Transformed(Plain):
    """Draws in a transform that it holds."""

    def __init__(self) -> None:
        self.transforms = [Mixing()]

    def __getitem__(self, index: int) -> Any:
        return self.transforms[0]([float(index)])


class OfTheModule(Plain):
    """Draws from a generator that its module has."""

    def __getitem__(self, index: int) -> Any:
        return [self.drawn() for _ in range(2)]

    def drawn(self) -> float:
        return AT_THE_TOP.random()


def _closure(numbers: Any) -> Any:
    def inner(samples: list[Any]) -> Any:
        return torch.as_tensor(np.array(samples)) * numbers.random()

    return inner


def _global(samples: list[Any]) -> Any:
    return torch.as_tensor(np.array(samples)) * AT_THE_TOP.random()


REACHED = [
    (Plain(), Mixing(), "collate_fn.numbers"),
    (Plain(), Mixing().method, "collate_fn.numbers"),
    (Plain(), _closure(np.random.default_rng(1)), "collate_fn.numbers"),
    (Plain(), functools.partial(_closure(None), numbers=random.Random(1)), "collate_fn.numbers"),
    (Plain(), _global, "collate_fn.AT_THE_TOP"),
    (Transformed(), None, "dataset.transforms.0.numbers"),
    (OfTheModule(), None, "AT_THE_TOP"),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("dataset", "collate_fn", "place"), REACHED)
def test_a_generator_that_neither_the_state_nor_the_workers_keep_is_told(
    dataset: Any, collate_fn: Any, place: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    read = WorkerStreams(dataset) if workers else dataset
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(read, num_workers=workers, collate_fn=collate_fn))
    (told,) = caplog.messages
    assert f"{place})" in told
    assert ("generators=" in told) == (workers == 0)


def test_generators_that_are_saved_or_of_the_process_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    mixing, noisy = Mixing(), Noisy()
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(Plain(), collate_fn=mixing), generators={"mix": mixing.numbers})
    noisy.own = mixing.numbers  # both draw from the copy that the worker's state holds
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(WorkerStreams(noisy), num_workers=2, collate_fn=mixing))
    TrainState(nn.Linear(1, 1), data=StatefulDataLoader(Counting(), collate_fn=_closure(random.randrange)))
    assert caplog.messages == []


@pytest.mark.parametrize("named", [False, True])
def test_a_generator_of_the_dataset_goes_on_without_workers_if_it_is_named(named: bool, store_url: str) -> None:
    def make(seed: int) -> Loop:
        dataset = Noisy()
        return Loop(dataset, seed, 0, generators={"own": dataset.own} if named else None)

    loop = make(1)
    loop.run(2)
    save(loop.state, store_url, 1)
    wanted = loop.run(EPOCH)
    loop = make(99)
    resume(loop.state, store_url)
    assert (loop.run(EPOCH) == wanted) is named


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_of_a_dataset_in_it_go_on(workers: int, store_url: str) -> None:
    def make(seed: int) -> Loop:
        inside: Any = ConcatDataset([Subset(Noisy(), range(8)), Subset(Noisy(), range(8))])  # type: ignore[arg-type]
        return Loop(WorkerStreams(inside), seed, workers)

    loop = make(1)
    loop.run(3)
    save(loop.state, store_url, 1)
    wanted = loop.run(EPOCH)
    loop = make(99)
    resume(loop.state, store_url)
    assert loop.run(EPOCH) == wanted


def test_it_is_the_dataset_but_for_that() -> None:
    dataset = pickle.loads(pickle.dumps(WorkerStreams(Noisy())))
    assert (len(dataset), dataset.classes, dataset[3][0]) == (16, ("a", "b"), 3)
    assert not hasattr(dataset, "__getitems__")
    assert hasattr(WorkerStreams(Together()), "__getitems__")


def test_other_streams_are_refused() -> None:
    state = WorkerStreams(Noisy()).state_dict()
    other = Noisy()
    other.second = random.Random(1)  # type: ignore[attr-defined]
    with pytest.raises(StateMismatch, match=r"generator\.second"):
        WorkerStreams(other).load_state_dict(state)


def test_what_iterates_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for dataset in (Endless(), object()):
        with pytest.raises(ConfigError, match="no map-style dataset"):
            WorkerStreams(dataset)
