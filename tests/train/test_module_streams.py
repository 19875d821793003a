"""Generators that modules keep and draw from in `forward` go on after a resume, bit for bit, without being named."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.train.trainings import Training, continues
from txstore.errors import StateMismatch
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState


class Noisy(nn.Module):
    """Adds noise of its own, from one kind of generator."""

    def __init__(self, kept: Any, draw: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self._kept = kept
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.draw(self._kept)
        return out


KINDS: dict[str, tuple[Any, Any, str]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(2, generator=g), ""),
    "numpy": (lambda: np.random.default_rng(2), lambda g: torch.tensor(g.random(2), dtype=torch.float32), ""),
    "numpy legacy": (lambda: np.random.RandomState(3), lambda g: float(g.standard_normal()), ""),
    "python": (lambda: random.Random(4), lambda g: g.gauss(0, 1), ""),
    "list": (lambda: [torch.Generator().manual_seed(5)], lambda g: torch.rand(2, generator=g[0]), "-0"),
    "dict": (lambda: {"a b": random.Random(6)}, lambda g: g["a b"].random(), "-a-b"),
}


def make(kind: str) -> Training:
    module = nn.Sequential(nn.Identity(), Noisy(KINDS[kind][0](), KINDS[kind][1]))
    return Training(module, [torch.optim.SGD(module.parameters(), lr=0.1)])


def names(state: TrainState) -> list[str]:
    own = state.pieces["rng"].capture(None).own  # type: ignore[arg-type]  # it looks at no place
    return [name for name in own if name.startswith("generator.")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_of_a_module_goes_on(kind: str, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    untouched, _ = continues(lambda: make(kind), f"file://{tmp_path}", before=3, after=3)
    assert names(untouched.state) == [f"generator.module-1-_kept{KINDS[kind][2]}"]
    assert "training changes" not in caplog.text


def test_names_do_not_depend_on_wrappers_and_no_generator_has_two() -> None:
    mine, shared = torch.Generator(), torch.Generator()
    layers = nn.ModuleDict({"a-b": Noisy(shared, None), "a_b": nn.ModuleDict({"c": Noisy(random.Random(), None)})})
    layers["again"], layers["system"] = Noisy(shared, None), Noisy(random.SystemRandom(), None)
    layers["a.b"[:1]] = nn.ModuleDict({"b": Noisy(random.Random(), None)})  # a.b, which is called like a-b
    layers["mine"], layers["global"] = Noisy(mine, None), Noisy(torch.default_generator, None)
    wanted = ["mine", "module-net-a-b-_kept", "module-net-a_b-c-_kept", "module-net-a-b-_kept-"]
    for module in (layers, torch.compile(layers)):
        state = TrainState({"net": module}, generators={"mine": mine})
        assert names(state) == [f"generator.{name}" for name in wanted]
    assert "rng" not in TrainState(layers, rng=False).pieces


def test_a_checkpoint_without_it_is_resumed_when_that_is_meant(store_url: str) -> None:
    old = TrainState(nn.Sequential(nn.Identity(), nn.Linear(4, 2)))
    with Checkpointer(store_url, old) as saves:
        saves.save()
    module = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    module[0].noise = torch.Generator().manual_seed(7)
    with Checkpointer(store_url, TrainState(module)) as saves:
        with pytest.raises(StateMismatch, match=r"fresh=\{'rng:generator.module-0-noise'\}"):
            saves.resume()
        assert saves.resume(ResumeOptions(fresh={"rng:generator.module-0-noise"})).proved
    assert module[0].noise.initial_seed() == 7


def test_one_that_is_made_later_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(Noisy(torch.Generator(), None))
    state = TrainState(module)
    module[0]._kept = torch.Generator()
    with caplog.at_level(logging.WARNING):
        state.capture()
    assert "training changes 0._kept. " in caplog.text
