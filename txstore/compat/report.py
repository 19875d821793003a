"""A judgement for people: rich tables. Only what prints imports this module."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from txstore.compat.judgement import ORDER, Judgement
from txstore.redact import printable

_STYLES = {"blocked": "bold red", "accepted": "yellow", "allowed": "green", "noted": "dim"}


def render(judgement: Judgement, console: Console | None = None) -> None:
    """Print a judgement: the verdict, every difference, hints and notes."""
    (console or Console(highlight=False, markup=False, emoji=False)).print(renderable(judgement))


def renderable(judgement: Judgement) -> RenderableType:
    """A judgement as something that rich prints. Names come from documents that others wrote, so they are escaped."""
    count = len(judgement.blocking)
    verdict = Text("resume allowed", style="bold green")
    if not judgement.allowed:
        verdict = Text(f"resume blocked by {count} difference{'' if count == 1 else 's'}", style="bold red")
    parts: list[RenderableType] = [verdict]
    parts += [Text(f"hint: {printable(hint)}", style="bold") for hint in judgement.hints]
    if judgement.differences:
        parts.append(_table(judgement))
    parts += [Text(f"note: {printable(remark)}") for remark in judgement.remarks]
    if judgement.matrix_entry:
        parts.append(Text("the entry for the matrix, for when a drill has passed:"))
        parts += [Text(printable(line)) for line in judgement.matrix_entry.splitlines()]
    return Group(*parts)


def _table(judgement: Judgement) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("VERDICT", "WHAT", "SAVED", "NOW", "BY / NEXT STEP"):
        table.add_column(name, overflow="fold")
    for verdict in ORDER:
        for one in judgement.differences:
            if one.verdict == verdict:
                what = f"{one.kind.replace('_', ' ')} {one.name}"
                cells = (what, one.saved or "-", one.now or "-", one.by or one.next_step)
                table.add_row(Text(verdict, style=_STYLES[verdict]), *(Text(printable(cell)) for cell in cells))
    return table
