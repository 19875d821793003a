"""One launch of train.py on all ranks: its processes, its files and what it logged."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

TRAIN = Path(__file__).with_name("train.py")
RANKS = 2
TIMEOUT_S = 150
POLL_S = 0.02


class DemoFailedError(Exception):
    """Something is not as the demo claims."""


def expect(claim: object, otherwise: str) -> None:
    """Fail the demo unless `claim` holds."""
    if not claim:
        raise DemoFailedError(otherwise)


@dataclass(kw_only=True)
class Run:
    """A context manager: whatever happens inside it, no process is left behind."""

    name: str
    folder: Path
    url: str
    steps: int
    save_every: int
    stop_in: str = ""
    launcher: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    seconds: float = 0.0

    def __enter__(self) -> Self:
        self.pids.mkdir(parents=True)
        arguments = ["--url", self.url, "--losses", str(self.log), "--pids", str(self.pids)]
        arguments += ["--steps", str(self.steps), "--save-every", str(self.save_every)]
        if self.stop_in:
            arguments += ["--stop-in", self.stop_in, "--stop-marker", str(self.stopped)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if sys.platform == "linux":
            env["GLOO_SOCKET_IFNAME"] = "lo"
        self.seconds = -time.monotonic()
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*torchrun, "--nproc-per-node", str(RANKS), str(TRAIN), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C then reaches the driver alone, which ends the ranks in __exit__.
                start_new_session=True,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.launcher is not None
        if self.launcher.poll() is not None:
            return
        self._kill_ranks()
        # Ends ranks that had not left their process id yet.
        self.launcher.terminate()
        try:
            self.launcher.wait(30)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()

    @property
    def pids(self) -> Path:
        return self.folder / "pids"

    @property
    def log(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def stopped(self) -> Path:
        """Appears when the run stands still before a commit."""
        return self.folder / "stopped"

    @property
    def output(self) -> Path:
        return self.folder / "output.txt"

    def finish(self) -> None:
        """Wait for a run that must succeed."""
        expect(self._wait() == 0, f"the {self.name} run failed, see {self.output}:\n{self.tail()}")

    def wait_until_stopped(self) -> None:
        """Wait until all shards of the last save are written and nothing is decided."""
        assert self.launcher is not None
        deadline = time.monotonic() + TIMEOUT_S
        while not self.stopped.exists():
            expect(self.launcher.poll() is None, f"the {self.name} run ended early, see {self.output}:\n{self.tail()}")
            expect(time.monotonic() < deadline, f"the {self.name} run never reached its save:\n{self.tail()}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL every rank by its process id. The launcher finds its children dead, reaps them and ends."""
        expect(self._kill_ranks() == RANKS, "not every rank was alive when it was to be killed")
        expect(self._wait() != 0, "the launcher reports success although its ranks were killed")
        expect("Signal 9 (SIGKILL)" in self.output.read_text(errors="replace"), "no rank died of SIGKILL")

    def _kill_ranks(self) -> int:
        killed = 0
        for file in self.pids.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name), signal.SIGKILL)
                killed += 1
        return killed

    def _wait(self) -> int:
        assert self.launcher is not None
        status = self.launcher.wait(TIMEOUT_S)
        self.seconds += time.monotonic()
        return status

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The logged events of one kind, in order; a line that the kill cut short is no event."""
        lines = self.log.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    def figures(self) -> dict[int, tuple[float, float, int]]:
        """Step to loss, learning rate and data cursor: JSON keeps every bit of a float."""
        return {event["step"]: (event["loss"], event["rate"], event["cursor"]) for event in self.events("step")}

    def tail(self) -> str:
        """The end of what the processes printed."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-30:])
