"""The proof after a resume (mission, "Proof after loading"): does training really go on where it stood?

A check holds, fails, or was not possible; what could not be checked is told as such and never counted as held.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise
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
        loss_fraction: ...or so large a fraction of the median, whichever is more; or twice as far as losses inside that
            window, where some lie farther.
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


@dataclass(frozen=True, slots=True)
class Start:
    """Where training goes on after a resume, as the checkpoint says.

    Attributes:
        step: The global step that it was saved at. The next one is trained first.
        batch: The id of the batch that comes next; None if the data could not tell.
        epoch_batches: After so many batches the data may give one again; None if that is not known.
    """

    step: int
    batch: str | None = None
    epoch_batches: int | None = None


def check_step(
    window: Sequence[StepRecord], record: StepRecord, policy: ProofPolicy, start: Start | None = None
) -> list[Check]:
    """Compare one step after a resume with the saved window.

    Args:
        window: The records before the save.
        record: The step.
        policy: What counts as a jump.
        start: Where the resume stood, for the first record after it; None for the others.
    """
    checks = [_loss(window, record, policy)]
    checks += [
        _norm(name, [getattr(one, name) for one in window], getattr(record, name), policy)
        for name in ("grad_norm", "update_norm")
    ]
    if start is not None:
        checks.append(_batch(window, record, start))
        checks.append(_next_step(window, record, start))
    return checks


_USUAL = {
    "loss": "ProofPolicy(loss_spreads=..., loss_fraction=...) allows more",
    "grad_norm": "ProofPolicy(norm_factor=...) allows more",
    "update_norm": "ProofPolicy(norm_factor=...) allows more",
    "first batch": "record a batch_id that names the batch, such as a digest of its indices, and no count of the loop",
    "next step": "count each step in state.progress, then record it",
}


def way_on(failed: Iterable[Check]) -> str:
    """What to do when a step after a resume fails checks; each option where it has an effect."""
    options = dict.fromkeys(_USUAL[check.name] for check in failed)
    return (
        "do not train on: compare with the log of the run before. If this is usual: "
        f"{'; '.join(options)}; ProofPolicy(on_failure='warn') only tells"
    )


def _loss(window: Sequence[StepRecord], record: StepRecord, policy: ProofPolicy) -> Check:
    losses = [one.loss for one in window if math.isfinite(one.loss)]
    if not math.isfinite(record.loss):
        detail = f"step {record.step}: {record.loss}"
        return _not_finite("loss", detail, len(window) - len(losses))
    if len(losses) < FEWEST:
        return Check("loss", ok=None, detail=f"only {len(losses)} losses were recorded before the save")
    if not any(losses):
        return Check("loss", ok=None, detail=f"step {record.step}: {record.loss:.6g}, and all before were 0")
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)  # of a normal distribution: its sigma
    allowed = max(policy.loss_spreads * spread, policy.loss_fraction * abs(middle))
    if len(losses) < FEW:
        allowed = max(allowed, 40 / len(losses) * (max(losses) - min(losses)))
    allowed = max(allowed, 2 * _stray([abs(loss - middle) for loss in losses], allowed))
    off = record.loss - middle
    return Check(
        "loss",
        ok=abs(off) <= allowed,
        detail=f"step {record.step}: {record.loss:.6g}, median before {middle:.6g}, allowed +-{allowed:.3g}",
    )


def _stray(offs: Sequence[float], allowed: float) -> float:
    """How far losses of the window itself lay off, if any lay farther than is allowed; else 0.

    Tasks that take turns, or a margin loss that is mostly 0, have no one level. Those that the window begins with do
    not count: they are the end of the first fall, and a model that was begun anew would have them again.
    """
    return max((off for off in dropwhile(lambda off: off > allowed, offs) if off > allowed), default=0.0)


def _not_finite(name: str, detail: str, before: int) -> Check:
    """The search for a loss scale makes infinite norms now and then. In a run that had none, the first one counts."""
    told = f", and {before} of the window were no finite numbers, too" if before else ""
    return Check(name, ok=None if before else False, detail=detail + told)


def _norm(name: str, before: Sequence[float | None], now: float | None, policy: ProofPolicy) -> Check:
    given = [norm for norm in before if norm is not None]
    known = [norm for norm in given if math.isfinite(norm)]
    if now is None or len(given) < FEWEST:
        return Check(name, ok=None, detail="not recorded" if now is None else "too few were recorded before the save")
    if not math.isfinite(now):
        return _not_finite(name, f"{now:.6g}", len(given) - len(known))
    largest = max(known, default=0.0)
    if not largest:
        return Check(name, ok=None, detail=f"{now:.6g}, and none before was a number above 0")
    allowed = policy.norm_factor * largest
    return Check(name, ok=now <= allowed, detail=f"{now:.6g}, largest before {largest:.6g}, allowed {allowed:.3g}")


def _batch(window: Sequence[StepRecord], record: StepRecord, start: Start) -> Check:
    if record.batch_id is None:
        return Check("first batch", ok=None, detail="no batch id was recorded")
    # Of another step it is no business, unless each was recorded: then steps, and with them batches, were left out.
    if start.batch is not None and (record.step == start.step + 1 or max(_gaps(window), default=2) == 1):
        same = record.batch_id == start.batch
        return Check("first batch", ok=same, detail=f"{record.batch_id!r}, expected {start.batch!r}")
    ids = [one.batch_id for one in window if one.batch_id is not None]
    come_again = len(set(ids)) < len(ids)
    ago = min((record.step - one.step for one in window if one.batch_id == record.batch_id), default=None)
    if ago is None or come_again or (start.epoch_batches is not None and ago >= start.epoch_batches):
        why = "; ids come again here" if come_again else ""
        return Check("first batch", ok=None, detail=f"{record.batch_id!r}; the expected id is not known{why}")
    return Check("first batch", ok=False, detail=f"{record.batch_id!r} was trained on {ago} steps before")


def _gaps(window: Sequence[StepRecord]) -> list[int]:
    return [later.step - one.step for one, later in pairwise(window)]


def _next_step(window: Sequence[StepRecord], record: StepRecord, start: Start) -> Check:
    """Loops record each step, or every so many, before the save or after it, and count these anew at each start."""
    gaps = _gaps(window)
    most = max(gaps, default=1)
    last = start.step + 2 * most - 1
    expected = str(last) if most == 1 else f"one from {start.step + 1} to {last}"
    detail = f"{record.step}, expected {expected}"
    if start.step < record.step <= last:
        return Check("next step", ok=True, detail=detail)
    if record.step > last and (not gaps or min(gaps) < most):
        return Check("next step", ok=None, detail=f"{record.step}; how often steps are recorded is not known")
    return Check("next step", ok=False, detail=detail)


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
