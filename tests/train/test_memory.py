"""Memory is bounded, and nothing is lost, however slow the store: each policy, and many large saves."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, FaultyStore
from torch import nn
from workers import PRELOAD

from txstore.catalog import entries
from txstore.registry import open_store
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
from txstore.train.state import TrainState

MIB = 1 << 20


def memory(kind: str) -> int:
    """Bytes of this process's memory: ``VmRSS`` now, ``VmHWM`` at most."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))


def forget_the_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def in_a_process(task: Any, *args: Any) -> Any:
    """What `task` sends, from a process of its own: its memory is nobody else's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_sending, args=(theirs, task, args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _sending(pipe: Any, task: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    pipe.send(task(*args))


def state_of(mib: int) -> TrainState:
    model = nn.Linear(1 << 10, mib << 8, bias=False)
    model.weight.requires_grad_(False)
    return TrainState(model)


def many_saves(url: str, count: int, mib: int) -> list[int]:
    """Resident bytes after each save has been committed."""
    state = state_of(mib)
    resident = []
    with Checkpointer(url, state) as saves:
        for step in range(count):
            state.progress.global_step = step
            saves.save()
            saves.wait()
            resident.append(memory("VmRSS"))
            shutil.rmtree(Path(url.removeprefix("file://"), "data", f"step-{step}"))  # not 5 GB of disk
    return resident


def flat_after_the_second(resident: list[int]) -> None:
    # What the allocator keeps of the pieces of 16 MiB that are written at once comes and goes by one or two.
    assert max(resident[2:]) - resident[1] < 40 * MIB, [size // MIB for size in resident]


def test_many_saves_take_no_more_memory_than_two(store_url: str) -> None:
    """Failure case C8."""
    flat_after_the_second(in_a_process(many_saves, store_url, 12, 32))


@pytest.mark.soak
def test_fifty_saves_of_100_mb_take_no_more_memory_than_two(store_url: str) -> None:
    flat_after_the_second(in_a_process(many_saves, store_url, 50, 100))


class Slow:
    """An action that lets a store take its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, store: Any, key: str, call: Any) -> Any:
        time.sleep(self.seconds)
        return call()


def faster_than_the_store(url: str, mib: int, count: int, policy: SavePolicy) -> dict[str, Any]:
    """Save at an interval that is a fraction of what the store takes; what came of it."""
    state = state_of(mib)
    store = FaultyStore(url, Fault(Slow(0.15), "put", ".safetensors", forever=True))
    asked: list[int] = []
    held: list[int] = []
    on_their_way: list[int] = []
    weight = next(iter(state._models.parameters().values()))
    before = memory("VmRSS")
    forget_the_highest()
    with Checkpointer(store, state, policy=policy) as saves:
        for step in range(count):
            with torch.no_grad():
                weight.fill_(float(step))
            state.progress.global_step = step
            if not saves.save().skipped:
                asked.append(step)
            held.append(sum(buffers.nbytes for buffers in saves._buffers))
            on_their_way.append(sum(not request.ended.is_set() for request in saves._ledger._requests))
            time.sleep(0.03)
    decided = [key for verb, key in store.calls if verb == "create" and key.startswith("commits/")]
    return {
        "asked": asked,
        "decided": [int(key.removeprefix("commits/step-").removesuffix(".0.json")) for key in decided],
        "held": max(held),
        "on their way": max(on_their_way),
        "grown": memory("VmHWM") - before,
    }


@pytest.mark.parametrize(("when_busy", "in_flight"), [("wait", 1), ("wait", 2), ("wait", 3), ("skip", 1), ("skip", 2)])
def test_a_store_slower_than_the_saves_costs_no_memory_and_loses_none(
    when_busy: Any, in_flight: int, store_url: str
) -> None:
    """Failure case C5."""
    mib, count = 24, 10
    policy = SavePolicy(when_busy=when_busy, max_in_flight=in_flight)
    found = in_a_process(faster_than_the_store, store_url, mib, count, policy)
    assert found["decided"] == found["asked"], "every save that was not skipped commits, in order"
    if when_busy == "wait":
        assert found["asked"] == list(range(count))
    else:
        assert in_flight <= len(found["asked"]) < count
        assert found["asked"][:in_flight] == list(range(in_flight))
    assert found["on their way"] == in_flight
    assert found["held"] < (in_flight + 0.1) * mib * MIB
    # Beside the snapshots: the pieces of 16 MiB that are being written. All saves at once would be 240 MiB.
    assert found["grown"] < (in_flight * mib + 80) * MIB
    with open_store(store_url) as store:
        standing = [entry.decision.step for entry in entries(store) if entry.state == "committed"]
    assert standing == found["asked"]
    values = [loaded(store_url, step) for step in standing]
    assert values == [float(step) for step in standing], "each holds the values of its own step"


def loaded(url: str, step: int) -> float:
    from txstore.train.resume import ResumeOptions

    state = state_of(24)
    with Checkpointer(url, state) as saves:
        saves.resume(ResumeOptions(checkpoint=f"step-{step}"))
    weight = next(iter(state._models.parameters().values()))
    assert float(weight.min()) == float(weight.max())
    return float(weight.max())
