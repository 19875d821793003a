"""A default device, as ``torch.set_default_device("cuda")`` sets it, moves no copy and no buffer that belongs to the host."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import txstore
from txstore.train import Checkpointer, TrainState

_WITHOUT_A_TENSOR = {
    "empty",
    "empty_strided",
    "full",
    "ones",
    "zeros",
    "arange",
    "rand",
    "randn",
    "randint",
    "randperm",
}
_FROM_DATA = {"tensor", "scalar_tensor", "as_tensor", "asarray"}


class Run:
    """A model with all that makes tensors at a save or a resume: moments, an average, schedules, a shuffled loader."""

    def __init__(self, root: Path, *, loader: bool) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=50)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        samples = torch.arange(64.0).reshape(16, 4)
        self.loader = StatefulDataLoader(samples, batch_size=2, shuffle=True) if loader else None
        self.batches = samples.split(2)
        self.state = TrainState(
            self.model,
            self.optimizer,
            schedulers=self.scheduler,
            data=self.loader,
            extras={"average": self.average},
        )
        self.saves = Checkpointer(root.as_uri(), self.state)

    def train(self, steps: int) -> list[torch.Tensor]:
        while self.state.progress.global_step < steps:
            for batch in self.loader or self.batches[self.state.progress.global_step % 8 :]:
                self.model(batch).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.average.update_parameters(self.model)
                self.state.progress.global_step += 1
                if self.state.progress.global_step == steps:
                    break
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *self.average.parameters())]


@pytest.mark.parametrize("loader", [True, False])
def test_a_run_saves_and_goes_on_under_a_default_device(tmp_path: Path, loader: bool) -> None:
    whole = Run(tmp_path / "whole", loader=loader)
    with whole.saves:
        expected = whole.train(7)
    first = Run(tmp_path / "run", loader=loader)
    with first.saves:
        first.train(5)
        with torch.device("meta"):
            first.saves.save(5)
            first.saves.wait()
    second = Run(tmp_path / "run", loader=loader)
    # A loader draws its order when it takes its state, on the default device, where "meta" has no numbers.
    with second.saves:
        with torch.device("cpu" if loader else "meta"):
            report = second.saves.resume()
        assert report.step == 5
        got = second.train(7)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def factories_without_a_device(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        makes = node.func.attr in _WITHOUT_A_TENSOR | _FROM_DATA
        if makes and isinstance(owner, ast.Name) and owner.id == "torch":
            given = {keyword.arg for keyword in node.keywords}
            if "device" not in given:
                found.append(f"{node.lineno}: torch.{node.func.attr}")
    return found


def test_every_new_tensor_has_its_device() -> None:
    """Without one it would lie wherever the program's default says."""
    modules = sorted(Path(txstore.__file__).parent.rglob("*.py"))
    found = {module.name: factories_without_a_device(module.read_text(encoding="utf-8")) for module in modules}
    assert len(modules) > 100
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_search_finds_what_it_looks_for() -> None:
    assert factories_without_a_device("x = torch.empty(3)\ny = torch.zeros(2, device='cpu')") == ["1: torch.empty"]
