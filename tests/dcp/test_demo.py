"""The demo in a short form, and that it notices a resume that is not exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def demo_command(folder: Path) -> list[str]:
    return [sys.executable, str(DEMO / "run.py"), "--dir", str(folder), "--steps", "6", "--save-every", "2"]


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            found.append(pid)
        except ProcessLookupError:
            pass
    return found


def test_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    done = subprocess.run(demo_command(tmp_path), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "half-written, no decision" in done.stdout
    assert "step 2, the newest committed" in done.stdout
    assert "bit for bit, 4 steps" in done.stdout
    assert not alive([int(file.name) for file in tmp_path.glob("*/pids/*")])


def test_a_driver_that_is_ended_leaves_no_rank_behind(tmp_path: Path) -> None:
    driver = subprocess.Popen(demo_command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("control/pids/*"))) < 2:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=60)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 143
    assert not alive([int(file.name) for file in tmp_path.glob("control/pids/*")])


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DEMO))
    import run

    return run


def write_run(demo: ModuleType, folder: Path, name: str, events: list[dict[str, Any]]) -> Any:
    (folder / name).mkdir()
    (folder / name / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return demo.Run(name=name, folder=folder / name, url="file:///unused", steps=4, save_every=1)


def steps(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": n, "loss": 5.0 - n / 3, "rate": 0.1 / n, "cursor": 16 * n}
        for n in range(first, last + 1)
    ]


def end(parameters: str = "f00d") -> dict[str, Any]:
    return {"event": "end", "step": 4, "parameters": parameters}


def start(step: int) -> dict[str, Any]:
    return {"event": "start", "step": step}


CONTROL = [start(0), *steps(1, 4), end()]
KILLED = [start(0), *steps(1, 3)]
RESUMED = [start(2), *steps(3, 4), end()]


def test_an_exact_resume_is_accepted(demo: ModuleType, tmp_path: Path) -> None:
    logs = {"control": CONTROL, "killed": KILLED, "resumed": RESUMED}
    runs = [write_run(demo, tmp_path, name, events) for name, events in logs.items()]
    assert demo.check_equal(*runs, 2) == 2


@pytest.mark.parametrize(
    ("resumed", "complaint"),
    [
        pytest.param([start(3), *steps(4, 4), end()], "from step 3 instead of 2", id="took-the-half-written-one"),
        pytest.param([start(0), *steps(1, 4), end()], "resumed from step 0 instead of 2", id="began-again"),
        pytest.param([start(2), *steps(4, 4), end()], "left out steps", id="skipped-a-step"),
        pytest.param([start(2), *steps(3, 4), end("beef")], "the parameters differ", id="other-parameters"),
        *(
            pytest.param(
                [start(2), {**steps(3, 3)[0], name: value}, *steps(4, 4), end()], "resumed run, step 3", id=name
            )
            for name, value in {"loss": 4.0000000000000009, "rate": 0.1, "cursor": 16}.items()
        ),
    ],
)
def test_an_inexact_resume_is_noticed(
    demo: ModuleType, tmp_path: Path, resumed: list[dict[str, Any]], complaint: str
) -> None:
    logs = {"control": CONTROL, "killed": KILLED, "resumed": resumed}
    runs = [write_run(demo, tmp_path, name, events) for name, events in logs.items()]
    with pytest.raises(demo.DemoFailedError, match=complaint):
        demo.check_equal(*runs, 2)


def test_a_folder_of_someone_else_is_not_emptied(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(demo.DemoFailedError, match="not the demo's"):
        demo.fresh_folder(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_text_is_what_its_script_writes() -> None:
    done = subprocess.run([sys.executable, str(DEMO / "make_corpus.py")], capture_output=True, timeout=60, check=True)
    assert done.stdout == (DEMO / "corpus.txt").read_bytes()
    assert 100_000 < len(done.stdout) < 200_000
