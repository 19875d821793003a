"""`Teller`: what a `Checkpointer` does, as events, to whoever observes it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from typing import TypedDict

from txstore.errors import IntegrityError, TxStoreError
from txstore.events import (
    ChecksumFailed,
    Committed,
    FellBack,
    Observer,
    Observers,
    Proved,
    Restored,
    RestoreFailed,
    SaveFailed,
    SavePhase,
    SaveRequested,
    SaveSkipped,
    SkipReason,
    Staged,
    StepRecorded,
    Verified,
    WhenBusy,
    Written,
    error_fields,
    restore_reason,
)
from txstore.field_types import check
from txstore.manifest import Decision
from txstore.ops.report import Report
from txstore.train.history import StepRecord
from txstore.train.report import ResumeReport
from txstore.train.request import Request, SaveHandle


class _Common(TypedDict):
    at_s: float
    rank: int
    world_size: int
    checkpoint: str
    step: int | None


def observers_in(given: Iterable[Observer]) -> tuple[Observer, ...]:
    """Several observers.

    Raises:
        ConfigError: Something that cannot be called, or one that is not in a list.
    """
    check("observers", given, Iterable, "pass a list of them")
    several = tuple(given)
    check("observers", several, Collection[Observer])
    return several


class Teller:
    """Makes the events of one rank. Observers are called on the thread on which the thing happened.

    Args:
        observers: Who listens; none of them can break a save.
        rank: This rank.
        world_size: How many ranks there are.
    """

    def __init__(self, observers: Iterable[Observer], rank: int, world_size: int) -> None:
        self._tell = Observers(*observers)
        self._rank = rank
        self._world_size = world_size
        self._failed_in_a_row = 0

    def _about(self, checkpoint: str, step: int | None) -> _Common:
        return {
            "at_s": time.time(),
            "rank": self._rank,
            "world_size": self._world_size,
            "checkpoint": checkpoint,
            "step": step,
        }

    def _of(self, handle: SaveHandle) -> _Common:
        return self._about(handle.checkpoint, handle.step)

    def step(self, record: StepRecord) -> None:
        """Training has finished a step."""
        loss = record.loss if math.isfinite(record.loss) else None
        self._tell(StepRecorded(**self._about("", record.step), loss=loss, consumed_samples=record.consumed_samples))

    def requested(self, handle: SaveHandle, when_busy: WhenBusy) -> None:
        """A save was asked for."""
        self._tell(SaveRequested(**self._of(handle), when_busy=when_busy))

    def skipped(self, handle: SaveHandle, reason: SkipReason) -> None:
        """The policy left it out."""
        self._tell(SaveSkipped(**self._of(handle), reason=reason))

    def refused(self, handle: SaveHandle, phase: SavePhase, error: BaseException) -> None:
        """It failed before it was on its way."""
        self._failed_in_a_row += 1
        self._tell(
            SaveFailed(**self._of(handle), phase=phase, consecutive=self._failed_in_a_row, **error_fields(error))
        )

    def staged(self, request: Request, capture_s: float) -> None:
        """The snapshot is safe."""
        self._tell(
            Staged(
                **self._of(request.handle),
                bytes=request.snapshot.nbytes,
                waited_s=request.waited_s,
                capture_s=capture_s,
                copy_s=max(0.0, request.staged_s - request.requested_s - request.waited_s - capture_s),
            )
        )

    def ended(self, request: Request, decision: Decision | None, error: TxStoreError | None) -> None:
        """A save has ended, well or not; from the background thread, or from training's if it was given up."""
        reached, ended_s = request.reached_s, request.ended_s or time.monotonic()
        if "written" in reached:
            self._tell(
                Written(
                    **self._of(request.handle),
                    bytes=request.written_bytes,
                    plan_s=reached["write"] - (request.begun_s or 0.0),
                    write_s=reached["written"] - reached["write"],
                )
            )
        if decision is None:
            self.refused(request.handle, request.phase, error or TxStoreError("no commit was reported"))
            return
        self._failed_in_a_row = 0
        self._tell(
            Committed(
                **self._of(request.handle),
                bytes=decision.totals.bytes if decision.totals else 0,
                save_s=ended_s - request.requested_s - request.waited_s,
                commit_s=ended_s - reached.get("commit", reached.get("written", ended_s)),
                lag_s=ended_s - request.requested_s,
                slot=decision.slot,
                txn=decision.txn,
            )
        )

    def verified(self, found: Report, verify_s: float) -> None:
        """A commit was examined before a load."""
        self._tell(
            Verified(
                **self._about(found.decision.checkpoint, found.decision.step),
                depth=found.depth,
                ok=found.state == "sound",
                bytes=found.bytes_read,
                verify_s=verify_s,
                problems=len(found.problems),
            )
        )
        for problem in found.problems:
            self._tell(ChecksumFailed(**self._about(found.decision.checkpoint, found.decision.step), key=problem.key))

    def restored(self, report: ResumeReport, loaded_bytes: int) -> None:
        """State is in place."""
        seconds = report.seconds
        self._tell(
            Restored(
                **self._about(report.checkpoint, report.step),
                bytes=loaded_bytes,
                restore_s=sum(seconds.values()),
                choose_s=seconds["choose"],
                judge_s=seconds["examine"] + seconds["judge"],
                load_s=seconds["load"],
                apply_s=seconds["restore"],
                validate_s=seconds["validate"],
                saved_world_size=report.saved_world_size,
            )
        )

    def not_restored(self, decision: Decision | None, error: BaseException) -> None:
        """A recovery point was not restored."""
        about = self._about(decision.checkpoint, decision.step) if decision else self._about("", None)
        if isinstance(error, IntegrityError) and error.key:
            self._tell(ChecksumFailed(**about, key=error.key))
        self._tell(RestoreFailed(**about, reason=restore_reason(error), **error_fields(error)))

    def fell_back(self, to: Decision, from_checkpoint: str, error: BaseException) -> None:
        """An older recovery point is tried."""
        self._tell(
            FellBack(
                **self._about(to.checkpoint, to.step), from_checkpoint=from_checkpoint, reason=restore_reason(error)
            )
        )

    def proved(self, report: ResumeReport) -> None:
        """The proof has ended."""
        delta = report.loss_delta
        self._tell(
            Proved(
                **self._about(report.checkpoint, report.step),
                ok=report.proved,
                loss_delta=delta if delta is not None and math.isfinite(delta) else None,
                reprocessed_samples=report.reprocessed_samples,
            )
        )
