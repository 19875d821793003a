"""A plain PyTorch loop that can be killed at any moment and goes on as if nothing had happened.

    python examples/plain_loop.py file:///tmp/run-1 --die-at 9      # SIGKILL after step 9
    python examples/plain_loop.py file:///tmp/run-1                 # goes on from the newest commit
    python examples/plain_loop.py file:///tmp/run-2                 # never killed: the same losses, the same last line

In it: a StatefulDataLoader, a scheduler, a GradScaler, gradient accumulation, dropout. All of that is state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from txstore.manifest import Description
from txstore.train import Checkpointer, TrainState

BATCH = 4
WINDOW = 2  # batches in one optimizer step
SEED = 7


def samples() -> TensorDataset:
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=numbers)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def train(url: str, *, steps: int, save_every: int, die_at: int = 0) -> None:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    # A small growth interval, so that the scale really changes within this short run.
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    loader = StatefulDataLoader(samples(), batch_size=BATCH, shuffle=True)
    # All that the next step depends on. The counters in `progress` are moved by the loop.
    state = TrainState(model, optimizer, schedulers=scheduler, scaler=scaler, data=loader)
    progress = state.progress
    # What must be the same when the run goes on; a difference is an error that names it.
    description = Description(settings={"batch_size": BATCH, "accumulation": WINDOW, "seed": SEED})
    # Leaving the block waits for the last save, and raises its error.
    with Checkpointer(url, state, description=description) as saves:
        print(saves.resume())
        window_loss = 0.0
        while progress.global_step < steps:
            for x, y in loader:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x), y) / WINDOW
                scaler.scale(loss).backward()
                window_loss += loss.item()
                progress.micro_step += 1
                progress.consumed_samples += len(x)
                if progress.micro_step < WINDOW:
                    continue
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
                progress.micro_step = 0
                progress.global_step += 1
                # After a resume the first steps are compared with those before the save: a jump is an error.
                saves.record(loss=window_loss, grad_norm=norm.item())
                print(f"step {progress.global_step} loss {window_loss!r}", flush=True)
                window_loss = 0.0
                if progress.global_step % save_every == 0:
                    saves.save()  # returns when the copy is made; the writing goes on beside training
                if progress.global_step == die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if progress.global_step == steps:
                    break
            else:
                progress.epoch += 1
    print("parameters", fingerprint(model))


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
