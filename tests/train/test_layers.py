"""A model that gained or lost a layer, or whose vocabulary grew: each has a way through, and the messages name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler as rates
from workers import Pool, Rank

from txstore.compat.migrations import KeyPlan, _registered, migration
from txstore.errors import Incompatible, StateMismatch
from txstore.manifest import Description
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

KEYS = ["model.layers.*"]


@pytest.fixture(autouse=True)
def registry() -> Any:
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


class Stack(nn.Module):
    def __init__(self, layers: int, rows: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        out: torch.Tensor = self.head(x)
        return out


@dataclass
class Made:
    model: Stack
    optimizer: torch.optim.Optimizer
    scheduler: Any
    state: TrainState

    def step(self) -> float:
        numbers = torch.Generator().manual_seed(self.state.progress.global_step)
        x, y = torch.randint(8, (4,), generator=numbers), torch.randint(3, (4,), generator=numbers)
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.state.progress.global_step += 1
        return loss.item()

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        names = {id(one): name for name, one in self.model.named_parameters()}
        return {
            names[id(one)]: {name: value.clone() for name, value in state.items()}
            for one, state in self.optimizer.state.items()
        }


def made(layers: int, rows: int = 8, seed: int = 1, optimizer: Any = torch.optim.AdamW, **options: Any) -> Made:
    torch.manual_seed(seed)
    model = Stack(layers, rows)
    optimizer = optimizer(model.parameters(), **{"lr": 1e-2, **options})
    scheduler = rates.CosineAnnealingLR(optimizer, T_max=40)
    return Made(model, optimizer, scheduler, TrainState(model, optimizer, schedulers=scheduler))


def saved(url: str, *args: Any, **options: Any) -> Made:
    one = made(*args, **options)
    with Checkpointer(url, one.state) as saves:
        for _ in range(3):
            saves.record(loss=one.step())
        saves.save()
    return one


def layers_may_change(**covers: Any) -> None:
    @migration("layers", keys=KEYS, **covers)
    def layers(saved_keys: Any, today: Any) -> KeyPlan:
        return KeyPlan(drop=saved_keys.keys() - today.keys(), fresh=today.keys() - saved_keys.keys())


BOTH_WAYS = pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)], ids=["add", "remove"])


@BOTH_WAYS
@pytest.mark.parametrize("fresh", [{"optimizer"}, {"optimizer", "scheduler"}])
def test_a_layer_comes_or_goes_with_a_new_optimizer(before: int, after: int, fresh: set[str], store_url: str) -> None:
    was = saved(store_url, before)
    layers_may_change()
    now = made(after, seed=2)
    new = {name: value.clone() for name, value in now.model.state_dict().items()}
    with Checkpointer(store_url, now.state) as saves:
        report = saves.resume(ResumeOptions(migrations=["layers"], fresh=fresh))
        assert report.proved, str(report)
        assert not now.optimizer.state
        for name, value in now.model.state_dict().items():
            assert torch.equal(value, was.model.state_dict().get(name, new[name])), name
        now.step()
        saves.save()
    again = made(after, seed=5)
    with Checkpointer(store_url, again.state) as saves:
        assert saves.resume().proved
    assert again.step() == now.step()


@BOTH_WAYS
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_layer_comes_or_goes_and_the_others_keep_their_moments(
    before: int, after: int, optimizer: Any, store_url: str
) -> None:
    options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    was = saved(store_url, before, optimizer=optimizer, **options)
    layers_may_change(parameters=["layers.*"])
    now = made(after, seed=2, optimizer=optimizer, **options)
    as_made = now.moments()
    with Checkpointer(store_url, now.state) as saves:
        report = saves.resume(ResumeOptions(migrations=["layers"]))
        assert report.proved, str(report)
        assert {"learning rates", "param groups", "schedulers"} <= {one.name for one in report.checks if one.ok}
        expected = {name: was.moments().get(name, as_made.get(name)) for name, _ in now.model.named_parameters()}
        expected = {name: state for name, state in expected.items() if state is not None}
        assert now.moments().keys() == expected.keys()
        for name, state in now.moments().items():
            assert all(torch.equal(value, expected[name][key]) for key, value in state.items()), name
        assert was.optimizer.param_groups[0]["lr"] == now.optimizer.param_groups[0]["lr"]
        now.step()
        saves.save()
    again = made(after, seed=5, optimizer=optimizer, **options)
    with Checkpointer(store_url, again.state) as saves:
        assert saves.resume().proved
    assert again.step() == now.step()


@BOTH_WAYS
def test_each_refusal_names_a_step_that_works(before: int, after: int, store_url: str) -> None:
    saved(store_url, before)
    now = made(after, seed=2)
    with Checkpointer(store_url, now.state) as saves:
        with pytest.raises(Incompatible, match="a migration that covers this key"):
            saves.resume()
        layers_may_change()
        with pytest.raises(Incompatible, match=r"whose parameters= covers.*, or.*fresh=\{'optimizer'\}"):
            saves.resume(ResumeOptions(migrations=["layers"]))
        _registered.clear()
        layers_may_change(parameters=["layers.*"])
        assert saves.resume(ResumeOptions(migrations=["layers"])).proved


def test_what_only_some_migration_covers_is_still_refused(store_url: str) -> None:
    saved(store_url, 2)
    layers_may_change(parameters=["layers.2.bias"])
    with (
        Checkpointer(store_url, made(3).state) as saves,
        pytest.raises(Incompatible, match=r"parameter layers\.2\.weight"),
    ):
        saves.resume(ResumeOptions(migrations=["layers"]))


def test_state_that_lies_under_one_parameter_and_is_of_all_is_not_taken_over(store_url: str) -> None:
    def lbfgs(layers: int) -> Made:
        one = made(layers)
        one.optimizer = torch.optim.LBFGS(one.model.parameters(), history_size=2)
        one.state = TrainState(one.model, one.optimizer)
        return one

    one = lbfgs(2)

    def closure() -> torch.Tensor:
        one.optimizer.zero_grad()
        loss = one.model(torch.arange(8)).square().mean()
        loss.backward()
        return loss

    one.optimizer.step(closure)
    with Checkpointer(store_url, one.state) as saves:
        saves.save()
    layers_may_change(parameters=["layers.*"])
    now = lbfgs(3)
    with Checkpointer(store_url, now.state) as saves:
        with pytest.raises(StateMismatch, match=r"keeps more numbers under .*fresh=\{'optimizer'\}"):
            saves.resume(ResumeOptions(migrations=["layers"]))
        assert saves.resume(ResumeOptions(migrations=["layers"], fresh={"optimizer"})).proved


def keep_old_rows(saved_value: Any, fresh: Any) -> Any:
    fresh[: len(saved_value)] = saved_value
    return fresh


def vocabulary_may_grow(**covers: Any) -> None:
    @migration("grow", keys=["model.embed.*"], **covers)
    def grow(saved_keys: Any, today: Any) -> KeyPlan:
        return KeyPlan(transform={"model.embed.weight": keep_old_rows})


def test_moments_of_another_shape_are_refused_before_anything_is_loaded(store_url: str) -> None:
    was = saved(store_url, 1)
    vocabulary_may_grow()
    now = made(1, rows=10, seed=2)
    head = now.model.head.weight.detach().clone()
    with Checkpointer(store_url, now.state) as saves:
        with pytest.raises(Incompatible, match=r"(?s)parameter embed.weight: .*fresh=\{'optimizer'\}") as refused:
            saves.resume(ResumeOptions(migrations=["grow"]))
        assert "parameters=" in str(refused.value)
        assert torch.equal(now.model.head.weight, head)
        assert saves.resume(ResumeOptions(migrations=["grow"], fresh={"optimizer"})).proved
    now.step()
    _registered.clear()
    vocabulary_may_grow(parameters=["embed.*"])
    now = made(1, rows=10, seed=2)
    with Checkpointer(store_url, now.state) as saves:
        assert saves.resume(ResumeOptions(migrations=["grow"])).proved
    assert now.moments().keys() == was.moments().keys() - {"embed.weight"}
    assert torch.equal(now.model.embed.weight[:8], was.model.embed.weight)
    now.step()


def test_moments_do_not_stay_behind_when_parameters_change_places(store_url: str) -> None:
    saved(store_url, 2)
    pairs = {f"model.layers.{one}.weight": f"model.layers.{1 - one}.weight" for one in (0, 1)}

    def swap(name: str, **covers: Any) -> None:
        migration(name, keys=KEYS, fingerprints=["order"], **covers)(lambda saved_keys, today: KeyPlan(rename=pairs))

    swap("swap")
    swap("swap-anew", parameters=["layers.*.weight"])
    today = Description(fingerprints={"order": "other"})
    now = made(2, seed=2)
    with Checkpointer(store_url, now.state, description=today) as saves:
        with pytest.raises(Incompatible, match=r"parameter layers.0.weight: "):
            saves.resume(ResumeOptions(migrations=["swap"]))
        saves.resume(ResumeOptions(migrations=["swap-anew"]))
    assert now.moments().keys() == {"embed.weight", "head.weight", "head.bias", "layers.0.bias", "layers.1.bias"}


class Counting(nn.Linear):
    """A layer with state that is no tensor, a table, a buffer that training moves, and one that its forward makes."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.seen = 0
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.count += 1
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(()), persistent=False)
        self.late += 1
        return super().forward(x + self.table)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def counting(layers: int) -> Made:
    one = made(layers)
    one.model.layers = nn.ModuleList(Counting() for _ in range(layers))
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-2)
    one.scheduler = rates.CosineAnnealingLR(one.optimizer, T_max=40)
    one.state = TrainState(one.model, one.optimizer, schedulers=one.scheduler)
    return one


