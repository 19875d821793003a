"""Small trainings that depend on every kind of state, built the same way every time, for one process or many."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from txstore.dcp import StorageReader, StorageWriter
from txstore.train.captured import Applied, unaccounted
from txstore.train.state import TrainState


def model(*, dropout: float = 0.0, norm: bool = True) -> nn.Sequential:
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6) if norm else nn.Identity(), nn.Dropout(dropout), nn.Linear(6, 2)]
    return nn.Sequential(*layers)


@dataclass
class Training:
    """A model, what trains it, and one step of it."""

    module: nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    window: int = 1
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = TrainState(
            self.module, self.optimizers, schedulers=self.schedulers or None, scaler=self.scaler, **self.more
        )

    def micro_step(self) -> float:
        """One backward pass, and an optimizer step when the window is full."""
        loss = self.module(torch.randn(5, 4)).square().mean()
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        progress = self.state.progress
        progress.micro_step += 1
        progress.consumed_samples += 5
        if progress.micro_step == self.window:
            self._optimizer_step(loss)
        return loss.item()

    def _optimizer_step(self, loss: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
            optimizer.zero_grad()
        if self.scaler:
            self.scaler.update()
        for scheduler in self.schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(loss.item()) if plateau else scheduler.step()
        self.state.progress.global_step += 1
        self.state.progress.micro_step = 0

    def run(self, steps: int) -> list[float]:
        return [self.micro_step() for _ in range(steps)]

    def bits(self) -> dict[str, Any]:
        """Everything that is saved, as bytes."""
        return {key: raw(value) for key, value in self.state.capture().state.items()}


def raw(tensor: Any) -> bytes:
    local = getattr(tensor, "_local_tensor", tensor)
    return bytes(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def save(state: TrainState, url: str, step: int, rank: int = 0, world: int = 1, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state.capture(rank, world).state,
            storage_writer=StorageWriter(url),
            checkpoint_id=f"step-{step}",
            **options,
        )


def resume(state: TrainState, url: str, rank: int = 0, world: int = 1, group: Any = None, **policy: Any) -> Applied:
    """As a resume does it: judge the metadata, then the Python state, then load everything and apply it."""
    reader = StorageReader(url, strict=False)
    metadata = reader.read_metadata()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = state.python_target(metadata, rank, world)
        dcp.load(small, storage_reader=reader, process_group=group)
        state.check(small, rank, world, **policy)
        target = state.target(metadata, rank, world)
        account = state.expected_keys(metadata, rank, world)
        assert target.keys() <= account
        if world == 1:
            assert unaccounted(metadata, [account]) == []
        dcp.load(target, storage_reader=reader, process_group=group)
    return state.apply(target, rank, world, **policy)


def continues(make: Callable[[], Training], url: str, *, before: int, after: int) -> tuple[Training, Training]:
    """Save after some steps, go on untouched and resumed, and compare losses and every bit of state."""
    untouched = make()
    untouched.run(before)
    save(untouched.state, url, before)
    saved = untouched.bits()
    losses = untouched.run(after)
    torch.manual_seed(12345)
    resumed = make()
    resumed.run(3)  # state of its own, which must not survive
    resume(resumed.state, url)
    assert resumed.bits() == saved
    assert resumed.run(after) == losses
    assert resumed.bits() == untouched.bits()
    return untouched, resumed
