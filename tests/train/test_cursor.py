"""No sample twice and none skipped, in the order of an untouched run, whatever was fetched ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from tests.train.trainings import resume, save
from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.progress import TrainProgress
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.stateful import shared

pytestmark = pytest.mark.filterwarnings("ignore:Neither dataset nor iter")


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    before = capture_streams()
    torch.manual_seed(1)
    yield
    restore_streams(before)


class Counting(IterableDataset):
    """Each worker counts its own numbers, and can say where it is."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while self.at * step + first < self.stop:
            value = self.at * step + first
            self.at += 1
            yield value
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loop:
    """Reads batches over epochs, and draws a number beside each as dropout does."""

    def __init__(self, kind: str, workers: int, **options: Any) -> None:
        options |= {"persistent_workers": True} if kind == "persistent" else {}
        dataset: Any = Counting(24) if kind == "iterable" else list(range(24))
        shuffle = {} if kind == "iterable" else {"shuffle": True}
        self.loader = StatefulDataLoader(dataset, batch_size=4, num_workers=workers, **shuffle, **options)
        self.state = TrainState(nn.Linear(1, 1), data=self.loader)
        self._batches: Iterator[Any] | None = None

    def run(self, count: int) -> list[Any]:
        seen = []
        while len(seen) < count:
            if self._batches is None:
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
    ("kind", "workers", "before"),
    [
        ("map", 0, 0),
        ("map", 0, 4),
        ("map", 0, 6),
        ("map", 0, 15),
        ("map", 2, 0),
        ("map", 2, 6),
        ("map", 2, 9),
        ("persistent", 2, 8),
        ("iterable", 0, 8),
        ("iterable", 2, 9),
    ],
)
def test_a_loader_goes_on_as_if_nothing_had_happened(kind: str, workers: int, before: int, store_url: str) -> None:
    loop = Loop(kind, workers)
    loop.run(before)
    save(loop.state, store_url, before)
    wanted = loop.run(14)  # to the end of this epoch, and two more: a cursor is applied once only
    del loop
    torch.manual_seed(99)
    other = Loop(kind, workers)
    resume(other.state, store_url)
    assert other.run(14) == wanted


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_a_save_soon_after_a_resume_lacks_no_worker(kind: str, store_url: str) -> None:
    loop = Loop(kind, 2)
    loop.run(2)
    save(loop.state, store_url, 2)
    wanted = loop.run(6)
    for step in range(3, 5):
        loop = Loop(kind, 2)
        resume(loop.state, store_url)
        assert loop.run(1) == wanted[step - 3 : step - 2]
        save(loop.state, store_url, step)
    assert loop.run(4) == wanted[2:]


def test_a_loader_that_snapshots_seldom_is_at_the_right_batch(store_url: str) -> None:
    loop = Loop("map", 2, snapshot_every_n_steps=3)
    loop.run(4)
    save(loop.state, store_url, 4)
    wanted = loop.run(5)
    other = Loop("map", 2, snapshot_every_n_steps=3)
    resume(other.state, store_url)
    assert other.run(5) == wanted


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 3}, "batch_size: saved 4, now 3"),
        ({"num_workers": 1}, "num_workers: saved 0, now 1"),
        ({"drop_last": True}, "drop_last: saved False, now True"),
        ({"shuffle": False}, r"sampler: saved RandomSampler\(replacement=False\), now SequentialSampler\(\)"),
        (
            {"shuffle": None, "sampler": RandomSampler(range(24), replacement=True)},
            r"sampler: .*, now .*replacement=True",
        ),
        ({"dataset": list(range(23))}, "samples: saved 24, now 23"),
        ({"dataset": list(range(25))}, "samples: saved 24, now 25"),
    ],
)
def test_settings_that_change_what_a_cursor_means_are_told_by_name(
    options: dict[str, Any], text: str, store_url: str
) -> None:
    def state(**changed: Any) -> TrainState:
        loader = StatefulDataLoader(**{"dataset": list(range(24)), "batch_size": 4, "shuffle": True, **changed})
        return TrainState(nn.Linear(1, 1), data={"train": loader})

    save(state(), store_url, 0)
    with pytest.raises(StateMismatch, match=f"data 'train' {text}") as caught:
        resume(state(**options), store_url)
    assert str(caught.value).count(": saved ") == 1, "and nothing else is"
    assert "fresh={'data:train'}" in str(caught.value)
    resume(state(), store_url)


