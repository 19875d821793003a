"""A run goes on under another wrapper than the one that saved: every moment lies as its parameter does today."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from workers import Pool, Rank

from tests.train.trainings import raw, resume, save
from txstore.errors import StateMismatch
from txstore.train.state import TrainState

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


class Rows(torch.optim.SGD):
    """Keeps one number for each row of a parameter, as Adafactor does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = torch.ones(parameter.shape[0])


def wrapped(rank: Rank, kind: str) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(module, process_group=rank.group)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(module[0], mesh=rank.mesh)
        return fully_shard(module, mesh=rank.mesh)
    if kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        return parallelize_module(module, rank.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return module


def step(module: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> float:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(state.progress.global_step))
    loss = module(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    state.progress.global_step += 1
    return loss.item()


def whole(state: TrainState, rank: Rank) -> dict[str, bytes]:
    shared = {key: one for key, one in state.capture(rank.rank, rank.world).state.items() if "python." not in key}
    return {key: raw(one.full_tensor() if hasattr(one, "full_tensor") else one) for key, one in sorted(shared.items())}


def run(rank: Rank, url: str, kind: str, make: Any, *, resumed: bool) -> Any:
    module = wrapped(rank, kind)
    optimizer = (Rows if make == "Rows" else OPTIMIZERS[make])(module.parameters())
    state = TrainState(module, optimizer)
    if resumed:
        try:
            resume(state, url, rank.rank, rank.world, rank.group, on_world_size_change="reseed")
        except StateMismatch as error:
            return str(error)
    else:
        for _ in range(3):
            step(module, optimizer, state)
        save(state, url, 3, rank.rank, rank.world, process_group=rank.group)
    kinds = {type(one).__name__ for key, one in state.capture().state.items() if key.endswith("rows")}
    found = whole(state, rank), kinds
    return *found, [step(module, optimizer, state) for _ in range(3)]


def first(rank: Rank, url: str, kind: str, make: str) -> Any:
    return run(rank, url, kind, make, resumed=False)


def second(rank: Rank, url: str, kind: str, make: str) -> Any:
    return run(rank, url, kind, make, resumed=True)


@pytest.mark.parametrize(
    ("before", "after", "make"),
    [
        ((2, "ddp"), (2, "fsdp"), "AdamW"),
        ((2, "fsdp"), (2, "ddp"), "AdamW"),
        ((2, "ddp"), (2, "fsdp"), "SGD"),
        ((2, "fsdp"), (2, "ddp"), "SGD"),
        ((2, "ddp"), (2, "fsdp"), "Adagrad"),
        ((2, "fsdp"), (1, "plain"), "AdamW"),
        ((1, "plain"), (2, "fsdp"), "AdamW"),
        ((2, "tp"), (2, "ddp"), "AdamW"),
        ((2, "fsdp"), (2, "tp"), "AdamW"),
    ],
    ids=lambda value: "".join(map(str, value)),
)
def test_moments_lie_as_their_parameters_do(
    before: tuple[int, str], after: tuple[int, str], make: str, pool: Pool, store_url: str
) -> None:
    saved = pool.run(before[0], first, store_url, before[1], make)
    for state, _, losses in pool.run(after[0], second, store_url, after[1], make):
        assert state == saved[0][0]
        assert losses == pytest.approx(saved[0][2], rel=1e-5), "the first step after it works, and is the same"


def test_what_has_another_shape_is_refused_before_the_load_with_what_to_do(pool: Pool, store_url: str) -> None:
    pool.run(2, first, store_url, "ddp", "Rows")
    for refusal in pool.run(2, second, store_url, "fsdp", "Rows"):
        assert "(2, such as 'optimizer.0.state.0.weight.rows')" in refusal
        assert "fresh={'optimizer'}" in refusal


def test_an_optimizer_that_keeps_whole_tensors_beside_shards_gets_them_whole(pool: Pool, store_url: str) -> None:
    saved = pool.run(2, first, store_url, "fsdp", "Rows")
    assert saved[0][1] == {"Tensor"}
    assert pool.run(2, second, store_url, "fsdp", "Rows") == saved
