"""What a scheduler moves in an optimizer goes with the scheduler: the rates stay on the schedule, whatever begins anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from txstore.errors import StateMismatch
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

STEPS, AFTER = 7, 12


def warm_up(optimizer: Any) -> Any:
    first, then = rates.LinearLR(optimizer, 0.1, total_iters=4), rates.CosineAnnealingLR(optimizer, T_max=30)
    return rates.SequentialLR(optimizer, [first, then], milestones=[4])


class Decay(rates.LRScheduler):
    """One of the user's own, which moves the weight decay as well."""

    def get_lr(self) -> list[float]:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = group["weight_decay"] * 0.9
        return [group["lr"] * 0.9 for group in self.optimizer.param_groups]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda optimizer: rates.CosineAnnealingLR(optimizer, T_max=30),
    "exponential": lambda optimizer: rates.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: rates.OneCycleLR(optimizer, max_lr=0.05, total_steps=40),
    "cyclic": lambda optimizer: rates.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=5),
    "warm-up": warm_up,
    "chained": lambda optimizer: rates.ChainedScheduler(
        [rates.ExponentialLR(optimizer, 0.9), rates.ConstantLR(optimizer, 0.5, total_iters=9)]
    ),
    "lambda": lambda optimizer: rates.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "plateau": lambda optimizer: rates.ReduceLROnPlateau(optimizer, patience=1),
    "of one's own": Decay,
}
OPTIMIZERS = {"cyclic": torch.optim.SGD}


class Run:
    def __init__(self, kind: str, groups: int = 2, **options: Any) -> None:
        torch.manual_seed(1)
        self.kind, self.model = kind, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
        make = OPTIMIZERS.get(kind, torch.optim.AdamW)
        split = [{"params": part.parameters(), "lr": 1e-2 / (1 + at)} for at, part in enumerate(self.model)][:groups]
        options = {"weight_decay": 0.1, **options, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
        self.optimizer = make(split, **options)
        self.scheduler = SCHEDULERS[kind](self.optimizer)
        self.state = TrainState(self.model, self.optimizer, schedulers=self.scheduler)

    def step(self) -> list[dict[str, str]]:
        self.model(torch.ones(2, 3)).sum().backward()
        used = self.settings()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.scheduler.step(*([1.0] if self.kind == "plateau" else []))
        self.state.progress.global_step += 1
        return used

    def settings(self) -> list[dict[str, str]]:
        return [
            {name: str(float(value) if name == "lr" else value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]


def saved(url: str, kind: str, **options: Any) -> Run:
    run = Run(kind, **options)
    with Checkpointer(url, run.state) as saves:
        for _ in range(STEPS):
            run.step()
        saves.save()
    return run


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_an_optimizer_that_begins_anew_is_on_the_restored_schedule(kind: str, store_url: str) -> None:
    control = saved(store_url, kind)
    run = Run(kind)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(fresh={"optimizer"}))
        assert not run.optimizer.state
        assert [run.step() for _ in range(AFTER)] == [control.step() for _ in range(AFTER)]
        saves.save()
    again = Run(kind)
    with Checkpointer(store_url, again.state) as saves:
        assert saves.resume().proved
    assert again.settings() == run.settings()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_schedule_that_begins_anew_is_the_whole_schedule(kind: str, store_url: str) -> None:
    saved(store_url, kind)
    control, run = Run(kind), Run(kind)
    with Checkpointer(store_url, run.state) as saves:
        report = saves.resume(ResumeOptions(fresh={"scheduler"}))
    assert report.proved
    assert run.optimizer.state, "the moments are restored"
    assert [run.step() for _ in range(AFTER)] == [control.step() for _ in range(AFTER)]


@pytest.mark.parametrize("kind", ["one cycle"])
def test_the_restored_schedule_is_the_saved_one_though_the_code_now_says_another(
    kind: str, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = saved(store_url, kind)
    cycle = {"max_lr": 0.09, "total_steps": 40, "max_momentum": 0.8}
    monkeypatch.setitem(SCHEDULERS, "one cycle", lambda optimizer: rates.OneCycleLR(optimizer, **cycle))
    run = Run(kind)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(fresh={"optimizer"}))
    assert [run.step() for _ in range(AFTER)] == [control.step() for _ in range(AFTER)]


def test_settings_that_no_scheduler_moves_are_the_codes(store_url: str) -> None:
    saved(store_url, "cosine")
    run = Run("cosine", weight_decay=0.7)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(fresh={"optimizer"}))
    assert run.optimizer.param_groups[0]["weight_decay"] == 0.7


def test_a_rate_that_is_a_tensor_is_on_the_schedule(store_url: str) -> None:
    def run() -> tuple[Any, Any, TrainState]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))
        scheduler = rates.CosineAnnealingLR(optimizer, T_max=30)
        return optimizer, scheduler, TrainState(model, optimizer, schedulers=scheduler)

    optimizer, scheduler, state = run()
    with Checkpointer(store_url, state) as saves:
        for _ in range(STEPS):
            optimizer.step()
            scheduler.step()
        saves.save()
    fresh, _, state = run()
    rate = fresh.param_groups[0]["lr"]
    with Checkpointer(store_url, state) as saves:
        saves.resume(ResumeOptions(fresh={"optimizer"}))
    assert fresh.param_groups[0]["lr"] is rate
    assert torch.equal(rate, optimizer.param_groups[0]["lr"])


