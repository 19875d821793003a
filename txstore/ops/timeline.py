"""When training stands still, and when its saves are committed: a schedule, computed exactly. No I/O.

The model: training runs steps of one length. At each save it copies its state into a free buffer and goes on; one
background thread writes the buffers to the store, in order, and a save is committed when its write ends. A buffer is
free again then, and not before. What varies from step to step, and every other cost, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from txstore.errors import ConfigError

Drawn = Literal["wait", "skip"]
"""The choices of `txstore.events.WhenBusy` that can be drawn: a run that raises has no schedule."""

MOST_SAVES = 100_000
"""Saves of one schedule."""

MOST_BUFFERS = 1000
"""Buffers of one schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is simulated; the defaults are the documents' worked example. Times are milliseconds.

    Attributes:
        steps: Steps of training.
        step_ms: One step.
        save_every: A save after every so many steps.
        copy_ms: The copy of the state into a buffer; training stands still.
        write_ms: Writing and committing one buffer, in the background.
        buffers: Copies of the state that fit into memory.
        when_busy: What a save does if no buffer is free.
    """

    steps: int = 4
    step_ms: Fraction = Fraction(10)
    save_every: int = 2
    copy_ms: Fraction = Fraction(2)
    write_ms: Fraction = Fraction(12)
    buffers: int = 1
    when_busy: Drawn = "wait"

    def __post_init__(self) -> None:
        if min(self.steps, self.save_every, self.buffers) < 1:
            raise ConfigError("steps, save_every and buffers are at least 1")
        if self.buffers > MOST_BUFFERS or self.steps // self.save_every > MOST_SAVES:
            raise ConfigError(f"more than {MOST_BUFFERS} buffers or {MOST_SAVES} saves are too many to draw")
        if self.step_ms <= 0 or self.copy_ms < 0 or self.write_ms < 0:
            raise ConfigError("a step takes time, and no time is negative")
        if self.when_busy not in get_args(Drawn):
            raise ConfigError(f"when_busy={self.when_busy!r} is none of {get_args(Drawn)}")

    @property
    def synchronous_ms(self) -> Fraction:
        """All of it if training stands still until each save is committed."""
        return self.steps * self.step_ms + self.steps // self.save_every * (self.copy_ms + self.write_ms)


@dataclass(frozen=True, slots=True)
class Span:
    """From a moment to a later one, in milliseconds."""

    start_ms: Fraction
    end_ms: Fraction

    @property
    def length_ms(self) -> Fraction:
        """How long it lasts."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save that was not skipped.

    Attributes:
        step: The step that training stood at.
        buffer: Which buffer holds the copy, from 0.
        wait: Training waited for the buffer; empty if one was free.
        copy: Training stood still for the copy. At its end the save is staged.
        write: The buffer was written. At its end the save is committed, and the buffer free.
    """

    step: int
    buffer: int
    wait: Span
    copy: Span
    write: Span

    @property
    def lag_ms(self) -> Fraction:
        """From the moment at which training stood at the step until the commit."""
        return self.write.end_ms - self.wait.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Steps that run without a pause, and the save after them.

    Attributes:
        first_step: The first of these steps, from 1.
        last_step: The last.
        run: When they run.
        save: The save; None if it was skipped, or the steps end with training before another is due.
        skipped: Whether a save was due and skipped.
    """

    first_step: int
    last_step: int
    run: Span
    save: Save | None
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule with saves in the background."""

    plan: Plan
    rounds: tuple[Round, ...]

    @property
    def saves(self) -> tuple[Save, ...]:
        """The saves that were not skipped, in order."""
        return tuple(one.save for one in self.rounds if one.save)

    @property
    def training_end_ms(self) -> Fraction:
        """When the training loop is left: after the last step, and the copy if a save follows it."""
        last = self.rounds[-1]
        return last.save.copy.end_ms if last.save else last.run.end_ms

    @property
    def last_commit_ms(self) -> Fraction | None:
        """When the last save is committed: not before then may the process end. None without a save."""
        return self.saves[-1].write.end_ms if self.saves else None

    @property
    def waited_ms(self) -> Fraction:
        """How long training waited for buffers."""
        return sum((save.wait.length_ms for save in self.saves), Fraction(0))

    @property
    def skipped(self) -> int:
        """Saves that were skipped."""
        return sum(one.skipped for one in self.rounds)

    @property
    def most_steps_at_risk(self) -> int:
        """The most finished steps that a crash would lose: just before a commit, or at the end if no commit follows."""
        worst = committed = begun = 0
        for save in self.saves:
            # Commits are in order, so the rounds are walked once, whatever their number.
            while begun + 1 < len(self.rounds) and self.rounds[begun + 1].run.start_ms <= save.write.end_ms:
                begun += 1
            worst = max(worst, self._finished_steps(self.rounds[begun], save.write.end_ms) - committed)
            committed = save.step
        return max(worst, self.plan.steps - committed)

    def _finished_steps(self, begun: Round, at_ms: Fraction) -> int:
        """Steps finished by then, if this is the last round that has begun."""
        since = (at_ms - begun.run.start_ms) // self.plan.step_ms
        return min(begun.last_step, begun.first_step - 1 + since)


def simulate(plan: Plan) -> Timeline:
    """The schedule of a plan."""
    rounds: list[Round] = []
    free_at_ms = [Fraction(0)] * plan.buffers
    writer_free_ms = now_ms = Fraction(0)
    saved = 0
    for first in range(1, plan.steps + 1, plan.save_every):
        last = min(first + plan.save_every - 1, plan.steps)
        run = Span(now_ms, now_ms + (last - first + 1) * plan.step_ms)
        now_ms, save, skipped = run.end_ms, None, False
        if last % plan.save_every == 0:
            # The one that is free first: there is one writer, so they are free in the order in which they were taken.
            buffer = saved % plan.buffers
            skipped = plan.when_busy == "skip" and free_at_ms[buffer] > now_ms
            if not skipped:
                wait = Span(now_ms, max(now_ms, free_at_ms[buffer]))
                copy = Span(wait.end_ms, wait.end_ms + plan.copy_ms)
                start_ms = max(copy.end_ms, writer_free_ms)
                write = Span(start_ms, start_ms + plan.write_ms)
                writer_free_ms = free_at_ms[buffer] = write.end_ms
                save = Save(step=last, buffer=buffer, wait=wait, copy=copy, write=write)
                now_ms = copy.end_ms
                saved += 1
        rounds.append(Round(first_step=first, last_step=last, run=run, save=save, skipped=skipped))
    return Timeline(plan=plan, rounds=tuple(rounds))
