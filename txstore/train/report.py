"""`ResumeReport`: what a resume found, judged, restored and checked; for people, and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from txstore.train.proof import Check

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A damaged checkpoint that was passed over, because the caller allowed it."""

    checkpoint: str
    reason: str


@dataclass(slots=True, kw_only=True)
class ResumeReport:
    """The outcome of `Checkpointer.resume`, equal on all ranks but for `restored`.

    Attributes:
        store: The store's URL.
        checkpoint: The recovery point; "" if the store has no checkpoint yet.
        step: Its global step; training goes on with the one after it.
        slot: Its slot.
        txn: Its transaction.
        saved_world_size: Ranks that saved it.
        world_size: Ranks that resumed.
        fell_back: Newer checkpoints that are damaged.
        accepted: Differences that were accepted by name, and migrations that were used.
        notes: Differences that do not matter.
        restored: What each piece of state got back on this rank.
        checks: What was compared after the load and, as steps are recorded, in the first steps.
        seconds: Time by phase: choose, judge, load, restore, validate.
        loss_delta: First loss after the resume minus the last one before the save; None until it is known.
        reprocessed_samples: Samples that were trained on after the save and are trained on again; None if unknown.
    """

    store: str
    checkpoint: str = ""
    step: int | None = None
    slot: int | None = None
    txn: str = ""
    saved_world_size: int = 0
    world_size: int = 0
    fell_back: list[PassedOver] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    restored: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    loss_delta: float | None = None
    reprocessed_samples: int | None = None

    @property
    def fresh(self) -> bool:
        """Whether there was no checkpoint yet: said only after a successful listing, never because reading failed."""
        return not self.checkpoint

    @property
    def failed(self) -> list[Check]:
        """Checks that do not hold."""
        return [check for check in self.checks if check.ok is False]

    @property
    def proved(self) -> bool:
        """Whether the state was compared, and no check failed. What could not be checked is in `checks`."""
        return not self.fresh and any(check.ok for check in self.checks) and not self.failed

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add what is done in it to the seconds of a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    def to_json(self) -> str:
        """All fields as one JSON object; values without a JSON form as text."""
        return json.dumps({**asdict(self), "fresh": self.fresh, "proved": self.proved}, default=str, sort_keys=True)

    def __rich__(self) -> RenderableType:
        from rich.console import Group  # noqa: PLC0415 - a run that prints nothing must not pay for rich
        from rich.table import Table  # noqa: PLC0415 - as above
        from rich.text import Text  # noqa: PLC0415 - as above

        lines: list[RenderableType] = [Text(line) for line in self._lines()]
        if self.checks:
            table = Table("check", "", "detail", box=None, pad_edge=False)
            for check in self.checks:
                verdict, style = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("unknown", "yellow")}[
                    check.ok
                ]
                table.add_row(Text(check.name), Text(verdict, style=style), Text(check.detail))
            lines.append(table)
        return Group(*lines)

    def __str__(self) -> str:
        if not self.checks:
            return "\n".join(self._lines())
        held = sum(check.ok is True for check in self.checks)
        unknown = [check for check in self.checks if check.ok is None]
        summary = f"{held} checks hold"
        if unknown:
            told = "; ".join(f"{check.name} ({check.detail})" for check in unknown)
            summary += f"; {len(unknown)} could not be made: {told}"
        failed = [f"FAILED: {check.name} ({check.detail})" for check in self.failed]
        return "\n".join([*self._lines(), *failed, summary])

    def _lines(self) -> list[str]:
        if self.fresh:
            return [f"no checkpoint yet in {self.store}: a fresh start"]
        lines = [f"resumed {self.checkpoint} (slot {self.slot}, transaction {self.txn}) from {self.store}"]
        if self.saved_world_size != self.world_size:
            lines.append(f"saved by {self.saved_world_size} ranks, resumed by {self.world_size}")
        lines += [f"passed over {one.checkpoint}, which is damaged: {one.reason}" for one in self.fell_back]
        lines += [f"accepted: {name}" for name in self.accepted]
        lines += [f"note: {note}" for note in self.notes]
        if self.reprocessed_samples is not None:
            lines.append(f"{self.reprocessed_samples} samples are trained on again")
        if self.loss_delta is not None:
            lines.append(f"loss delta {self.loss_delta:+.6g}")
        return lines
