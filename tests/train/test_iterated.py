"""Datasets that iterate: read on where they stopped, or refused at the latest by the first save."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.trainings import resume, save
from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.iterated import why_not_again
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.stateful import repeatable

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:Neither dataset nor iter")


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    before = capture_streams()
    torch.manual_seed(1)
    yield
    restore_streams(before)


class Plain(IterableDataset[int]):
    """Numbers, shared out among workers; another order in each epoch."""

    stride = 7

    def __init__(self, stop: int = 26) -> None:
        self.stop = stop
        self.epoch = 0
        self.names = ["a", "b"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def mine(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return itertools.islice(range(self.stop), first, None, step)

    def __iter__(self) -> Iterator[int]:
        for at in self.mine():
            yield (at * self.stride + self.epoch) % self.stop


class Lines(IterableDataset[Any]):
    """Reads a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        with open(self.path) as lines:
            found = []
            for line in lines:
                found.append(json.loads(line.strip())["at"])
                if len(found) == 2:
                    yield torch.tensor(found)
                    found = []


class Buffering(Plain):
    """Has a list of its own, and changes only what it has made itself."""

    headers = ("a", "b")

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        found, text = [], ""
        at = total = 0
        for number in self.mine():
            at += 1  # noqa: SIM113 - what is asked for
            total += number
            total -= len(self.names)
            text += str(number)
            found.append(total)
            if len(found) == 2:
                found += [at, len(text)]
                yield sum(one for one in found if info is None or one >= info.id)
                found = []
                found.extend([1] if self.stop else [])
                found = [2, 3]
                found.clear()


class Wrapping(Plain):
    """Reads another one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        yield from self.inner


class Drawing(Plain):
    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.stop).tolist()


class Shuffled(Plain):
    def __iter__(self) -> Iterator[int]:
        numbers = list(self.mine())
        random.shuffle(numbers)
        yield from numbers


class Private(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)

    def __iter__(self) -> Iterator[int]:
        yield self.rng.random()  # type: ignore[misc]


class Counting(Plain):
    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        yield self.epoch


class Taking(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.left = list(range(9))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop()


class Writing(Taking):
    def __iter__(self) -> Iterator[int]:
        left = self.left
        left += left
        yield left[0]


class Setting(Taking):
    def __iter__(self) -> Iterator[int]:
        self.left[0] = self.left[0] + 1
        yield self.left[0]


class Array(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = np.arange(6)

    def __iter__(self) -> Iterator[Any]:
        kept = self.kept
        yield from kept.tolist()
        kept += 1


class Tensor(Array):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.arange(6)


class Doubling(Array):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [1]

    def __iter__(self) -> Iterator[Any]:
        kept = self.kept
        yield len(kept)
        kept *= 2


class Either(Array):
    """Changes what is only sometimes its own list."""

    def __iter__(self) -> Iterator[Any]:
        kept = self.kept if self.stop else []
        yield len(kept)
        kept += [1]


class Beside(Array):
    """Sets two names at once, one of them to its own list."""

    def __iter__(self) -> Iterator[Any]:
        at, kept = 0, self.kept
        yield at, len(kept)
        kept += 1


class Between(Array):
    def __iter__(self) -> Iterator[Any]:
        kept, at = self.kept, 0
        yield at, len(kept)
        kept += 1


class Given(Array):
    """Changes what it is given, and what it goes through."""

    def __iter__(self) -> Iterator[Any]:
        for kept in [self.kept]:
            yield len(kept)
            kept += 1  # noqa: PLW2901 - what is asked for


class Called(Array):
    def __iter__(self) -> Iterator[Any]:
        yield moved(self.kept)


def moved(kept: Any) -> int:
    kept += 1
    return len(kept)


class InTuple(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.names = ([1],)  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        yield len(self.names[0])
        self.names[0].append(1)  # type: ignore[attr-defined]


class Bare(IterableDataset[Any]):
    """Without a list of its own."""

    def __init__(self) -> None:
        self.stop = 9


class ListOfClass(Bare):
    seen: list[int] = []  # noqa: RUF012 - what is asked for

    def __iter__(self) -> Iterator[Any]:
        yield len(self.seen)
        self.seen.append(1)


class DictOfClass(Bare):
    kept = {"k": 0}  # noqa: RUF012 - what is asked for

    def __iter__(self) -> Iterator[Any]:
        yield self.kept["k"]
        self.kept["k"] += 1


class Default(Bare):
    def __iter__(self, seen: list[int] = []) -> Iterator[Any]:  # noqa: B006 - what is asked for
        yield len(seen)
        seen.append(1)


class Named(Bare):
    def __iter__(self, *, seen: list[int] = []) -> Iterator[Any]:  # noqa: B006 - what is asked for
        yield len(seen)
        seen.append(1)


SEEN: list[int] = []


class Global(Bare):
    def __iter__(self) -> Iterator[Any]:
        yield len(SEEN)
        SEEN.append(1)


class Inner(Bare):
    """Changes a list of the dataset that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()

    names = 0

    def __iter__(self) -> Iterator[Any]:
        yield len(self.inner.names)
        self.inner.names.append("c")


