"""``txstore verify``: the report of `txstore.ops.verify` for people and machines, with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from txstore.catalog import find, newest, nothing_committed
from txstore.cli.outcome import DAMAGED, NOT_FOUND, OK, STORE, Outcome
from txstore.cli.render import Table, count_text, size_text
from txstore.keys import SlotName
from txstore.ops.report import Depth, Problem, Report, Step, StoreReport
from txstore.ops.verify import Observer, verify_store
from txstore.redact import printable
from txstore.store import Store


def verify(
    store: Store, checkpoint: str | None, *, everything: bool, depth: Depth, seed: int | None, blocks: int
) -> Outcome:
    """Verify one name, the newest, or all commits that are not retired."""
    name = checkpoint
    if name is None and not everything:
        name = newest(store).checkpoint
    with _progress() as observer:
        report = verify_store(store, checkpoint=name, depth=depth, seed=seed, sample_blocks=blocks, progress=observer)
    if not report.reports and not report.problems:
        if name is not None:
            find(store, name)  # raises: not found, or retired
        raise nothing_committed(store)
    return Outcome(_code(report, one=not everything), _document(report, depth, blocks), tuple(_text(report)))


def _code(report: StoreReport, *, one: bool) -> int:
    if report.state != "sound":
        return DAMAGED if report.state == "damaged" else STORE
    # Removed on purpose while it was read: no damage, but no checkpoint that could be loaded either.
    return NOT_FOUND if one and all(found.state == "retired" for found in report.reports) else OK


def _document(report: StoreReport, depth: Depth, blocks: int) -> dict[str, object]:
    return {
        "state": report.state,
        "depth": depth,
        "seed": report.reports[0].seed if report.reports and depth == "sample" else None,
        "sample_blocks": blocks if depth == "sample" else None,
        "problems": [_problem(problem) for problem in _problems(report)],
        "checkpoints": [
            {
                "checkpoint": found.decision.checkpoint,
                "slot": found.decision.slot,
                "step": found.decision.step,
                "txn": found.decision.txn,
                "state": found.state,
                "superseded": _is_superseded(report, found),
                "shards": found.shards,
                "blocks": found.blocks,
                "bytes_read": found.bytes_read,
                "problems": [_problem(problem) for problem in _problems_of(report, found)],
            }
            for found in report.reports
        ],
    }


def _is_superseded(report: StoreReport, found: Report) -> bool:
    return report.is_superseded(SlotName(found.decision.checkpoint, found.decision.slot))


def _problems(report: StoreReport) -> list[Problem]:
    """Of the records."""
    above = "a later slot stands, and readers take that one; what this record named is kept"
    return [replace(one, next_step=above) if report.is_harmless(one) else one for one in report.problems]


def _problems_of(report: StoreReport, found: Report) -> list[Problem]:
    """Of one commit."""
    above = f"a later slot of {found.decision.checkpoint} stands, and readers take that one; retention removes this one"
    is_superseded = _is_superseded(report, found)
    return [replace(one, next_step=above) if is_superseded else one for one in found.problems]


def _problem(problem: Problem) -> dict[str, str]:
    return {"kind": problem.kind, "key": problem.key, "what": problem.what, "next_step": problem.next_step}


def _text(report: StoreReport) -> Iterator[str | Table]:
    problems = _problems(report)
    for found in report.reports:
        superseded = "superseded, " if _is_superseded(report, found) else ""
        yield f"{found.decision.checkpoint} (slot {found.decision.slot}): {superseded}{found.state}; {_extent(found)}"
        problems += _problems_of(report, found)
    if problems:
        yield ""
        yield Table(("PROBLEM", "KEY", "WHAT"), tuple((one.kind, one.key, one.what) for one in problems))
        yield ""
        for step in dict.fromkeys(one.next_step for one in problems):
            yield f"next: {step}"


def _extent(found: Report) -> str:
    read = f"{count_text(found.shards, 'shard')}, documents and sizes"
    if found.depth == "documents":
        return read
    read = (
        f"{count_text(found.shards, 'shard')}, {count_text(found.blocks, 'block')}, {size_text(found.bytes_read)} read"
    )
    return f"{read}, seed {found.seed}" if found.depth == "sample" else f"{read}, every byte"


@contextmanager
def _progress() -> Iterator[Observer | None]:
    """A bar on stderr, on a terminal only: a log file must not fill with it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal pays for rich
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("verify", total=None)

        def observe(step: Step) -> None:
            name = printable(f"{step.decision.checkpoint} {step.key.rpartition('/')[2]}")
            bar.update(task, description=name, completed=step.done_bytes, total=step.total_bytes or None)

        yield observe
