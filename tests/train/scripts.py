"""Runs scripts as real processes, each forked from a server that has imported torch: killed ones are really killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from workers import PRELOAD

LIMIT_S = 120.0


@dataclass
class Script:
    """A script that runs on one or several ranks, under the environment that torchrun gives them.

    Attributes:
        output: What all its ranks print.
    """

    output: Path
    processes: list[BaseProcess]

    def wait(self) -> list[int | None]:
        """The exit codes of all ranks; a negative one is a signal. When a rank fails, the others are killed."""
        left = {process.sentinel: process for process in self.processes}
        deadline = time.monotonic() + LIMIT_S
        while left:
            ended = wait(list(left), max(0.0, deadline - time.monotonic()))
            for process in [left.pop(sentinel) for sentinel in ended if isinstance(sentinel, int)]:
                process.join()
            if not ended or any(process.exitcode for process in self.processes):
                for process in left.values():
                    process.kill()
                    process.join()
                left.clear()
        return [process.exitcode for process in self.processes]

    def finish(self) -> str:
        """Wait for a script that must succeed; what it has printed."""
        codes = self.wait()
        assert not any(codes), f"exit codes {codes}:\n{self.text}"
        return self.text

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")


def start(script: Path, *arguments: object, output: Path, world: int = 0) -> Script:
    """Start a script.

    Args:
        script: Its path.
        arguments: Its arguments.
        output: The file that stdout and stderr go to.
        world: Number of ranks; 0 for one process without a process group.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    output.write_text("")
    argv = [str(script), *map(str, arguments)]
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(max(world, 1)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        env = {name: str(value) for name, value in place.items()} if world else {}
        process = context.Process(target=_run, args=(argv, str(output), env), name=f"{script.name}, rank {rank}")
        process.start()
        processes.append(process)
    return Script(output, processes)


def _run(argv: list[str], output: str, env: dict[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
