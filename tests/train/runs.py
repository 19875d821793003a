"""Small training runs for the tests: everything that can be forgotten is in them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from txstore.train.history import StepRecord
from txstore.train.state import TrainState


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return out


@dataclass
class Run:
    """One process's training of a small net on numbers that depend on the cursor."""

    seed: int = 3
    losses: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=40)
        self.state = TrainState(self.model, self.optimizer, schedulers=self.scheduler)

    def step(self) -> StepRecord:
        progress = self.state.progress
        numbers = torch.Generator().manual_seed(progress.consumed_samples)
        x = torch.randn(8, 6, generator=numbers)
        y = torch.randint(3, (8,), generator=numbers)
        loss = nn.functional.cross_entropy(self.model(x + random.random() / 10), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        progress.global_step += 1
        progress.consumed_samples += 8
        self.losses[progress.global_step] = loss.item()
        return StepRecord(step=progress.global_step, loss=loss.item(), consumed_samples=progress.consumed_samples)

    def values(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}
