"""The proof after a resume: what is usual passes, each kind of jump fails, and the unknown stays unknown."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest
from torch import nn

from txstore.errors import ConfigError, FormatError
from txstore.train.history import History, StepRecord
from txstore.train.names import Models
from txstore.train.piece import Loaded, Place
from txstore.train.progress import TrainProgress
from txstore.train.proof import Check, ProofPolicy, Start, check_step, compare_with_control, loss_delta, way_on
from txstore.train.proof_piece import Facts, ProofPiece

WINDOW = [
    StepRecord(
        step=step,
        loss=2.0 + 0.05 * (-1) ** step,
        grad_norm=1.0 + 0.1 * (step % 3),
        update_norm=0.01,
        batch_id=f"b{step}",
    )
    for step in range(1, 17)
]
GOOD = StepRecord(step=17, loss=2.02, grad_norm=1.1, update_norm=0.011, batch_id="b17")
POLICY = ProofPolicy()


def results(
    record: StepRecord, window=WINDOW, *, expected: str | None = "b17", first: bool = True, at=16, epoch=None
) -> dict[str, bool | None]:
    start = Start(at, expected, epoch) if first else None
    return {check.name: check.ok for check in check_step(window, record, POLICY, start)}


def changed(**fields) -> StepRecord:
    values = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__}
    return StepRecord(**{**values, **fields})


ALL_WELL = {"loss": True, "grad_norm": True, "update_norm": True, "first batch": True, "next step": True}


def test_a_step_that_goes_on_passes_everything() -> None:
    assert results(GOOD) == ALL_WELL
    assert results(changed(batch_id="b90", step=40), first=False) == dict.fromkeys(
        ("loss", "grad_norm", "update_norm"), True
    )


@pytest.mark.parametrize(
    ("record", "failing"),
    [
        (changed(loss=3.2), "loss"),
        (changed(loss=0.5), "loss"),
        (changed(loss=math.nan), "loss"),
        (changed(loss=math.inf), "loss"),
        (changed(grad_norm=13.0), "grad_norm"),
        (changed(grad_norm=math.nan), "grad_norm"),
        (changed(update_norm=0.2), "update_norm"),
        (changed(batch_id="b18"), "first batch"),
        (changed(step=18), "next step"),
        (changed(step=16), "next step"),
    ],
)
def test_each_jump_fails_its_own_check(record: StepRecord, failing: str) -> None:
    assert results(record) == {**ALL_WELL, failing: False}


def test_a_batch_that_was_seen_before_the_save_fails_without_an_expectation() -> None:
    assert results(changed(batch_id="b16"), expected=None)["first batch"] is False
    assert results(GOOD, expected=None)["first batch"] is None


def test_what_cannot_be_checked_is_unknown() -> None:
    bare = StepRecord(step=17, loss=2.0)
    assert results(bare) == {
        "loss": True,
        "grad_norm": None,
        "update_norm": None,
        "first batch": None,
        "next step": True,
    }
    assert results(GOOD, WINDOW[:3]) == {
        "loss": None, "grad_norm": None, "update_norm": None, "first batch": True, "next step": True,
    }  # fmt: skip
    assert results(GOOD, []) == {
        **dict.fromkeys(("loss", "grad_norm", "update_norm")),
        "first batch": True,
        "next step": True,
    }
    assert results(changed(loss=math.nan), [])["loss"] is False, "not a number is wrong whatever came before"


def losses(*values: float) -> list[StepRecord]:
    return [StepRecord(step=step, loss=loss) for step, loss in enumerate(values)]


@pytest.mark.parametrize(
    "usual",
    [
        [5.0 if step % 5 == 4 else 0.1 + 0.01 * math.sin(step) for step in range(40)],  # two tasks
        [0.3 + step / 200 if step % 6 == 5 else 0.0 for step in range(40)],  # a margin loss
        [0.1 if step % 9 else -4.0 for step in range(40)],
    ],
)
def test_what_the_window_itself_holds_is_no_jump(usual: list[float]) -> None:
    for begin in range(len(usual) - 33):
        window = losses(*usual[begin : begin + 32])
        assert all(results(changed(loss=loss), window)["loss"] for loss in usual[begin + 32 :]), begin
        assert results(changed(loss=20.0), window)["loss"] is False
        assert results(changed(loss=math.nan), window)["loss"] is False


def test_the_first_fall_of_a_loss_is_not_usual() -> None:
    """Else a model that lost its weights would pass for the rest of the window."""
    window = losses(11.0, 8.0, 5.0, 3.5, *(2.0 + 0.05 * (-1) ** step for step in range(28)))
    assert results(changed(loss=11.0), window)["loss"] is False
    assert results(changed(loss=2.1), window)["loss"] is True


def test_what_has_no_scale_is_unknown() -> None:
    assert results(changed(loss=0.3), losses(*[0.0] * 32))["loss"] is None
    still = [StepRecord(step=step, loss=1.0, grad_norm=0.0) for step in range(8)]
    assert results(changed(loss=1.0), still)["grad_norm"] is None


@pytest.mark.parametrize("now", [math.inf, math.nan])
def test_an_infinite_norm_counts_only_where_there_was_none(now: float) -> None:
    scaled = [StepRecord(step=step, loss=1.0, grad_norm=1.0 if step % 7 else math.inf) for step in range(16)]
    assert results(changed(grad_norm=now), scaled)["grad_norm"] is None
    assert results(changed(grad_norm=20.0), scaled)["grad_norm"] is False
    assert results(changed(grad_norm=now), scaled[1:7])["grad_norm"] is False
    bad = losses(1.0, 1.1, math.nan, 1.0, 1.1, 1.0)
    assert results(changed(loss=now), bad)["loss"] is None


def every(gap: int, last: int) -> list[StepRecord]:
    return [StepRecord(step=step, loss=1.0) for step in range(last - 20 * gap, last + 1, gap)]


@pytest.mark.parametrize(
    ("window", "at", "good", "bad"),
    [
        (every(1, 40), 40, [41], [40, 42, 90]),
        (every(1, 39), 40, [41], [39, 40, 42]),  # the loop saves, then records
        (every(10, 100), 100, [101, 110, 119], [100, 120]),  # its own count of steps may begin anew
        (every(10, 100), 105, [106, 110, 115], [105, 130]),
        (every(10, 90), 100, [110], [100]),
        (every(3, 30)[-1:], 30, [31], [30]),
        ([], 7, [8], [7]),
    ],
)
def test_the_next_step_follows_the_habit_of_the_window(window, at, good, bad) -> None:
    found = {step: results(changed(step=step), window, at=at)["next step"] for step in good + bad}
    assert found == {**dict.fromkeys(good, True), **dict.fromkeys(bad, False)}


def test_a_habit_that_does_not_show_is_unknown() -> None:
    assert results(changed(step=40), every(1, 30)[-1:], at=30)["next step"] is None
    timed = [StepRecord(step=step, loss=1.0) for step in (3, 90, 201, 300)]
    assert results(changed(step=900), timed, at=310)["next step"] is None
    assert results(changed(step=310), timed, at=310)["next step"] is False


def epochs(length: int, last: int) -> list[StepRecord]:
    return [
        StepRecord(step=step, loss=1.0, batch_id=f"b{step % length}") for step in range(max(1, last - 31), last + 1)
    ]


def test_ids_that_come_again_in_each_epoch_are_no_repetition() -> None:
    again = changed(step=41, batch_id="b1")
    assert results(again, epochs(10, 40), expected=None, at=40)["first batch"] is None
    assert results(again, epochs(100, 40), expected=None, at=40)["first batch"] is None
    first = epochs(10, 10)  # the first epoch, and the first batch of the second: only the data's length can tell
    again = changed(step=11, batch_id="b1")
    assert results(again, first, expected=None, at=10, epoch=10)["first batch"] is None
    assert results(again, first, expected=None, at=10, epoch=11)["first batch"] is False
    assert results(again, first, expected=None, at=10)["first batch"] is False


def test_an_expected_batch_is_that_of_the_next_step_only() -> None:
    assert results(changed(step=20, batch_id="b20"), every(10, 10), at=10)["first batch"] is None


@pytest.mark.parametrize(
    ("wrong", "helps"),
    [
        ({"loss": 9.0}, "loss_spreads"),
        ({"grad_norm": 99.0}, "norm_factor"),
        ({"batch_id": "b16"}, "record a batch_id"),
        ({"step": 19}, "count each step"),
    ],
)
def test_the_advice_names_the_option_that_has_an_effect(wrong, helps) -> None:
    failed = [check for check in check_step(WINDOW, changed(**wrong), POLICY, Start(16)) if check.ok is False]
    advice = way_on(failed)
    assert helps in advice
    assert "on_failure='warn'" in advice
    assert sum(word in advice for word in ("loss_spreads", "norm_factor", "record a batch_id", "count each step")) == 1


class Loader:
    """Data that may be able to tell its next batch."""

    def __init__(self, batch: str | None) -> None:
        self.batch = batch

    def next_batch_id(self) -> str:
        return str(self.batch)


@pytest.mark.parametrize(
    ("data", "expected"),
    [({}, []), ({"train": object()}, [("next batch", None)]), ({"train": Loader("b7")}, [("next batch", True)])],
)
def test_a_fact_that_nobody_knows_is_not_one_that_holds(data, expected) -> None:
    facts = Facts(Models(nn.Linear(1, 1)), TrainProgress(), [], data=data)
    piece = ProofPiece(facts, History())
    place = Place(0, 1)
    saved = piece.capture(place)
    piece.restore(Loaded({**saved.shared, **saved.replicated}, saved.own, {}, True, place, 1, "error"))
    found = {check.name: check.ok for check in piece.checks()}
    assert [(name, ok) for name, ok in found.items() if name == "next batch"] == expected
    assert "loss scale" not in found
    assert found["micro step"] is True


def test_a_flat_window_does_not_make_every_loss_a_jump() -> None:
    flat = [StepRecord(step=step, loss=1.0) for step in range(8)]
    assert results(StepRecord(step=8, loss=1.05), flat)["loss"] is True
    assert results(StepRecord(step=8, loss=1.2), flat)["loss"] is False


def test_plain_noise_is_no_jump_however_short_the_run_was() -> None:
    noise = random.Random(1)
    alarms = 0
    for length in [4, 6, 8, 12, 16, 24, 32] * 300:
        window = [StepRecord(step=step, loss=2.0 + noise.gauss(0, 0.5)) for step in range(length)]
        alarms += results(StepRecord(step=length, loss=2.0 + noise.gauss(0, 0.5)), window)["loss"] is False
    assert alarms <= 1, "in 2100 resumes"


def test_the_loss_delta() -> None:
    assert loss_delta(WINDOW, GOOD) == pytest.approx(2.02 - 2.05)
    assert loss_delta([], GOOD) is None


def test_a_check_says_what_it_compared() -> None:
    (loss, *_) = check_step(WINDOW, changed(loss=9.5), POLICY)
    assert isinstance(loss, Check)
    assert "9.5" in loss.detail
    assert "median" in loss.detail


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"loss_spreads": 0}, {"norm_factor": -1}, {"on_failure": "ignore"}])
def test_a_policy_is_validated(wrong) -> None:
    with pytest.raises(ConfigError):
        ProofPolicy(**wrong)


def test_a_history_is_a_window_that_round_trips() -> None:
    history = History(window=4)
    for record in WINDOW:
        history.add(record)
    assert list(history) == WINDOW[-4:]
    other = History(window=4)
    other.add(GOOD)
    other.load_state_dict(history.state_dict())
    assert list(other) == WINDOW[-4:]
    with pytest.raises(ConfigError, match="step 16 was recorded after step 16"):
        other.add(WINDOW[-1])
    with pytest.raises(ConfigError):
        History(0)


@pytest.mark.parametrize(
    "state", [{}, {"records": [{"step": 1}]}, {"records": [{"step": "1", "loss": 2.0}]}, {"records": 3}]
)
def test_a_hostile_history_is_refused_and_changes_nothing(state) -> None:
    history = History()
    history.add(GOOD)
    with pytest.raises(FormatError):
        history.load_state_dict(state)
    assert list(history) == [GOOD]


def stepping(losses, start=1):
    numbers = count(start)
    values = iter(losses)
    return lambda: StepRecord(step=(step := next(numbers)), loss=next(values), batch_id=f"b{step}")


def test_a_run_beside_its_control() -> None:
    control = [StepRecord(step=step, loss=1 / step, batch_id=f"b{step}") for step in range(1, 6)]
    same = compare_with_control(control, stepping([1.0, 0.5, 1 / 3]), steps=3)
    assert same.ok
    assert [(row.step, row.delta) for row in same.rows] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    off = compare_with_control(control, stepping([1.0, 0.5000001]), steps=2)
    assert not off.ok
    assert "step 2" in off.problems[0]
    assert compare_with_control(control, stepping([1.0, 0.5000001]), steps=2, rtol=1e-6).ok
    assert not compare_with_control(control, stepping([math.nan]), steps=1, atol=100).ok
    assert "no such step" in compare_with_control(control, stepping([1.0], start=9), steps=1).problems[0]
    other = [StepRecord(step=1, loss=1.0, batch_id="another")]
    assert "batch" in compare_with_control(other, stepping([1.0]), steps=1).problems[0]
    with pytest.raises(ConfigError):
        compare_with_control(control, stepping([]), steps=0)
