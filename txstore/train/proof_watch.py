"""Watches the first steps after a resume, and says once whether training goes on where it stood."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from txstore.errors import NotProved
from txstore.train.history import StepRecord
from txstore.train.proof import ProofPolicy, Start, check_step, loss_delta, way_on
from txstore.train.report import ResumeReport

log = logging.getLogger(__name__)


class ProofWatch:
    """The proof of one resume. The restored state holds it, whichever checkpointer records the next steps.

    Args:
        report: Of the resume; gets the checks and the loss delta.
        window: The records before the save.
        policy: What counts as a jump.
        start: Where training goes on.
        tell: Called with the report when the proof has ended, well or not.
    """

    def __init__(
        self,
        report: ResumeReport,
        window: Sequence[StepRecord],
        policy: ProofPolicy,
        start: Start,
        tell: Callable[[ResumeReport], object],
    ) -> None:
        self.report = report
        self.done = False
        self._tell = tell
        self._window = tuple(window)
        self._policy = policy
        self._start = start
        self._seen = 0

    def see(self, record: StepRecord) -> None:
        """Compare one step, unless the proof has ended.

        Raises:
            NotProved: A check failed, and the policy is to raise.
        """
        if self.done:
            return
        first = self._seen == 0
        self._seen += 1
        checks = check_step(self._window, record, self._policy, self._start if first else None)
        self.report.checks += checks
        if first:
            self.report.loss_delta = loss_delta(self._window, record)
        failed = [check for check in checks if check.ok is False]
        raises = bool(failed) and self._policy.on_failure == "raise"
        self.done = raises or self._seen >= self._policy.steps
        if self.done:
            self._tell(self.report)
        if not failed:
            return
        error = NotProved(
            f"step {record.step}, {self._seen} after the resume from {self.report.checkpoint}: "
            + "; ".join(f"{check.name}: {check.detail}" for check in failed),
            key=self.report.checkpoint,
            next_step=way_on(failed),
        )
        if raises:
            raise error
        log.warning("%s", error)
