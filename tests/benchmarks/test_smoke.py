"""The benchmarks run to their end. What they measure is not looked at here: a busy machine is not a failure."""

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
        timeout=150,
        check=False,
    )


def test_record(tmp_path: Path) -> None:
    out, disk = tmp_path / "smoke.json", tmp_path / "disk"
    disk.mkdir()
    done = run("--smoke", "--mib", "4", "--disk", str(disk), "--out", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    seen = {(record["contender"], record["operation"]) for record in results["records"]}
    operations = {"save", "load", "load model only", "reshard"}
    assert {operation for contender, operation in seen if contender == "txstore"} == operations
    assert {operation for contender, operation in seen if contender.startswith("DCP")} == operations
    for record in results["records"]:
        for one in record["rounds"]:
            assert one["wall_s"] > 0
            assert one["cpu_s"] > 0
            assert one["needed_bytes"] > 0
    assert "verified load against DCP FileSystem" in done.stdout
    assert list(disk.iterdir()) == []
    assert str(tmp_path) not in out.read_text()


def test_scale(tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    done = run("scale", "--ranks", "8", "--chunks", "64", "128", "--steps", "0", "20", "--out", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert [one["chunks"] for one in results["checkpoints"]] == [64, 128]
    few, many = results["steps"]
    assert few["steps"] < many["steps"]
    # The first commit of a store also writes txstore.json.
    assert sum(many["commit"].values()) <= sum(few["commit"].values())


def test_a_load_that_brings_other_values_is_no_measurement(tmp_path: Path) -> None:
    code = """
import sys
from benchmarks import contenders, hosts
class Nothing(contenders.Contender):
    def save(self, state, name): pass
    def load(self, state, name): pass
contenders.MAKERS["txstore"] = Nothing
from benchmarks import client
client.main()
"""
    requests = [
        {
            "do": "start",
            "group": "a",
            "contender": "txstore",
            "place": {"url": "file://" + str(tmp_path), "options": {}},
        }
        | {"world": 1, "kind": "large", "mib": 4, "warm": False},
        {"do": "load", "group": "a", "name": "step-1", "only": None},
    ]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    started, loaded = (json.loads(line)["ranks"][0] for line in done.stdout.splitlines())
    assert started["bytes"] == 4 << 20
    assert "loaded values differ" in loaded["error"]


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
