"""The user's own objects come back as they were, down to which of their tensors are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from workers import Pool, Rank

from tests.train.trainings import resume, save
from txstore.errors import UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.extras import ExtrasPiece
from txstore.train.state import TrainState


class Keeper:
    """Keeps what it is given, as a callback does that writes `self.best = state["best"]`."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def through(url: str, **values: Any) -> dict[str, Any]:
    state = TrainState(nn.Linear(1, 1), extras={"own": Keeper(**values)})
    with Checkpointer(url, state) as saves:
        saves.save()
    other = Keeper()
    with Checkpointer(url, TrainState(nn.Linear(1, 1), extras={"own": other})) as saves:
        assert saves.resume().proved
    return other.values


def test_one_tensor_under_two_names_is_one_again(store_url: str) -> None:
    one = torch.ones(2)
    found = through(store_url, last=one, best=one, deep=[one.detach(), {"x": one[:]}], other=torch.ones(2))
    found["last"].mul_(3)
    assert [found[name].tolist() for name in ("best", "other")] == [[3, 3], [1, 1]]
    assert found["deep"][0].tolist() == found["deep"][1]["x"].tolist() == [3, 3]


def test_a_parameter_and_its_values_are_one_memory_again(store_url: str) -> None:
    one = nn.Parameter(torch.ones(2))
    found = through(store_url, parameter=one, values=one.detach())
    assert type(found["parameter"]) is nn.Parameter
    found["values"].mul_(3)
    assert found["parameter"].tolist() == [3, 3]
    assert not found["values"].requires_grad


def test_equal_tensors_empty_ones_and_parts_stay_apart(store_url: str) -> None:
    whole = torch.ones(2, 2)
    found = through(store_url, a=whole, b=whole[0], c=whole.T, d=torch.ones(2, 2), e=whole[:0], f=whole[:0])
    found["a"].mul_(3)
    assert [found[name].sum().item() for name in "bcd"] == [2, 4, 4], "parts of one memory come back as copies"
    assert found["e"] is not found["f"]
    assert found["e"].shape == found["f"].shape == (0, 2)


def test_state_that_shares_with_the_model_is_copied_as_before(store_url: str) -> None:
    module = nn.Linear(1, 1)
    state = TrainState(module, extras={"own": Keeper(weight=module.weight.detach())})
    save(state, store_url, 0)
    other, keeper = nn.Linear(1, 1), Keeper()
    resume(TrainState(other, extras={"own": keeper}), store_url)
    assert torch.equal(keeper.values["weight"], module.weight)
    assert keeper.values["weight"].data_ptr() != other.weight.data_ptr()


def test_a_checkpoint_that_does_not_tell_gives_copies(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExtrasPiece, "more", lambda self, name, state: {})
    one = torch.ones(2)
    found = through(store_url, last=one, best=one)
    found["last"].mul_(3)
    assert found["best"].tolist() == [1, 1]


def sharded(rank: Rank, url: str) -> list[Any]:
    one = distribute_tensor(torch.ones(4), rank.mesh, [Replicate()])
    state = TrainState(model(), extras={"own": Keeper(last=one, best=one)})
    save(state, url, 0, rank.rank, rank.world, process_group=rank.group)
    other = Keeper(last=one.clone(), best=one.clone())
    resume(TrainState(model(), extras={"own": other}), url, rank.rank, rank.world, rank.group)
    other.values["last"].mul_(3)
    return other.values["best"].full_tensor().tolist()  # type: ignore[no-any-return]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(1, 1)


def test_a_sharded_tensor_under_two_names_is_one_again(pool: Pool, store_url: str) -> None:
    assert pool.run(2, sharded, store_url) == [[3, 3, 3, 3]] * 2


class Queue(nn.Module):
    """Keeps a queue, a table, and what it may make late, that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("queue", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.arange(3), persistent=False)


def test_a_module_whose_buffers_its_state_dict_leaves_out_is_refused_when_they_move() -> None:
    module = Queue()
    state = TrainState(nn.Linear(1, 1), extras={"average": module})
    module.queue.copy_(torch.zeros(3))  # an average copies what has not changed
    state.capture()
    module.queue[0] = 1
    with pytest.raises(UnsupportedValue, match=r"extra 'average' changes its buffer 'queue'") as caught:
        state.capture()
    assert "give it as a model" in str(caught.value.next_step)
    TrainState({"net": nn.Linear(1, 1), "average": module}).capture()


def test_a_buffer_that_such_a_module_makes_late_is_refused() -> None:
    module = Queue()
    state = TrainState(nn.Linear(1, 1), extras={"average": module})
    module.register_buffer("late", torch.zeros(1), persistent=False)
    with pytest.raises(UnsupportedValue, match="changes its buffer 'late'"):
        state.capture()


def test_an_average_of_a_model_with_such_buffers_is_no_fault() -> None:
    module = Queue()
    average = torch.optim.swa_utils.AveragedModel(module)
    state = TrainState(module, extras={"average": average})
    for _ in range(3):
        average.update_parameters(module)
        state.capture()


def test_a_sharded_one_is_not_known() -> None:
    module = Queue()
    module.register_buffer("meta", torch.zeros(1, device="meta"), persistent=False)
    TrainState(nn.Linear(1, 1), extras={"average": module}).capture()


@pytest.mark.parametrize(("values", "count"), [({}, 1), ({"n": 0}, 0)])
def test_an_extra_that_tells_nothing_is_told_once(
    values: dict[str, Any], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = TrainState(nn.Linear(1, 1), extras={"own": Keeper(**values)})
    for _ in range(2):
        state.capture()
    told = [one.getMessage() for one in caplog.records if one.name == "txstore.train.extras"]
    assert len(told) == count
    assert all("extra 'own': its state_dict is empty" in one for one in told)
