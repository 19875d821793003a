"""Tensors of a model that share memory share it after a resume, or the save refuses, by name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from workers import Pool, Rank

from tests.train.trainings import raw, resume, save
from txstore.errors import Incompatible, StateMismatch, UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.names import Models
from txstore.train.resume import ResumeOptions
from txstore.train.shared_memory import SharedMemory
from txstore.train.state import TrainState


class Net(nn.Module):
    """Shares in `__init__` what `share` tells it to; `late` is called by the first forward pass."""

    def __init__(self, *, share: bool = False, late: Callable[[Net], None] = lambda net: None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if share:
            self.b.weight = self.a.weight
        weight = self.a.weight.detach()
        self.register_buffer("t", weight if share else torch.ones(3, 3))
        self.register_buffer("row", weight[1] if share else torch.ones(3), persistent=False)
        self.register_buffer("same", self.t[:2] if share else torch.ones(2, 3), persistent=False)  # type: ignore[index]
        self.late: Any = [late]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while self.late:
            self.late.pop()(self)
        out: torch.Tensor = self.b(self.a(x)) + x @ self.t + self.row + self.same.sum()  # type: ignore[operator]
        return out


def steps(net: nn.Module, count: int) -> list[bytes]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.ones(1, 3) / 4).square().mean().backward()
        optimizer.step()
    return [raw(tensor) for tensor in (*net.parameters(), *net.buffers()) if tensor.numel()]


def test_what_is_shared_in_init_is_shared_after_a_resume(store_url: str) -> None:
    net = Net(share=True)
    state = TrainState(net)
    steps(net, 3)
    save(state, store_url, 3)
    wanted = steps(net, 3)
    other = Net(share=True)
    resumed = TrainState(other)
    resume(resumed, store_url)
    assert steps(other, 3) == wanted
    resumed.capture()


def view_of_a_parameter(net: Net) -> None:
    net.register_buffer("late_view", net.a.bias.detach()[1:], persistent=False)


def one_tensor_twice(net: Net) -> None:
    net.register_buffer("late_one", torch.zeros(2), persistent=False)
    net.register_buffer("late_two", net.late_one, persistent=False)  # type: ignore[arg-type]


def persistent_rebound(net: Net) -> None:
    net.t = net.a.weight.detach()


def temporary_rebound(net: Net) -> None:
    net.row = net.b.bias.detach()


def one_buffer_in_another(net: Net) -> None:
    net.row = net.t[0]  # type: ignore[index]


def column(net: Net) -> None:
    net.row = net.a.weight.detach()[:, 1]


def tied(net: Net) -> None:
    net.b.weight = net.a.weight


SHARED = [
    (view_of_a_parameter, "'late_view' shares memory with 'a.bias'"),
    (one_tensor_twice, "'late_two' shares memory with 'late_one'"),
    (persistent_rebound, "'t' shares memory with 'a.weight'"),
    (temporary_rebound, "'row' shares memory with 'b.bias'"),
    (one_buffer_in_another, "'row' shares memory with 't'"),
    (column, "'row' shares memory with 'a.weight'"),
    (tied, "'b.weight' shares memory with 'a.weight'"),
]


@pytest.mark.parametrize(("late", "text"), SHARED)
def test_what_training_makes_share_is_refused_at_the_save(late: Callable[[Net], None], text: str) -> None:
    net = Net(late=late)
    state = TrainState(net)
    state.capture()
    steps(net, 1)
    with pytest.raises(UnsupportedValue, match=rf"{text}, and did not.*share it in the module's __init__"):
        state.capture()


def into_a_buffer(net: Net) -> None:
    net.b.bias.data = net.row  # type: ignore[assignment]


@pytest.mark.parametrize("late", [temporary_rebound, into_a_buffer])
def test_the_memory_of_a_parameter_is_no_table_even_if_it_looks_like_one(late: Callable[[Net], None]) -> None:
    net = Net()
    nn.init.ones_(net.b.bias)
    state = TrainState(net)
    late(net)
    with pytest.raises(UnsupportedValue, match=r"'row' shares memory with 'b.bias'"):
        state.capture()


def another_row(net: Net) -> None:
    net.row = net.a.weight.detach()[2]


def test_another_part_of_the_same_memory_is_refused() -> None:
    net = Net(share=True, late=another_row)
    state = TrainState(net)
    steps(net, 1)
    with pytest.raises(UnsupportedValue, match=r"'row' shares memory with 'a.weight', in another way than when"):
        state.capture()


def separate(net: Net) -> None:
    net.row = net.row.clone()


def untied(net: Net) -> None:
    net.b.weight = nn.Parameter(net.a.weight.detach().clone())


@pytest.mark.parametrize(("late", "name"), [(separate, "row"), (untied, "b.weight")])
def test_what_training_takes_apart_is_refused(late: Callable[[Net], None], name: str) -> None:
    net = Net(share=True, late=late)
    state = TrainState(net)
    steps(net, 1)
    with pytest.raises(UnsupportedValue, match=rf"'{name}' shared memory with 'a.weight' when.*copy_\(\)"):
        state.capture()


def columns(net: Net) -> None:
    """Lie in one memory, and have no byte in common."""
    both = torch.zeros(3, 4)
    net.register_buffer("keys", both[:, :2], persistent=False)
    net.register_buffer("values", both[:, 2:], persistent=False)


def halves(net: Net) -> None:
    both = torch.zeros(8)
    net.register_buffer("keys", both[:4], persistent=False)
    net.register_buffer("values", both[4:], persistent=False)


def replaced(net: Net) -> None:
    net.t, net.row = net.t + 1, torch.arange(3.0)  # type: ignore[operator]


def empty(net: Net) -> None:
    none = torch.zeros(3)[:0]
    net.register_buffer("keys", none, persistent=False)
    net.register_buffer("values", none, persistent=False)


def table(net: Net) -> None:
    """As rotary embeddings take up the table of a short or a long context."""
    net.register_buffer("row", net.same.detach()[0], persistent=False)  # type: ignore[index]


@pytest.mark.parametrize("late", [columns, halves, replaced, empty, table])
def test_what_has_no_byte_in_common_or_is_a_table_is_nothing_to_refuse(
    late: Callable[[Net], None], store_url: str
) -> None:
    net = Net(late=late)
    state = TrainState(net)
    steps(net, 1)
    save(state, store_url, 1)
    wanted = steps(net, 2)
    other = Net()
    resume(TrainState(other), store_url)
    assert steps(other, 2) == wanted


def test_parameters_that_torch_lays_side_by_side_share_nothing() -> None:
    net = nn.LSTM(3, 3, num_layers=2)
    state = TrainState(net)
    flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    at = 0
    for parameter in net.parameters():
        parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
    state.capture()


def test_many_tensors_are_looked_at_at_little_cost() -> None:
    net = nn.Sequential(*(nn.Linear(1, 1) for _ in range(2000)))
    shared = SharedMemory(Models(net))
    began = time.thread_time()
    shared.refuse_other(tuple)
    assert time.thread_time() - began < 1


def sharded(rank: Rank) -> str:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    fully_shard(net, mesh=rank.mesh)
    state = TrainState(net)
    net(torch.ones(1, 3))  # leaves the root gathered
    state.capture(rank.rank, rank.world)
    net(torch.ones(1, 3)).sum().backward()
    state.capture(rank.rank, rank.world)
    net.row = net.a.weight.to_local().detach()  # type: ignore[operator]
    try:
        state.capture(rank.rank, rank.world)
    except UnsupportedValue as error:
        return str(error)
    return "captured"


def test_shards_are_looked_at_where_they_lie(pool: Pool) -> None:
    for text in pool.run(2, sharded):
        assert "shares memory with" in text, text


def test_a_copy_of_a_model_that_shares_is_no_other_one() -> None:
    net = copy.deepcopy(Net(share=True))
    state = TrainState({"one": net, "two": net.a})
    steps(net, 2)
    state.capture()


class Pair(nn.Module):
    """Two frozen layers and two buffers, each pair one tensor or two."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("count", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.register_buffer("other_table", torch.ones(2), persistent=False)
        if shared:
            self.b.weight, self.seen, self.other_table = self.a.weight, self.count, self.table


@pytest.mark.parametrize("shared", [False, True])
def test_what_the_code_now_shares_or_no_longer_shares_blocks_a_resume(shared: bool, store_url: str) -> None:
    """One of two saved values would be left, and nothing that is counted or sampled need show it."""
    with Checkpointer(store_url, TrainState(Pair(shared=shared))) as saves:
        saves.save()
    other = Pair(shared=not shared)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with Checkpointer(store_url, TrainState(other)) as saves:
        with pytest.raises(Incompatible) as caught:
            saves.resume()
        assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
        told = str(caught.value)
        assert "2 differences" in told
        assert "b.weight: saved" in told
        assert "seen: saved" in told
        assert "accept={'tied'}" in told
        if shared:
            saves.resume(ResumeOptions(accept={"tied"}))
        else:  # it is accepted that there is one tensor, and nobody said which of the two values it has
            with pytest.raises(StateMismatch, match="share memory in the target: other values were saved"):
                saves.resume(ResumeOptions(accept={"tied"}))
    with Checkpointer(store_url, TrainState(Pair(shared=shared))) as saves:
        assert saves.resume().proved
