"""Numbers that the loop sets on a dataset reach the workers of a resumed epoch; what cannot be saved of it is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.trainings import resume, save
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.worker_streams import WorkerStreams

EPOCH = 4  # batches


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


class Scaled(Dataset[Any]):
    """Reads by what the loop sets: a number of the class, one of its own, a list and an array."""

    scale = 1.0

    def __init__(self) -> None:
        self.epoch = 0
        self.flips: list[Any] = [1, 2]
        self.weights = np.ones(3)
        self._private = [0]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.flips = [epoch, epoch]

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        return index * self.scale + 100.0 * self.epoch + 1000.0 * self.flips[0]


class Outer(Dataset[Any]):
    """Wraps one, and says so to it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


class Loop:
    """Reads batches, and changes the dataset before each epoch."""

    def __init__(self, wrap: Any, change: Callable[[Any, int], None], **options: Any) -> None:
        torch.manual_seed(0)
        self.dataset = Scaled()
        self.change = change
        self.loader = StatefulDataLoader(wrap(self.dataset), batch_size=4, shuffle=True, **options)
        self.state = TrainState(nn.Linear(1, 1), data=self.loader)

    def run(self, count: int) -> list[Any]:
        """Through `count` batches in all, from where the state stands."""
        seen: list[Any] = []
        progress = self.state.progress
        while True:
            self.change(self.dataset, progress.epoch)
            for batch in self.loader:
                seen.append(batch.tolist())
                progress.global_step += 1
                if progress.global_step == count:
                    return seen
            progress.epoch += 1


def scaled(dataset: Scaled, epoch: int) -> None:
    dataset.scale = 1.0 + epoch


def by_method(dataset: Scaled, epoch: int) -> None:
    dataset.set_epoch(epoch)


def goes_on(url: str, wrap: Any, change: Any, *, before: int, **options: Any) -> bool:
    untouched = Loop(wrap, change, **options)
    untouched.run(before)
    save(untouched.state, url, before)
    untouched = Loop(wrap, change, **options)
    seen = untouched.run(before + 3)[before:]
    resumed = Loop(wrap, change, **options)
    resume(resumed.state, url)
    return resumed.run(before + 3) == seen


@pytest.mark.parametrize(
    ("wrap", "change"),
    [
        (lambda one: one, scaled),
        (lambda one: Subset(ConcatDataset([one, one]), range(16)), scaled),
        (lambda one: WorkerStreams(Outer(one)), by_method),
    ],
)
def test_the_rest_of_an_epoch_is_read_with_its_numbers(store_url: str, wrap: Any, change: Any) -> None:
    assert goes_on(store_url, wrap, change, before=EPOCH + 2, num_workers=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_has_ended_is_followed_by_the_next_one(store_url: str, workers: int) -> None:
    assert goes_on(store_url, lambda one: one, by_method, before=2 * EPOCH, num_workers=workers)


def test_a_number_that_the_code_now_sets_otherwise_is_the_codes_if_training_had_not_moved_it(store_url: str) -> None:
    def change(dataset: Scaled, epoch: int) -> None:
        dataset.epoch = epoch

    first = Loop(lambda one: one, change, num_workers=1)
    first.run(EPOCH + 2)
    save(first.state, store_url, 6)
    second = Loop(lambda one: one, change, num_workers=1)
    second.dataset.scale = 5.0
    resume(second.state, store_url)
    assert (second.dataset.scale, second.dataset.epoch) == (5.0, 1)


def test_without_workers_a_number_does_not_come_back_without_what_it_stands_for(store_url: str) -> None:
    def opened(dataset: Any, epoch: int) -> None:
        dataset.scale = 3.0

    first = Loop(lambda one: one, opened)
    first.run(2)
    save(first.state, store_url, 2)
    second = Loop(lambda one: one, nothing)
    resume(second.state, store_url)
    assert second.dataset.scale == 1.0


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "txstore.train.read_by_workers"]


def nothing(dataset: Scaled, epoch: int) -> None:
    """The dataset stays as it is."""


def after(change: Callable[[Any], None], caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """What is told at saves in one epoch, with a change between the first two."""
    loop = Loop(lambda one: one, nothing, **options)
    batches = iter(loop.loader)
    next(batches)
    loop.state.capture()
    assert told(caplog) == []
    change(loop.dataset)
    next(batches)
    loop.state.capture()
    found = told(caplog)
    next(batches)
    loop.state.capture()
    assert told(caplog) == found
    return found


def write(dataset: Any) -> None:
    dataset.weights[1] = 2


def rescale(dataset: Any) -> None:
    dataset.scale = 3.0


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (write, {"num_workers": 1}, "not saved: training changes weights of its dataset"),
        (write, {}, "not saved: training changes weights of"),
        (rescale, {}, "not saved: training changes scale of"),
        (rescale, {"num_workers": 1, "persistent_workers": True}, "not saved: training changes scale of"),
        (rescale, {"num_workers": 1}, "training changes scale of its dataset in the middle of an epoch"),
    ],
)
def test_what_cannot_be_saved_is_told_once(
    change: Any, options: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = after(change, caplog, **options)
    assert words in message


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_what_a_loop_sets_in_each_epoch_is_not_told(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(lambda one: one, by_method, **options)
    loop.dataset._private = [1]
    with caplog.at_level(logging.WARNING):
        loop.state.capture()
        loop.run(EPOCH + 1)
        loop.state.capture()
        loop.run(2 * EPOCH + 2)
        loop.state.capture()
    assert told(caplog) == []
