"""Every example runs as it stands: killed and resumed it equals a run that nobody touched."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.scripts import start
from txstore.catalog import entries
from txstore.registry import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, SAVE_EVERY, DIE_AT = 12, 3, 7
RUN = ("--steps", STEPS, "--save-every", SAVE_EVERY)


def committed(url: str) -> list[int]:
    with open_store(url) as store:
        return [entry.decision.step or 0 for entry in entries(store) if entry.state == "committed"]


def losses(text: str) -> dict[int, str]:
    """The losses by step, as they were printed: every bit."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", text, re.MULTILINE)}


def parameters(text: str) -> list[str]:
    return re.findall(r"^parameters ([0-9a-f]{64})$", text, re.MULTILINE)


def assert_goes_on(untouched: str, resumed: str, newest: int) -> None:
    expected = losses(untouched)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert losses(resumed) == {step: loss for step, loss in expected.items() if step > newest}
    assert parameters(resumed) == parameters(untouched)
    assert len(parameters(untouched)) == 1


@pytest.mark.parametrize(
    "command",
    [
        ("plain_loop.py",),
        ("accelerate_loop.py",),
        ("lightning_checkpoint.py",),
        ("lightning_checkpoint.py", "--background"),
    ],
    ids=" ".join,
)
def test_killed_and_resumed_equals_untouched(command: tuple[str, ...], tmp_path: Path) -> None:
    script, *options = command
    url, other = ((tmp_path / name).as_uri() for name in ("killed", "untouched"))
    killed = start(EXAMPLES / script, url, *RUN, *options, "--die-at", DIE_AT, output=tmp_path / "1.txt")
    untouched = start(EXAMPLES / script, other, *RUN, *options, output=tmp_path / "2.txt")
    assert killed.wait() == [-signal.SIGKILL], killed.text
    before = committed(url)
    assert before, "the save before the last one has been waited for"
    resumed = start(EXAMPLES / script, url, *RUN, *options, output=tmp_path / "3.txt")
    assert_goes_on(untouched.finish(), resumed.finish(), before[-1])
    assert committed(url)[-1] == STEPS


def test_fsdp2_under_torchrun_is_killed_and_goes_on_with_as_many_ranks_and_with_fewer(tmp_path: Path) -> None:
    script = EXAMPLES / "fsdp2_loop.py"
    url, other = ((tmp_path / name).as_uri() for name in ("killed", "untouched"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    arguments = ["--nproc-per-node", "2", str(script), url, *map(str, RUN), "--die-at", str(DIE_AT)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    untouched = start(
        script, other, "--steps", STEPS + 3, "--save-every", STEPS + 3, output=tmp_path / "2.txt", world=2
    )
    done = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=120, check=False, env=env)
    assert "Signal 9 (SIGKILL)" in done.stderr, done.stderr
    newest = committed(url)[-1]
    expected = losses(untouched.finish())
    same = start(script, url, *RUN, output=tmp_path / "3.txt", world=2).finish()
    assert losses(same) == {step: loss for step, loss in expected.items() if newest < step <= STEPS}
    fewer = start(script, url, "--steps", STEPS + 3, output=tmp_path / "4.txt", world=1).finish()
    assert f"resumed step-{STEPS}" in fewer
    assert "saved by 2 ranks, resumed by 1" in fewer
    found = {step: float(loss) for step, loss in losses(fewer).items()}
    # Another number of ranks adds in another order: equal but for rounding.
    assert found == pytest.approx({step: float(loss) for step, loss in expected.items() if step > STEPS}, rel=1e-5)


def test_torchtitan_saves_and_loads_through_the_manager(tmp_path: Path) -> None:
    """The cases are in titan.py: one start of two ranks serves all of them, since torchtitan is slow to import."""
    script = start(Path(__file__).with_name("titan.py"), tmp_path, output=tmp_path / "out.txt", world=2)
    assert script.finish().count("all is well") == 2
