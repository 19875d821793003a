"""Trains the demo's transformer under torchrun; saves as it goes; started again, goes on where the last commit stands.

    torchrun --nproc-per-node 2 examples/demo/train.py --url file:///tmp/run-1 --losses losses.jsonl

Everything that the next step depends on is in the `TrainState`: parameters, optimizer, scheduler,
the random streams of each rank, the step and the position in the data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import ModelConfig, Text, Transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from txstore import open_store
from txstore.keys import decision_key
from txstore.manifest import Description
from txstore.retry import RetryingStore
from txstore.train.checkpointer import Checkpointer
from txstore.train.state import TrainState

BATCH = 8
SEED = 7


class Trainer:
    """Model, optimizer, scheduler, data and position of one rank."""

    def __init__(self, *, total_steps: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        config = ModelConfig()
        self.model = Transformer(config)
        mesh = init_device_mesh("cpu", (self.world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=total_steps)
        self.text = Text(config.context)
        self.state = TrainState(self.model, self.optimizer, schedulers=self.scheduler)
        # From here on each rank draws its own random numbers.
        torch.manual_seed(SEED + 1 + self.rank)
        random.seed(SEED + 1 + self.rank)

    def train_step(self) -> dict[str, Any]:
        """One step; returns its figures, the loss being the mean over the ranks."""
        progress = self.state.progress
        inputs, targets = self.text.batch(progress.consumed_samples, BATCH, self.rank, self.world)
        # Python's generator now and then leaves one sample out: a second random stream that a resume must bring back.
        if random.random() < 0.25:
            inputs, targets = inputs[:-1], targets[:-1]
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        progress.global_step += 1
        progress.consumed_samples += BATCH * self.world
        progress.epoch = progress.consumed_samples // self.text.windows
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        figures = {"step": progress.global_step, "loss": mean.item() / self.world}
        return {**figures, "rate": rate, "cursor": progress.consumed_samples}

    def describe(self) -> Description:
        """What must be the same when the run goes on."""
        return Description(topology={"dp": self.world}, fingerprints={"dataset": f"sha256:{self.text.sha256}"})

    def fingerprint(self) -> str:
        """sha256 over all parameters, gathered: equal only if every bit is."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(name.encode() + parameter.full_tensor().detach().numpy().tobytes())
        return digest.hexdigest()


class StopsBeforeCommit(RetryingStore):
    """For the demo alone: stands still when every rank has written its shards and nothing has been decided.

    It makes the place of the SIGKILL certain; the kill, the processes and the files are real.
    """

    def __init__(self, url: str, checkpoint: str, marker: Path) -> None:
        super().__init__(open_store(url))
        self._decision = decision_key(checkpoint, 0)
        self._marker = marker

    def create(self, key: str, data: bytes) -> None:
        if key == self._decision:
            self._marker.touch()
            threading.Event().wait(120)
            raise RuntimeError("the demo's driver should have killed this run by now")
        super().create(key, data)


def train(options: argparse.Namespace) -> None:
    trainer = Trainer(total_steps=options.steps)
    progress = trainer.state.progress
    log = Log(options.losses if trainer.rank == 0 else None)
    store = StopsBeforeCommit(options.url, options.stop_in, options.stop_marker) if options.stop_in else options.url
    # Leaving the block waits for the last save: without that its error, or its commit, would be lost.
    with Checkpointer(store, trainer.state, description=trainer.describe()) as saves:
        saves.resume()
        log.write(event="start", step=progress.global_step)
        while progress.global_step < options.steps:
            figures = trainer.train_step()
            saves.record(loss=figures["loss"])
            log.write(event="step", **figures)
            if progress.global_step % options.save_every == 0:
                saves.save()
        # The last collective, and before `close` on purpose: torch aborts a process whose interpreter ends while one of
        # gloo's threads still holds a tensor of a collective that has only just returned (pytorch issue 190489).
        parameters = trainer.fingerprint()
    log.write(event="end", step=progress.global_step, parameters=parameters)


class Log:
    """JSON lines, each on disk at once: the process may be killed after any of them."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("a", buffering=1) if path else None

    def write(self, **fields: object) -> None:
        if self._file:
            self._file.write(json.dumps(fields) + "\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the store")
    parser.add_argument("--losses", type=Path, required=True, help="losses, as JSON lines")
    parser.add_argument("--pids", type=Path, help="folder in which each rank leaves a file named after its process id")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--stop-in", default="", help="demo: checkpoint in whose save to stand still before the commit")
    parser.add_argument("--stop-marker", type=Path, help="demo: file to create when standing still")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    if options.pids:
        (options.pids / str(os.getpid())).touch()
    dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
