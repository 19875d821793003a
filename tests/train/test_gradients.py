"""A save inside an accumulation window carries the unfinished gradients, on one rank and on many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from workers import Pool, Rank

from tests.train.trainings import Training, model, raw, resume, save
from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState


def training(window: int = 4) -> Training:
    module = model()
    module[0].unused = nn.Linear(2, 2)
    return Training(module, [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)], window=window)


def gradients(state: TrainState) -> dict[str, Any]:
    return {key: raw(value) for key, value in state.capture().state.items() if key.startswith("gradients.")}


@pytest.mark.parametrize("micro_step", [1, 2, 3])
def test_the_window_goes_on_at_its_micro_step(micro_step: int, store_url: str) -> None:
    torch.manual_seed(3)
    first = training()
    first.run(4 + micro_step)
    save(first.state, store_url, 1)
    saved = gradients(first.state)
    assert saved
    losses = first.run(5)
    torch.manual_seed(4)
    other = training()
    other.run(2)
    other.module[0].unused.weight.grad = torch.ones(2, 2)
    applied = resume(other.state, store_url)
    assert applied.restored["gradients"] == {"gradients": 6, "zeros": 0}
    assert applied.progress.micro_step == micro_step
    assert gradients(other.state) == saved
    assert other.module[0].unused.weight.grad is None, "absent when it was saved"
    assert other.run(5) == losses


def test_a_window_that_is_left_behind_begins_anew(store_url: str) -> None:
    """Else the next step would be made of what was left of it: one pass of four, at a quarter of its size."""
    first = training()
    first.run(4 + 3)
    with Checkpointer(store_url, first.state) as saves:
        saves.save()
    for other in (training(), first):  # a new process, and the same one, whose gradients are those of what was left
        with Checkpointer(store_url, other.state) as saves:
            report = saves.resume(ResumeOptions(checkpoint="step-1", fresh={"gradients"}))
        assert report.proved
        assert "gradients of 3 backward passes are left behind, and their samples count as consumed" in report.notes
        assert (other.state.progress.global_step, other.state.progress.micro_step) == (1, 0)
        assert gradients(other.state) == {}
        assert all(parameter.grad is None for parameter in other.module.parameters())


def test_outside_a_window_no_gradient_is_saved_and_no_value_survives_a_resume(store_url: str) -> None:
    first = training(window=1)
    first.run(2)
    for parameter in first.module.parameters():
        parameter.grad = torch.ones_like(parameter)  # spent, and not cleared yet
    assert gradients(first.state) == {}
    save(first.state, store_url, 2)
    resume(first.state, store_url)
    assert not any(parameter.grad.count_nonzero() for parameter in first.module.parameters())


def test_a_window_without_gradients_is_refused() -> None:
    one = training()
    one.state.progress.micro_step = 2
    with pytest.raises(UnsupportedValue, match="micro_step is 2, and no parameter has a gradient"):
        one.state.capture()


def test_sparse_gradients_are_refused_by_name() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    state = TrainState(module)
    module(torch.tensor([1])).sum().backward()
    state.progress.micro_step = 1
    with pytest.raises(UnsupportedValue, match="'weight' is sparse"):
        state.capture()


def test_a_window_cannot_go_on_with_other_ranks() -> None:
    one = training()
    one.run(1)
    with pytest.raises(StateMismatch, match="2 ranks had begun an accumulation window, there are 1"):
        one.state.apply(one.state.capture(0, 2).state, 0, 1, on_world_size_change="reseed")


def test_fsdp1_is_refused() -> None:
    class Fsdp1(torch.distributed.fsdp.FullyShardedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    with pytest.raises(ConfigError, match="fully_shard"):
        TrainState(nn.ModuleList([Fsdp1()]))


# Real ranks.


def _module(rank: Rank, kind: str) -> nn.Module:
    torch.manual_seed(1)
    module = model(norm=False)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(module, process_group=rank.group)
    from torch.distributed.fsdp import fully_shard

    fully_shard(module[0], mesh=rank.mesh)
    return fully_shard(module, mesh=rank.mesh)


def _backward(module: nn.Module, rank: Rank, at: int, *, sync: bool) -> float:
    inputs = torch.full((5, 4), 0.1 * at) + rank.rank
    if isinstance(module, nn.parallel.DistributedDataParallel) and not sync:
        with module.no_sync():
            loss = module(inputs).square().mean()
            loss.backward()
    else:
        loss = module(inputs).square().mean()
        loss.backward()
    return loss.item()


def accumulate(rank: Rank, url: str, kind: str, name: str) -> Any:
    """Two windows of three backward passes; with a name "save" or "resume" the second is cut after its second pass."""
    module = _module(rank, kind)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = TrainState(module, optimizer)
    losses = []
    first = 0
    if name == "resume":
        resume(state, url, rank.rank, rank.world, group=rank.group)
        first = 5
    for at in range(first, 6):
        last = at % 3 == 2
        losses.append(_backward(module, rank, at, sync=last or kind == "fsdp"))
        state.progress.micro_step += 1
        if last:
            optimizer.step()
            optimizer.zero_grad()
            state.progress.micro_step = 0
        if name == "save" and at == 4:
            save(state, url, 5, rank.rank, rank.world, process_group=rank.group)
            keys = sorted(key for key in state.capture(rank.rank, rank.world).state if key.startswith("gradients"))
            return keys, losses
    return [raw(p) for p in module.parameters()], losses


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_end_their_window_as_if_nothing_had_happened(kind: str, pool: Pool, store_url: str) -> None:
    untouched = pool.run(2, accumulate, store_url, kind, "untouched")
    saved = pool.run(2, accumulate, store_url, kind, "save")
    prefix = ["gradients.rank-0.", "gradients.rank-1."] if kind == "ddp" else ["gradients.", "gradients."]
    for rank, (keys, _) in enumerate(saved):
        assert keys == [f"{prefix[rank]}{name}" for name in ("0.bias", "0.weight", "3.bias", "3.weight")]
    resumed = pool.run(2, accumulate, store_url, kind, "resume")
    assert [parameters for parameters, _ in resumed] == [parameters for parameters, _ in untouched]
    assert [losses for _, losses in resumed] == [losses[5:] for _, losses in untouched]


def unreduced(rank: Rank, mixed: bool) -> str:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module = model(norm=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None
    module = fully_shard(module, mesh=rank.mesh, **({"mp_policy": policy} if policy else {}))
    state = TrainState(module)
    module.set_requires_gradient_sync(False)
    module(torch.ones(2, 4)).sum().backward()
    state.progress.micro_step = 1
    try:
        state.capture(rank.rank, rank.world)
    except UnsupportedValue as error:
        return str(error)
    return "captured"


@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_that_fsdp_keeps_to_itself_are_refused(mixed: bool, pool: Pool) -> None:
    for text in pool.run(2, unreduced, mixed):
        assert "FSDP2 holds gradients that are not reduced" in text
        assert "save when progress.micro_step is 0, or leave gradient synchronisation on" in text
