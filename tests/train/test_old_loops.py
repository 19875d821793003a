"""A resume inside a running loop: the loop cannot go on, in any way; a new one is the same as in a new process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.jobs import WORKERS
from txstore.errors import NotProved
from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.loader import ReplayedSampler
from txstore.train.progress import TrainProgress
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

DATA = list(range(24))

Maker = Callable[[TrainProgress], tuple[Any, Any]]


def stateful(_: TrainProgress, **options: Any) -> tuple[Any, Any]:
    loader = StatefulDataLoader(DATA, batch_size=4, shuffle=True, collate_fn=list, **options)
    return loader, loader


def replayed(_: TrainProgress) -> tuple[Any, Any]:
    sampler = ReplayedSampler(SubsetRandomSampler(DATA, generator=torch.Generator().manual_seed(1)))
    loader = StatefulDataLoader(DATA, batch_size=4, sampler=sampler, collate_fn=list)
    return loader, loader


def elastic(progress: TrainProgress, **options: Any) -> tuple[Any, Any]:
    sampler = ElasticBatchSampler(24, 4, progress, seed=1)
    return sampler, DataLoader(DATA, batch_sampler=sampler, collate_fn=list, **options)


KINDS: dict[str, Maker] = {
    "loader": stateful,
    "workers": lambda p: stateful(p, num_workers=1, **WORKERS),
    "persistent": lambda p: stateful(p, num_workers=1, persistent_workers=True, **WORKERS),
    "replayed": replayed,
    "elastic": elastic,
    "elastic, workers": lambda p: elastic(p, num_workers=1, **WORKERS),
    "elastic, persistent": lambda p: elastic(p, num_workers=1, persistent_workers=True, **WORKERS),
}
FEW = ["loader", "elastic", "persistent"]


class Job:
    """Reads batches of 6 in an epoch, and saves at step 2."""

    def __init__(self, kind: str, url: str) -> None:
        torch.manual_seed(3)
        progress = TrainProgress()
        data, self.batches = KINDS[kind](progress)
        self.state = TrainState(nn.Linear(1, 1), data=data, progress=progress)
        self.saves = Checkpointer(url, self.state)
        self.seen: list[Any] = []
        self.saves.resume()

    def count(self, batch: Any) -> None:
        self.seen.append(batch)
        self.state.progress.global_step += 1
        self.state.progress.consumed_samples += 4

    def until(self, step: int, loop: Iterator[Any]) -> None:
        for batch in loop:
            self.count(batch)
            if self.state.progress.global_step == 2 and self.saves.saved_step != 2:
                self.saves.save()
            if self.state.progress.global_step == step:
                return

    def samples(self) -> list[int]:
        return sorted(index for batch in self.seen for index in batch)

    def go_back(self) -> None:
        self.saves.wait()
        self.saves.resume()
        del self.seen[2:]


@pytest.fixture
def job(request: pytest.FixtureRequest, store_url: str) -> Iterator[Job]:
    job = Job(request.param, store_url)
    yield job
    job.saves.close()


@pytest.mark.parametrize(
    ("job", "at"), [*((kind, 5) for kind in KINDS), ("loader", 6), ("elastic", 6), ("loader", 3)], indirect=["job"]
)
def test_a_loop_that_a_resume_has_left_gives_no_batch(job: Job, at: int) -> None:
    """Not even to its end: the last batches of an epoch, and the count of it, would be those of before."""
    loop = iter(job.batches)
    job.until(at, loop)
    job.go_back()
    with pytest.raises(NotProved, match="stood at step 2") as caught:
        next(loop)
    assert "break" in caught.value.next_step
    assert job.state.progress.global_step == 2
    del loop
    # The advice holds: what comes is what comes in a new process.
    job.until(6, iter(job.batches))
    assert job.samples() == DATA
    job.saves.save()


@pytest.mark.parametrize("job", FEW, indirect=True)
@pytest.mark.parametrize("tell", ["record", "save"])
def test_the_batch_that_it_holds_is_not_trained_on_unseen(job: Job, tell: str) -> None:
    def told() -> None:
        job.saves.record(loss=1.0) if tell == "record" else job.saves.save()

    for number, batch in enumerate(job.batches):
        job.count(batch)
        if number == 1:
            job.saves.save()
        if number == 3:
            job.go_back()
            job.count(batch)
            with pytest.raises(NotProved, match="goes on"):
                told()
            break
    job.go_back()
    job.until(6, iter(job.batches))
    assert job.samples() == DATA
    told()


@pytest.mark.parametrize("job", FEW, indirect=True)
def test_who_has_left_the_loop_hears_nothing(job: Job) -> None:
    """By `break`, by an exception that holds its frames, or before the resume; and before a new loop is begun."""
    kept: list[BaseException] = []

    def bad() -> None:
        for batch in job.batches:
            job.count(batch)
            if job.state.progress.global_step == 4:
                raise FloatingPointError

    job.until(3, iter(job.batches))
    job.go_back()
    job.state.capture()
    for _ in range(2):
        try:
            bad()
        except FloatingPointError as error:
            kept.append(error)
        job.go_back()
        job.state.capture()
    for batch in job.batches:
        job.count(batch)
        job.saves.record(loss=1.0)
        if job.state.progress.global_step == 6:
            break
    assert job.samples() == DATA
    job.saves.save()


def test_an_iterator_of_other_data_that_is_kept_does_no_harm(store_url: str) -> None:
    """A look at the validation's first batch, say: it is not read any more, and would be stopped if it were."""
    state = TrainState(nn.Linear(2, 2), data={name: stateful(TrainProgress())[0] for name in ("train", "valid")})
    train, valid = (state.pieces["data"]._items[name].item for name in ("train", "valid"))
    with Checkpointer(store_url, state) as saves:
        saves.save()
        kept = iter(valid)
        next(kept)
        saves.resume()
        for _ in train:
            state.progress.global_step += 1
            saves.record(loss=1.0)
        with pytest.raises(NotProved, match="'valid'"):
            next(kept)


def test_data_that_is_left_as_it_is_goes_on(store_url: str) -> None:
    job = Job("loader", store_url)
    loop = iter(job.batches)
    job.until(4, loop)
    job.saves.wait()
    job.saves.resume(ResumeOptions(fresh={"data"}))
    job.until(4, loop)
    job.saves.record(loss=1.0)
    assert job.samples() == DATA
    job.saves.close()


def test_an_iterator_that_was_made_before_the_resume_of_a_new_process_is_no_way_on(store_url: str) -> None:
    job = Job("loader", store_url)
    job.until(3, iter(job.batches))
    job.saves.close()
    loader, _ = stateful(TrainProgress())
    early = iter(loader)
    with Checkpointer(store_url, TrainState(nn.Linear(1, 1), data=loader)) as saves:
        saves.resume()
        with pytest.raises(NotProved, match="make it after resume"):
            next(early)
