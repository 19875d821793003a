"""Training jobs that may be killed at any point: each kind depends on another part of the state, and logs every step."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from faults import Fault, FaultyStore, Kill
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.trainings import raw
from txstore.dcp.snapshot import SnapshotBuffers
from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.history import StepRecord
from txstore.train.piece import Place
from txstore.train.progress import TrainProgress
from txstore.train.python_state import flatten
from txstore.train.state import TrainState

SAMPLES, BATCH = 48, 4


def _die_with_parent(worker: int) -> None:
    """A loader's worker would otherwise look for its parent only every few seconds."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# A process of the fork server would start its workers by that server, one import of torch each.
WORKERS: dict[str, Any] = {"multiprocessing_context": "fork", "worker_init_fn": _die_with_parent}


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 3))


@dataclass
class Job:
    """One process's training, whatever it is made of.

    Attributes:
        batches: Indices of samples, without end; None for batches that follow from `consumed_samples`.
        save_every: Backward passes between saves.
        at: Called at each point inside a step, by name.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    window: int = 1
    save_every: int = 2
    progress: TrainProgress = field(default_factory=TrainProgress)
    data: Any = None
    batches: Callable[[], Iterator[list[int]]] | None = None
    generators: dict[str, Any] = field(default_factory=dict)
    at: Callable[[str], None] = lambda point: None

    def __post_init__(self) -> None:
        self.state = TrainState(
            self.module,
            self.optimizer,
            schedulers=self.schedulers or None,
            scaler=self.scaler,
            data=self.data,
            progress=self.progress,
            generators=self.generators,
        )
        self._stream: Iterator[list[int]] | None = None

    def next_batch(self) -> list[int]:
        if self.batches is None:
            return [(self.progress.consumed_samples + at) % 1000 for at in range(BATCH)]
        if self._stream is None:
            self._stream = self.batches()
        return next(self._stream)

    def backward(self) -> dict[str, Any]:
        """One backward pass, and an optimizer step when the window is full; what is logged of it."""
        tell = getattr(self.data, "next_batch_id", None)
        name = tell() if tell else None
        indices = self.next_batch()
        x, y = samples(indices)
        noise = random.random() / 10
        loss = nn.functional.cross_entropy(self.module(x + noise), y) / self.window
        self.at("forward")
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        self.at("backward")
        self.progress.micro_step += 1
        self.progress.consumed_samples += len(indices)
        if self.progress.micro_step == self.window:
            self._step()
        return {
            "step": self.progress.global_step,
            "micro": self.progress.micro_step,
            "loss": loss.item().hex(),
            "lr": [float(group["lr"]).hex() for group in self.optimizer.param_groups],
            "scale": self.scaler.get_scale() if self.scaler else None,
            "batch": indices,
            "name": name or repr(indices),
        }

    def _step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.at("stepped")
        self.optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        self.progress.micro_step = 0
        self.progress.global_step += 1
        self.at("counted")

    def parallel_step(self, group: Any, world: int) -> dict[str, Any]:
        """One step of data-parallel training: gradients and loss are means over the ranks."""
        indices = self.next_batch()
        x, y = samples(indices)
        loss = nn.functional.cross_entropy(self.module(x), y)
        self.at("forward")
        loss.backward()
        self.at("backward")
        mean = loss.detach().clone()
        for value in [mean, *(parameter.grad for parameter in self.module.parameters())]:
            dist.all_reduce(value, group=group)
            value.div_(world)
        self.progress.consumed_samples += len(indices) * world
        self._step()
        return {"step": self.progress.global_step, "loss": mean.item().hex(), "batch": indices}

    def digests(self) -> dict[str, str]:
        """Every piece of state by name, as a digest of all its bits."""
        found = {}
        for name, piece in self.state.pieces.items():
            state = piece.capture(Place(0, 1))
            tensors = sorted((key, raw(tensor)) for key, tensor in state.tensors.items())
            blob = repr((flatten(state.shared)[0], flatten(state.own)[0], tensors))
            found[name] = hashlib.sha256(blob.encode()).hexdigest()
        return found


def samples(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers for an index whoever asks."""
    rows = [torch.randn(6, generator=torch.Generator().manual_seed(index)) for index in indices]
    return torch.stack(rows), torch.tensor([index % 3 for index in indices])


# the kinds


def plain() -> Job:
    module = net()
    return Job(module, torch.optim.AdamW(module.parameters(), lr=1e-2, amsgrad=True))


def accumulation() -> Job:
    """Every fourth pass is saved, and a window is three: saves are at micro steps 1, 2 and 0."""
    module = net()
    return Job(module, torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9), window=3, save_every=4)


