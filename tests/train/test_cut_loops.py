"""Loops that cut a loader, as the guide says to write them: what follows a resume is what would have followed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from txstore.train.checkpointer import Checkpointer
from txstore.train.state import TrainState

STEPS = 4


def by_islice(loader: Any, state: TrainState) -> Iterator[list[int]]:
    while True:
        done = state.progress.global_step % STEPS
        yield from itertools.islice(loader, STEPS - done)
        state.progress.epoch += 1


def for_ever(loader: Any, state: TrainState) -> Iterator[list[int]]:
    while True:
        yield from loader


@pytest.mark.parametrize("loop", [by_islice, for_ever])
@pytest.mark.parametrize("at", [2, 3, 5, 7, 9])
def test_the_loops_of_the_guide_go_on(loop: Any, at: int, store_url: str) -> None:
    def run(upto: int, *, save: bool) -> list[list[int]]:
        torch.manual_seed(1)
        loader = StatefulDataLoader(list(range(24)), batch_size=4, shuffle=True, collate_fn=list)
        state = TrainState(nn.Linear(2, 2), data=loader)
        read = []
        with Checkpointer(store_url, state) as saves:
            if save:
                saves.resume()
            batches = loop(loader, state)
            while state.progress.global_step < upto:
                read.append(next(batches))
                state.progress.global_step += 1
            if save:
                saves.save()
        return read

    untouched = run(14, save=False)
    assert run(at, save=True) + run(14, save=True) == untouched
