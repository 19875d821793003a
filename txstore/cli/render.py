"""Text output: rich tables on a terminal, plain aligned columns everywhere else. rich is loaded only for the first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from txstore.redact import printable

_NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; columns whose header is in `right` are aligned to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows of a label and one character a cell; `styles` colours characters where there are colours."""

    rows: tuple[tuple[str, str], ...]
    styles: dict[str, str]

    def lines(self) -> list[tuple[str, str]]:
        """The rows with labels of one width."""
        width = max(len(label) for label, _ in self.rows) + 2
        return [(label.ljust(width), cells) for label, cells in self.rows]


Part = str | Table | Chart


def render(parts: Sequence[Part]) -> None:
    """Write lines, tables and charts to stdout. Control characters are escaped here, whatever the caller did."""
    if sys.stdout.isatty():
        _render_rich(parts)
        return
    lines: list[str] = []
    for part in parts:
        if isinstance(part, Chart):
            lines += [f"{label}{cells}".rstrip() for label, cells in part.lines()]
        else:
            lines += [printable(part)] if isinstance(part, str) else _aligned(part)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _aligned(table: Table) -> list[str]:
    rows = [table.columns, *([printable(cell) or "-" for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [name in table.right for name in table.columns]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _render_rich(parts: Sequence[Part]) -> None:
    from rich import box  # noqa: PLC0415 - piped and JSON output must not pay for rich
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.table import Table as RichTable  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console = Console(highlight=False, markup=False, emoji=False)
    for part in parts:
        if isinstance(part, str):
            console.print(Text(printable(part)), soft_wrap=True)
            continue
        if isinstance(part, Chart):
            for label, cells in part.lines():
                coloured = [(cell, part.styles.get(cell, "")) for cell in cells]
                console.print(Text.assemble(label, *coloured), soft_wrap=True)
            continue
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in part.columns:
            shown.add_column(name, justify="right" if name in part.right else "left", overflow="fold")
        for row in part.rows:
            shown.add_row(*(Text(printable(cell) or "-") for cell in row))
        if console.measure(shown, options=console.options.update(max_width=_NO_LIMIT)).maximum > console.width:
            # rich would break cells over lines, and a name in two pieces cannot be copied.
            sys.stdout.write("".join(f"{line}\n" for line in _aligned(part)))
        else:
            console.print(shown)


def size_text(count: int | None) -> str:
    """Bytes for people: ``0 B``, ``1.5 KiB``, ``12.0 GiB``."""
    if count is None:
        return ""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def count_text(count: int, noun: str) -> str:
    """``1 shard``, ``2 shards``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
