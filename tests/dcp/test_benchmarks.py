"""The benchmarks run. What they measure is not looked at here: a busy machine is not a failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_stall(tmp_path: Path) -> None:
    done = run("stall", "--mib", "2", "--tensor-mib", "1", "--rounds", "2", "--folder", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert {"txstore", "limit: warm copy_"} < set(result["median_s"]) == set(result["first_s"])
    assert all(seconds > 0 for seconds in result["median_s"].values())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_name_lists_the_benchmarks() -> None:
    done = run("no-such")
    assert done.returncode == 2
    assert "stall" in done.stdout
    assert "scale" in done.stdout
