"""What a run says: tables, ratios of medians, the targets, JSON, and the plot."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.cases import DCP, FSSPEC, NAMES, OURS, RAW, S3_TORCH, SHARED, UNVERIFIED

RESULTS = Path(__file__).parent / "results"
WIDTH = 128
PLOTS = Path(__file__).parents[1] / "docs"

Record = dict[str, Any]

_FIGURES = ("MiB/s", "txstore is", "range", "CPU-s/GiB", "extra MiB", "requests", "moved/needed")
_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"


def median(record: Record, field: str) -> float:
    """Of one measurement over the rounds."""
    return statistics.median(one[field] for one in record["rounds"])


def rate(record: Record) -> float:
    """MiB/s of needed bytes, by the median time."""
    return record["rounds"][0]["needed_bytes"] / 2**20 / median(record, "wall_s")


def cpu(record: Record) -> float:
    """CPU-seconds of all client processes for a GiB of needed bytes."""
    return median(record, "cpu_s") * 2**30 / record["rounds"][0]["needed_bytes"]


def extra_mib(record: Record) -> float:
    """The most memory above the state in any round, in MiB, of one rank."""
    return max(one["extra_bytes"] for one in record["rounds"]) / 2**20


def amplification(record: Record) -> float | None:
    """Bytes that moved over bytes that were needed, if they were counted."""
    moved = record.get("moved_bytes")
    return None if moved is None else moved / record["rounds"][0]["needed_bytes"]


def show(results: dict[str, Any]) -> None:
    """The tables and the verdicts."""
    console = Console(width=WIDTH)
    computer = results["machine"]
    console.print(
        f"{computer['cores']} cores ({computer['processor']}), {computer['memory_gib']} GiB, "
        f"Linux {computer['kernel']}, disk {computer['file_systems']['disk']}, load {computer['load_average']:.1f}; "
        f"{results['mode']} run, {results['seconds']} s"
    )
    records = results["records"]
    for backend, case in dict.fromkeys((record["backend"], record["case"]) for record in records):
        chosen = [record for record in records if (record["backend"], record["case"]) == (backend, case)]
        console.print(_table(f"{NAMES[backend]}: {case}", chosen))
    for line in verdicts(records):
        console.print(line, highlight=False, markup=False)


def _table(title: str, records: list[Record]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("operation", "contender"):
        table.add_column(column)
    for column in _FIGURES:
        table.add_column(column, justify="right")
    for row, last in _rows(records):
        table.add_row(*row, end_section=last)
    return table


def _rows(records: list[Record]) -> Iterator[tuple[list[str], bool]]:
    """The cells of one case, and whether a row is the last of its operation."""
    for operation in dict.fromkeys(record["operation"] for record in records):
        group = [record for record in records if record["operation"] == operation]
        ours = next((median(record, "wall_s") for record in group if record["contender"] == OURS), None)
        for number, record in enumerate(group):
            middle, seconds = median(record, "wall_s"), [one["wall_s"] for one in record["rounds"]]
            moved = amplification(record)
            row = [
                "" if number else operation,
                record["contender"],
                f"{rate(record):.0f}",
                f"{middle / ours:.2f}x" if ours else "",
                f"{min(seconds) / middle:.2f}-{max(seconds) / middle:.2f}",
                f"{cpu(record):.2f}",
                f"{extra_mib(record):.0f}",
                str(sum(record["requests"].values())) if "requests" in record else "",
                "" if moved is None else f"{moved:.3f}",
            ]
            yield row, number == len(group) - 1


@dataclass(frozen=True)
class Target:
    """A figure to reach: what, on which backends, and how it is computed from the records of one case."""

    what: str
    backends: tuple[str, ...]
    goal: float
    sense: Literal[">=", "<="]
    value: Callable[[dict[tuple[str, str], Record]], float | None]


def _faster(operation: str, peers: Iterable[str]) -> Callable[[dict[tuple[str, str], Record]], float | None]:
    """How many times faster txstore is than the fastest of `peers`."""

    def value(of: dict[tuple[str, str], Record]) -> float | None:
        theirs = [median(of[peer, operation], "wall_s") for peer in peers if (peer, operation) in of]
        ours = of.get((OURS, operation))
        return min(theirs) / median(ours, "wall_s") if ours and theirs else None

    return value


def _own(
    operation: str, figure: Callable[[Record], float | None], contender: str = OURS
) -> Callable[[dict[tuple[str, str], Record]], float | None]:
    return lambda of: figure(of[contender, operation]) if (contender, operation) in of else None


def _checksum_cost(of: dict[tuple[str, str], Record]) -> float | None:
    if (UNVERIFIED, "load") not in of:
        return None
    return median(of[OURS, "load"], "wall_s") / median(of[UNVERIFIED, "load"], "wall_s") - 1


POSIX, CLOUDS = ("disk", "tmpfs"), ("s3", "gcs", "azure")

TARGETS = (
    Target("save against DCP FileSystem, its better setting", ("disk",), 1.2, ">=", _faster("save", DCP)),
    Target("save against DCP FileSystem, its better setting", ("tmpfs",), 1.5, ">=", _faster("save", DCP)),
    Target("save against DCP FileSystem as it comes", ("disk",), 1.2, ">=", _faster("save", DCP[:1])),
    Target("save against DCP FileSystem as it comes", ("tmpfs",), 1.5, ">=", _faster("save", DCP[:1])),
    Target("save against the best raw write", POSIX, 0.95, ">=", _faster("save", RAW)),
    Target("verified load against DCP FileSystem, its better setting", POSIX, 4.0, ">=", _faster("load", DCP)),
    Target("load, CPU-s/GiB", POSIX, 0.45, "<=", _own("load", cpu)),
    Target("time that checksums add to a load", POSIX, 0.10, "<=", _checksum_cost),
    Target("save against s3torchconnector, its better setting", ("s3",), 1.1, ">=", _faster("save", S3_TORCH)),
    Target("save against s3torchconnector as it comes", ("s3",), 1.1, ">=", _faster("save", S3_TORCH[:1])),
    Target("load against s3torchconnector, its better setting", ("s3",), 2.5, ">=", _faster("load", S3_TORCH)),
    Target("save, CPU-s/GiB", ("s3",), 1.0, "<=", _own("save", cpu)),
    Target("load, CPU-s/GiB", ("s3",), 0.8, "<=", _own("load", cpu)),
    Target("save against DCP Fsspec", ("gcs", "azure"), 1.5, ">=", _faster("save", (FSSPEC,))),
    Target("load against DCP Fsspec", ("gcs", "azure"), 4.0, ">=", _faster("load", (FSSPEC,))),
    Target("bytes read over needed, model only", (*POSIX, *CLOUDS), 1.05, "<=", _own("load model only", amplification)),
    Target(
        "bytes read over needed, reshard, reads shared",
        (*POSIX, *CLOUDS),
        1.05,
        "<=",
        _own("reshard", amplification, SHARED),
    ),
    Target("extra memory of a save, MiB", (*POSIX, *CLOUDS), 256, "<=", _own("save", extra_mib)),
    Target("extra memory of a load, MiB", (*POSIX, *CLOUDS), 256, "<=", _own("load", extra_mib)),
)


def verdicts(records: list[Record]) -> list[str]:
    """Each target in each case of its backends that has what it needs: met, or missed."""
    cases: dict[tuple[str, str], dict[tuple[str, str], Record]] = {}
    for record in records:
        of = cases.setdefault((record["backend"], record["case"]), {})
        of[record["contender"], record["operation"]] = record
    lines = []
    for target in TARGETS:
        for (backend, case), of in cases.items():
            value = target.value(of) if backend in target.backends else None
            if value is None:
                continue
            met = value >= target.goal if target.sense == ">=" else value <= target.goal
            lines.append(
                f"{'met   ' if met else 'MISSED'} {NAMES[backend]}: {target.what}: "
                f"{value:.2f} (goal {target.sense} {target.goal:g}) [{case}]"
            )
    return lines


def document(results: dict[str, Any], page: Path = PLOTS / "performance.md") -> None:
    """Put the tables and verdicts of a run into the page, between its two marks."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    page.write_text(before + _BEGIN + "\n" + _markdown(results) + _END + after, encoding="utf-8")


