"""The client side: a host that forks rank processes and measures what they do. ``python -m benchmarks.client``.

Runs in the project's environment or in that of the peers, and speaks JSON, one object a line: requests on standard
input, answers on standard output. A group is a contender on some ranks with one state, kept for all its rounds:

* ``{"do": "start", "group": ..., "contender": ..., "place": {...}, "world": n, "kind": ..., "mib": n}``
* ``{"do": "save" | "load", "group": ..., "name": ..., "only": [...] | null}``
* ``{"do": "stop", "group": ...}``

The answer to a save or load holds one measurement for each rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import states
from benchmarks.contenders import MAKERS
from benchmarks.sampling import Sampler

WARM_MIB = 4


@dataclass(frozen=True)
class _Child:
    pid: int
    requests: TextIO
    answers: TextIO


def main() -> None:
    """Serve until standard input ends. Single-threaded, since it forks."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    groups: dict[str, list[_Child]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        children = groups.get(request["group"], [])
        if request["do"] == "start":
            children = groups[request["group"]] = _start(request, groups)
        else:
            for child in children:
                child.requests.write(line)
                child.requests.flush()
        replies = [json.loads(child.answers.readline() or '{"error": "the process died"}') for child in children]
        if request["do"] == "stop":
            for child in groups.pop(request["group"]):
                os.waitpid(child.pid, 0)
                child.requests.close()
                child.answers.close()
        answers.write(json.dumps({"ranks": replies}) + "\n")
        answers.flush()


def _start(request: dict[str, Any], groups: dict[str, list[_Child]]) -> list[_Child]:
    rendezvous = tempfile.mktemp(prefix="txstore-bench-")
    children = []
    for rank in range(request["world"]):
        inward, outward = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(inward[1])
            os.close(outward[0])
            for other in [*children, *(child for group in groups.values() for child in group)]:
                # An end that is held here would keep the other process from seeing that its host has gone.
                os.close(other.requests.fileno())
                os.close(other.answers.fileno())
            _serve(os.fdopen(inward[0]), os.fdopen(outward[1], "w"), rank, request, rendezvous)
            os._exit(0)
        os.close(inward[0])
        os.close(outward[1])
        children.append(_Child(pid, os.fdopen(inward[1], "w"), os.fdopen(outward[0])))
    return children


def _serve(requests: TextIO, answers: TextIO, rank: int, request: dict[str, Any], rendezvous: str) -> None:
    def answer(call: Callable[[], dict[str, Any]]) -> None:
        try:
            reply = call()
        except BaseException:  # noqa: BLE001 - told to the host, whatever it is
            reply = {"error": f"rank {rank}: {traceback.format_exc()}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    ranks: list[Rank] = []

    def begin() -> dict[str, Any]:
        ranks.append(Rank(rank, request, rendezvous))
        return {"bytes": states.nbytes(ranks[0].state)}

    answer(begin)
    for line in requests:
        asked = json.loads(line)
        if asked["do"] == "stop":
            answer(dict)
            return
        answer(lambda asked=asked: ranks[0].run(asked))


class Rank:
    """One rank of a group: its state, its contender, and the measuring."""

    def __init__(self, rank: int, request: dict[str, Any], rendezvous: str) -> None:
        warnings.simplefilter("ignore")
        world = request["world"]
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        mesh = None
        if world > 1:
            os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(world))
            store = dist.FileStore(rendezvous, world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
            mesh = init_device_mesh("cpu", (world,))
        self.state = states.build(request["kind"], request["mib"], rank, mesh)
        self._contender = MAKERS[request["contender"]](request["place"])
        if request.get("warm", True):
            # Connections, caches of the code, gcsfs's question for the kind of its bucket: none of it is a save.
            tiny = states.build("large", WARM_MIB, rank, mesh)
            self._contender.save(tiny, f"step-{request['warm_step']}")
            self._contender.load(tiny, f"step-{request['warm_step']}")

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One save or load, measured; a load is compared with what was saved."""
        state = {name: self.state[name] for name in asked["only"]} if asked.get("only") else self.state
        call = self._contender.save if asked["do"] == "save" else self._contender.load
        wanted = states.digests(state) if asked["do"] == "load" else []
        if asked["do"] == "load":
            states.wipe(state)
        before = self._contender.read_bytes
        with Sampler() if asked.get("profile") else nullcontext() as sampler:
            measured = measure(lambda: call(state, asked["name"]))
        if sampler is not None:
            measured["profile"] = sampler.shares()
        if dist.is_initialized():
            # The kernel's count holds what gloo reads from its sockets.
            after = self._contender.read_bytes
            measured["read_bytes"] = None if before is None or after is None else after - before
        if wanted != (states.digests(state) if wanted else []):
            raise RuntimeError("loaded values differ")
        return measured | {"needed_bytes": states.nbytes(state)}


def measure(call: Callable[[], object]) -> dict[str, Any]:
    """Run it: times of begin and end on the clock that all processes share, CPU, peak of memory, what was read.

    ``extra_bytes`` is how far the resident memory rose above what it was, at most; the state is in what it was.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if dist.is_initialized():
        dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    resident, io, cpu = _memory("VmRSS"), _io(), _cpu_s()
    begin = time.monotonic()
    call()
    end = time.monotonic()
    used, after = _cpu_s() - cpu, _io()
    return {
        "begin_s": begin,
        "end_s": end,
        "cpu_s": used,
        "extra_bytes": max(0, _memory("VmHWM") - resident),
        "calls": after["syscr"] + after["syscw"] - io["syscr"] - io["syscw"],
        "read_bytes": after["rchar"] - io["rchar"],
    }


def _cpu_s() -> float:
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


if __name__ == "__main__":
    main()
