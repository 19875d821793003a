"""The other end of `benchmarks.client`: hosts in either environment, and groups of ranks in them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHECKOUT = Path(__file__).parents[1]
DEADLINE_S = 600.0

_numbers = count()


@dataclass(frozen=True)
class Measured:
    """One save or load by all ranks of a group.

    Attributes:
        wall_s: From the first rank's begin to the last one's end.
        cpu_s: User and system time of all ranks.
        extra_bytes: Peak of resident memory above what was there before; of the rank that took most.
        needed_bytes: Bytes of tensors that were saved or asked for, over all ranks.
        read_bytes: Bytes that went through read calls, not those of mapped files; of several ranks the bytes of data
            that the contender says it read, or None.
        calls: Read and write calls.
    """

    wall_s: float
    cpu_s: float
    extra_bytes: int
    needed_bytes: int
    read_bytes: int | None
    calls: int


class Host:
    """A process of `benchmarks.client` in one environment."""

    def __init__(self, python: Path | str = sys.executable) -> None:
        path = os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "backends")])
        self._process = subprocess.Popen(
            [str(python), "-m", "benchmarks.client"],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": path, "AWS_EC2_METADATA_DISABLED": "true"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def send(self, request: dict[str, Any]) -> None:
        """Ask, without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, what: str, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
        """The ranks' answers to the oldest request that was not answered."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.close()
            raise RuntimeError(f"{what}: no answer" + ("" if ready else f" in {deadline_s:.0f} s"))
        ranks: list[dict[str, Any]] = json.loads(line)["ranks"]
        if errors := [rank["error"] for rank in ranks if "error" in rank]:
            raise RuntimeError(f"{what}:\n" + "\n".join(errors))
        return ranks

    def close(self) -> None:
        """End the host and what it forked."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Group:
    """A contender on some ranks, with a state. Its start is asked for at once and awaited by `ready`."""

    def __init__(
        self, host: Host, contender: str, place: dict[str, Any], *, world: int, kind: str, mib: int, warm: bool = True
    ) -> None:
        self.contender = contender
        self._host = host
        number = next(_numbers)
        self._name = f"{contender} {number}"
        host.send(
            {
                "do": "start",
                "group": self._name,
                "contender": contender,
                "place": place,
                "world": world,
                "kind": kind,
                "mib": mib,
                "warm": warm,
                "warm_step": number,
            }
        )

    def ready(self) -> None:
        """Wait until the state is made and the contender is warm."""
        self._host.receive(f"{self.contender}: start")

    def run(self, do: str, name: str, only: list[str] | None = None, *, profile: bool = False) -> Measured:
        """A save or a load, on all ranks."""
        self._host.send({"do": do, "group": self._name, "name": name, "only": only, "profile": profile})
        ranks = self._host.receive(f"{self.contender}: {do}")
        self.profile: dict[str, list[tuple[str, float]]] = ranks[0].get("profile", {})
        read = [rank["read_bytes"] for rank in ranks]
        return Measured(
            wall_s=max(rank["end_s"] for rank in ranks) - min(rank["begin_s"] for rank in ranks),
            cpu_s=sum(rank["cpu_s"] for rank in ranks),
            extra_bytes=max(rank["extra_bytes"] for rank in ranks),
            needed_bytes=sum(rank["needed_bytes"] for rank in ranks),
            read_bytes=None if None in read else sum(read),
            calls=sum(rank["calls"] for rank in ranks),
        )

    def stop(self) -> None:
        """End the ranks."""
        self._host.send({"do": "stop", "group": self._name, "name": ""})
        self._host.receive(f"{self.contender}: stop")


@contextmanager
def watch(what: str) -> Iterator[None]:
    """Say on standard error what goes on and how long it took."""
    began = time.monotonic()
    print(f"  {what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f" {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
