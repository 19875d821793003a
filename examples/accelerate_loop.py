"""An Accelerate loop whose state goes through `Checkpointer` instead of `accelerator.save_state`.

    python examples/accelerate_loop.py file:///tmp/run-1 --die-at 9    # SIGKILL after step 9
    python examples/accelerate_loop.py file:///tmp/run-1               # goes on from the newest commit
    torchrun --nproc-per-node 2 examples/accelerate_loop.py file:///tmp/run-2

Model, optimizer and scheduler are prepared and unwrapped. The data loader is not prepared: Accelerate's reads a batch
ahead, and its state does not tell the epoch. `ElasticBatchSampler` shares one order of samples among all processes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from txstore.compat import Topology
from txstore.manifest import Description
from txstore.train import Checkpointer, ElasticBatchSampler, TrainProgress, TrainState

SAMPLES = 40
GLOBAL_BATCH = 4  # of all processes together
WINDOW = 2  # batches in one optimizer step
SEED = 7


def train(url: str, *, steps: int, save_every: int, die_at: int = 0) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100 * world)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=numbers)
    progress = TrainProgress()
    sampler = ElasticBatchSampler(SAMPLES, GLOBAL_BATCH, progress, rank=rank, world_size=world, seed=SEED)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    state = TrainState(
        model,  # wrapped by DDP or not: the names of the tensors are the same
        optimizer.optimizer,  # what AcceleratedOptimizer wraps
        schedulers=scheduler.scheduler,
        scaler=accelerator.scaler,  # None without fp16
        data=sampler,
        progress=progress,
    )
    torch.manual_seed(SEED + 1 + rank)  # from here on each process draws its own random numbers
    description = Description(
        topology=Topology(world=world, dp=world).as_dict(),
        settings={"global_batch": GLOBAL_BATCH, "accumulation": WINDOW, "seed": SEED},
    )
    with Checkpointer(url, state, description=description) as saves:
        accelerator.print(saves.resume())
        accelerator.step = progress.micro_step  # Accelerate's own count of the accumulation window
        window_loss = torch.zeros(())
        while progress.global_step < steps:
            for batch in loader:
                x, y = send_to_device(batch, accelerator.device)
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                progress.consumed_samples += GLOBAL_BATCH
                progress.epoch = progress.consumed_samples // SAMPLES
                progress.micro_step = (progress.micro_step + 1) % WINDOW
                window_loss += accelerator.reduce(loss.detach(), "mean") / WINDOW
                if progress.micro_step:
                    continue
                progress.global_step += 1
                saves.record(loss=window_loss.item())
                accelerator.print(f"step {progress.global_step} loss {window_loss.item()!r}", flush=True)
                window_loss.zero_()
                if progress.global_step % save_every == 0:
                    saves.save()
                if progress.global_step == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if progress.global_step == steps:
                    break
    accelerator.print("parameters", fingerprint(accelerator.unwrap_model(model)))
    accelerator.end_training()


def fingerprint(model: nn.Module) -> str:
    """Equal only if every bit of the parameters is."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the store: file:///path, s3://bucket/prefix, ...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--die-at", type=int, default=0, help="kill this process after that step")
    options = parser.parse_args(arguments)
    train(options.url, steps=options.steps, save_every=options.save_every, die_at=options.die_at)


if __name__ == "__main__":
    main()
