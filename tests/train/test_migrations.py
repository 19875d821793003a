"""Resumes through migrations, and pieces that are left fresh on purpose: explicit, recorded, and nothing more than asked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.train.runs import Net, Run
from txstore.compat.migrations import KeyPlan, _registered, migration
from txstore.errors import ConfigError, Incompatible, StateMismatch
from txstore.manifest import Description
from txstore.registry import open_store
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState


@pytest.fixture
def registry():
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


@pytest.fixture
def saved(store_url):
    run = Run()
    with Checkpointer(store_url, run.state) as saves:
        for _ in range(3):
            saves.record(loss=run.step().loss)
        saves.save()
    return run


class Wider(Net):
    """The last layer has five outputs instead of three, and another name."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 5)
        del self.last

    def forward(self, x):
        return self.head(self.drop(self.norm(self.first(x)).relu()))


def wider():
    torch.manual_seed(11)
    model = Wider()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    return model, optimizer, TrainState(model, optimizer, schedulers=scheduler)


def grow(saved_value, fresh):
    grown = fresh.clone()
    grown[: saved_value.shape[0]] = saved_value
    return grown


def register(rename=True):
    @migration("widen-head", keys=["model.last.*", "model.head.*"])
    def widen(saved, today):
        names = {f"model.last.{part}": f"model.head.{part}" for part in ("weight", "bias")}
        return KeyPlan(rename=names, transform=dict.fromkeys(names.values(), grow))


def test_a_changed_model_is_refused_with_every_difference(store_url, saved):
    model, _, state = wider()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Checkpointer(store_url, state) as saves, pytest.raises(Incompatible) as refused:
        saves.resume()
    for key in ("model.last.weight", "model.last.bias", "model.head.weight", "model.head.bias"):
        assert key in str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was loaded"


def test_a_migration_carries_the_model_over_and_is_recorded(store_url, saved, registry):
    register()
    model, optimizer, state = wider()
    fresh_head = model.head.weight.detach().clone()
    options = ResumeOptions(migrations=["widen-head"], fresh=["optimizer"])
    with Checkpointer(store_url, state) as saves:
        report = saves.resume(options)
        assert report.accepted == ["migration widen-head", "fresh optimizer"]
        state.progress.global_step += 1
        saves.save()
    assert torch.equal(model.first.weight, saved.model.first.weight)
    assert torch.equal(model.head.weight[:3], saved.model.last.weight)
    assert torch.equal(model.head.weight[3:], fresh_head[3:])
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"], "the scheduler is restored"
    assert state.progress.global_step == 4
    with open_store(store_url) as store:
        from txstore.catalog import newest
        from txstore.decisions import read_manifest

        told = read_manifest(store, newest(store)).description
    assert told.accepted == ("migration widen-head", "fresh optimizer")
    unknown = {check.name for check in report.checks if check.ok is None}
    assert {"learning rates", "moment tensors", "param groups"} <= unknown


def test_an_optimizer_of_other_parameters_is_not_taken_along_silently(store_url, saved, registry):
    register()
    _, _, state = wider()
    with Checkpointer(store_url, state) as saves, pytest.raises(Incompatible, match=r"fresh=\{'optimizer'\}"):
        saves.resume(ResumeOptions(migrations=["widen-head"]))


def test_a_migration_that_makes_the_wrong_thing_is_refused(store_url, saved, registry):
    @migration("wrong", keys=["model.last.*", "model.head.*"])
    def wrong(saved_keys, today):
        names = {f"model.last.{part}": f"model.head.{part}" for part in ("weight", "bias")}
        return KeyPlan(rename=names, transform={new: lambda value, fresh: value for new in names.values()})

    _, _, state = wider()
    with (
        Checkpointer(store_url, state) as saves,
        pytest.raises(StateMismatch, match=r"made .*\[3, 16\], the state has .*\[5, 16\]"),
    ):
        saves.resume(ResumeOptions(migrations=["wrong"], fresh=["optimizer"]))


def test_keys_that_are_dropped_and_kept_fresh(store_url, saved, registry):
    @migration("new-head", keys=["model.last.*", "model.head.*"])
    def new_head(saved_keys, today):
        return KeyPlan(
            drop=[key for key in saved_keys if key.startswith("model.last.")],
            fresh=[key for key in today if key.startswith("model.head.")],
        )

    model, _, state = wider()
    head = model.head.weight.detach().clone()
    with Checkpointer(store_url, state) as saves:
        saves.resume(ResumeOptions(migrations=["new-head"], fresh=["optimizer", "scheduler"]))
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.first.weight, saved.model.first.weight)


@pytest.mark.parametrize("fresh", [["model"], ["proof"], ["nothing"], "optimizer"])
def test_only_some_pieces_can_be_left_fresh(fresh):
    with pytest.raises(ConfigError):
        ResumeOptions(fresh=fresh)


def test_what_is_not_left_fresh_is_restored(store_url, saved):
    run = Run(seed=9)
    with Checkpointer(store_url, run.state) as saves:
        report = saves.resume(ResumeOptions(fresh=["rng"]))
    assert report.accepted == ["fresh rng"]
    assert run.optimizer.state_dict()["state"][0]["step"] == 3
    other = Run(seed=9)
    assert torch.equal(torch.rand(2), torch.rand(2)) is False
    assert other.state.progress.global_step == 0


def test_samples_that_are_trained_on_again(store_url, saved):
    run = Run()
    with Checkpointer(store_url, run.state) as saves:
        assert saves.resume(ResumeOptions(seen_samples=64)).reprocessed_samples == 40
        assert saves.resume(ResumeOptions(seen_samples=24)).reprocessed_samples == 0
        assert saves.resume().reprocessed_samples is None


def test_an_accepted_difference_stays_on_record(store_url):
    run = Run()
    with Checkpointer(store_url, run.state, description=Description(settings={"batch_size": 8})) as saves:
        saves.save()
    other = Run()
    with Checkpointer(store_url, other.state, description=Description(settings={"batch_size": 16})) as saves:
        with pytest.raises(Incompatible, match="batch_size: saved 8, now 16"):
            saves.resume()
        report = saves.resume(ResumeOptions(accept=["batch_size"]))
        assert other.state.accepted == tuple(report.accepted)
        assert "batch_size" in report.accepted[0]
