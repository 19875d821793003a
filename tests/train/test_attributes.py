"""An attribute that training moves and no state dict holds is told, once; what the next step cannot depend on is not."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from txstore.train.state import TrainState


class Plain(nn.Module):
    """Keeps things beside its state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls = 0
        self.scale = 1.0
        self.hidden: torch.Tensor | None = None
        self.seen: torch.Tensor | None = None
        self.where = "here"
        self.pair = (torch.zeros(2), torch.zeros(2))
        self.counts: Any = np.zeros(3, dtype=np.int64)
        self.table = np.arange(100_000).reshape(100, -1).T
        self.last: deque[float] = deque([0.0] * 40, maxlen=40)
        self.queue: list[Any] = []
        self.classes = {1}
        self.by_name: dict[str, Any] = {"seen": {"cats": [1, 2]}, "of": [self.inner]}
        self.shadow = Shadow(self.inner)
        self._private = 0
        self.register_buffer("kept", torch.zeros(1))
        self.both = [self.kept, self.inner.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "txstore.train.attributes"]


def count(module: Any) -> None:
    module.calls += 1


def carry(module: Any) -> None:
    module.hidden = torch.ones(2)


def begin(module: Any) -> None:
    module.later = 3.0


def carry_pair(module: Any) -> None:
    module.pair = (torch.ones(2), module.pair[1])


def count_in_place(module: Any) -> None:
    module.counts[1] += 1


def write_into_a_table(module: Any) -> None:
    module.table += 1


def push(module: Any) -> None:
    module.last.append(1.0)  # one goes for it


def enqueue(module: Any) -> None:
    module.queue.append(object())


def meet(module: Any) -> None:
    module.classes.add(len(module.classes) + 1)


def note(module: Any) -> None:
    module.by_name["seen"]["cats"][1] += 1


def write_into_one_of_a_pair(module: Any) -> None:
    module.pair[1].add_(1)


class Shadow:
    """An average of weights, as many keep it."""

    def __init__(self, module: nn.Module) -> None:
        self.updates = 0
        self.weights = {name: one.detach().clone() for name, one in module.named_parameters()}
        self.module = module


def average(module: Any) -> None:
    module.shadow.weights["bias"] = torch.ones(2)


CHANGES: list[tuple[Any, str]] = [
    (average, "shadow"),
    (count, "calls"),
    (carry, "hidden"),
    (begin, "later"),
    (carry_pair, "pair"),
    (write_into_one_of_a_pair, "pair"),
    (count_in_place, "counts"),
    (write_into_a_table, "table"),
    (push, "last"),
    (enqueue, "queue"),
    (meet, "classes"),
    (note, "by_name"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_what_moved_is_told_once(change: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(Plain())
    state = TrainState({"actor": module})
    with caplog.at_level(logging.WARNING):
        state.capture()
        assert told(caplog) == []
        change(module[0])
        state.capture()
        change(module[0])
        state.capture()
    (message,) = told(caplog)
    assert f"training changes actor.0.{name}. " in message
    assert "get_extra_state" in message


def test_a_tensor_that_is_written_to_has_moved(caplog: pytest.LogCaptureFixture) -> None:
    module = Plain()
    module.hidden = torch.zeros(2)
    state = TrainState(module)
    module.hidden += 1
    state.capture()
    assert "training changes hidden" in told(caplog)[0]


def test_many_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    modules = nn.ModuleList(Plain() for _ in range(20))
    state = TrainState(modules)
    for module in modules:
        count(module)
    state.capture()
    assert "7.calls and 12 more" in told(caplog)[0]


def test_what_is_saved_or_of_one_step_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    module = Plain()
    state = TrainState(module)
    module.kept += 1
    with torch.no_grad():
        module.inner.weight += 1
    module.classes = set(module.classes)
    module.counts = module.counts.copy()
    module.seen = module(torch.ones(2)) * 2  # of this step's graph: the next step cannot go on with it
    module._private = 5
    module.shadow.updates += 1  # an object may count and measure as it likes
    module.eval()
    module.train()
    module.inner.in_features = 2
    module.where = "he" + "re"
    state.capture()
    assert told(caplog) == []


class Counted(Plain):
    """Says itself what it keeps."""

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_a_module_that_has_extra_state_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    module = Counted()
    state = TrainState(module)
    count(module)
    state.capture()
    assert told(caplog) == []


def test_a_setting_of_a_class_of_torch_that_moves_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1), nn.Conv1d(2, 2, 1), nn.LSTM(2, 2))
    state = TrainState(module)
    module.eval().train()
    state.capture()
    assert told(caplog) == []
    module[0].momentum = 0.05
    module[1].p = 0.5
    module[3].batch_first = True
    module[2].padding_mode = "circular"  # no number
    state.capture()
    (message,) = told(caplog)
    assert "training changes 0.momentum, 1.p, 3.batch_first. " in message
    assert "set it after resume()" in message


class Look(torch.optim.SGD):
    """An optimizer that counts its steps beside its state."""

    k = 0

    def step(self, closure: Any = None) -> Any:
        self.k = self.k + 1
        return super().step(closure)


def test_what_an_optimizer_moves_beside_its_state_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    looks = Look(model.parameters(), lr=0.1)
    state = TrainState(model, [torch.optim.SGD(model.parameters(), lr=0.1), looks])
    looks.param_groups[0]["lr"] = 0.2  # is saved
    looks.step()
    state.capture()
    (message,) = told(caplog)
    assert "training changes optimizer.1.k. " in message


def test_a_class_that_is_derived_from_the_trainings_own_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    module = Plain()
    module.__class__ = type("FSDPPlain", (Plain,), {"__module__": "torch.distributed.fsdp"})  # as fully_shard does
    state = TrainState(module)
    module.calls += 1
    state.capture()
    assert "training changes calls. " in told(caplog)[0]


def test_training_stands_still_for_the_first_looks_only(caplog: pytest.LogCaptureFixture) -> None:
    module = Plain()
    state = TrainState(module)
    for _ in range(3):
        state.capture()
    count(module)
    state.capture()
    assert told(caplog) == []


class Average(dict[str, Any]):
    """Keeps an average of weights in itself."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def test_an_attribute_that_is_an_extra_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    module = Plain()
    module.average = Average(weight=torch.ones(2))
    for extras in ({"average": module.average}, {}):
        caplog.clear()
        state = TrainState(module, extras=extras)
        module.average["weight"].mul_(2)
        state.capture()
        assert bool(told(caplog)) == (not extras)