def warm_up() -> Job:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = rates.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    then = rates.CosineAnnealingLR(optimizer, T_max=20)
    return Job(module, optimizer, [rates.SequentialLR(optimizer, [first, then], milestones=[5])])


def scaled() -> Job:
    """The scale grows until something overflows, shrinks, and grows again: steps are left out."""
    module = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**125, growth_interval=3)
    return Job(module, torch.optim.AdamW(module.parameters(), lr=1e-2), scaler=scaler)


def dropout() -> Job:
    module = net(0.4)
    return Job(module, torch.optim.AdamW(module.parameters(), lr=1e-2))


def loader() -> Job:
    module = net(0.2)
    stateful = StatefulDataLoader(
        range(SAMPLES), batch_size=BATCH, shuffle=True, num_workers=2, collate_fn=list, **WORKERS
    )

    def batches() -> Iterator[list[int]]:
        while True:
            yield from stateful

    return Job(module, torch.optim.AdamW(module.parameters(), lr=1e-2), data=stateful, batches=batches)


def elastic() -> Job:
    module, progress = net(0.2), TrainProgress()
    sampler = ElasticBatchSampler(SAMPLES, BATCH, progress, seed=11)
    own = torch.Generator().manual_seed(5)
    reader = DataLoader(range(SAMPLES), batch_sampler=sampler, num_workers=2, collate_fn=list, generator=own, **WORKERS)

    def batches() -> Iterator[list[int]]:
        while True:
            yield from reader

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return Job(module, optimizer, progress=progress, data=sampler, batches=batches)


class LowRank(nn.Module):
    """A frozen layer and a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank() -> Job:
    module = net(0.2)
    module[0], module[4] = LowRank(module[0]), LowRank(module[4])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return Job(module, torch.optim.AdamW(trained, lr=1e-2))


KINDS = {
    make.__name__: make
    for make in (plain, accumulation, warm_up, scaled, dropout, loader, elastic, low_rank)
}  # fmt: skip


# one life of a job


@dataclass(frozen=True)
class Death:
    """Where a process kills itself.

    Attributes:
        point: A point of a step (``forward``, ``backward``, ``stepped``, ``counted``), of a save (``capture``,
            ``copy``, ``copied``, ``queued``), or a call of the store: verb, part of the key, ``before`` or ``after``.
        at: At which time that it comes by, from 0.
    """

    point: str
    at: int

    def faults(self) -> list[Fault]:
        """For the store."""
        if self.point.count(" ") != 2:
            return []
        verb, part, when = self.point.split(" ")
        return [Fault(Kill(when == "after"), verb, part, at=self.at)]

    def watch(self, job: Job) -> None:
        """Be called at every other point."""
        left = self.at

        def at(point: str) -> None:
            nonlocal left
            if point == self.point:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        job.at = at
        _around(job.state, "capture", lambda: at("capture"), lambda: None)
        _around(SnapshotBuffers, "stage", lambda: at("copy"), lambda: at("copied"))


def _around(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    inner = getattr(owner, name)

    def around(*args: Any, **options: Any) -> Any:
        before()
        result = inner(*args, **options)
        after()
        return result

    setattr(owner, name, around)


class Log:
    """Lines that outlive their writer."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def live(kind: str, steps: int, log_path: str, url: str | None, death: Death | None, seed: int) -> None:
    """Train until `steps` steps are done: from the newest checkpoint of `url`, or, without one, untouched.

    Args:
        kind: Of `KINDS`.
        steps: When to stop.
        log_path: Gets a line for every pass.
        url: The store.
        death: Where to be killed.
        seed: What the process starts with; after a resume it must not matter.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    job, log = KINDS[kind](), Log(log_path)
    if url is None:
        while job.progress.global_step < steps:
            _pass(job, log, lambda **seen: job.state.history.add(_record(job, **seen)))
        log.write({"end": job.digests()})
        return
    if death is not None:
        death.watch(job)
    with Checkpointer(FaultyStore(url, *(death.faults() if death else [])), job.state) as saves:
        report = saves.resume()
        log.write({"resumed": report.checkpoint, "proved": report.proved})
        while job.progress.global_step < steps:
            _pass(job, log, saves.record)
            if (job.progress.global_step * job.window + job.progress.micro_step) % job.save_every == 0:
                saves.save()
                job.at("queued")
        saves.wait()
    log.write({"end": job.digests()})


def _pass(job: Job, log: Log, record: Callable[..., Any]) -> None:
    line = job.backward()
    if line["micro"] == 0:
        record(loss=float.fromhex(line["loss"]), batch_id=line["name"])
    log.write(line)


def _record(job: Job, loss: float, batch_id: str) -> StepRecord:
    progress = job.progress
    return StepRecord(
        step=progress.global_step, loss=loss, batch_id=batch_id, consumed_samples=progress.consumed_samples
    )
