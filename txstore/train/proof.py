"""The proof after a resume (mission, "Proof after loading"): does training really go on where it stood?

A check holds, fails, or was not possible; what could not be checked is told as such and never counted as held.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from txstore.errors import ConfigError
from txstore.field_types import check_fields
from txstore.train.history import StepRecord

FEWEST = 4
"""Records below which a window says nothing about what is usual."""

FEW = 16
"""Losses below which their median deviation is a matter of luck: by it alone, plain noise would be a jump at every 30th
step after a resume from 4 records. The range of the window, times 40 over their number, is then allowed, too."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared.
        ok: Whether it holds; None if it could not be checked.
        detail: The values, or why it could not be checked.
    """

    name: str
    ok: bool | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofPolicy:
    """What counts as a jump, in the first steps after a resume.

    Attributes:
        steps: How many steps after a resume are looked at.
        loss_spreads: A loss may lie so many spreads (scaled median deviations of the saved window) from its median...
        loss_fraction: ...or so large a fraction of the median, whichever is more.
        norm_factor: Gradient and update norms may be so many times the largest of the window.
        on_failure: ``raise`` `NotProved`, or ``warn``.
    """

    steps: int = 3
    loss_spreads: float = 8.0
    loss_fraction: float = 0.1
    norm_factor: float = 10.0
    on_failure: Literal["raise", "warn"] = "raise"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps < 1 or not min(self.loss_spreads, self.loss_fraction, self.norm_factor) > 0:
            raise ConfigError(f"not a proof policy: {self}")


def loss_delta(window: Sequence[StepRecord], record: StepRecord) -> float | None:
    """The first loss after a resume minus the last one before the save; None without a window."""
    return record.loss - window[-1].loss if window else None


def check_step(
    window: Sequence[StepRecord], record: StepRecord, policy: ProofPolicy, *, expected_batch: str | None, first: bool
) -> list[Check]:
    """Compare one step after a resume with the saved window.

    Args:
        window: The records before the save.
        record: The step.
        policy: What counts as a jump.
        expected_batch: The id that the batch of the first step must have, if it is known.
        first: Whether it is the first step after the resume.
    """
    checks = [_loss(window, record, policy)]
    checks += [
        _norm(name, [getattr(one, name) for one in window], getattr(record, name), policy)
        for name in ("grad_norm", "update_norm")
    ]
    if first:
        checks.append(_batch(window, record, expected_batch))
        checks.append(_next_step(window, record))
    return checks


def _loss(window: Sequence[StepRecord], record: StepRecord, policy: ProofPolicy) -> Check:
    if not math.isfinite(record.loss):
        return Check("loss", ok=False, detail=f"step {record.step}: {record.loss}")
    losses = [one.loss for one in window if math.isfinite(one.loss)]
    if len(losses) < FEWEST:
        return Check("loss", ok=None, detail=f"only {len(losses)} losses were recorded before the save")
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)  # of a normal distribution: its sigma
    allowed = max(policy.loss_spreads * spread, policy.loss_fraction * abs(middle))
    if len(losses) < FEW:
        allowed = max(allowed, 40 / len(losses) * (max(losses) - min(losses)))
    off = record.loss - middle
    return Check(
        "loss",
        ok=abs(off) <= allowed,
        detail=f"step {record.step}: {record.loss:.6g}, median before {middle:.6g}, allowed +-{allowed:.3g}",
    )


def _norm(name: str, before: Sequence[float | None], now: float | None, policy: ProofPolicy) -> Check:
    known = [norm for norm in before if norm is not None and math.isfinite(norm)]
    if now is None or len(known) < FEWEST:
        return Check(name, ok=None, detail="not recorded" if now is None else "too few were recorded before the save")
    allowed = policy.norm_factor * max(known)
    return Check(
        name,
        ok=math.isfinite(now) and now <= allowed,
        detail=f"{now:.6g}, largest before {max(known):.6g}, allowed {allowed:.3g}",
    )


def _batch(window: Sequence[StepRecord], record: StepRecord, expected: str | None) -> Check:
    if record.batch_id is None:
        return Check("first batch", ok=None, detail="no batch id was recorded")
    if expected is not None:
        return Check(
            "first batch", ok=record.batch_id == expected, detail=f"{record.batch_id!r}, expected {expected!r}"
        )
    if any(one.batch_id == record.batch_id for one in window):
        return Check("first batch", ok=False, detail=f"{record.batch_id!r} was trained on before the save")
    return Check("first batch", ok=None, detail=f"{record.batch_id!r}; the expected id is not known")


def _next_step(window: Sequence[StepRecord], record: StepRecord) -> Check:
    if not window:
        return Check("next step", ok=None, detail="no step was recorded before the save")
    expected = window[-1].step + 1
    return Check("next step", ok=record.step == expected, detail=f"{record.step}, expected {expected}")


@dataclass(frozen=True, slots=True)
class ControlRow:
    """One step of both runs."""

    step: int
    control: float
    resumed: float

    @property
    def delta(self) -> float:
        """Resumed minus control."""
        return self.resumed - self.control


@dataclass(frozen=True, slots=True)
class ControlReport:
    """How far a resumed run stayed with an uninterrupted one.

    Attributes:
        rows: The losses, step by step.
        problems: Each step that left the tolerance, trained on another batch, or is missing; empty if all is well.
    """

    rows: tuple[ControlRow, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether all steps stayed within the tolerance."""
        return not self.problems


def compare_with_control(
    control: Iterable[StepRecord],
    run: Callable[[], StepRecord],
    *,
    steps: int,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> ControlReport:
    """Run `steps` steps after a resume, and compare each with the uninterrupted run's record of it.

    Args:
        control: Records of a run that nobody interrupted, or of the killed run beyond the save.
        run: Trains one step and returns its record.
        steps: How many.
        rtol: Tolerated difference of losses, relative to the control's; 0 for bit equality.
        atol: Tolerated difference, absolute.
    """
    known = {record.step: record for record in control}
    rows: list[ControlRow] = []
    problems: list[str] = []
    for _ in range(steps):
        record = run()
        other = known.get(record.step)
        if other is None:
            problems.append(f"step {record.step}: the control has no such step")
            continue
        rows.append(ControlRow(record.step, other.loss, record.loss))
        if not abs(record.loss - other.loss) <= atol + rtol * abs(other.loss):  # NaN fails
            problems.append(f"step {record.step}: loss {record.loss!r}, control {other.loss!r}")
        if None not in (record.batch_id, other.batch_id) and record.batch_id != other.batch_id:
            problems.append(f"step {record.step}: batch {record.batch_id!r}, control {other.batch_id!r}")
    if steps < 1:
        raise ConfigError(f"steps={steps} must be positive")
    return ControlReport(tuple(rows), tuple(problems))
