"""Two checkpointers, such as one of a local and one of a remote store, that save and resume one state in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from workers import Pool, Rank

from tests.train.runs import Run
from txstore.errors import NotProved
from txstore.events import Event, Proved
from txstore.train.checkpointer import Checkpointer

WORLD = 4
Both = dict[str, Checkpointer]


@contextmanager
def both(url: str, run: Run, events: list[Event] | None = None) -> Iterator[Both]:
    heard = [] if events is None else [events.append]
    with (
        Checkpointer(f"{url}-near", run.state, observers=heard) as near,
        Checkpointer(f"{url}-far", run.state) as far,
    ):
        yield {"near": near, "far": far}


def step(saves: Checkpointer, run: Run) -> None:
    saves.record(loss=run.step().loss)


def saved(url: str) -> None:
    """Step 4 in the near store, step 6 in the far one."""
    run = Run()
    with both(url, run) as of:
        for one in of.values():
            one.resume()
        for number in range(6):
            step(of["near"], run)
            if number == 3:
                of["near"].save()
        of["far"].save()


@pytest.mark.parametrize("resumed", ["near far", "far near", "near far near"])
@pytest.mark.parametrize("recorded", ["near near far", "far far near", "near far near", "far near far"])
def test_the_steps_after_a_resume_prove_that_resume_and_no_other(resumed: str, recorded: str, store_url: str) -> None:
    """A watch that each checkpointer kept for itself took the steps after the other's restore for a jump."""
    saved(store_url)
    run = Run(9)
    with both(store_url, run) as of:
        for name in resumed.split():
            report = of[name].resume()
        for name in recorded.split():
            step(of[name], run)
        assert report.proved
        assert [check.name for check in report.checks].count("loss") == 3
        assert {check.name: check.ok for check in report.checks}["next step"]
        step(of["near"], run)  # what comes later is looked at by nobody
        assert [check.name for check in report.checks].count("loss") == 3


def test_steps_that_the_other_one_recorded_are_no_gap(store_url: str) -> None:
    saved(store_url)
    run = Run(9)
    with both(store_url, run) as of:
        report = of["near"].resume()
        for name in ("far", "far", "far", "far", "near"):
            step(of[name], run)
        assert report.proved


def test_a_jump_is_seen_whoever_records_it_and_told_by_whoever_resumed(store_url: str) -> None:
    saved(store_url)
    run, events = Run(9), list[Event]()
    with both(store_url, run, events) as of:
        report = of["near"].resume()
        record = run.step()
        with pytest.raises(NotProved, match="1 after the resume from step-4: loss"):
            of["far"].record(loss=record.loss * 100)
        assert not report.proved
        assert [event.ok for event in events if isinstance(event, Proved)] == [False]
        step(of["near"], run)  # told once
        assert len([event for event in events if isinstance(event, Proved)]) == 1


def test_a_resume_that_finds_nothing_leaves_the_proof_of_the_other(store_url: str) -> None:
    """As the guide does it to go back: the new store is empty, the state comes from the old one."""
    run = Run()
    with Checkpointer(store_url, run.state) as saves:
        for _ in range(4):
            step(saves, run)
        saves.save()
    run = Run(9)
    with Checkpointer(f"{store_url}-new", run.state) as new:
        with Checkpointer(store_url, run.state) as past:
            report = past.resume()
        assert new.resume().fresh
        step(new, run)
        assert "next step" in [check.name for check in report.checks]
        assert report.proved


def in_turn(me: Rank, url: str) -> Any:
    saved(url)
    run = Run(9)
    with both(url, run) as of:
        of["near"].resume()
        report = of["far"].resume()
        for name in ("near", "far", "near"):
            step(of[name], run)
        of["near"].resume()  # and back again
        run.step()
        with pytest.raises(NotProved, match="next step: 6, expected 5"):
            step(of["far"], run)
        return report.proved, report.checkpoint, run.state.progress.global_step


def test_ranks_prove_the_same_resume(pool: Pool, store_url: str) -> None:
    assert pool.run(WORLD, in_turn, store_url) == [(True, "step-6", 6)] * WORLD
