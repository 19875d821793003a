"""Samplers that draw no random number and keep what they did: saved and put back, or refused by name."""

from __future__ import annotations

import collections
import logging
import logging.handlers
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.trainings import resume, save
from txstore.errors import ConfigError
from txstore.train.loader import ReplayedSampler
from txstore.train.rehearsal import why_not_again
from txstore.train.state import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

DATA: Any = list(range(24))
EPOCH = 6


class Mine(Sampler[int]):
    """Its order follows from what it keeps."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def shuffled(self, seed: Any) -> list[int]:
        return random.Random(seed).sample(DATA, len(DATA))

    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


class Text(Mine):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(self.kept)
        self.kept += "b"


class NumberToText(Mine):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(self.kept)
        self.kept = f"{self.kept}1"


class Third(Mine):
    """Gives another order from the third time on."""

    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(self.kept["k"] // 2)
        self.kept["k"] += 1


class ThirdOfList(Mine):
    def __iter__(self) -> Iterator[int]:
        order = self.shuffled(1) if len(self.kept) >= 2 else DATA
        self.kept.append(1)
        return iter(order)


class ThirdOfNumber(Mine):
    """A number that is moved when an order begins: a resume would move it twice."""

    def __iter__(self) -> Iterator[int]:
        order = self.shuffled(self.kept // 2)
        self.kept += 1
        return iter(order)


class Rotating(Mine):
    def __iter__(self) -> Iterator[int]:
        yield from list(self.kept)
        self.kept.rotate(1)


class Growing(Mine):
    """Tuples and bytes."""

    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(len(self.kept))
        self.kept += self.kept[:1]


class Nested(Mine):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(self.kept.kept)
        self.kept.kept += 1


class Array(Mine):
    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(int(self.kept[0]))
        self.kept[0] += 1


class OfClass(Mine):
    told = 0

    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(OfClass.told)
        OfClass.told += 1


class ListOfClass(Mine):
    told: list[int] = []  # noqa: RUF012 - what is asked for

    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(len(self.told) // 2)
        self.told.append(1)


class Default(Mine):
    def __iter__(self, seen: list[int] = []) -> Iterator[int]:  # noqa: B006 - what is asked for
        yield from self.shuffled(len(seen) // 2)
        seen.append(1)


def closed() -> Any:
    count = 0

    class Closed(Mine):
        def __iter__(self) -> Iterator[int]:
            nonlocal count
            yield from self.shuffled(count // 2)
            count += 1

    return Closed()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: Text("a"), "'kept'"),
    "number to text": (lambda: NumberToText(1), "'kept'"),
    "third": (lambda: Third({"k": 0}), "'kept'"),
    "third, in a list": (lambda: ThirdOfList([]), "'kept'"),
    "third, deeper": (lambda: Third(collections.Counter(k=0)), "'kept'"),
    "third, a number at the begin": (lambda: ThirdOfNumber(0), "'kept' while it gives an order"),
    "deque": (lambda: Rotating(collections.deque(DATA)), "'kept'"),
    "tuple": (lambda: Growing((1,)), "'kept'"),
    "bytes": (lambda: Growing(b"a"), "'kept'"),
    "nested": (lambda: Nested(types.SimpleNamespace(kept=0)), "'kept'"),
    "array": (lambda: Array(np.zeros(2)), "'kept'"),
    "tensor": (lambda: Array(torch.zeros(2)), "'kept'"),
    "class": (OfClass, "'OfClass.told'"),
    "list of a class": (ListOfClass, "'ListOfClass.told'"),
    "default": (Default, "'Default.__iter__'"),
    "closed": (closed, "'Closed.__iter__'"),
}


def loader(sampler: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(DATA, sampler=sampler, batch_size=4)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_state_that_nobody_saves_is_refused_by_name(kind: str) -> None:
    make, text = REFUSED[kind]
    with pytest.raises(ConfigError, match=f"which moves its own {text}") as caught:
        TrainState(nn.Linear(1, 1), data=loader(make()))
    assert "give it, or its iterator, state_dict and load_state_dict" in str(caught.value)
    assert "ReplayedSampler" not in str(caught.value)
    assert "random numbers" not in str(caught.value)


class AtTheEnd(Mine):
    """Counts its epochs itself, at the end of each."""

    told = 0

    def __iter__(self) -> Iterator[int]:
        yield from self.shuffled(int(self.kept) + self.told)
        self.kept += 1
        self.told += 1


class Filling(Mine):
    """Makes its order when it is first asked."""

    def __iter__(self) -> Iterator[int]:
        self.kept = self.kept or {"order": self.shuffled(1)}
        return iter(self.kept["order"])


class Renewing(Mine):
    """Keeps how far it is, in each order anew."""

    def __iter__(self) -> Iterator[int]:
        self.given, self.kept, self.order = 0, [], torch.tensor(self.shuffled(1))
        for index in self.order.tolist():
            self.given += 1
            self.kept.append(index)
            yield index


class Reseeded(Mine):
    """Draws from a generator that it seeds itself, wherever it is."""

    def __iter__(self) -> Iterator[int]:
        self.kept["rng"].seed(4)
        return iter(self.kept["rng"].sample(DATA, len(DATA)))


class Logging(Mine):
    """Tells something each time, to a handler that keeps it."""

    def __init__(self) -> None:
        self.log = logging.Logger("told")  # noqa: LOG001 - nobody else's
        self.log.addHandler(logging.handlers.MemoryHandler(100))

    def __iter__(self) -> Iterator[int]:
        self.log.warning("begun")
        return iter(DATA)


KEPT: dict[str, Callable[[], Any]] = {
    "number": lambda: AtTheEnd(0),
    "numpy's number": lambda: AtTheEnd(np.int64(0)),
    "filled once": Filling,
    "renewed": Renewing,
    "logging": Logging,
    "reseeded": lambda: Reseeded({"rng": random.Random()}),
}


@pytest.mark.parametrize("before", [2, EPOCH + 2, 2 * EPOCH + 1])
@pytest.mark.parametrize("kind", KEPT)
def test_what_moves_and_comes_back_goes_on(kind: str, before: int, store_url: str) -> None:
    data = loader(KEPT[kind]())
    state = TrainState(nn.Linear(1, 1), data=data)
    batches = forever(data)
    for _ in range(before):
        next(batches)
    save(state, store_url, before)
    wanted = [next(batches) for _ in range(2 * EPOCH)]
    data = loader(KEPT[kind]())
    state = TrainState(nn.Linear(1, 1), data=data)
    resume(state, store_url)
    batches = forever(data)
    assert [next(batches) for _ in range(2 * EPOCH)] == wanted


def forever(data: Any) -> Iterator[Any]:
    while True:
        for batch in data:
            yield batch.tolist()


class Weights:
    """Saves the weights of a sampler, as an extra."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def state_dict(self) -> Any:
        return {"weights": self.sampler.weights}

    def load_state_dict(self, state: Any) -> None:
        self.sampler.weights = state["weights"]


