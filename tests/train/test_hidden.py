"""What attributes hide: an optimizer in an optimizer, and modules in lists and objects, are saved or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.trainings import Training, continues, model
from txstore.errors import ConfigError, UnsupportedValue
from txstore.train.state import TrainState


class Stepper(torch.optim.Optimizer):
    """Steps with another optimizer over the same groups, and keeps state of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.Adam(self.param_groups, lr=lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                parameter.data.lerp_(slow, 0.1)


class Linked(Stepper):
    """Binds the groups of the two together again when it takes a state, as SAM does."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


class Nested(Training):
    """Only the first of its optimizers is stepped by the loop."""

    outer: torch.optim.Optimizer

    def _optimizer_step(self, loss: torch.Tensor) -> None:
        self.outer.step()
        self.outer.zero_grad()
        self.state.progress.global_step += 1
        self.state.progress.micro_step = 0


def test_an_optimizer_in_an_optimizer_is_refused_and_given_beside_it_goes_on(store_url: str) -> None:
    module = model()
    outer = Stepper(module.parameters(), lr=0.01)
    with pytest.raises(ConfigError, match="keeps a Adam in its attribute 'inner'") as caught:
        TrainState(module, outer)
    assert "optimizer.inner" in str(caught.value.next_step)

    def make() -> Nested:
        module = model()
        outer = Stepper(module.parameters(), lr=0.01)
        training = Nested(module, [outer, outer.inner])
        training.outer = outer
        return training

    continues(make, store_url, before=3, after=3)


def test_one_with_a_load_state_dict_of_its_own_goes_on_as_an_extra_beside_its_inner_one(store_url: str) -> None:
    module = model()
    outer = Linked(module.parameters(), lr=0.01)
    with pytest.raises(ConfigError, match="Linked has a load_state_dict of its own"):
        TrainState(module, [outer, outer.inner])
    with pytest.raises(ConfigError, match="Linked keeps a Adam in its attribute 'inner'"):
        TrainState(module, extras={"outer": outer})

    def make() -> Nested:
        module = model()
        outer = Linked(module.parameters(), lr=0.01)
        training = Nested(module, [outer.inner], more={"extras": {"outer": outer}})
        training.outer = outer
        return training

    continues(make, store_url, before=3, after=3)


def test_an_inner_optimizer_is_found_in_containers_and_objects() -> None:
    class Holder:
        def __init__(self, one: Any) -> None:
            self.parts = {"fast": [one]}

    module = nn.Linear(2, 2)
    outer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    outer.held = Holder(torch.optim.Adam(module.parameters()))
    with pytest.raises(ConfigError, match=r"'held\.parts\.fast\.0'"):
        TrainState(module, outer)


def test_an_inner_optimizer_that_shares_the_state_or_is_told_by_the_outer_one_is_saved() -> None:
    module = nn.Linear(2, 2)
    outer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    outer.view = torch.optim.Adam(module.parameters())
    outer.view.state = outer.state
    TrainState(module, outer)

    class Telling(Stepper):
        def state_dict(self) -> dict[str, Any]:
            return {"outer": super().state_dict(), "inner": self.inner.state_dict()}

        def load_state_dict(self, state_dict: Any) -> None:
            self.inner.load_state_dict(state_dict["inner"])
            super().load_state_dict(state_dict["outer"])

    TrainState(module, extras={"outer": Telling(module.parameters(), lr=0.1)})


class Average:
    """Keeps an average of a module, as an attribute of another one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module)