def test_data_that_grew_under_its_loader_is_told(store_url: str) -> None:
    """A sampler draws an order of as many samples as there are: of more, another order."""
    samples = list(range(24))
    state = TrainState(nn.Linear(1, 1), data=StatefulDataLoader(samples, batch_size=4))
    samples += range(24, 30)
    save(state, store_url, 0)
    with pytest.raises(StateMismatch, match="samples: saved 30, now 24"):
        resume(TrainState(nn.Linear(1, 1), data=StatefulDataLoader(samples[:24], batch_size=4)), store_url)


class Lacking(StatefulDataLoader):
    """A loader that lost the state of a worker."""

    def state_dict(self) -> Any:
        state = super().state_dict()
        state["_snapshot"]["_worker_snapshots"].pop("worker_1")
        return state


class Standing(StatefulDataLoader):
    """A loader whose main process does not take the state."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({})


def test_an_incomplete_state_is_refused_at_the_save() -> None:
    state = TrainState(nn.Linear(1, 1), data=Lacking(list(range(8)), num_workers=2))
    with pytest.raises(UnsupportedValue, match="1 of its 2 workers"):
        state.capture()


def test_a_loader_that_stays_at_the_beginning_is_found(store_url: str) -> None:
    loader = Standing(list(range(24)), batch_size=4)
    state = TrainState(nn.Linear(1, 1), data=loader)
    batches = iter(loader)
    next(batches)
    save(state, store_url, 2)
    with pytest.raises(StateMismatch, match="stands at batch 0"):
        resume(TrainState(nn.Linear(1, 1), data=Standing(list(range(24)), batch_size=4)), store_url)


def test_another_class_of_loader_is_told_and_may_be_meant(store_url: str) -> None:
    state = TrainState(nn.Linear(1, 1), data=StatefulDataLoader(list(range(24)), batch_size=4))
    save(state, store_url, 2)

    class Own(StatefulDataLoader):
        """A subclass."""

    other = TrainState(nn.Linear(1, 1), data=Own(list(range(24)), batch_size=4))
    with pytest.raises(StateMismatch, match=r"class: saved torchdata.*, now .*Own .*accept=\{'data:0:class'\}"):
        resume(other, store_url)
    applied = resume(other, store_url, accept={"data:0:class"})
    assert applied.restored["data"] == {"restored": ["0"]}


def test_objects_that_do_not_know_what_was_consumed_are_refused() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="is a dataset"):
        TrainState(module, data=Counting(3))
    with pytest.raises(ConfigError, match="without state_dict"):
        TrainState(module, data=DataLoader([1]))
    with pytest.raises(ConfigError, match="in_order=False"):
        TrainState(module, data=StatefulDataLoader([1], in_order=False))
    sampler = ElasticBatchSampler(4, 2, TrainProgress())
    with pytest.raises(ConfigError, match="pass the sampler"):
        TrainState(module, data=StatefulDataLoader([1], batch_sampler=sampler))


# The elastic sampler.

SAMPLES, BATCH = 41, 6


class Ranks:
    """All ranks of a training that read by an elastic sampler, through real loaders with workers that fetch ahead."""

    def __init__(self, world: int, workers: int = 0) -> None:
        self.states = []
        self.loaders: list[Any] = []
        for rank in range(world):
            progress = TrainProgress()
            sampler = ElasticBatchSampler(SAMPLES, BATCH, progress, rank=rank, world_size=world, seed=5)
            torch.manual_seed(1)
            state = TrainState(nn.Linear(1, 1), data=sampler, progress=progress)
            self.states.append(state)
            self.loaders.append(
                DataLoader(range(SAMPLES), batch_sampler=sampler, num_workers=workers, generator=torch.Generator())
            )
        self.world = world

    def run(self, batches: int) -> list[int]:
        """The samples that were trained on, in the order of the global batches."""
        seen: list[int] = []
        iterators = [iter(loader) for loader in self.loaders]
        for _ in range(batches):
            parts = [next(iterator, None) for iterator in iterators]
            if parts[0] is None:
                iterators = [iter(loader) for loader in self.loaders]
                parts = [next(iterator) for iterator in iterators]
            for part, state in zip(parts, self.states, strict=True):
                seen += part.tolist()
                state.progress.consumed_samples += BATCH
        return seen

    def captured(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        digests = []
        for rank, state in enumerate(self.states):
            captured = state.capture(rank, self.world)
            found |= captured.state
            digests.append(captured.shared_digests)
        assert all(one == digests[0] for one in digests), "equal on all ranks"
        return found

    def apply(self, state: dict[str, Any]) -> None:
        for rank, one in enumerate(self.states):
            one.apply(state, rank, self.world, on_world_size_change="reseed")


def test_two_ranks_then_one_then_three_read_every_sample_once() -> None:
    untouched = Ranks(1).run(15)
    seen: list[int] = []
    state = None
    for world, batches in [(2, 4), (1, 4), (3, 3), (2, 4)]:
        ranks = Ranks(world, workers=2 if world == 2 else 0)
        if state is not None:
            ranks.apply(state)
        seen += ranks.run(batches)
        state = ranks.captured()
    assert seen == untouched
    epoch = SAMPLES // BATCH * BATCH
    first, second = seen[:epoch], seen[epoch : 2 * epoch]
    assert len(set(first)) == len(set(second)) == epoch
    assert first != second


class EpochLoop:
    """The loop of the README, with dropout, over a plain `DataLoader` without a generator of its own."""

    def __init__(self, seed: int, workers: int = 0) -> None:
        torch.manual_seed(seed)
        progress = TrainProgress()
        self.sampler = ElasticBatchSampler(SAMPLES, BATCH, progress, seed=5)
        self.loader: Any = DataLoader(range(SAMPLES), batch_sampler=self.sampler, num_workers=workers)
        self.state = TrainState(nn.Linear(1, 1), data=self.sampler, progress=progress)

    def run(self, epochs: int, save: Callable[[str], object] = lambda _where: None) -> list[Any]:
        seen: list[Any] = []
        progress = self.state.progress
        while progress.epoch < epochs:
            for batch in self.loader:
                seen.append((batch.tolist(), torch.rand(1).item()))
                progress.consumed_samples += BATCH
                progress.global_step += 1
                save(f"step {progress.global_step}")
            progress.epoch += 1
            save(f"epoch {progress.epoch}")
        return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["step 2", "step 6", "epoch 1", "step 8", "step 12", "epoch 2"])
def test_a_plain_loader_goes_on_in_its_epoch_with_the_same_random_numbers(
    where: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept: dict[str, Any] = {}
    loop = EpochLoop(1, workers)
    untouched = loop.run(2, lambda at: kept.update({at: loop.state.capture()}))
    at = int(kept[where].progress.global_step)
    after = torch.rand(1).item()
    resumed = EpochLoop(2, workers)
    resumed.state.apply(kept[where].state)
    assert resumed.run(2) == untouched[at:]
    assert torch.rand(1).item() == after
    assert len(caplog.messages) == (where in {"step 6", "step 12"})


def test_what_a_loop_draws_itself_before_its_first_batch_is_left_to_it() -> None:
    loop = EpochLoop(1)
    batches = iter(loop.loader)
    next(batches)
    loop.state.progress.consumed_samples += BATCH
    kept = loop.state.capture()
    resumed = EpochLoop(2)
    resumed.state.apply(kept.state)
    batches = iter(resumed.loader)
    torch.rand(3)
    before = torch.get_rng_state()
    next(batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_workers_fetched_ahead_is_not_consumed() -> None:
    ranks = Ranks(1, workers=2)
    taken = ranks.run(1)  # by now the workers hold several batches more
    fetched = iter(ranks.loaders[0])
    next(fetched)  # taken by the loop and not trained on: a save now must not skip it
    state = ranks.captured()
    other = Ranks(1)
    other.apply(state)
    assert taken + other.run(2) == Ranks(1).run(3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 6}, "seed is 6, 5 was saved"),
        ({"samples": 40}, "samples is 40, 41 was saved"),
        ({"global_batch": 3}, "global_batch is 3, 6 was saved"),
        ({"shuffle": False}, "shuffle is False, True was saved"),
    ],
)
def test_another_order_is_refused(change: dict[str, Any], text: str) -> None:
    first = ElasticBatchSampler(SAMPLES, BATCH, TrainProgress(consumed_samples=12), seed=5)
    progress = TrainProgress(consumed_samples=6)
    other = ElasticBatchSampler(progress=progress, **{"samples": SAMPLES, "global_batch": BATCH, "seed": 5, **change})
    with pytest.raises(StateMismatch, match=text):
        other.load_state_dict(first.state_dict())
    assert progress.consumed_samples == 6


def test_a_library_that_shuffles_in_another_way_is_found() -> None:
    sampler = ElasticBatchSampler(SAMPLES, BATCH, TrainProgress(), seed=5)
    state = {**sampler.state_dict(), "order_check": 1}
    with pytest.raises(StateMismatch, match="order_check"):
        sampler.load_state_dict(state)


def test_misuse_of_the_sampler_is_refused() -> None:
    progress = TrainProgress()
    sampler = ElasticBatchSampler(12, 6, progress, shuffle=False)
    assert len(sampler) == 2
    assert list(sampler) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with pytest.raises(ConfigError, match="has not moved"):
        list(sampler)
    progress.consumed_samples = 7
    with pytest.raises(ConfigError, match="no whole number of batches"):
        list(sampler)
    with pytest.raises(ConfigError, match="shared equally by 4 ranks"):
        ElasticBatchSampler(12, 6, progress, world_size=4)
    with pytest.raises(ConfigError, match="do not fill"):
        ElasticBatchSampler(5, 6, progress)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        ElasticBatchSampler(12, 6, progress, rank=2, world_size=2)


def test_a_shared_cursor_of_ones_own_survives_a_change_of_ranks() -> None:
    class Mine:
        at = 3

        def state_dict(self) -> Any:
            return {"at": self.at}

        def load_state_dict(self, state: Any) -> None:
            self.at = state["at"]

    saved = TrainState(nn.Linear(1, 1), data=shared(Mine())).capture(0, 2).state
    mine = Mine()
    mine.at = 0
    TrainState(nn.Linear(1, 1), data=shared(mine)).apply(saved, 0, 1, on_world_size_change="reseed")
    assert mine.at == 3


@pytest.mark.parametrize("stop", [2, 6, 9])
@pytest.mark.parametrize("rng", ["found", "named"])
def test_the_generator_of_a_loader_comes_back(stop: int, rng: str, store_url: str) -> None:
    """The order of the epochs after the one in which the run resumed, too."""

    def begin() -> tuple[TrainState, Iterator[list[int]]]:
        generator = torch.Generator().manual_seed(3)
        loader = StatefulDataLoader(list(range(24)), batch_size=4, shuffle=True, generator=generator)
        named = {"mine": generator} if rng == "named" else None
        state = TrainState(nn.Linear(1, 1), data=loader, generators=named)

        def batches() -> Iterator[list[int]]:
            while True:
                for batch in loader:
                    state.progress.global_step += 1
                    yield batch.tolist()

        return state, batches()

    _, truth = begin()
    expected = [next(truth) for _ in range(20)]
    state, batches = begin()
    with Checkpointer(store_url, state) as saves:
        found = [next(batches) for _ in range(stop)]
        saves.save()
    state, batches = begin()
    with Checkpointer(store_url, state) as saves:
        saves.resume()
        found += [next(batches) for _ in range(20 - stop)]
    assert found == expected
