"""`TrainState` on real ranks: streams and buffers of each, shards of all, and another number of ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from workers import Pool, Rank

from tests.train.trainings import model, raw, resume, save
from txstore.dcp import StorageReader
from txstore.errors import StateMismatch
from txstore.train.captured import unaccounted
from txstore.train.state import TrainState


class Average:
    """A sharded moving average of the parameters, as an EMA is."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in module.named_parameters()}

    def update(self, module: nn.Module) -> None:
        for name, value in module.named_parameters():
            self.values[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def build(rank: Rank, kind: str) -> tuple[nn.Module, torch.optim.Optimizer, TrainState]:
    torch.manual_seed(1)
    module: nn.Module = model(dropout=0.3)
    extras = {}
    if kind == "ddp":
        module = nn.parallel.DistributedDataParallel(module, process_group=rank.group)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(module[0], mesh=rank.mesh, reshard_after_forward=False)
        fully_shard(module, mesh=rank.mesh)
        extras = {"ema": Average(module)}
    elif kind == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        module[1] = nn.Identity()
        module[2] = nn.Identity()
        parallelize_module(module, rank.mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    state = TrainState(module, optimizer, schedulers=scheduler, extras=extras)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + (0 if kind == "tp" else rank.rank))
    return module, optimizer, state


def step(module: nn.Module, optimizer: torch.optim.Optimizer, state: TrainState) -> tuple[float, ...]:
    loss = module(torch.randn(5, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for piece in state.pieces["scheduler"]._items.values():  # type: ignore[attr-defined]
        piece.item.step()
    for extra in state.pieces["extras"]._items.values():  # type: ignore[attr-defined]
        extra.item.update(module)
    state.progress.global_step += 1
    return loss.item(), random.random(), np.random.rand(), torch.rand(1).item()


def bits(state: TrainState, rank: Rank) -> dict[str, bytes]:
    return {key: raw(value) for key, value in state.capture(rank.rank, rank.world).state.items()}


def train(rank: Rank, url: str, kind: str, *, resumed: bool) -> Any:
    module, optimizer, state = build(rank, kind)
    if resumed:
        torch.manual_seed(4242)
        step(module, optimizer, state)
        resume(state, url, rank.rank, rank.world, rank.group)
    else:
        for _ in range(4):
            step(module, optimizer, state)
        save(state, url, 4, rank.rank, rank.world, process_group=rank.group)
    digests = state.capture(rank.rank, rank.world).shared_digests
    return [step(module, optimizer, state) for _ in range(4)], bits(state, rank), digests


def train_untouched(rank: Rank, url: str, kind: str) -> Any:
    return train(rank, url, kind, resumed=False)


def train_resumed(rank: Rank, url: str, kind: str) -> Any:
    return train(rank, url, kind, resumed=True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_every_rank_goes_on_as_if_nothing_had_happened(kind: str, pool: Pool, store_url: str) -> None:
    untouched = pool.run(2, train_untouched, store_url, kind)
    resumed = pool.run(2, train_resumed, store_url, kind)
    for (losses, state, _), (losses_again, state_again, _) in zip(untouched, resumed, strict=True):
        assert losses_again == losses
        assert state_again.keys() == state.keys()
        assert [key for key in state if state[key] != state_again[key]] == []
    assert untouched[0][2] == untouched[1][2], "digests of what is equal on all ranks"
    if kind != "tp":
        own = [[one[1:] for one in losses] for losses, _, _ in untouched]
        assert own[0] != own[1], "each rank draws its own numbers"
    if kind == "fsdp":
        assert "python.shared.extras.ema.state['0.weight']" in untouched[1][1]
        assert "buffers.rank-1.1.running_mean" in untouched[1][1]


class Queue(nn.Module):
    """A queue that no state dict holds, a table that the code computes, and a cache that the first batch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = x.detach()[:1].clone()
        self.queue = torch.roll(self.queue, 1)
        self.queue[0] = x.detach().mean()
        return self.norm(x) + self.table + self.cache + self.queue.sum()


def queues(rank: Rank, url: str, resumed: bool) -> Any:
    """Under DDP without broadcasts every rank has buffers of its own."""
    torch.manual_seed(1)
    inner = Queue()
    module = nn.parallel.DistributedDataParallel(inner, process_group=rank.group, broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = TrainState(module, optimizer)
    torch.manual_seed(7 + rank.rank)

    def step() -> float:
        loss = module(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if resumed:
        torch.manual_seed(0)
        resume(state, url, rank.rank, rank.world, rank.group)
    else:
        for _ in range(2):
            step()
        inner.norm.eval()
        save(state, url, 1, rank.rank, rank.world, process_group=rank.group)
    values = [step() for _ in range(3)]
    keys = {key for key in state.capture(rank.rank, rank.world).state if key.startswith("temporary.")}
    return values, inner.queue.tolist(), inner.norm.training, inner.norm.running_mean.tolist(), keys


def test_buffers_of_each_rank_come_back_whether_a_state_dict_holds_them_or_not(pool: Pool, store_url: str) -> None:
    saved = pool.run(2, queues, store_url, False)
    assert pool.run(2, queues, store_url, True) == saved
    assert saved[0][1] != saved[1][1], "each rank has its own"
    assert saved[0][3] != saved[1][3], "these too"
    assert saved[1][2] is False, "a module that was frozen in the middle of the run"
    assert [one[4] for one in saved] == [{f"temporary.rank-{r}.queue", f"temporary.rank-{r}.cache"} for r in (0, 1)]


def draws(rank: Rank, url: str, resumed: bool) -> Any:
    _, _, state = build(rank, "plain")
    if resumed:
        resume(state, url, rank.rank, rank.world, rank.group)
    else:
        save(state, url, 1, rank.rank, rank.world, process_group=rank.group)
    return [torch.rand(1).item() for _ in range(3)], [random.random() for _ in range(3)], np.random.rand(3).tolist()


def test_no_rank_goes_on_with_the_streams_of_another(pool: Pool, store_url: str) -> None:
    saved = pool.run(4, draws, store_url, False)
    assert pool.run(4, draws, store_url, True) == saved
    for stream in zip(*saved, strict=True):
        assert len({str(one) for one in stream}) == 4


def save_sharded(rank: Rank, url: str) -> Any:
    module, optimizer, state = build(rank, "fsdp")
    for _ in range(3):
        step(module, optimizer, state)
    save(state, url, 3, rank.rank, rank.world, process_group=rank.group)
    return full(state, rank)


def load_sharded(rank: Rank, url: str) -> Any:
    """Refused unless streams may be seeded anew; then everything but the streams is what was saved."""
    _, _, state = build(rank, "fsdp")
    metadata = StorageReader(url, strict=False).read_metadata()
    account = state.expected_keys(metadata, rank.rank, rank.world)
    try:
        resume(state, url, rank.rank, rank.world, rank.group)
        refusal = ""
    except StateMismatch as error:
        refusal = str(error)
    applied = resume(state, url, rank.rank, rank.world, rank.group, on_world_size_change="reseed")
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    return refusal, full(state, rank), drawn, unaccounted(metadata, [account]), applied.saved_world_size


def full(state: TrainState, rank: Rank) -> dict[str, bytes]:
    """All tensors that the ranks share, gathered."""
    found = {}
    for key, value in sorted(state.capture(rank.rank, rank.world).state.items()):
        if not key.startswith(("python.rank-", "buffers.rank-")) and key != "python.shared":
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[key] = raw(whole)
    return found


def test_another_number_of_ranks_loads_every_shard(pool: Pool, store_url: str) -> None:
    saved = pool.run(2, save_sharded, store_url)
    for world in (1, 3):
        loaded = pool.run(world, load_sharded, store_url)
        for refusal, state, _, left, saved_world in loaded:
            assert f"random streams: saved of world size 2, now of world size {world}" in refusal
            assert left == []
            assert saved_world == 2
            assert state == {key: value for key, value in saved[0].items() if key in state}
        assert loaded[0][1] == saved[0], "rank 0 has rank 0's buffers too"
        assert len({str(drawn) for _, _, drawn, _, _ in loaded}) == world, "no two ranks draw the same"
    assert set(saved[0]) >= {
        "optimizer.0.state.0.weight.exp_avg",
        "model.0.weight",
        "python.shared.extras.ema.state['0.weight']",
    }


class Factored(torch.optim.Optimizer):
    """Keeps rows and columns of the gradient, as Adafactor does; torch's own does not run on sharded parameters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if gradient.dim() == 2:
                    whole = gradient.full_tensor().square()
                    rows = (gradient * gradient).mean(dim=1)
                    columns = distribute_tensor(
                        whole.mean(dim=0), gradient.device_mesh, [Replicate()], src_data_rank=None
                    )
                    state["rows"] = state.get("rows", 0) * 0.9 + rows
                    state["columns"] = state.get("columns", 0) * 0.9 + columns
                    state["plain"] = whole.mean()
                    parameter.data.sub_(gradient / (state["rows"].sqrt().unsqueeze(1) + 1), alpha=group["lr"])


def factored(rank: Rank, url: str, resumed: bool) -> Any:
    """Rows and columns are sharded and replicated tensors of other shapes than their parameter."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    module = fully_shard(nn.Linear(6, 8), mesh=rank.mesh)
    optimizer = Factored(module.parameters(), {"lr": 0.1})
    state = TrainState(module, optimizer)
    if resumed:
        resume(state, url, rank.rank, rank.world, rank.group)
    else:
        module(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        save(state, url, 1, rank.rank, rank.world, process_group=rank.group)
    found = bits(state, rank)
    optimizer.zero_grad()
    module(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    return found, bits(state, rank)


def test_moments_of_other_shapes_than_their_parameter_are_restored(pool: Pool, store_url: str) -> None:
    saved = pool.run(2, factored, store_url, False)
    assert pool.run(2, factored, store_url, True) == saved


def after_evaluation(rank: Rank, url: str) -> Any:
    """A forward pass without a backward one leaves FSDP2's root gathered, and its optimizer holds the shards."""
    module, optimizer, state = build(rank, "fsdp")
    step(module, optimizer, state)
    module.eval()
    before = state.pieces["optimizer"].layouts(), bits(state, rank)
    module(torch.ones(3, 4))
    layout = state.pieces["optimizer"].layouts()
    module(torch.ones(3, 4))
    captured = bits(state, rank)
    module(torch.ones(3, 4))
    save(state, url, 1, rank.rank, rank.world, process_group=rank.group)
    module(torch.ones(3, 4))
    resume(state, url, rank.rank, rank.world, rank.group)
    return before, (layout, captured), bits(state, rank)


def test_a_save_after_an_evaluation_finds_the_shards(pool: Pool, store_url: str) -> None:
    for before, after, resumed in pool.run(2, after_evaluation, store_url):
        assert after == before
        assert resumed == before[1]