@pytest.mark.parametrize(("in_extras", "goes_on"), [(True, True), (False, False)])
def test_weights_that_the_loop_replaces_are_kept_by_an_extra(in_extras: bool, goes_on: bool, store_url: str) -> None:
    """As the guide says; nobody notices where it is missing."""

    def make() -> tuple[Any, Any, TrainState]:
        sampler = WeightedRandomSampler([1.0] * 24, 24, generator=torch.Generator().manual_seed(3))
        data = loader(ReplayedSampler(sampler))
        extras = {"weights": Weights(sampler)} if in_extras else {}
        return sampler, data, TrainState(nn.Linear(1, 1), data=data, extras=extras)

    sampler, data, state = make()
    list(data)
    sampler.weights = torch.tensor([1.0, 9.0] * 12)
    batches = forever(data)
    next(batches)
    save(state, store_url, 1)
    wanted = [next(batches) for _ in range(EPOCH)]
    _, data, state = make()
    resume(state, store_url)
    batches = forever(data)
    assert ([next(batches) for _ in range(EPOCH)] == wanted) is goes_on


def test_a_text_that_is_the_class_s_too_stays_the_object_s(store_url: str) -> None:
    class Told(AtTheEnd):
        name = "class"

        def __init__(self, name: str) -> None:
            super().__init__(0)
            self.name = name

    data = loader(Told("old"))
    save(TrainState(nn.Linear(1, 1), data=data), store_url, 1)
    sampler = Told("new")
    resume(TrainState(nn.Linear(1, 1), data=loader(sampler)), store_url)
    assert sampler.name == "new", "texts are left alone: paths may move"


def test_a_class_number_that_became_an_attribute_is_the_class_s_again(store_url: str) -> None:
    data = loader(AtTheEnd(0))
    state = TrainState(nn.Linear(1, 1), data=data)
    batches = forever(data)
    next(batches)
    save(state, store_url, 1)
    wanted = [next(batches) for _ in range(EPOCH)]
    resume(state, store_url)
    batches = forever(data)
    assert [next(batches) for _ in range(EPOCH)] == wanted


def test_a_long_order_and_large_attributes_cost_little() -> None:
    sampler = Mine({"names": [(str(at), at) for at in range(300_000)], "numbers": np.zeros(1 << 24)})
    assert why_not_again(sampler, fetched_ahead=False) == ""
    rng = torch.Generator()
    sampler.generator = rng  # type: ignore[attr-defined]
    assert why_not_again(ReplayedSampler(sampler).sampler, fetched_ahead=True, drawn_from=rng) == ""
