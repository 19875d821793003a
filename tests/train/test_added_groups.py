"""Groups that training adds to an optimizer, to thaw layers: told at the first save, and two ways that a resume takes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.train.trainings import raw
from txstore.errors import Incompatible
from txstore.train import optimizer_state
from txstore.train.checkpointer import Checkpointer
from txstore.train.piece import PieceState, Place
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

WARNING = "optimizer 0 (torch.optim.adamw.AdamW) has groups of 2, 2 parameters; before it had groups of 2 parameters"


class Thawing:
    """A head that learns from the start, and a body from step 2 on."""

    def __init__(self, body: str) -> None:
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 1)
        self.body.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=0.1)
        if body == "made at the start":
            self.optimizer.add_param_group({"params": self.body.parameters(), "lr": 0.01})
        self.state = TrainState({"body": self.body, "head": self.head}, self.optimizer)

    def steps(self, count: int) -> bytes:
        for _ in range(count):
            at = self.state.progress.global_step
            if at == 2:
                self.body.requires_grad_(True)
                if len(self.optimizer.param_groups) == 1:
                    self.optimizer.add_param_group({"params": self.body.parameters(), "lr": 0.01})
            self.optimizer.zero_grad()
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(at))
            self.head(self.body(x)).square().mean().backward()
            self.optimizer.step()
            self.state.progress.global_step += 1
        return b"".join(raw(one) for part in (self.body, self.head) for one in part.parameters())


def test_groups_that_are_added_between_the_state_and_the_resume(store_url: str) -> None:
    run = Thawing("made at the start")
    run.steps(3)
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    wanted = run.steps(2)
    late = Thawing("added in training")
    late.optimizer.add_param_group({"params": late.body.parameters(), "lr": 0.01})
    with Checkpointer(store_url, late.state) as saves:
        saves.resume()
        assert late.steps(2) == wanted
        saves.save()
    again = Thawing("made at the start")
    with Checkpointer(store_url, again.state) as saves:
        saves.resume()
    assert again.steps(2) == late.steps(2)


def test_a_state_without_the_settings_of_added_groups(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was written before their settings were saved."""
    run = Thawing("added in training")
    run.steps(3)
    with monkeypatch.context() as patch, Checkpointer(store_url, run.state) as saves:
        captured = optimizer_state.OptimizerPiece.capture

        def early(self: optimizer_state.OptimizerPiece, place: Place) -> PieceState:
            made = captured(self, place)
            for entry in made.shared:
                entry["settings"] = entry["settings"][:1]
            return made

        patch.setattr(optimizer_state.OptimizerPiece, "capture", early)
        saves.save()
    wanted = run.steps(2)
    resumed = Thawing("made at the start")
    with Checkpointer(store_url, resumed.state) as saves:
        saves.resume()
    assert resumed.steps(2) == wanted


@pytest.mark.parametrize("body", ["made at the start", "added in training"])
def test_a_run_that_thaws_layers(body: str, store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Thawing(body)
    with caplog.at_level(logging.WARNING, "txstore"), Checkpointer(store_url, run.state) as saves:
        for _ in range(4):  # before the change, and three times after it
            run.steps(1)
            saves.save()
    told = [one.getMessage() for one in caplog.records if "groups" in one.getMessage()]
    assert [WARNING in one for one in told] == ([] if body == "made at the start" else [True])
    wanted = run.steps(2)
    if body != "made at the start":
        resumed = Thawing(body)
        with Checkpointer(store_url, resumed.state) as saves, pytest.raises(Incompatible, match="group"):
            saves.resume()
    caplog.clear()
    resumed = Thawing("made at the start")  # the way that the warning names
    with Checkpointer(store_url, resumed.state) as saves:
        saves.resume()
        assert resumed.state.progress.global_step == 4
        assert resumed.steps(2) == wanted
        saves.save()
    assert not [one for one in caplog.records if "groups" in one.getMessage()]


class Scheduled:
    """Three layers; the groups of the last two come after the `TrainState`, with a decay of their own each."""

    def __init__(self, decays: dict[int, float]) -> None:
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
        self.optimizer = torch.optim.SGD(self.layers[0].parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = TrainState(self.layers, self.optimizer, schedulers=self.scheduler)
        for at, decay in decays.items():
            self.add(at, decay)

    def add(self, at: int, decay: float) -> None:
        group = {"params": list(self.layers[at].parameters()), "lr": 0.05, "initial_lr": 0.05, "weight_decay": decay}
        self.optimizer.add_param_group(group)
        self.scheduler.base_lrs.append(0.05)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.layers(torch.ones(1, 2)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.progress.global_step += 1

    def decays(self) -> list[float]:
        return [group["weight_decay"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("fresh", [(), ("scheduler",), ("optimizer",)], ids=str)
@pytest.mark.parametrize("is_early", [False, True])
def test_settings_go_with_the_parameters_of_a_group(
    fresh: tuple[str, ...], is_early: bool, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that went takes its own along; what the code chooses otherwise is told of late groups too."""
    run = Scheduled({1: 0.1, 2: 0.2})
    with Checkpointer(store_url, run.state) as saves:
        run.step()
        saves.save()
        del run.optimizer.param_groups[1], run.scheduler.base_lrs[1]
        run.step()
        if is_early:
            monkeypatch.setattr(optimizer_state, "followed", lambda before, known, now, groups: known[:1])
        saves.save()
        monkeypatch.undo()
    resumed = Scheduled({2: 0.7})
    with Checkpointer(store_url, resumed.state) as saves:
        report = saves.resume(ResumeOptions(fresh=frozenset(fresh)))
        notes = "".join(note for note in report.notes if "weight_decay" in note)
    assert resumed.decays() == [0.0, 0.7 if fresh == ("optimizer",) else 0.2]
    assert ("saved 0.2, now 0.7" in notes) == (not is_early and fresh != ("optimizer",))
    assert "0.1" not in notes
    resumed.step()
