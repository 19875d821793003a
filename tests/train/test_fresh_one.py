"""State that only one side has: the message names how to begin that object anew, and no other is given up for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as rates
from workers import Pool, Rank

from tests.train.runs import Run
from txstore.errors import ConfigError, StateMismatch
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState
from txstore.train.stateful import per_rank

WORLD = 4


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def get_scale(self) -> float:
        return float(self.count)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stream:
    """A generator, asked as the objects with a count are: by the number that tells its state."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def count(self) -> int:
        return self.generator.initial_seed()


class Slow(rates.LambdaLR):
    """A scheduler whose count moves without the optimizer."""

    @property
    def count(self) -> int:
        return int(self.last_epoch)

    @count.setter
    def count(self, value: int) -> None:
        self.last_epoch = value


def scheduled(run: Run, count: int) -> Slow:
    made = Slow(run.optimizer, lambda epoch: 1.0)
    made.count = count
    return made


# what is made for a run, under which name it is left fresh, and how it is handed to the state
KINDS: dict[str, tuple[Any, str, Any]] = {
    "extra": (lambda run, count: Counter(count), "extra:{}", lambda made: {"extras": made}),
    "extra of each rank": (
        lambda run, count: Counter(count),
        "extra:{}",
        lambda made: {"extras": {name: per_rank(one) for name, one in made.items()}},
    ),
    "data": (lambda run, count: Counter(count), "data:{}", lambda made: {"data": made}),
    "scaler": (lambda run, count: Counter(count), "scaler:{}", lambda made: {"scaler": made}),
    "scheduler": (scheduled, "scheduler:{}", lambda made: {"schedulers": made}),
    "generator": (
        lambda run, count: Stream(count),
        "rng:generator.{}",
        lambda made: {"generators": {name: one.generator for name, one in made.items()}},
    ),
}


def with_objects(kind: str, seed: int, **counts: int) -> tuple[Run, dict[str, Any]]:
    make, _, hand_over = KINDS[kind]
    run = Run(seed)
    made = {name: make(run, count) for name, count in counts.items()}
    run.state = TrainState(run.model, run.optimizer, **hand_over(made))
    return run, made


def saved(url: str, kind: str, **counts: int) -> Run:
    run, _ = with_objects(kind, 3, **counts)
    run.step()
    with Checkpointer(url, run.state) as saves:
        saves.save()
    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [({"a": 1}, {"a": 8, "b": 9}), ({"a": 1, "b": 2}, {"a": 8})])
def test_one_that_only_one_side_has_begins_anew_alone(kind: str, before: Any, after: Any, store_url: str) -> None:
    first = saved(store_url, kind, **before)
    run, made = with_objects(kind, 9, **after)
    name = KINDS[kind][1].format("b")
    with Checkpointer(store_url, run.state) as saves:
        with pytest.raises(StateMismatch) as raised:
            saves.resume()
        assert f"if that is meant: fresh={{'{name}'}}" in str(raised.value)
        report = saves.resume(ResumeOptions(fresh={name}))
        assert report.proved, str(report)
        assert report.accepted == [f"fresh {name}"]
    assert made["a"].count == 1, "what both sides have is restored"
    if "b" in made:
        assert made["b"].count == 9, "what is new stays as the code made it"
    assert torch.equal(run.model.first.weight, first.model.first.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_both_sides_have_may_begin_anew_too(kind: str, store_url: str) -> None:
    saved(store_url, kind, a=1, b=2)
    run, made = with_objects(kind, 9, a=8, b=9)
    with Checkpointer(store_url, run.state) as saves:
        assert saves.resume(ResumeOptions(fresh=[KINDS[kind][1].format("b")])).proved
        assert (made["a"].count, made["b"].count) == (1, 9)
        saves.resume()
    assert (made["a"].count, made["b"].count) == (1, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_neither_side_has_is_a_mistake(kind: str, store_url: str) -> None:
    saved(store_url, kind, a=1)
    run, made = with_objects(kind, 9, a=8)
    with Checkpointer(store_url, run.state) as saves:
        with pytest.raises(StateMismatch, match="c' is named in fresh, and neither side has it"):
            saves.resume(ResumeOptions(fresh={KINDS[kind][1].format("c")}))
        assert made["a"].count == 8
        saves.resume()


@pytest.mark.parametrize("name", ["extras:b", "extra:", "extra", "model:first", "optimizer:b", ":b"])
def test_a_wrong_label_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match="labels are optimizer, scheduler, scaler, extra, data, rng"):
        ResumeOptions(fresh=[name])


def test_a_piece_that_only_one_side_has_is_named_as_well(store_url: str) -> None:
    run = Run()
    with Checkpointer(store_url, TrainState(run.model, run.optimizer, rng=False)) as saves:
        saves.save()
    run = Run(9)
    with Checkpointer(store_url, TrainState(run.model, run.optimizer)) as saves:
        with pytest.raises(StateMismatch, match=r"'rng' was not saved \(if that is meant: fresh=\{'rng'\}\)"):
            saves.resume()
        assert saves.resume(ResumeOptions(fresh={"rng"})).proved


def together(me: Rank, url: str) -> Any:
    kind = "extra of each rank"
    saved(url, kind, a=me.rank)
    run, made = with_objects(kind, 9, a=70, b=80 + me.rank)
    with Checkpointer(url, run.state) as saves:
        with pytest.raises(StateMismatch, match=r"fresh=\{'extra:b'\}"):
            saves.resume()
        proved = saves.resume(ResumeOptions(fresh={"extra:b"})).proved
    return proved, made["a"].count, made["b"].count


def test_each_rank_restores_its_own_and_keeps_its_new_one(pool: Pool, store_url: str) -> None:
    assert pool.run(WORLD, together, store_url) == [(True, rank, 80 + rank) for rank in range(WORLD)]