class ByDunder(Bare):
    def __iter__(self) -> Iterator[Any]:
        yield self.stop
        self.__setattr__("stop", self.stop + 1)


class Deleting(Bare):
    def __iter__(self) -> Iterator[Any]:
        yield self.stop
        del self.stop


def counted() -> Any:
    count = 0

    class Counted(Bare):
        def __iter__(self) -> Iterator[Any]:
            nonlocal count
            yield count
            count += 1

    return Counted()


def listed() -> Any:
    seen: list[int] = []

    class Listed(Bare):
        def __iter__(self) -> Iterator[Any]:
            yield len(seen)
            seen.append(1)

    return Listed()


class Sets(Plain):
    def __iter__(self) -> Iterator[Any]:
        yield from {name.upper() for name in self.names}


class Deep(Plain):
    def mine(self) -> Iterator[int]:
        return map(drawn, range(3))


def drawn(at: int) -> int:
    return at + random.randrange(3)


class Answering(Plain):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def closed() -> Any:
    rng = random.Random(1)

    class Closed(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield rng.random()

    return Closed()


class Importing(Plain):
    def __iter__(self) -> Iterator[Any]:
        import time

        yield time.time()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "drawing": (Drawing, "uses 'randperm' in __iter__"),
    "shuffled": (Shuffled, "uses 'random' in __iter__"),
    "private": (Private, "has a Random in its attribute 'rng'"),
    "counting": (Counting, "sets 'epoch' in __iter__"),
    "taking": (Taking, "may change a list, dict or array of its own .by 'pop'. in __iter__"),
    "writing": (Writing, r"may change a list, dict or array of its own \(in place: 'left'\) in __iter__"),
    "array": (Array, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "tensor": (Tensor, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "doubling": (Doubling, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "either": (Either, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "beside": (Beside, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "between": (Between, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "given": (Given, r"may change a list, dict or array of its own \(in place: 'kept'\) in __iter__"),
    "called": (Called, r"may change a list, dict or array of its own \(in place: 'kept'\) in moved"),
    "in a tuple": (InTuple, "may change a list, dict or array of its own .* in __iter__"),
    "list of a class": (ListOfClass, "may change a list, dict or array of its own .by 'append'. in __iter__"),
    "dict of a class": (DictOfClass, "may change a list, dict or array of its own .* in __iter__"),
    "default": (Default, "may change a list, dict or array of its own .by 'append'. in __iter__"),
    "named default": (Named, "may change a list, dict or array of its own .by 'append'. in __iter__"),
    "global": (Global, "may change a list, dict or array of its own .by 'append'. in __iter__"),
    "inner": (Inner, "may change a list, dict or array of its own .by 'append'. in __iter__"),
    "by a method of all": (ByDunder, "uses '__setattr__' in __iter__"),
    "deleting": (Deleting, "sets 'stop' in __iter__"),
    "counted": (counted, "sets 'count' in __iter__"),
    "listed": (listed, "may change a list, dict or array of its own .by 'append'. in __iter__"),
    "setting": (Setting, "may change a list, dict or array of its own .an item of it. in __iter__"),
    "sets": (Sets, "goes through a set in __iter__"),
    "deep": (Deep, "uses 'random' in drawn"),
    "answering": (Answering, "answers for attributes that nobody sees"),
    "closed": (closed, "uses 'rng' of the function around it in __iter__"),
    "importing": (Importing, "imports 'time' in __iter__"),
    "wrapping": (lambda: Wrapping(Drawing()), "reads a Drawing, which uses 'randperm' in __iter__"),
    "chain": (lambda: ChainDataset([Plain()]), "has a list in its attribute 'datasets'"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_proved_to_come_again_is_refused_before_a_step(kind: str, workers: int) -> None:
    make, text = REFUSED[kind]
    data = StatefulDataLoader(make(), batch_size=None, num_workers=workers)
    with pytest.raises(ConfigError, match=text) as caught:
        TrainState(nn.Linear(1, 1), data=data)
    assert "give it, or its iterator, state_dict and load_state_dict; if you know" in str(caught.value)
    assert "data=repeatable(loader)" in str(caught.value)
    TrainState(nn.Linear(1, 1), data=repeatable(data))


class Loop:
    """Reads batches over epochs."""

    def __init__(self, dataset: Any, workers: int, **options: Any) -> None:
        self.dataset = dataset
        self.loader: Any = StatefulDataLoader(dataset, num_workers=workers, **{"batch_size": 4, **options})
        self.state = TrainState(nn.Linear(1, 1), data=self.loader)
        self._batches: Iterator[Any] | None = None

    def run(self, count: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < count:
            if self._batches is None:
                if isinstance(self.dataset, Plain):
                    self.dataset.set_epoch(self.state.progress.epoch)
                self._batches = iter(self.loader)
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
                self.state.progress.epoch += 1
                continue
            seen.append((batch.tolist(), torch.rand(1).item()))
            self.state.progress.global_step += 1
        return seen


@pytest.mark.parametrize(
    ("workers", "before", "options"),
    [
        (0, 0, {}),
        (0, 3, {}),
        (0, 7, {}),
        (0, 9, {}),
        (0, 9, {"batch_size": 5, "drop_last": True}),
        (2, 3, {}),
        (2, 11, {"snapshot_every_n_steps": 3}),
    ],
)
def test_a_dataset_without_a_state_goes_on_where_it_stopped(
    workers: int, before: int, options: dict[str, Any], store_url: str
) -> None:
    """torchdata reads again, too, and counts each batch twice: the second resume would have been elsewhere."""
    loop = Loop(Plain(), workers, **options)
    loop.run(before)
    save(loop.state, store_url, before)
    wanted = loop.run(9)
    found: list[Any] = []
    for step, count in ((1, 2), (2, 7)):
        torch.manual_seed(99)
        loop = Loop(Plain(), workers, **options)
        resume(loop.state, store_url)
        found += loop.run(count)
        save(loop.state, store_url, before + step)
    assert found == wanted


def test_what_it_has_made_itself_a_dataset_may_change(store_url: str) -> None:
    loop = Loop(Buffering(), 0)
    loop.run(2)
    save(loop.state, store_url, 2)
    wanted = loop.run(5)
    loop = Loop(Buffering(), 0)
    resume(loop.state, store_url)
    assert loop.run(5) == wanted


def test_a_save_at_the_very_end_of_an_epoch_begins_the_next(store_url: str) -> None:
    loop = Loop(Plain(8), 0)
    loop.run(2)
    assert loop._batches is not None
    assert next(loop._batches, None) is None
    save(loop.state, store_url, 2)
    wanted = [batch.tolist() for batch in loop.loader]
    other = Loop(Plain(8), 0)
    resume(other.state, store_url)
    assert [batch.tolist() for batch in other.loader] == wanted != []


def test_workers_that_live_on_do_not_see_an_epoch_that_is_set() -> None:
    loop = Loop(Plain(), 2, persistent_workers=True)
    loop.state.capture()
    loop.dataset.set_epoch(1)
    with pytest.raises(
        UnsupportedValue, match=r"the workers were started before or after .*use persistent_workers=False"
    ):
        loop.state.capture()


def test_a_file_and_a_dataset_in_a_dataset_are_read_again(tmp_path: Path, store_url: str) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f'{{"at": {at}}}\n' for at in range(30)))
    loop = Loop(Wrapping(Lines(path)), 0)
    loop.run(2)
    save(loop.state, store_url, 2)
    wanted = loop.run(3)
    other = Loop(Wrapping(Lines(path)), 0)
    resume(other.state, store_url)
    assert other.run(3) == wanted
    path.write_text('{"at": 1}\n' * 4)
    with pytest.raises(StateMismatch, match=r"stands at batch 1 after it took its state, 2 was saved.*still has all"):
        resume(Loop(Wrapping(Lines(path)), 0).state, store_url)


class Cursor(Iterator[int]):
    """An iterator with a state."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.at = 0

    def __next__(self) -> int:
        if self.at == self.stop:
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Told(Plain):
    """A dataset whose iterator has the two methods; nobody can see it before there is one."""

    def __iter__(self) -> Iterator[int]:
        return Cursor(self.stop)


class Untold(Plain):
    """Of the same looks, and without a state."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(self.stop), self.stop))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_with_a_state_is_asked_for_it_and_without_one_the_save_is_refused(
    workers: int, store_url: str
) -> None:
    loop = Loop(Told(), workers)
    loop.run(3)
    save(loop.state, store_url, 3)
    wanted = loop.run(3)
    other = Loop(Told(), workers)
    resume(other.state, store_url)
    assert other.run(3) == wanted
    untold = Loop(Untold(), workers)
    with pytest.raises(UnsupportedValue, match=r"reads a Untold without a state, which uses 'random'.*give it, or its"):
        untold.state.capture()


def test_what_is_proved_is_proved_by_its_code_alone() -> None:
    def never() -> Iterator[int]:
        raise AssertionError("read")

    dataset = Plain()
    dataset.mine = never  # type: ignore[method-assign]
    assert why_not_again(Plain()) == ""
    assert "has a function in its attribute 'mine'" in why_not_again(dataset)
