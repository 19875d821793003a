"""The schedule of background saves: the worked example, cases computed by hand, and what holds for every plan."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore.errors import ConfigError
from txstore.ops.timeline import MOST_BUFFERS, MOST_SAVES, Plan, Span, Timeline, simulate


def spans(found: Timeline) -> list[tuple]:
    """(steps, copy, write) of each round, in whole milliseconds."""

    def pair(span: Span) -> tuple[int, int]:
        assert span.start_ms.denominator == span.end_ms.denominator == 1
        return int(span.start_ms), int(span.end_ms)

    return [
        (pair(one.run), *((pair(one.save.copy), pair(one.save.write)) if one.save else (None, None)))
        for one in found.rounds
    ]


def test_the_worked_example() -> None:
    found = simulate(Plan())
    assert Plan().synchronous_ms == 68
    assert spans(found) == [((0, 20), (20, 22), (22, 34)), ((22, 42), (42, 44), (44, 56))]
    assert (found.training_end_ms, found.last_commit_ms) == (44, 56)
    assert (found.waited_ms, found.skipped) == (0, 0)
    # Step 3 ends at 32; the first commit is at 34.
    assert found.most_steps_at_risk == 3


def test_the_worked_example_with_slow_storage() -> None:
    found = simulate(Plan(write_ms=Fraction(40)))
    assert spans(found) == [((0, 20), (20, 22), (22, 62)), ((22, 42), (62, 64), (64, 104))]
    assert (found.training_end_ms, found.last_commit_ms) == (64, 104)
    assert (found.waited_ms, found.most_steps_at_risk) == (20, 4)
    assert [save.lag_ms for save in found.saves] == [42, 62]


def test_a_second_buffer_takes_the_copy_and_the_write_queues() -> None:
    found = simulate(Plan(write_ms=Fraction(40), buffers=2, steps=6))
    assert spans(found) == [
        ((0, 20), (20, 22), (22, 62)),
        ((22, 42), (42, 44), (62, 102)),  # copied at once, written when the writer is free
        ((44, 64), (64, 66), (102, 142)),  # the first buffer is free at 62
    ]
    assert [save.buffer for save in found.saves] == [0, 1, 0]
    assert (found.training_end_ms, found.last_commit_ms, found.waited_ms) == (66, 142, 0)


def cost(saves: int, buffers: int) -> float:
    """Processor seconds of a schedule and of what is told of it; the least of three."""
    plan = Plan(steps=2 * saves, buffers=buffers, write_ms=Fraction(40))

    def once() -> float:
        started = time.process_time()
        found = simulate(plan)
        assert found.most_steps_at_risk > 0
        return time.process_time() - started

    return min(once() for _ in range(3))


def test_time_grows_with_the_saves_and_not_with_the_buffers() -> None:
    """Quotients only, so that a slow machine changes nothing: 8 times the saves, then 1000 times the buffers."""
    small = cost(1000, 1)
    assert cost(8000, 1) < 16 * small
    assert cost(1000, MOST_BUFFERS) < 4 * small


def test_two_buffers_wait_only_for_the_oldest() -> None:
    found = simulate(Plan(steps=3, save_every=1, write_ms=Fraction(40), buffers=2))
    # Copies at 10-12 and 22-24; the third is due at 34 and waits for the first buffer until 52.
    assert spans(found) == [
        ((0, 10), (10, 12), (12, 52)),
        ((12, 22), (22, 24), (52, 92)),
        ((24, 34), (52, 54), (92, 132)),
    ]
    assert (found.waited_ms, found.training_end_ms) == (18, 54)


def test_skipping_keeps_training_going_and_loses_steps() -> None:
    found = simulate(Plan(write_ms=Fraction(40), when_busy="skip", steps=8))
    # Saves due at 20, 42, 62 and 84 (the one at 62 is copied until 64); the buffer is busy until 62, and until 104.
    assert spans(found) == [
        ((0, 20), (20, 22), (22, 62)),
        ((22, 42), None, None),
        ((42, 62), (62, 64), (64, 104)),
        ((64, 84), None, None),
    ]
    assert [one.skipped for one in found.rounds] == [False, True, False, True]
    assert (found.training_end_ms, found.last_commit_ms, found.waited_ms) == (84, 104, 0)
    assert found.saves[-1].step == 6
    assert found.most_steps_at_risk == 6  # just before the commit at 104: 8 finished, 2 committed


def test_a_buffer_that_is_free_at_that_moment_is_not_busy() -> None:
    # The first write ends at 42, exactly when the second save is due.
    found = simulate(Plan(write_ms=Fraction(20), when_busy="skip"))
    assert found.skipped == 0
    assert found.saves[1].copy == Span(Fraction(42), Fraction(44))


def test_steps_after_the_last_save_are_at_risk() -> None:
    found = simulate(Plan(steps=7, save_every=4))
    assert spans(found) == [((0, 40), (40, 42), (42, 54)), ((42, 72), None, None)]
    assert not found.rounds[-1].skipped
    assert (found.training_end_ms, found.last_commit_ms) == (72, 54)
    assert found.most_steps_at_risk == 5  # step 5 ends at 52


def test_a_run_without_a_save() -> None:
    found = simulate(Plan(steps=3, save_every=4))
    assert (found.saves, found.last_commit_ms, found.training_end_ms) == ((), None, 30)
    assert found.most_steps_at_risk == 3
    assert found.plan.synchronous_ms == 30


def test_decimals_carry_no_noise() -> None:
    found = simulate(
        Plan(step_ms=Fraction("0.1"), copy_ms=Fraction("0.2"), write_ms=Fraction("0.3"), steps=3, save_every=1)
    )
    assert found.plan.synchronous_ms == Fraction("1.8")
    assert found.last_commit_ms == Fraction("1.6")


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"save_every": 0},
        {"buffers": 0},
        {"buffers": MOST_BUFFERS + 1},
        {"steps": MOST_SAVES + 1, "save_every": 1},
        {"step_ms": Fraction(0)},
        {"copy_ms": Fraction(-1)},
        {"write_ms": Fraction(-1)},
        {"when_busy": "raise"},
    ],
    ids=str,
)
def test_what_is_no_plan_is_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Plan(**wrong)


times = st.fractions(0, 100, max_denominator=8)
plans = st.builds(
    Plan,
    steps=st.integers(1, 40),
    step_ms=times.filter(bool),
    save_every=st.integers(1, 6),
    copy_ms=times,
    write_ms=times,
    buffers=st.integers(1, 5),
    when_busy=st.sampled_from(["wait", "skip"]),
)


@given(plans)
def test_a_buffer_is_never_reused_before_its_write_has_ended(plan: Plan) -> None:
    found = simulate(plan)
    for number in range(plan.buffers):
        mine = [save for save in found.saves if save.buffer == number]
        for earlier, later in pairwise(mine):
            assert later.copy.start_ms >= earlier.write.end_ms


@given(plans)
def test_writes_are_one_after_another_and_commits_in_order(plan: Plan) -> None:
    saves = simulate(plan).saves
    for save in saves:
        assert save.wait.start_ms <= save.wait.end_ms == save.copy.start_ms
        assert save.copy.end_ms <= save.write.start_ms
        assert (save.copy.length_ms, save.write.length_ms) == (plan.copy_ms, plan.write_ms)
    for earlier, later in pairwise(saves):
        assert earlier.step < later.step
        assert earlier.write.end_ms <= later.write.start_ms


@given(plans)
def test_training_is_steps_waits_and_copies_and_nothing_else(plan: Plan) -> None:
    found = simulate(plan)
    stood = sum(save.wait.length_ms + save.copy.length_ms for save in found.saves)
    assert found.training_end_ms == plan.steps * plan.step_ms + stood
    assert sum(one.last_step - one.first_step + 1 for one in found.rounds) == plan.steps
    assert len(found.saves) + found.skipped == plan.steps // plan.save_every


@given(plans)
def test_the_background_is_never_slower_than_standing_still(plan: Plan) -> None:
    found = simulate(plan)
    assert found.training_end_ms <= plan.synchronous_ms
    assert max(found.training_end_ms, found.last_commit_ms or 0) <= plan.synchronous_ms


@given(plans)
def test_waiting_skips_nothing_and_skipping_never_waits(plan: Plan) -> None:
    found = simulate(plan)
    assert (found.skipped if plan.when_busy == "wait" else found.waited_ms) == 0


@given(plans)
def test_more_buffers_never_end_training_later(plan: Plan) -> None:
    waiting = replace(plan, when_busy="wait")
    more = simulate(replace(waiting, buffers=plan.buffers + 1))
    assert more.training_end_ms <= simulate(waiting).training_end_ms


@given(plans)
def test_steps_at_risk_are_those_that_a_crash_would_lose(plan: Plan) -> None:
    """By brute force, at every end of a step and just before each commit."""
    found = simulate(plan)
    ends = [
        one.run.start_ms + number * plan.step_ms
        for one in found.rounds
        for number in range(1, one.last_step - one.first_step + 2)
    ]
    commits = [(save.write.end_ms, save.step) for save in found.saves]

    def lost(at_ms: Fraction) -> int:
        committed = max((step for when_ms, step in commits if when_ms < at_ms), default=0)
        return sum(end_ms <= at_ms for end_ms in ends) - committed

    assert found.most_steps_at_risk == max(lost(at_ms) for at_ms in (*ends, *(when_ms for when_ms, _ in commits)))
