"""What training changes of a model beside its values: restored, or refused at the save, and not at the next start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization

from tests.train.trainings import raw
from txstore.errors import Incompatible, UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.state import TrainState

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")


class Adversaries:
    """Two models that train each other: one is frozen while the other learns."""

    def __init__(self, *, is_frozen_later: bool, made_frozen: bool = False) -> None:
        torch.manual_seed(1)
        self.ours, self.theirs = nn.Linear(2, 3), nn.Linear(3, 1)
        self.theirs.bias.requires_grad_(not made_frozen)
        parts = (self.ours, self.theirs)
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.1, weight_decay=0.1) for part in parts]
        self.state = TrainState({"ours": self.ours, "theirs": self.theirs}, self.optimizers)
        self.is_frozen_later = is_frozen_later

    def steps(self, count: int) -> list[bytes]:
        seen = []
        for _ in range(count):
            at = self.state.progress.global_step
            made = self.ours(torch.randn(4, 2, generator=torch.Generator().manual_seed(at)))
            if not self.is_frozen_later:
                self.theirs.requires_grad_(True)
            if self.theirs.weight.requires_grad:
                self._learn(self.theirs(made.detach()), self.optimizers[1])
            self.theirs.requires_grad_(self.is_frozen_later and at < 1)
            self._learn(self.theirs(made).neg(), self.optimizers[0])
            self.state.progress.global_step += 1
            seen.append(b"".join(raw(one) for part in (self.ours, self.theirs) for one in part.parameters()))
        return seen

    def _learn(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss.square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_frozen_later", [False, True])
def test_parameters_that_training_froze_are_frozen_again(is_frozen_later: bool, store_url: str) -> None:
    run = Adversaries(is_frozen_later=is_frozen_later)
    run.steps(3)
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    wanted = run.steps(3)
    for _ in range(2):  # what is saved after a resume is as good
        other = Adversaries(is_frozen_later=is_frozen_later)
        with Checkpointer(store_url, other.state) as saves:
            report = saves.resume()
            assert "parameter theirs.weight: saved frozen, now trained" in str(report)
            assert not any(one.requires_grad for one in other.theirs.parameters())
            assert other.steps(1) == wanted[other.state.progress.global_step - 4 :][:1]
            saves.save()


def test_parameters_that_the_code_makes_in_another_way_are_told_with_what_to_do(store_url: str) -> None:
    run = Adversaries(is_frozen_later=False, made_frozen=True)
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    other = Adversaries(is_frozen_later=False)
    text = (
        r"parameters theirs.bias: saved frozen, now trained\s+next: call requires_grad_\(False\) on them before resume"
    )
    with pytest.raises(Incompatible, match=text), Checkpointer(store_url, other.state) as saves:
        saves.resume()
    other.theirs.bias.requires_grad_(False)
    with Checkpointer(store_url, other.state) as saves:
        assert saves.resume().proved


@pytest.mark.parametrize("made_frozen", [False, True])
def test_what_was_changed_before_the_resume_is_not_changed_back(made_frozen: bool, store_url: str) -> None:
    """Somebody has meant it: the saved state says another thing, and neither is taken in silence."""
    run = Adversaries(is_frozen_later=False)
    run.theirs.bias.requires_grad_(not made_frozen)
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    other = Adversaries(is_frozen_later=False, made_frozen=made_frozen)
    other.theirs.bias.requires_grad_(made_frozen)
    with pytest.raises(Incompatible, match=r"parameters theirs\.bias"), Checkpointer(store_url, other.state) as saves:
        saves.resume()


class Bank(nn.Module):
    """Keeps what it has seen."""

    bank: torch.Tensor

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("bank", torch.zeros(0, 2), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x.detach()])[-5:]
        out: torch.Tensor = self.linear(x) + self.bank.mean(0)
        return out


def observed() -> nn.Module:
    module = nn.Sequential(quantization.QuantStub(), nn.Linear(2, 2), quantization.DeQuantStub())
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    return quantization.prepare_qat(module.train())


def half(module: nn.Module) -> object:
    return module.bfloat16()


def forward(module: nn.Module) -> object:
    return module(torch.ones(3, 2))


CHANGED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], str]] = {
    "dtype": (lambda: nn.Linear(2, 2), half, r"'bias' was float32 \[2\] when .*, and is bfloat16 \[2\]|'weight' was"),
    "bank": (lambda: Bank(persistent=True), forward, r"'bank' was float32 \[0, 2\] when .*, and is float32 \[3, 2\]"),
    "observers": (observed, forward, r"'1.weight_fake_quant.scale' was float32 \[1\] .*and is float32 \[2\]"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", CHANGED)
def test_tensors_of_another_kind_are_refused_at_the_save(kind: str, rank: int) -> None:
    make, change, text = CHANGED[kind]
    module = make()
    state = TrainState(module)
    state.capture(rank, 2)
    change(module)
    with pytest.raises(UnsupportedValue, match=rf"{text}.*before the TrainState is made"):
        state.capture(rank, 2)


@pytest.mark.parametrize("kind", [*CHANGED, "not persistent"])
def test_what_it_says_to_do_works(kind: str, store_url: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        if kind == "not persistent":
            return Bank(persistent=False)
        module = CHANGED[kind][0]()
        for _ in range(2):  # a bank is full after it
            CHANGED[kind][1](module)
        return module

    def step(module: nn.Module) -> list[Any]:
        module(torch.ones(3, 2, dtype=torch.bfloat16 if kind == "dtype" else torch.float32)).sum().backward()
        return [raw(buffer) for buffer in module.buffers()]

    module = made()
    with Checkpointer(store_url, TrainState(module)) as saves:
        step(module)
        saves.save()
    other = made()
    with Checkpointer(store_url, TrainState(other)) as saves:
        assert saves.resume().proved
    assert step(other) == step(module)
