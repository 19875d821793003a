"""FSDP2 under torchrun: sharded saves beside training, and a resume on another number of ranks.

    torchrun --nproc-per-node 2 examples/fsdp2_loop.py file:///tmp/run-1 --die-at 9   # SIGKILL to rank 0 after step 9
    torchrun --nproc-per-node 2 examples/fsdp2_loop.py file:///tmp/run-1              # goes on, bit for bit
    torchrun --nproc-per-node 1 examples/fsdp2_loop.py file:///tmp/run-1 --steps 30   # goes on, on one rank

The data is one global order that all ranks share out (`ElasticBatchSampler`), so that another number of ranks goes
on at the same sample. Weights and moments are resharded by DCP.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from txstore.compat import Topology, parse_matrix
from txstore.manifest import Description
from txstore.train import Checkpointer, ElasticBatchSampler, ResumeOptions, TrainProgress, TrainState

SAMPLES = 40
GLOBAL_BATCH = 8  # of all ranks together: the same for every number of ranks
SEED = 7

# Changes of the parallelism that a drill has shown to be right. In earnest this is a file: compat.read_matrix(path).
MATRIX = parse_matrix("""
resume_compatibility:
  - {from: {dp: 2}, to: {dp: 1}, status: verified}
""")


def build(
    rank: int, world: int
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[tuple[torch.Tensor, ...]], TrainState]:
    """Everything the loop needs, and the `TrainState` that knows all of it."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=numbers)
    progress = TrainProgress()
    sampler = ElasticBatchSampler(SAMPLES, GLOBAL_BATCH, progress, rank=rank, world_size=world, seed=SEED)
    # A generator of its own: a loader draws from the global one at each epoch, and that is state as well.
    loader = DataLoader(
        TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_sampler=sampler, generator=torch.Generator()
    )
    torch.manual_seed(SEED + 1 + rank)  # from here on each rank draws its own random numbers
    # The sampler and not the loader: where training stands in the data is progress.consumed_samples.
    return model, optimizer, loader, TrainState(model, optimizer, data=sampler, progress=progress)


def train(url: str, *, steps: int, save_every: int, die_at: int = 0) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer, loader, state = build(rank, world)
    progress = state.progress
    description = Description(
        topology=Topology(world=world, dp=world).as_dict(), settings={"global_batch": GLOBAL_BATCH, "seed": SEED}
    )
    # "reseed": with another number of ranks the saved random streams cannot be given back one to one.
    options = ResumeOptions(matrix=MATRIX, on_world_size_change="reseed")
    with Checkpointer(url, state, description=description) as saves:
        report = saves.resume(options)  # collective: the coordinator chooses, all ranks load the same commit
        tell(report)
        while progress.global_step < steps:
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                progress.global_step += 1
                progress.consumed_samples += GLOBAL_BATCH
                progress.epoch = progress.consumed_samples // SAMPLES
                mean = loss.detach().clone()
                dist.all_reduce(mean)  # what is recorded must be equal on all ranks
                saves.record(loss=mean.item() / world)
                tell(f"step {progress.global_step} loss {mean.item() / world!r}")
                if progress.global_step % save_every == 0:
                    saves.save()
                if progress.global_step == die_at and rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                if progress.global_step == steps:
                    break
        # The last collective, and before `close` on purpose: torch aborts a process whose interpreter ends while one of
        # gloo's threads still holds a tensor of a collective that has only just returned (pytorch issue 190489).
        parameters = fingerprint(model)
    tell(f"parameters {parameters}")


def tell(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def fingerprint(model: nn.Module) -> str:
    """Equal only if every bit of the parameters is; gathered, so all ranks call it."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the store: file:///path, s3://bucket/prefix, ...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--die-at", type=int, default=0, help="kill rank 0 after that step")
    options = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    try:
        train(options.url, steps=options.steps, save_every=options.save_every, die_at=options.die_at)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