class Hiding(nn.Module):
    """Keeps modules where torch does not register them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self._target = [copy.deepcopy(self.net)]
        self.average = Average(self.net)
        self.by_name = {"teacher": nn.BatchNorm1d(2).eval(), "same": self.net}
        self.others: list[Any] = [self.net.weight, "text", None]


def target(module: Hiding) -> None:
    for mean, parameter in zip(module._target[0].parameters(), module.net.parameters(), strict=True):
        mean.data.lerp_(parameter.data + 1, 0.1)  # torch does not count this write


def average(module: Hiding) -> None:
    with torch.no_grad():
        module.average.module.bias[0].add_(1)  # not the middle element


def statistics(module: Hiding) -> None:
    module.by_name["teacher"].train()(torch.randn(4, 2))


def replaced(module: Hiding) -> None:
    module._target[0] = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("move", "path"),
    [
        (target, "_target.0"),
        (average, "average.module"),
        (statistics, "by_name.teacher"),
        (replaced, "_target.0"),
    ],
)
def test_a_module_that_hides_and_moves_is_refused_by_its_name_at_any_save(move: Any, path: str) -> None:
    module = Hiding()
    state = TrainState({"actor": nn.Sequential(module)})
    for _ in range(5):
        state.capture()
    move(module)
    with pytest.raises(UnsupportedValue, match=f"training changes actor.0.{path}, a ") as caught:
        state.capture()
    assert caught.value.key == f"actor.0.{path}"


def test_what_hides_and_stands_still_is_not_refused() -> None:
    module = Hiding()
    module.others.append(nn.LazyLinear(2))
    state = TrainState(module)
    module.by_name["teacher"](torch.randn(4, 2))
    module._target[0].requires_grad_(requires_grad=False)
    for parameter in module._target[0].parameters():
        parameter.data = parameter.data.clone()  # as a move to a device does it
    with torch.no_grad():
        module.net.weight.add_(1)
    state.capture()


class Rotary(nn.Module):
    """Makes its table when it is used, and a longer one when it has to."""

    def forward(self, length: int) -> torch.Tensor:
        if getattr(self, "table", torch.ones(0)).numel() < length:
            self.register_buffer("table", torch.arange(length).cos(), persistent=False)
        return self.table


def test_the_cache_of_a_frozen_one_may_move() -> None:
    module = Hiding()
    module.others.append(Rotary())
    module.others[-1](2)
    state = TrainState(module)
    module.others[-1](4)
    state.capture()
    module.others[-1].weight = nn.Parameter(torch.ones(1))
    state = TrainState(module)
    module.others[-1](8)
    with pytest.raises(UnsupportedValue, match="training changes"):
        state.capture()


def test_one_that_is_made_late_is_refused_when_it_moves() -> None:
    module = Hiding()
    state = TrainState(module)
    module.others.append(nn.Linear(2, 2))
    state.capture()
    with torch.no_grad():
        module.others[-1].weight.add_(1)
    with pytest.raises(UnsupportedValue, match=r"others\.3, a Linear"):
        state.capture()


def test_an_optimizer_in_a_model_is_refused_when_it_has_state() -> None:
    module = Hiding()
    module.others.append(torch.optim.Adam(module.net.parameters()))
    given = TrainState(module, module.others[-1])
    state = TrainState(module)
    state.capture()
    module.net(torch.ones(1, 2)).sum().backward()
    module.others[-1].step()
    given.capture()
    with pytest.raises(UnsupportedValue, match=r"others\.3, a Adam") as caught:
        state.capture()
    assert "optimizers=" in str(caught.value.next_step)


class Kept:
    """An extra that saves the average that it holds."""

    def __init__(self, held: Average) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held.module.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.held.module.load_state_dict(state)


def test_what_is_given_in_another_way_is_saved() -> None:
    module = Hiding()
    models = {"net": module, "target": module._target[0]}
    state = TrainState(models, extras={"average": Kept(module.average), "teacher": module.by_name["teacher"]})
    for move in (target, average, statistics):
        move(module)
        state.capture()


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Grows, and then lets another scheduler go on, which its state dict holds as an object."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > 2:
            return self.after.get_last_lr()
        return [rate * (1 + self.last_epoch) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= 2:
            self.after.step()
        super().step()


def test_a_scheduler_in_a_scheduler_goes_on(store_url: str) -> None:
    def make() -> Training:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        warm = WarmUp(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
        return Training(module, [optimizer], [warm])

    untouched, resumed = continues(make, store_url, before=5, after=4)
    rates = [one.schedulers[0].after.state_dict() for one in (untouched, resumed)]
    assert rates[0] == rates[1]
    assert rates[0]["last_epoch"] > 4