@BOTH_WAYS
def test_what_else_a_layer_holds_comes_and_goes_with_it(before: int, after: int, store_url: str) -> None:
    one = counting(before)
    with Checkpointer(store_url, one.state) as saves:
        for _ in range(2):
            one.step()
        saves.save()
    layers_may_change(parameters=["layers.*"])
    now = counting(after)
    with Checkpointer(store_url, now.state) as saves:
        with pytest.raises(Incompatible, match=r"accept=\{'buffers'\}"):
            saves.resume(ResumeOptions(migrations=["layers"]))
        assert saves.resume(ResumeOptions(migrations=["layers"], accept={"buffers"})).proved
        told = [(layer.seen, int(layer.count), int(getattr(layer, "late", -1))) for layer in now.model.layers]
        assert told == [(2, 2, 2), (2, 2, 2), (0, 0, -1)][:after]
        now.step()
        saves.save()
    again = counting(after)
    with Checkpointer(store_url, again.state) as saves:
        assert saves.resume().proved
    assert again.step() == now.step()


def sharded(layers: int, mesh: Any) -> Made:
    from torch.distributed.fsdp import fully_shard

    one = made(layers)
    for layer in one.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(one.model, mesh=mesh)
    one.optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-2)
    one.scheduler = rates.CosineAnnealingLR(one.optimizer, T_max=40)
    one.state = TrainState(one.model, one.optimizer, schedulers=one.scheduler)
    return one


