"""``txstore timeline``: the schedule of `txstore.ops.timeline` as numbers, a table and a chart."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

from txstore.cli.outcome import OK, Outcome
from txstore.cli.render import Chart, Part, Table, count_text
from txstore.ops.timeline import Plan, Round, Save, Span, Timeline, simulate

ROWS = 20
"""Rounds in the table for people; ``--json`` has all."""

BUFFER_ROWS = 8
"""Buffers in the chart."""

_LABELS_WIDTH = 10
_TICK = 10
_WIDTH = 80
_STYLES = {
    **{str(digit): "black on bright_cyan" if digit % 2 else "black on cyan" for digit in range(10)},
    "c": "black on yellow",
    "q": "black on bright_black",
    "w": "black on green",
    ".": "red",
}
_LEGEND = "digits: step (last digit), c: copy, .: training waits, q: queued, w: write"


def timeline(plan: Plan) -> Outcome:
    """Simulate a plan, and draw it."""
    found = simulate(plan)
    return Outcome(OK, _document(found), tuple(_text(found)))


def _document(found: Timeline) -> dict[str, object]:
    plan = found.plan
    return {
        "unit": "ms",
        "plan": {
            "steps": plan.steps,
            "step_ms": _number(plan.step_ms),
            "save_every": plan.save_every,
            "copy_ms": _number(plan.copy_ms),
            "write_ms": _number(plan.write_ms),
            "buffers": plan.buffers,
            "when_busy": plan.when_busy,
        },
        "synchronous": {"total_ms": _number(plan.synchronous_ms)},
        "asynchronous": {
            "training_end_ms": _number(found.training_end_ms),
            "last_commit_ms": None if found.last_commit_ms is None else _number(found.last_commit_ms),
            "last_committed_step": found.saves[-1].step if found.saves else None,
            "waited_ms": _number(found.waited_ms),
            "skipped": found.skipped,
            "most_steps_at_risk": found.most_steps_at_risk,
            "rounds": [
                {
                    "first_step": one.first_step,
                    "last_step": one.last_step,
                    "run": _pair(one.run),
                    "skipped": one.skipped,
                    "save": _save(one.save) if one.save else None,
                }
                for one in found.rounds
            ],
        },
    }


def _save(save: Save) -> dict[str, object]:
    return {
        "step": save.step,
        "buffer": save.buffer,
        "wait": _pair(save.wait),
        "copy": _pair(save.copy),
        "write": _pair(save.write),
        "lag_ms": _number(save.lag_ms),
    }


def _pair(span: Span) -> list[int | float]:
    return [_number(span.start_ms), _number(span.end_ms)]


def _number(value: Fraction) -> int | float:
    # Computed exactly, rounded once at the very end: no 0.30000000000000004.
    return value.numerator if value.denominator == 1 else float(value)


def _ms(value: Fraction) -> str:
    return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"


def _text(found: Timeline) -> Iterator[Part]:
    plan = found.plan
    yield (
        f"{count_text(plan.steps, 'step')} of {_ms(plan.step_ms)} ms, a save every {plan.save_every}, "
        f"copy {_ms(plan.copy_ms)} ms, write {_ms(plan.write_ms)} ms, "
        f"{count_text(plan.buffers, 'buffer')}, {plan.when_busy}"
    )
    yield ""
    yield f"synchronous   total {_ms(plan.synchronous_ms)} ms"
    commit = "nothing is ever committed"
    if found.last_commit_ms is not None:
        commit = f"the last commit, of step {found.saves[-1].step}, is at {_ms(found.last_commit_ms)} ms"
    yield f"asynchronous  training ends at {_ms(found.training_end_ms)} ms, {commit}"
    yield f"              training waited {_ms(found.waited_ms)} ms; {count_text(found.skipped, 'save')} skipped"
    yield f"at risk       a crash loses {count_text(found.most_steps_at_risk, 'finished step')} at most"
    yield ""
    yield _table(found)
    if len(found.rounds) > ROWS:
        yield f"{len(found.rounds) - ROWS} more; --json shows all"
    yield ""
    yield from _chart(found)


def _table(found: Timeline) -> Table:
    rows = []
    for one in found.rounds[:ROWS]:
        steps = f"{one.first_step}-{one.last_step}" if one.first_step < one.last_step else str(one.last_step)
        rows.append((steps, _range(one.run), *(_cells(one.save) if one.save else (*[""] * 5, _why(one)))))
    return Table(("STEPS", "RUN", "WAITED", "COPY", "WRITE", "LAG", "BUFFER", "SAVE"), tuple(rows), frozenset({"LAG"}))


def _cells(save: Save) -> tuple[str, ...]:
    waited = _range(save.wait) if save.wait.length_ms else ""
    return (
        waited,
        _range(save.copy),
        _range(save.write),
        _ms(save.lag_ms),
        str(save.buffer + 1),
        f"committed at {_ms(save.write.end_ms)}",
    )


def _why(one: Round) -> str:
    return "skipped" if one.skipped else "none"


def _range(span: Span) -> str:
    return f"{_ms(span.start_ms)}-{_ms(span.end_ms)}"


def _chart(found: Timeline) -> Iterator[Part]:
    columns = shutil.get_terminal_size((_WIDTH, 0)).columns if sys.stdout.isatty() else _WIDTH
    end_ms = max(found.plan.synchronous_ms, found.training_end_ms, found.last_commit_ms or Fraction(0))
    canvas = _Canvas(end_ms, max(columns - _LABELS_WIDTH, 2 * _TICK))
    rows = [("ms", canvas.ruler()), ("sync", canvas.synchronous(found)), ("training", canvas.training(found))]
    drawn = min(found.plan.buffers, BUFFER_ROWS)
    rows += [(f"buffer {number + 1}", canvas.buffer(found, number)) for number in range(drawn)]
    yield Chart(tuple(rows), _STYLES)
    yield f"one cell is {_ms(canvas.cell_ms)} ms"
    yield _LEGEND
    if drawn < found.plan.buffers:
        yield f"{count_text(found.plan.buffers - drawn, 'more buffer')} not drawn"


class _Canvas:
    """Draws spans of time into rows of cells; a cell is 1, 2 or 5 times a power of ten milliseconds."""

    def __init__(self, end_ms: Fraction, cells: int) -> None:
        power = Fraction(10) ** (math.floor(math.log10(end_ms / cells)) - 1)
        sizes = (power * 10**more * digit for more in range(4) for digit in (1, 2, 5))
        self.cell_ms = next(size for size in sizes if math.ceil(end_ms / size) <= cells)
        self._cells = math.ceil(end_ms / self.cell_ms)

    def ruler(self) -> str:
        """Times, each above the cell where it begins."""
        longest = len(_ms(self._cells * self.cell_ms)) + 1
        tick = _TICK * math.ceil(longest / _TICK)
        marks = [_ms(cell * self.cell_ms) for cell in range(0, self._cells + 1, tick)]
        return "".join(mark.ljust(tick) for mark in marks).rstrip()

    def synchronous(self, found: Timeline) -> str:
        """The same steps and saves, with training standing still until each commit."""
        plan, row, now_ms = found.plan, [" "] * self._cells, Fraction(0)
        saves: list[tuple[Span, str]] = []
        for one in found.rounds:
            run = Span(now_ms, now_ms + one.run.length_ms)
            self._steps(row, one, run, plan.step_ms)
            now_ms = run.end_ms
            if one.save or one.skipped:
                copy = Span(now_ms, now_ms + plan.copy_ms)
                now_ms = copy.end_ms + plan.write_ms
                saves += [(Span(copy.end_ms, now_ms), "w"), (copy, "c")]
        return self._over(row, saves)

    def training(self, found: Timeline) -> str:
        """Steps, waits and copies."""
        row = [" "] * self._cells
        for one in found.rounds:
            self._steps(row, one, one.run, found.plan.step_ms)
        waits = [(save.wait, ".") for save in found.saves]
        return self._over(row, waits + [(save.copy, "c") for save in found.saves])

    def buffer(self, found: Timeline, number: int) -> str:
        """When a buffer is held, and by what."""
        mine = [save for save in found.saves if save.buffer == number]
        queued = [(Span(save.copy.end_ms, save.write.start_ms), "q") for save in mine]
        held = [(save.write, "w") for save in mine] + [(save.copy, "c") for save in mine]
        return self._over([" "] * self._cells, queued + held)

    def _steps(self, row: list[str], one: Round, run: Span, step_ms: Fraction) -> None:
        for cell in self._span(run):
            passed = max(cell * self.cell_ms - run.start_ms, Fraction(0)) // step_ms
            row[cell] = str(min(one.first_step + passed, one.last_step) % 10)

    def _over(self, row: list[str], spans: list[tuple[Span, str]]) -> str:
        """`row` with spans drawn over it in order: what is short comes last, or it would vanish in what is long."""
        for span, mark in spans:
            for cell in self._span(span):
                row[cell] = mark
        return "".join(row)

    def _span(self, span: Span) -> range:
        """The cells that a span touches: at least one, so that a short copy is seen, and none if it is empty."""
        if not span.length_ms:
            return range(0)
        return range(math.floor(span.start_ms / self.cell_ms), math.ceil(span.end_ms / self.cell_ms))
