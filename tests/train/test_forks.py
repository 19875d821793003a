"""A run that begins with the weights of another one: its counters begin anew, and what was accepted stays on record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.train.runs import Run
from txstore.catalog import newest
from txstore.decisions import read_manifest
from txstore.errors import NotNewest, StateMismatch
from txstore.manifest import Description
from txstore.registry import open_store
from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.progress import TrainProgress
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
NEW, OLD = Description(settings={"batch_size": 16}), Description(settings={"batch_size": 8})


def pretrained(url: str, steps: int = 12) -> Run:
    run = Run()
    with Checkpointer(url, run.state, description=OLD) as saves:
        saves.resume()
        for _ in range(steps):
            record = run.step()
            saves.record(loss=record.loss)
        saves.save()
    return run


def accepted_in(url: str) -> tuple[str, ...]:
    with open_store(url) as store:
        found: tuple[str, ...] = read_manifest(store, newest(store)).description.accepted
    return found


@pytest.fixture
def urls(tmp_path: Path) -> tuple[str, str]:
    return (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()


def forked(old: str, new: str, recipe: str, **options: Any) -> Run:
    """The guide's recipe, and two steps after it, recorded and saved."""
    run = Run(9)
    names = {"Checkpointer": Checkpointer, "ResumeOptions": ResumeOptions, "old": old, "new": new, "state": run.state}
    body = "\n    for _ in range(2):\n        saves.record(loss=run.step().loss)\n    saves.save()\n"
    exec(recipe.rstrip() + body, {**names, "description": NEW, "run": run, "report": None, **options})
    return run


def recipe(head: str) -> str:
    (found,) = re.findall(rf"\*\*{head}\*\*.*?```python\n(.*?)```", GUIDE, re.DOTALL)
    return str(found)


def test_a_fork_counts_from_the_begin_and_records_its_steps(urls: tuple[str, str]) -> None:
    old, new = urls
    before = pretrained(old)
    text = recipe("To begin a new run").replace('fresh={"progress"', 'accept={"batch_size"}, fresh={"progress"')
    run = forked(old, new, text)
    assert run.state.progress.global_step == 2
    assert [record.step for record in run.state.history] == [1, 2]
    assert any("batch_size: saved 8, now 16" in one for one in accepted_in(new)), "of the resume from the other root"
    again = Run(10)
    with Checkpointer(new, again.state, description=NEW) as saves:
        assert saves.resume().proved, "the next start is a resume like any other"
        assert again.state.progress.global_step == 2
        saves.record(loss=again.step().loss)
        saves.save()
    assert any("batch_size: saved 8, now 16" in one for one in accepted_in(new))
    assert before.state.progress.global_step == 12


def test_what_was_accepted_on_the_way_back_is_on_record_in_the_new_root(urls: tuple[str, str]) -> None:
    old, new = urls
    pretrained(old)
    text = recipe("To go back").replace('"step-4000"', '"step-12", accept={"batch_size"}')
    run = forked(old, new, text)
    assert run.state.progress.global_step == 14
    assert any("batch_size: saved 8, now 16" in one for one in accepted_in(new))


def test_a_root_that_counts_on_takes_no_save_of_a_run_that_counts_anew(store_url: str) -> None:
    pretrained(store_url)
    run = Run(4)
    with Checkpointer(store_url, run.state, description=OLD) as saves:
        report = saves.resume(ResumeOptions(fresh={"progress"}))
        assert (report.step, report.failed, len(run.state.history)) == (0, [], 0)
        run.state.progress.global_step = 12
        with pytest.raises(NotNewest, match="the counters began anew"):
            saves.save()
    with Checkpointer(store_url, Run(5).state, description=OLD) as saves:
        assert saves.resume().step == 12


def test_what_stands_by_the_counters_begins_anew_with_them_or_is_refused(store_url: str) -> None:
    def made() -> tuple[Run, TrainState]:
        run, progress = Run(), TrainProgress()
        sampler = ElasticBatchSampler(16, 8, progress, seed=1)
        DataLoader(list(range(16)), batch_sampler=sampler)
        return run, TrainState(run.model, run.optimizer, data=sampler, progress=progress)

    run, state = made()
    state.progress.consumed_samples = 8
    state.progress.micro_step = 1
    run.model(run.model.first.weight.new_ones(2, 6)).sum().backward()
    with Checkpointer(store_url, state) as saves:
        saves.save()
    with Checkpointer(store_url, made()[1]) as saves:
        with pytest.raises(StateMismatch) as refused:
            saves.resume(ResumeOptions(fresh={"progress"}))
        (names,) = set(re.findall(r"if that is meant: fresh=\{(.*?)\}", str(refused.value)))
        assert names == "'data:0', 'gradients', 'progress'"
        report = saves.resume(ResumeOptions(fresh=set(re.findall(r"'(.*?)'", names))))
        assert report.failed == []
        assert saves.state.progress == TrainProgress()