def on_ranks(me: Rank, url: str, before: int, after: int) -> Any:
    one = sharded(before, me.mesh)
    with Checkpointer(url, one.state) as saves:
        for _ in range(2):
            one.step()
        saves.save()
    _registered.clear()
    layers_may_change(parameters=["layers.*"])
    found = []
    for fresh in (set(), {"optimizer"}):
        now = sharded(after, me.mesh)
        with Checkpointer(url, now.state) as saves:
            found.append(saves.resume(ResumeOptions(migrations=["layers"], fresh=fresh)).proved)
        assert now.optimizer.param_groups[0]["lr"] == one.optimizer.param_groups[0]["lr"]
        stayed = (
            {}
            if fresh
            else {name: one.moments()[name] for name, _ in now.model.named_parameters() if name in one.moments()}
        )
        assert now.moments().keys() == stayed.keys()
        for name, state in now.moments().items():
            for key, value in state.items():
                was = stayed[name][key]
                local = (value.to_local(), was.to_local()) if isinstance(value, DTensor) else (value, was)
                assert torch.equal(*local), (name, key)
        now.step()
    return found


@BOTH_WAYS
def test_shards_of_a_layer_come_and_go_on_all_ranks(before: int, after: int, pool: Pool, store_url: str) -> None:
    assert pool.run(4, on_ranks, store_url, before, after) == [[True, True]] * 4


def test_gradients_of_an_unfinished_window_are_not_those_of_a_changed_model(store_url: str) -> None:
    one = made(2)
    one.model(torch.arange(8)).square().mean().backward()
    one.state.progress.micro_step = 1
    with Checkpointer(store_url, one.state) as saves:
        saves.save()
    layers_may_change(parameters=["layers.*"])
    now = made(3)
    with Checkpointer(store_url, now.state) as saves:
        with pytest.raises(StateMismatch, match=r"fresh=\{'gradients'\}"):
            saves.resume(ResumeOptions(migrations=["layers"]))
        assert saves.resume(ResumeOptions(migrations=["layers"], fresh={"gradients"})).proved


class Words(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [True, False], ids=["untie", "tie"])
@pytest.mark.parametrize("fresh", [set(), {"optimizer"}], ids=["moments kept", "moments anew"])
def test_a_head_is_tied_or_untied(tied: bool, fresh: set[str], store_url: str) -> None:
    """No key comes or goes, and one parameter does: the number of those that are trained is not that of the save."""

    @migration("head", keys=["model.embed.*", "model.head.*"], parameters=["embed.*", "head.*"])
    def head(saved_keys: Any, today: Any) -> KeyPlan:
        # Two saved values for one tensor: the plan says which of them goes.
        left = set() if tied else {"model.head.weight"}
        return KeyPlan(drop=left, fresh=left)

    def built(tied: bool) -> tuple[Words, TrainState]:
        model = Words(tied=tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.head(model.embed(torch.arange(8))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, TrainState(model, optimizer)

    was, state = built(tied)
    with Checkpointer(store_url, state) as saves:
        saves.save()
    now, state = built(not tied)
    with Checkpointer(store_url, state) as saves:
        report = saves.resume(ResumeOptions(migrations=["head"], fresh=fresh))
        assert report.proved, str(report)
        assert torch.equal(now.embed.weight, was.embed.weight)
        assert torch.equal(now.head.weight, was.head.weight if tied else was.embed.weight)
        state.progress.global_step += 1
        saves.save()
    with Checkpointer(store_url, built(not tied)[1]) as saves:
        report = saves.resume()
        assert "trained parameters" in {one.name for one in report.checks if one.ok}
