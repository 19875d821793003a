"""At `micro_step` 0 nobody needs a gradient's values, but whether it is None or zero decides if a parameter moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from workers import Pool, Rank

from tests.train.trainings import raw, resume, save
from txstore.errors import UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.piece import Place
from txstore.train.spent import _is_zero, zeros_of
from txstore.train.state import TrainState

ORDERS = ("before", "after", "last")
"""When gradients are cleared: before the backward pass, after the step, or after the save."""


class Heads:
    """Heads that take turns: a step uses one of them."""

    def __init__(self, order: str, *, to_none: bool, kind: str = "adamw", module: nn.Module | None = None) -> None:
        torch.manual_seed(1)
        self.heads = module or nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)])
        parameters = self.heads.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=0.1)
            if kind == "adamw"
            else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        )
        self.state = TrainState(self.heads, self.optimizer)
        self.order, self.to_none = order, to_none

    def _clear(self, when: str) -> None:
        if when == self.order:
            self.optimizer.zero_grad(set_to_none=self.to_none)

    def steps(self, count: int, at: Callable[[int], object] = lambda step: None) -> list[bytes]:
        """Train on; `at` is called where a save would be. All parameters after each step."""
        seen = []
        for _ in range(count):
            step = self.state.progress.global_step
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            self._clear("before")
            self.heads[step % 2](x).square().sum().backward()  # type: ignore[index]
            self.optimizer.step()
            self._clear("after")
            self.state.progress.global_step += 1
            at(step + 1)
            self._clear("last")
            seen.append(b"".join(raw(parameter) for parameter in self.heads.parameters()))
        return seen

    def absent(self) -> list[bool]:
        return [parameter.grad is None for parameter in self.heads.parameters()]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_heads_that_take_turns_go_on_as_they_would(order: str, to_none: bool, kind: str, store_url: str) -> None:
    run = Heads(order, to_none=to_none, kind=kind)
    wanted = run.steps(9, lambda step: save(run.state, f"{store_url}-{step}", step) if step in {2, 5} else None)
    for step in (2, 5):
        resumed = Heads(order, to_none=to_none, kind=kind)
        resumed.steps(3)
        resume(resumed.state, f"{store_url}-{step}")
        assert resumed.steps(9 - step) == wanted[step:], step


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("at", range(4, 9))
def test_gradients_that_are_cleared_in_both_ways_go_on_as_they_would(at: int, kind: str, store_url: str) -> None:
    """To None where an epoch begins, to zero after a step: one head without a gradient says nothing of the others."""

    def train(run: Heads, last: int, save_at: int | None = None) -> list[bytes]:
        def clear(step: int) -> None:
            run.optimizer.zero_grad(set_to_none=step % 5 == 0)
            if step == save_at:
                save(run.state, store_url, step)

        return run.steps(last - run.state.progress.global_step, clear)

    wanted = train(run := Heads("never", to_none=True, kind=kind), at, at) and train(run, 12)
    resumed = Heads("never", to_none=True, kind=kind)
    resume(resumed.state, store_url)
    assert train(resumed, 12) == wanted


@pytest.mark.parametrize("sparse", [True, False])
def test_what_is_zero_of_a_sparse_gradient(sparse: bool) -> None:
    gradient = torch.zeros(3, 2).to_sparse(1) if sparse else torch.zeros(3, 2)
    assert _is_zero(gradient)
    assert not _is_zero(gradient + (torch.ones(3, 2).to_sparse(1) if sparse else 1))


def test_it_costs_no_tensor_and_says_what_it_restored(store_url: str) -> None:
    run = Heads("before", to_none=False)
    run.steps(2)
    assert not [key for key in run.state.capture().state if key.startswith("gradients")]
    save(run.state, store_url, 2)
    other = Heads("before", to_none=False)
    assert resume(other.state, store_url).restored["gradients"] == {"gradients": 0, "zeros": 4}
    assert other.absent() == run.absent() == [False] * 4 + [True] * 2


def test_frozen_parameters_and_those_of_no_optimizer_keep_their_zeros(store_url: str) -> None:
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizer = torch.optim.AdamW(module[0].parameters())
    state = TrainState(module, optimizer)
    (module[0](torch.ones(1, 2)) + module[1](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    module[0].bias.requires_grad_(False)
    module[1].bias.grad = None
    save(state, store_url, 1)
    for parameter in module.parameters():
        parameter.grad = None
    resume(state, store_url)
    assert [parameter.grad is None for parameter in module.parameters()] == [False, False, False, True]


def test_a_checkpoint_that_does_not_tell_resumes_without_gradients(store_url: str, monkeypatch: Any) -> None:
    run = Heads("before", to_none=False)
    run.steps(2)
    monkeypatch.setattr(type(run.state.pieces["gradients"]), "_spent", lambda self: None)
    save(run.state, store_url, 2)
    resume(run.state, store_url)
    assert all(run.absent())


def test_gradients_that_are_cleared_after_the_last_save_do_not_make_it_another(store_url: str) -> None:
    run = Heads("last", to_none=True)
    with Checkpointer(store_url, run.state) as saves:
        handles = []
        run.steps(1, lambda step: handles.append(saves.save()))
        assert saves.save() is handles[-1]


@pytest.mark.parametrize("to_none", [True, False])
def test_sparse_gradients_stay_sparse(to_none: bool, store_url: str) -> None:
    def make() -> tuple[nn.Embedding, torch.optim.Optimizer, TrainState]:
        torch.manual_seed(1)
        module = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        return module, optimizer, TrainState(module, optimizer)

    def step(module: nn.Embedding, optimizer: torch.optim.Optimizer, at: int) -> bytes:
        optimizer.zero_grad(set_to_none=to_none)
        if at != 2:
            module(torch.tensor([at, 1])).square().sum().backward()
        optimizer.step()
        return raw(module.weight)

    module, optimizer, state = make()
    step(module, optimizer, 0)
    save(state, store_url, 1)
    wanted = [step(module, optimizer, at) for at in (2, 3, 4)]
    other, its, restored = make()
    resume(restored, store_url)
    assert other.weight.grad is not None
    assert other.weight.grad.layout == torch.sparse_coo
    assert [step(other, its, at) for at in (2, 3, 4)] == wanted


def test_another_number_of_ranks_takes_what_rank_0_had(store_url: str) -> None:
    run = Heads("before", to_none=False)
    run.steps(1)
    whole = run.state.capture(1, 2).state
    run.heads[1].weight.grad = torch.ones(1, 4)  # type: ignore[index]
    whole |= run.state.capture(0, 2).state
    other = Heads("before", to_none=False)
    other.state.apply(whole, 0, 1, on_world_size_change="reseed")
    assert other.absent() == [False, False, False, True, True, True]


# Real ranks.


def sharded(rank: Rank, url: str, to_none: bool, resumed: bool) -> list[bytes]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    for head in heads:
        fully_shard(head, mesh=rank.mesh)
    run = Heads("before", to_none=to_none, module=heads)
    if resumed:
        resume(run.state, url, rank.rank, rank.world, rank.group)
        return run.steps(4)
    run.steps(3)
    save(run.state, url, 3, rank.rank, rank.world, process_group=rank.group)
    return run.steps(4)


@pytest.mark.parametrize("to_none", [True, False])
def test_sharded_heads_go_on_as_they_would(to_none: bool, pool: Pool, store_url: str) -> None:
    wanted = pool.run(2, sharded, store_url, to_none, False)
    assert pool.run(2, sharded, store_url, to_none, True) == wanted


def ranks_differ(rank: Rank, url: str) -> list[bool]:
    """Each rank has used one head; gradients are not reduced."""
    run = Heads("before", to_none=False)
    run.state.progress.global_step = rank.rank
    run.steps(1)
    run.state.progress.global_step = 1
    run.optimizer.state.clear()
    save(run.state, url, 1, rank.rank, rank.world, process_group=rank.group)
    other = Heads("before", to_none=False)
    resume(other.state, url, rank.rank, rank.world, rank.group)
    return other.absent()


def test_each_rank_has_its_own(pool: Pool, store_url: str) -> None:
    assert pool.run(2, ranks_differ, store_url) == [
        [False, False, True, True, True, True],
        [True, True, False, False, True, True],
    ]


def placed(rank: Rank) -> list[Any]:
    """Gradients of replicated parameters are partial sums under sequence parallelism."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    parameter = nn.Parameter(distribute_tensor(torch.ones(3, 2), rank.mesh, [Replicate()]))
    module = nn.Module()
    module.register_parameter("weight", parameter)
    parameter.grad = DTensor.from_local(torch.ones(3, 2), rank.mesh, [Partial()], run_check=False)
    state = TrainState(module)
    own = state.pieces["gradients"].capture(Place(rank.rank, rank.world)).own
    zeros = zeros_of(own["weight"], parameter)
    assert isinstance(zeros, DTensor)
    parameter.grad = DTensor.from_local(torch.ones(3, 2), rank.mesh, [Partial("avg")], run_check=False)
    with pytest.raises(UnsupportedValue, match=r"'weight' is.*avg.*call zero_grad\(\) after the optimizer's step"):
        state.capture(rank.rank, rank.world)
    return [own, zeros.placements == (Partial(),), zeros.shape, zeros.to_local().tolist()]


def test_zeros_are_placed_as_the_gradient_was(pool: Pool) -> None:
    for own, same, shape, local in pool.run(2, placed):
        assert own == {"weight": "zeros float32 partial"}
        assert same
        assert (shape, local) == ((3, 2), [[0.0, 0.0]] * 3)
