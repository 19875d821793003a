"""One of several optimizers begins anew, and what a message advises is enough, at the first try and at the next start."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from txstore.errors import Incompatible, StateMismatch
from txstore.train.checkpointer import Checkpointer
from txstore.train.report import ResumeReport
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState


class Run:
    """A body and a head, each with its optimizer and its schedule."""

    def __init__(self, *classes: Any, split: bool = False, scheduled: bool = True) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        parts = [list(self.model[0].parameters()), list(self.model[2].parameters())]
        if len(classes) == 1:
            parts = [parts[0] + parts[1]]
        groups: list[Any] = [[{"params": one} for one in part] if split else part for part in parts]
        self.optimizers = [make(part, lr=0.1) for make, part in zip(classes, groups, strict=False)]
        self.schedulers = [rates.ExponentialLR(one, 0.9) for one in self.optimizers] if scheduled else []
        self.state = TrainState(self.model, self.optimizers, schedulers=self.schedulers or None)

    def step(self) -> None:
        self.model(torch.ones(3, 4)).square().sum().backward()
        for one in (*self.optimizers, *self.schedulers):
            one.step()
        self.model.zero_grad()
        self.state.progress.global_step += 1

    def steps(self) -> list[int]:
        """How many steps each optimizer's moments know of."""
        return [max((int(one["step"]) for one in every.state.values()), default=0) for every in self.optimizers]

    def start(self, url: str, *fresh: str, **options: Any) -> ResumeReport:
        """One start of a script: resume, a step, a save."""
        with Checkpointer(url, self.state) as saves:
            report = saves.resume(ResumeOptions(fresh=set(fresh), **options))
            self.held = self.steps(), [one.param_groups[0]["lr"] for one in self.optimizers]
            self.step()
            saves.save()
        return report


def advised(error: Exception) -> set[str]:
    return {name for found in re.findall(r"fresh=\{([^}]*)\}", str(error)) for name in re.findall(r"'(.*?)'", found)}


ADAM, NADAM = torch.optim.Adam, torch.optim.NAdam
CHANGES: dict[str, tuple[Any, Any, set[str], list[int]]] = {
    "class": ((ADAM, ADAM), (ADAM, NADAM), {"optimizer:1"}, [1, 0]),
    "the only one": ((ADAM,), (NADAM,), {"optimizer"}, [0]),
}


@pytest.mark.parametrize("what", [*CHANGES])
def test_the_message_names_the_smallest_thing_and_nothing_else_is_given_up(what: str, store_url: str) -> None:
    before, after, names, held = CHANGES[what]
    Run(*before).start(store_url)
    with pytest.raises(Incompatible) as refused:
        Run(*after).start(store_url)
    assert advised(refused.value) == names
    run = Run(*after)
    assert run.start(store_url, *names).proved
    assert run.held == (held, [0.1 * 0.9] * len(held)), "the rate goes with the schedule, which is restored"
    run = Run(*after)
    run.start(store_url, *names)
    assert run.held[0] == [2 if one else 1 for one in held], "applied once"


def test_an_optimizer_comes_and_goes_alone(store_url: str) -> None:
    Run(ADAM, ADAM, scheduled=False).start(store_url)
    with pytest.raises(Incompatible, match=r"count: saved 2 optimizers, now 1 optimizer") as refused:
        few_of_body().start(store_url)
    assert advised(refused.value) == {"optimizer:1"}
    for _ in range(2):
        run = few_of_body()
        assert run.start(store_url, "optimizer:1").proved
    assert run.held[0] == [2]
    run = Run(ADAM, ADAM, scheduled=False)
    assert run.start(store_url, "optimizer:1", checkpoint="step-3").proved
    assert run.held[0] == [3, 0]


def few_of_body() -> Run:
    """The optimizer of the body alone."""
    run = Run(ADAM, ADAM, scheduled=False)
    del run.optimizers[1]
    run.state = TrainState(run.model, run.optimizers)
    return run


def test_a_number_that_neither_side_has_is_a_mistake(store_url: str) -> None:
    Run(ADAM, ADAM).start(store_url)
    with pytest.raises(StateMismatch, match="optimizer '7' is named in fresh, and neither side has it"):
        Run(ADAM, ADAM).start(store_url, "optimizer:7")


def test_split_groups_name_optimizer_and_scheduler_at_once(store_url: str) -> None:
    Run(ADAM, ADAM).start(store_url)
    with pytest.raises(Incompatible) as refused:
        Run(ADAM, ADAM, split=True).start(store_url)
    names = advised(refused.value)
    assert names == {"optimizer:0", "optimizer:1", "scheduler"}
    run = Run(ADAM, ADAM, split=True)
    assert run.start(store_url, *names).proved
    assert run.held == ([0, 0], [0.1, 0.1])


def test_advice_that_was_taken_already_says_how_to_take_it_once_more(store_url: str) -> None:
    Run(ADAM).start(store_url)
    Run(NADAM).start(store_url, "optimizer")
    with pytest.raises(Incompatible, match=r"'optimizer' in fresh was applied by an earlier resume: .*'step-2'"):
        Run(torch.optim.RAdam).start(store_url, "optimizer")
    run = Run(torch.optim.RAdam)
    assert run.start(store_url, "optimizer", checkpoint="step-2").proved
    assert run.held[0] == [0]


def test_state_that_the_code_has_made_is_not_loaded_over(store_url: str) -> None:
    Run(ADAM, torch.optim.Adagrad).start(store_url)
    run = Run(ADAM, torch.optim.Adagrad)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(fresh={"optimizer:1"}))
    assert not any(state["sum"].any() for state in run.optimizers[1].state.values())
