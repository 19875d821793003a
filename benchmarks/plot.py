"""Bars of one result file: ``python -m benchmarks.plot RESULTS.json FOLDER``. Runs in the peers' environment."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

TITLES = {
    "disk": "POSIX, disk",
    "tmpfs": "POSIX, tmpfs",
    "s3": "S3 (SeaweedFS)",
    "gcs": "GCS (fake-gcs-server)",
    "azure": "Azure (Azurite)",
}


def main(source: Path, folder: Path) -> None:
    """Draw save and load of the large tensors by one rank: MiB/s, each backend a row."""
    results = json.loads(source.read_text())
    records = [r for r in results["records"] if r["world"] == r["readers"] == 1 and r["kind"] == "large"]
    backends = [backend for backend in TITLES if any(record["backend"] == backend for record in records)]
    figure, axes = plt.subplots(len(backends), 2, figsize=(11, 1.9 * len(backends)), squeeze=False)
    for row, backend in zip(axes, backends, strict=True):
        for axis, operation in zip(row, ("save", "load"), strict=True):
            chosen = [r for r in records if (r["backend"], r["operation"]) == (backend, operation)]
            _bars(axis, f"{TITLES[backend]}: {operation}", chosen)
    machine = results["machine"]
    figure.suptitle(
        f"MiB/s, median and range of {len(records[0]['rounds'])} or fewer rounds; "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB",
        fontsize=10,
    )
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "performance.svg", metadata={"Date": None})


def _bars(axis: Any, title: str, records: list[dict[str, Any]]) -> None:
    for number, record in enumerate(records):
        rates = [one["needed_bytes"] / 2**20 / one["wall_s"] for one in record["rounds"]]
        middle = statistics.median(rates)
        ours = record["contender"] == "txstore"
        axis.barh(number, middle, color="#2563eb" if ours else "#9ca3af")
        axis.plot([min(rates), max(rates)], [number, number], color="black", linewidth=1)
    axis.set_yticks(range(len(records)), [record["contender"] for record in records], fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=9)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
