"""A run that is killed and resumed, several times, equals one that nobody touched: every step, bit for bit.

The processes are real and die of a real SIGKILL, at seeded points: inside steps, inside `save()`, and while the
background thread writes or commits.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from workers import PRELOAD, Pools, Rank

from tests.train.jobs import KINDS, SAMPLES, Death, Job, Log, live, net, samples
from txstore.catalog import newest
from txstore.compat.matrix import parse_matrix
from txstore.errors import CheckpointNotFound
from txstore.manifest import Description
from txstore.registry import open_store
from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.progress import TrainProgress
from txstore.train.resume import ResumeOptions

STEPS = 14
LIFE_S = 100.0

IN_A_STEP = ("forward", "backward", "stepped", "counted")
IN_A_SAVE = ("capture", "copy", "copied", "queued")
IN_THE_BACKGROUND = (
    "put begin.json before",
    "put begin.json after",
    "put .safetensors before",
    "put .safetensors after",
    "put index.msgpack before",
    "put manifest.json before",
    "put manifest.json after",
    "create commits/ before",
    "create commits/ after",
    "put latest.json before",
    "put latest.json after",
)


def run(task: Callable[..., None], *args: Any, limit_s: float = LIFE_S) -> int | None:
    """Run a task in a process of its own; its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=task, args=args)
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{task.__name__}{args} did not end within {limit_s} s")
    return process.exitcode


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def standing(url: str) -> str:
    """The newest checkpoint that is committed, or ""."""
    with open_store(url) as store:
        try:
            return newest(store).checkpoint
        except CheckpointNotFound:
            return ""


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """The log of an untouched run of a kind."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(kind: str) -> list[dict[str, Any]]:
        if kind not in known:
            log = tmp_path_factory.mktemp("control") / kind
            assert run(live, kind, STEPS, str(log), None, None, 1) == 0
            known[kind] = lines(log)
        return known[kind]

    return of


def killed_and_resumed(kind: str, deaths: list[Death], url: str, log: Path, control: list[dict[str, Any]]) -> None:
    """One run of several lives; each must go on from the newest commit, and equal the control wherever it gets."""
    wanted = {(line["step"], line["micro"]): line for line in control if "step" in line}
    for number, death in enumerate([*deaths, None]):
        before, there = len(lines(log)), standing(url)
        code = run(live, kind, STEPS, str(log), url, death, 1 if not there else 1000 + number)
        # After two deaths the end may come before the third.
        ended = death is None or (number >= 2 and code == 0)
        assert code == (0 if ended else -signal.SIGKILL), f"{kind}, life {number}, {death}: exit code {code}"
        told = lines(log)[before:]
        if told:
            assert told[0] == {"resumed": there, "proved": bool(there)}
        for line in told[1:]:
            if "step" in line:
                assert line == wanted[line["step"], line["micro"]], f"{kind}, life {number}, {death}"
        if ended:
            break
    assert lines(log)[-1] == control[-1]


def deaths(kind: str, seed: int, count: int) -> list[Death]:
    """Seeded places to die, of all three sorts. The first is after a commit: the second save waits for it."""
    chance = random.Random(f"{kind} {seed}")
    sorts = [(IN_A_STEP, 4), (IN_A_SAVE, 2), (IN_THE_BACKGROUND, 2)]
    begin = seed + sum(map(ord, kind))
    found = []
    for number in range(count):
        points, times = sorts[(begin + number) % 3]
        early = 0 if number else 1 if times == 2 else 2 * KINDS[kind]().save_every
        found.append(Death(chance.choice(points), early + chance.randrange(times - (number == 0))))
    return found


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_and_resumed_run_equals_an_untouched_one(
    kind: str, seed: int, control: Callable[[str], list[dict[str, Any]]], store_url: str, tmp_path: Path
) -> None:
    killed_and_resumed(kind, deaths(kind, seed, 2), store_url, tmp_path / "log", control(kind))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.parametrize("kind", KINDS)
def test_many_lives(
    kind: str, seed: int, control: Callable[[str], list[dict[str, Any]]], store_url: str, tmp_path: Path
) -> None:
    killed_and_resumed(kind, deaths(kind, seed, 5), store_url, tmp_path / "log", control(kind))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_any_moment(
    kind: str, seed: int, control: Callable[[str], list[dict[str, Any]]], store_url: str, tmp_path: Path
) -> None:
    """From outside, after a random time: wherever the process happens to be."""
    log, chance, wanted = tmp_path / "log", random.Random(f"{kind} {seed}"), control(kind)
    for number in range(12):
        there = standing(store_url)
        limit_s = chance.uniform(0.05, 0.4) if number < 8 else LIFE_S
        try:
            code = run(live, kind, STEPS, str(log), store_url, None, 1 if not there else number + 2, limit_s=limit_s)
        except TimeoutError:
            continue
        assert code == 0
        break
    known = {(line["step"], line["micro"]): line for line in wanted if "step" in line}
    found = [line for line in lines(log) if "step" in line]
    assert [line for line in found if line != known[line["step"], line["micro"]]] == []
    assert lines(log)[-1] == wanted[-1]


# another number of ranks

RANKS_STEPS = 18
GLOBAL_BATCH = 6
MATRIX = "resume_compatibility:\n" + "".join(
    f"  - {{from: {{dp: {before}}}, to: {{dp: {after}}}, status: verified}}\n"
    for before in (1, 2, 3)
    for after in (1, 2, 3)
    if before != after
)


def ranked(me: Rank, url: str, log_path: str, death: Death | None) -> list[dict[str, Any]]:
    """Data-parallel training of `me.world` ranks: the mean of the gradients is that of the whole batch."""
    torch.manual_seed(1)
    module, progress = net(), TrainProgress()
    module[1] = torch.nn.Identity()  # statistics of a part of the batch are not those of the whole
    sampler = ElasticBatchSampler(SAMPLES, GLOBAL_BATCH, progress, rank=me.rank, world_size=me.world, seed=11)
    job = Job(
        module,
        torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9),
        progress=progress,
        data=sampler,
        batches=lambda: (batch for _ in itertools.count() for batch in sampler),
    )
    torch.manual_seed(100 + me.rank)
    world = Description(topology={"dp": me.world, "tp": 1, "pp": 1})
    if death is not None and me.rank == me.world - 1:
        death.watch(job)
    log = Log(f"{log_path}-{me.rank}")
    with Checkpointer(url, job.state, description=world) as saves:
        report = saves.resume(ResumeOptions(matrix=parse_matrix(MATRIX), on_world_size_change="reseed"))
        log.write({"resumed": report.checkpoint, "saved by": report.saved_world_size, "proved": report.proved})
        while progress.global_step < RANKS_STEPS:
            line = job.parallel_step(me.group, me.world)
            saves.record(loss=float.fromhex(line["loss"]))
            log.write(line)
            if progress.global_step % 3 == 0:
                saves.save()
                job.at("queued")
        saves.wait()
    return [job.digests()[name] for name in ("model", "optimizer", "progress", "data")]


def test_two_ranks_then_one_then_three_train_on_every_sample_once(pools: Pools, store_url: str, tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    there = []
    for world, death in [(2, Death("backward", 7)), (1, Death("queued", 1)), (3, None)]:
        log = tmp_path / f"log-{world}"
        there.append(standing(store_url))
        with pools.fresh(world) as pool:
            if death is None:
                ends = pool.run(world, ranked, store_url, str(log), death)
                assert ends == [ends[0]] * world
            else:
                assert pool.first_failure(world, ranked, store_url, str(log), death) is not None
        told = [lines(Path(f"{log}-{rank}")) for rank in range(world)]
        assert {one[0]["resumed"] for one in told} == {there[-1]}
        for step in range(1, RANKS_STEPS + 1):
            parts = [[line for line in one[1:] if line["step"] == step] for one in told]
            if all(parts):
                seen[step] = [index for part in parts for index in part[0]["batch"]]
                losses[step] = float.fromhex(parts[0][0]["loss"])
    assert there[0] == ""
    assert there[1] in {"step-3", "step-6"}
    assert there[2] in {"step-6", "step-9", "step-12"}
    progress = TrainProgress()
    order = ElasticBatchSampler(SAMPLES, GLOBAL_BATCH, progress, seed=11)
    wanted: list[list[int]] = []
    while len(wanted) < RANKS_STEPS:
        progress.consumed_samples = GLOBAL_BATCH * len(wanted)
        wanted += list(order)
    assert [seen[step] for step in range(1, RANKS_STEPS + 1)] == wanted[:RANKS_STEPS]
    assert sorted(index for batch in wanted[:8] for index in batch) == list(range(SAMPLES))
    assert losses == pytest.approx(alone(wanted[:RANKS_STEPS]), rel=1e-4)


def alone(batches: list[list[int]]) -> dict[int, float]:
    """Losses of one process that nobody touched, on the same batches."""
    before = torch.get_rng_state()
    torch.manual_seed(1)
    module = net()
    module[1] = torch.nn.Identity()
    torch.set_rng_state(before)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    losses = {}
    for step, batch in enumerate(batches, 1):
        x, y = samples(batch)
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses
