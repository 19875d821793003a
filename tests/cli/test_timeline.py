"""``txstore timeline``: the worked example of the documents, in numbers and drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.terminals import on_terminal
from txstore.cli.outcome import OK, USAGE

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_defaults_are_the_worked_example(cli) -> None:
    answer = cli("timeline", "--json")
    assert (answer.code, answer.err) == (OK, "")
    document = answer.json
    assert document["version"] == 1
    assert "url" not in document
    assert document["unit"] == "ms"
    assert document["plan"] == {
        "steps": 4,
        "step_ms": 10,
        "save_every": 2,
        "copy_ms": 2,
        "write_ms": 12,
        "buffers": 1,
        "when_busy": "wait",
    }
    assert document["synchronous"] == {"total_ms": 68}
    background = document["asynchronous"]
    assert [one["run"] for one in background["rounds"]] == [[0, 20], [22, 42]]
    assert [one["save"]["copy"] for one in background["rounds"]] == [[20, 22], [42, 44]]
    assert [one["save"]["write"] for one in background["rounds"]] == [[22, 34], [44, 56]]
    assert (background["training_end_ms"], background["last_commit_ms"]) == (44, 56)
    assert (background["last_committed_step"], background["most_steps_at_risk"]) == (4, 3)


def test_slow_storage(cli) -> None:
    background = cli("timeline", "--write-ms", "40", "--json").json["asynchronous"]
    assert background["rounds"][0]["save"]["write"] == [22, 62]
    assert background["rounds"][1]["save"] == {
        "step": 4,
        "buffer": 0,
        "wait": [42, 62],
        "copy": [62, 64],
        "write": [64, 104],
        "lag_ms": 62,
    }
    assert (background["training_end_ms"], background["last_commit_ms"], background["waited_ms"]) == (64, 104, 20)


def test_skipping(cli) -> None:
    args = ("timeline", "--write-ms", "40", "--when-busy", "skip")
    background = cli(*args, "--json").json["asynchronous"]
    assert (background["skipped"], background["last_committed_step"]) == (1, 2)
    assert background["rounds"][1] == {"first_step": 3, "last_step": 4, "run": [22, 42], "skipped": True, "save": None}
    assert "1 save skipped" in cli(*args).out


def test_the_chart_of_the_worked_example(cli) -> None:
    out = cli("timeline").out
    assert "synchronous   total 68 ms" in out
    assert "training ends at 44 ms, the last commit, of step 4, is at 56 ms" in out
    chart = out[out.index("ms   ") :].splitlines()
    steps = "1" * 10 + "2" * 10 + "cc" + "3" * 10 + "4" * 10 + "cc"
    assert chart[0] == "ms        0         10        20        30        40        50        60"
    assert chart[1] == "sync      " + "1" * 10 + "2" * 10 + "cc" + "w" * 12 + "3" * 10 + "4" * 10 + "cc" + "w" * 12
    assert chart[2] == "training  " + steps
    assert chart[3] == "buffer 1  " + " " * 20 + "cc" + "w" * 12 + " " * 8 + "cc" + "w" * 12
    assert chart[4] == "one cell is 1 ms"
    assert all(len(line) <= 80 for line in out.splitlines())


def test_waiting_and_queueing_are_drawn(cli) -> None:
    out = cli("timeline", "--steps", "3", "--save-every", "1", "--write-ms", "30", "--buffers", "2").out
    chart = {line[:8].strip(): line[10:] for line in out[out.index("ms   ") :].splitlines()}
    # Of 2 ms a cell: training waits from 34 to 42; the second buffer is copied at 22-24 and written from 42.
    assert chart["training"] == "11111c22222c33333....c"
    assert chart["buffer 2"] == " " * 11 + "c" + "q" * 9 + "w" * 15


def test_a_short_copy_is_seen_in_a_long_run(cli) -> None:
    out = cli("timeline", "--steps", "1000", "--save-every", "500", "--copy-ms", "0.5", "--write-ms", "1").out
    training = next(line for line in out.splitlines() if line.startswith("training  "))
    assert training.count("c") >= 2
    assert "one cell is 200 ms" in out


@pytest.mark.parametrize("steps", ["1000000", "999999999"])
@pytest.mark.parametrize("step_ms", ["0.000001", "7", "999999999999.999999"])
def test_every_scale_fits(cli, steps: str, step_ms: str) -> None:
    answer = cli("timeline", "--steps", steps, "--save-every", "100000", "--step-ms", step_ms, "--buffers", "9")
    assert answer.code == OK
    *_, end = answer.out.partition("\n\nms  ")
    assert all(len(line) <= 80 for line in end.splitlines()[1:] if not line.startswith("digits"))
    ticks = re.split(r" +", end.splitlines()[0].strip())
    assert len(ticks) >= 2
    assert "1 more buffer not drawn" in end


def test_long_schedules_are_cut_for_people_only(cli) -> None:
    args = ("timeline", "--steps", "100", "--save-every", "1")
    assert "80 more; --json shows all" in cli(*args).out
    assert len(cli(*args, "--json").json["asynchronous"]["rounds"]) == 100


def test_decimals_are_exact(cli) -> None:
    args = (
        "timeline",
        "--steps",
        "3",
        "--save-every",
        "1",
        "--step-ms",
        "0.1",
        "--copy-ms",
        "0.2",
        "--write-ms",
        "0.3",
    )
    assert cli(*args, "--json").json["synchronous"] == {"total_ms": 1.8}
    assert "total 1.8 ms" in cli(*args).out


@pytest.mark.parametrize(
    "args",
    [
        ["--step-ms", "0"],
        ["--step-ms", "nan"],
        ["--copy-ms", "-1"],
        ["--write-ms", "1e3"],
        ["--write-ms", "1/3"],
        ["--steps", "0"],
        ["--buffers", "0"],
        ["--when-busy", "raise"],
        ["--steps", "1000000", "--save-every", "1"],
    ],
    ids=" ".join,
)
def test_wrong_usage(cli, args: list[str]) -> None:
    answer = cli("timeline", *args)
    assert (answer.code, answer.out) == (USAGE, "")


@pytest.mark.parametrize("columns", [40, 100])
def test_a_terminal_gets_colours_and_a_chart_of_its_width(columns: int) -> None:
    code, seen = on_terminal("timeline", columns=columns)
    assert code == OK
    assert "\x1b[" in seen
    bare = re.sub(r"\x1b\[[0-9;]*m", "", seen).replace("\r", "")
    sync = next(line for line in bare.splitlines() if line.startswith("sync  "))
    assert len(sync) <= columns
    assert len(sync) == {40: 10 + 14, 100: 10 + 68}[columns]


def test_the_documents_show_what_the_command_prints(cli) -> None:
    shown = re.search(r"```\n(4 steps of 10 ms.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert shown
    assert shown[1] == cli("timeline").out
