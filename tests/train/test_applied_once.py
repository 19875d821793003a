"""A launch script is started again and again: a name that is left in fresh= is applied once, and told after that."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.train.runs import Run
from tests.train.test_fresh_one import KINDS, saved, with_objects
from txstore.errors import StateMismatch
from txstore.train.checkpointer import Checkpointer
from txstore.train.report import ResumeReport
from txstore.train.resume import ResumeOptions

ALONE = [kind for kind in KINDS if kind != "generator"]  # whose count is a seed, and does not move


def start(url: str, kind: str, fresh: set[str], counts: dict[str, int], **options: Any) -> tuple[ResumeReport, Any]:
    """One start of the script: it resumes, moves what it has, and saves."""
    run, made = with_objects(kind, 9, **counts)
    with Checkpointer(url, run.state) as saves:
        report = saves.resume(ResumeOptions(fresh=fresh, **options))
        found = {name: one.count for name, one in made.items()}
        run.step()
        for one in made.values():
            one.count += 100
        saves.save()
    return report, found


@pytest.mark.parametrize("kind", ALONE)
def test_one_that_was_added_goes_on_at_the_next_start(
    kind: str, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(store_url, kind, a=1)
    fresh, counts = {KINDS[kind][1].format("b")}, {"a": 8, "b": 9}
    report, found = start(store_url, kind, fresh, counts)
    assert found["b"] == 9
    assert "in fresh was" not in "".join(report.notes)
    for restart in (1, 2):
        with caplog.at_level(logging.WARNING):
            report, found = start(store_url, kind, fresh, counts)
        assert found["b"] == 9 + 100 * restart, "what training made of it is restored"
        (note,) = (note for note in report.notes if "was applied by an earlier resume" in note)
        assert next(iter(fresh)) in note
        assert note in caplog.text
        caplog.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_was_removed_is_no_mistake_at_the_next_start(kind: str, store_url: str) -> None:
    saved(store_url, kind, a=1, b=2)
    fresh = {KINDS[kind][1].format("b")}
    for _ in range(3):
        run, _ = with_objects(kind, 9, a=8)
        with Checkpointer(store_url, run.state) as saves:
            assert saves.resume(ResumeOptions(fresh=fresh)).proved
            run.step()
            saves.save()


def test_a_whole_piece_is_restored_at_the_next_start(store_url: str) -> None:
    options = ResumeOptions(fresh={"optimizer"})
    moments: list[list[int]] = []
    for seed in range(3):
        run = Run(seed)
        with Checkpointer(store_url, run.state) as saves:
            saves.resume(options)  # the first finds nothing, and all is fresh: that counts as well
            moments.append([int(one["step"]) for one in run.optimizer.state.values()][:1])
            run.step()
            saves.save()
    assert moments == [[], [1], [2]]


def test_a_crash_before_the_first_save_leaves_the_wish(store_url: str) -> None:
    saved(store_url, "extra", a=1, b=2)
    for _ in range(2):
        run, made = with_objects("extra", 9, a=8, b=9)
        with Checkpointer(store_url, run.state) as saves:
            saves.resume(ResumeOptions(fresh={"extra:b"}))
        assert made["b"].count == 9


def test_after_a_start_without_the_name_it_is_a_new_wish(store_url: str) -> None:
    saved(store_url, "extra", a=1)
    counts = {"a": 8, "b": 9}
    assert start(store_url, "extra", {"extra:b"}, counts)[1]["b"] == 9
    report, found = start(store_url, "extra", set(), counts)
    assert (found["b"], report.accepted) == (109, ["formerly fresh extra:b"])
    report, found = start(store_url, "extra", {"extra:b"}, counts)
    assert (found["b"], report.accepted) == (9, ["formerly fresh extra:b", "fresh extra:b"])
    assert start(store_url, "extra", {"extra:b"}, counts)[1]["b"] == 109


def test_who_names_the_checkpoint_gets_it_anew_and_a_mistake_told(store_url: str) -> None:
    saved(store_url, "extra", a=1)
    start(store_url, "extra", {"extra:b"}, {"a": 8, "b": 9})
    _, found = start(store_url, "extra", {"extra:b"}, {"a": 8, "b": 9}, checkpoint="step-2")
    assert found["b"] == 9
    with pytest.raises(StateMismatch, match="'c' is named in fresh, and neither side has it"):
        start(store_url, "extra", {"extra:b", "extra:c"}, {"a": 8, "b": 9})