def _markdown(results: dict[str, Any]) -> str:
    computer, records = results["machine"], results["records"]
    machine = (
        f"{computer['cores']} cores ({computer['processor']}), {computer['memory_gib']} GiB of memory, "
        f"Linux {computer['kernel']}, disk {computer['file_systems']['disk']}, "
        f"torch {computer['versions']['torch']}, load average {computer['load_average']:.1f} at the end; "
        f"a {results['mode']} run of {results['seconds']} s."
    )
    lines = [machine]
    for backend, case in dict.fromkeys((record["backend"], record["case"]) for record in records):
        chosen = [record for record in records if (record["backend"], record["case"]) == (backend, case)]
        lines += ["", f"### {NAMES[backend]}: {case}", "", "| operation | contender | " + " | ".join(_FIGURES) + " |"]
        lines.append("|---|---|" + "---:|" * len(_FIGURES))
        lines += [f"| {' | '.join(row)} |" for row, _ in _rows(chosen)]
    lines += ["", "### Targets", "", *(f"- {line}" for line in verdicts(records)), ""]
    return "\n".join(lines)


def path_of(mode: str, out: Path | None) -> Path:
    """Where a run's JSON goes; one file a mode, so that the repository holds the newest of each."""
    return out or RESULTS / f"{mode}.json"


def write(results: dict[str, Any], path: Path) -> None:
    """The JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def plot(path: Path, python: Path) -> None:
    """The plot, drawn in the peers' environment, which has matplotlib."""
    subprocess.run([python, "-m", "benchmarks.plot", path, PLOTS], cwd=Path(__file__).parents[1], check=True)
