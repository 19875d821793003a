"""Trains the demo's transformer under torchrun; saves as it goes; started again, goes on where the last commit stands.

    torchrun --nproc-per-node 2 examples/demo/train.py --url file:///tmp/run-1 --losses losses.jsonl

Everything that the next step depends on is in the checkpoint: parameters, optimizer, scheduler,
the random state of each rank, the step and the position in the data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import ModelConfig, Text, Transformer
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from txstore import open_store
from txstore.catalog import newest
from txstore.dcp import SnapshotBuffers, StorageReader, StorageWriter
from txstore.errors import CheckpointNotFound
from txstore.manifest import Description, Progress

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
        self.step = 0
        self.cursor = 0
        # From here on each rank draws its own random numbers.
        torch.manual_seed(SEED + 1 + self.rank)
        random.seed(SEED + 1 + self.rank)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on. Names of per-rank items carry the rank."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "progress": {"step": self.step, "cursor": self.cursor},
            f"random-{self.rank}": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.cursor = state["progress"]["step"], state["progress"]["cursor"]
        torch.set_rng_state(state[f"random-{self.rank}"]["torch"])
        random.setstate(state[f"random-{self.rank}"]["python"])

    def train_step(self) -> dict[str, Any]:
        """One step; returns its figures, the loss being the mean over the ranks."""
        inputs, targets = self.text.batch(self.cursor, BATCH, self.rank, self.world)
        # Python's generator now and then leaves one sample out: a second random state that a resume must bring back.
        if random.random() < 0.25:
            inputs, targets = inputs[:-1], targets[:-1]
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        rate = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        self.cursor += BATCH * self.world
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return {"step": self.step, "loss": mean.item() / self.world, "rate": rate, "cursor": self.cursor}

    def describe(self) -> Description:
        """What `txstore show` tells about a checkpoint, without torch."""
        progress = Progress(global_step=self.step, epoch=self.cursor // self.text.windows, consumed_samples=self.cursor)
        return Description(
            progress=progress, topology={"dp": self.world}, fingerprints={"dataset": f"sha256:{self.text.sha256}"}
        )

    def fingerprint(self) -> str:
        """sha256 over all parameters, gathered: equal only if every bit is."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters()):
            digest.update(name.encode() + parameter.full_tensor().detach().numpy().tobytes())
        return digest.hexdigest()


class BackgroundSaves:
    """One save in flight; its error is raised at the next save or at the end, never lost."""

    def __init__(self, url: str, *, stop_in: str = "", stop_marker: Path | None = None) -> None:
        self._url = url
        self._stop_in = stop_in
        self._stop_marker = stop_marker
        # Saves run beside training: on the same group their collectives would mix with those of the step.
        self._group = dist.new_group(backend="gloo")
        self._last: Future[Any] | None = None
        # Each save has a writer of its own, with its description: the host memory is the same for all.
        self._buffers = SnapshotBuffers()

    def start(self, checkpoint: str, state: dict[str, Any], description: Description) -> None:
        self.wait()
        writer = StorageWriter(self._url, description=description, buffers=self._buffers)
        if checkpoint == self._stop_in and self._stop_marker is not None:
            writer = StopsBeforeCommit(self._url, self._stop_marker)
        self._last = dcp.async_save(state, checkpoint_id=checkpoint, storage_writer=writer, process_group=self._group)

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()
            self._last = None


class StopsBeforeCommit(StorageWriter):
    """For the demo alone: stands still when every rank has written its shards and nothing has been decided.

    It makes the place of the SIGKILL certain; the kill, the processes and the files are real.
    """

    def __init__(self, url: str, marker: Path) -> None:
        super().__init__(url)
        self._marker = marker

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - the signature is DCP's
        self._marker.touch()
        threading.Event().wait(120)
        raise RuntimeError("the demo's driver should have killed this run by now")


def resume(trainer: Trainer, url: str) -> int:
    """Load the newest committed checkpoint, if there is one; returns the step to go on from."""
    with open_store(url) as store:
        try:
            newest(store)
        except CheckpointNotFound:
            return 0
    state = trainer.state_dict()
    # No checkpoint_id: the newest committed one. What was not committed does not exist.
    dcp.load(state, storage_reader=StorageReader(url))
    trainer.load_state_dict(state)
    return trainer.step


def train(options: argparse.Namespace) -> None:
    trainer = Trainer(total_steps=options.steps)
    saves = BackgroundSaves(options.url, stop_in=options.stop_in, stop_marker=options.stop_marker)
    log = Log(options.losses if trainer.rank == 0 else None)
    started_at = resume(trainer, options.url)
    log.write(event="start", step=started_at)
    while trainer.step < options.steps:
        log.write(event="step", **trainer.train_step())
        if trainer.step % options.save_every == 0:
            saves.start(f"step-{trainer.step}", trainer.state_dict(), trainer.describe())
    # The last save may still be on its way: without this its error, or its commit, would be lost.
    saves.wait()
    log.write(event="end", step=trainer.step, parameters=trainer.fingerprint())


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
