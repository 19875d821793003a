"""Another number of ranks, as the guide tells it from start to end: each sample of the epoch once, and one judgement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from workers import Pool, Pools, Rank

from txstore.errors import ConfigError, TxStoreError
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

SECTION = (Path(__file__).parents[2] / "docs" / "guides" / "compatibility-of-resume.md").read_text(encoding="utf-8")
SECTION = SECTION.partition("## Another number of ranks, start to end")[2]
MATRIX, EXAMPLE = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL)[0] for kind in ("yaml", "python"))


def as_shown(rank: Rank, url: str, matrix: str, steps: int) -> list[int]:
    """The guide's script; the samples that this rank trained on."""
    torch.manual_seed(rank.rank)
    model = nn.Linear(1, 1)
    seen: list[int] = []
    torch.manual_seed(5)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    names: dict[str, Any] = {
        "dataset": torch.arange(16),
        "global_batch": 4,
        "rank": rank.rank,
        "world": rank.world,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "url": url,
        "steps": steps,
        "train_step": lambda batch: seen.extend(batch.tolist()),
    }
    exec(EXAMPLE.replace('"matrix.yaml"', repr(matrix)), names)
    return seen


@pytest.fixture(scope="module")
def pair(pools: Pools) -> Iterator[Pool]:
    with pools.fresh(2) as made:
        yield made


ALONE: Any = SimpleNamespace(rank=0, world=1)


def test_the_guide_is_followed_from_two_ranks_to_one(pair: Pool, store_url: str, tmp_path: Path) -> None:
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(MATRIX)
    before = pair.run(2, as_shown, store_url, str(matrix), 3)
    after = as_shown(ALONE, store_url, str(matrix), 4)
    assert sorted([*before[0], *before[1], *after]) == list(range(16)), "one epoch, each sample once"


def with_a_loader_of_its_own(rank: Rank, url: str) -> str:
    model = nn.Linear(1, 1)
    data = list(range(16))
    order = DistributedSampler(data, rank.world, rank.rank)  # type: ignore[arg-type, var-annotated]
    loader = StatefulDataLoader(data, batch_size=2, sampler=order)  # type: ignore[arg-type, var-annotated]
    torch.manual_seed(5)
    nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
    state = TrainState(model, torch.optim.AdamW(model.parameters()), data=loader)
    with Checkpointer(url, state) as saves:
        try:
            saves.resume()
        except TxStoreError as error:
            return f"{type(error).__name__}: {error}"
        saves.save()
    return ""


def test_all_that_another_number_needs_is_said_at_once(pair: Pool, store_url: str) -> None:
    pair.run(2, with_a_loader_of_its_own, store_url)
    told = with_a_loader_of_its_own(ALONE, store_url)
    assert told.startswith("Incompatible: 3 differences")
    for text in (
        "topology world: saved 2, now 1",
        "random streams",
        'on_world_size_change="reseed"',
        "data '0': saved",
    ):
        assert text in told
    assert "ElasticBatchSampler" in told


def test_a_file_name_for_a_matrix_says_how_it_is_read(tmp_path: Path) -> None:
    for name in ("matrix.yaml", tmp_path / "matrix.yaml"):
        with pytest.raises(ConfigError, match=r"matrix=compat\.read_matrix\('.*matrix\.yaml'\)"):
            ResumeOptions(matrix=name)  # type: ignore[arg-type]