def test_another_number_of_groups_is_not_on_any_schedule(store_url: str) -> None:
    saved(store_url, "cosine", groups=2)
    run = Run("cosine", groups=3)
    before = run.model[0].weight.detach().clone()
    with Checkpointer(store_url, run.state) as saves:
        with pytest.raises(StateMismatch, match=r"3 groups, 2 groups .*fresh=\{'optimizer', 'scheduler'\}"):
            saves.resume(ResumeOptions(fresh={"optimizer"}))
        assert torch.equal(run.model[0].weight, before)
        saves.resume(ResumeOptions(fresh={"optimizer", "scheduler"}))
    assert run.settings() == Run("cosine", groups=3).settings()


def test_a_setting_that_the_new_optimizer_has_not_is_refused(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(store_url, "cyclic")
    monkeypatch.setitem(SCHEDULERS, "cyclic", lambda one: rates.CyclicLR(one, 1e-3, 1e-2, step_size_up=5))
    monkeypatch.setitem(OPTIMIZERS, "cyclic", torch.optim.AdamW)
    with Checkpointer(store_url, Run("cyclic").state) as saves:
        with pytest.raises(StateMismatch, match=r"no setting 'momentum'.*fresh=\{'optimizer', 'scheduler'\}"):
            saves.resume(ResumeOptions(fresh={"optimizer"}))
        saves.resume(ResumeOptions(fresh={"optimizer", "scheduler"}))


def test_each_optimizer_follows_its_own_scheduler(store_url: str) -> None:
    def run() -> tuple[list[Any], list[Any], TrainState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in model]
        schedulers = [rates.CosineAnnealingLR(one, T_max=30) for one in optimizers]
        return optimizers, schedulers, TrainState(model, optimizers, schedulers=schedulers)

    optimizers, schedulers, state = run()
    with Checkpointer(store_url, state) as saves:
        for _ in range(STEPS):
            for one in (*optimizers, *schedulers):
                one.step()
        saves.save()
    rate = optimizers[0].param_groups[0]["lr"]
    for fresh, expected in (
        ({"scheduler:1"}, [rate, 1e-2]),
        ({"optimizer", "scheduler:0"}, [1e-2, rate]),
        ({"optimizer"}, [rate, rate]),
    ):
        now, _, state = run()
        with Checkpointer(store_url, state) as saves:
            saves.resume(ResumeOptions(fresh=fresh))
        assert [one.param_groups[0]["lr"] for one in now] == expected, fresh


def told(url: str, rate: float, step: int, fresh: set[str]) -> tuple[list[str], float]:
    """What a resume tells under a rate in the code, and the rate in force; a step and a save follow."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    scheduler = rates.CosineAnnealingLR(optimizer, T_max=30)
    state = TrainState(model, optimizer, schedulers=scheduler)
    with Checkpointer(url, state) as saves:
        report = saves.resume(ResumeOptions(fresh=fresh))
        in_force = optimizer.param_groups[0]["initial_lr"]
        optimizer.step()
        scheduler.step()
        state.progress.global_step = step
        saves.save()
    return [note for note in report.notes if note.startswith("state ")], in_force


@pytest.mark.parametrize(("fresh", "in_force"), [("scheduler", 1e-3), ("optimizer", 1e-2)])
def test_the_report_says_which_rate_is_in_force_and_so_do_the_next_ones(
    fresh: str, in_force: float, store_url: str
) -> None:
    line = "state optimizer 0 lr, as the code sets it, in group 0: saved {}, now {}; the {} is in force"
    told(store_url, 1e-2, 1, set())
    whose = {1e-3: "code's", 1e-2: "saved one"}[in_force]
    assert told(store_url, 1e-3, 2, {fresh}) == ([line.format(1e-2, 1e-3, whose)], in_force)
    for step, rate in enumerate((1e-3, 1e-2), 3):
        notes = [] if rate == in_force else [line.format(in_force, rate, "saved one")]
        assert told(store_url, rate, step, {fresh}) == (notes, in_force), "applied once, and recorded as it is"
