"""SIGKILL for any rank of a gloo group, at any of its operations on a cloud store: a whole checkpoint or none.

A rank dies at its n-th operation of `dcp.save`, before the store has done it or after. Then the previous checkpoint still
loads unless the decision was made, and the step can be saved again. A sample runs in CI, every point under `make soak`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Kill
from workers import Pools, Rank

from tests.servers.fixtures import Place
from txstore import open_store
from txstore.catalog import entries, newest
from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import AlreadyCommitted
from txstore.ops.verify import verify_store
from txstore.sweep import sweep

SEED = 20
GLOO_TIMEOUT_S = 5
WORLD = 2

Calls = list[list[tuple[str, str]]]


@dataclass(frozen=True)
class Point:
    """One kill: the rank, its operation, and whether the store does it first."""

    rank: int
    at: int
    after: bool


def state(me: Rank, number: float) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    return {
        "d": distribute_tensor(torch.full((6, 40), float(number)), me.mesh, [Shard(0)], src_data_rank=None),
        "w": torch.full((100,), float(number)),
        "o": [float(number)],
    }


def alone(number: float) -> dict[str, Any]:
    return {"d": torch.full((6, 40), float(number)), "w": torch.full((100,), float(number)), "o": [float(number)]}


def save_on_ranks(
    me: Rank, url: str, options: dict[str, Any], number: int, point: Point | None = None
) -> list[tuple[str, str]]:
    """Save ``step-<number>``; what this rank asked of the store."""
    faults = [Fault(Kill(point.after), at=point.at)] if point is not None and point.rank == me.rank else []
    store = FaultyStore(open_store(url, **options), *faults)
    writer = StorageWriter(store, shard_bytes=600)  # several for each rank
    dcp.save(state(me, number), checkpoint_id=f"step-{number}", storage_writer=writer, process_group=me.group)
    return store.calls


def load(place: Place, name: str | None = None) -> float:
    """The number that a checkpoint was saved with, all of it bit for bit."""
    target = alone(0)
    reader = StorageReader(place.url, **place.options)
    dcp.load(target, checkpoint_id=name, storage_reader=reader, no_dist=True)
    number = float(target["w"][0])
    expected = alone(number)
    assert all(torch.equal(target[name], expected[name]) for name in "dw")
    assert target["o"] == expected["o"]
    return number


def save(place: Place, name: str, number: float, *, overwrite: bool = False) -> None:
    writer = StorageWriter(place.url, overwrite=overwrite, **place.options)
    dcp.save(alone(number), checkpoint_id=name, storage_writer=writer, no_dist=True)


def check(pools: Pools, place: Place, point: Point, *, committed: bool) -> None:
    with pools.fresh(WORLD, gloo_timeout_s=GLOO_TIMEOUT_S) as pool:
        pool.run(WORLD, save_on_ranks, place.url, place.options, 1)
        outcomes = pool.outcomes(WORLD, save_on_ranks, place.url, place.options, 2, point, deadline_s=60)
    assert outcomes[point.rank].lost, outcomes[point.rank].trace
    assert outcomes[1 - point.rank].error is not None, "the survivor must not believe that it saved"

    with open_store(place.url, **place.options) as store:
        assert newest(store).checkpoint == ("step-2" if committed else "step-1")
        assert load(place) == (2 if committed else 1)
        assert load(place, "step-1") == 1
        if committed:
            with pytest.raises(dcp.CheckpointException) as caught:
                save(place, "step-2", 3)
            assert isinstance(caught.value.failures[0][0], AlreadyCommitted)
            assert load(place) == 2
        save(place, "step-2", 3, overwrite=committed)
        assert load(place) == 3
        sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
        assert load(place) == 3
        assert verify_store(store).state == "sound"
        kept = {entry.decision.txn for entry in entries(store)}
        assert {info.key.split("/")[2] for info in store.list("data/")} <= kept, "dead attempts are gone"


def points(calls: Calls) -> list[tuple[Point, bool]]:
    """Every point of a save, and whether the checkpoint is committed by then."""
    decisions = [at for at, (verb, key) in enumerate(calls[0]) if verb == "create" and key.startswith("commits/")]
    assert len(decisions) == 1
    return [
        (Point(rank, at, after), rank == 0 and at + after > decisions[0])
        for rank, own in enumerate(calls)
        for at in range(len(own))
        for after in (False, True)
    ]


@pytest.fixture
def fresh(place: Place) -> Iterator[Place]:
    """Empty places, one within the other's parent."""
    return (replace(place, url=f"{place.url}/{number}") for number in count())


@pytest.fixture
def every_point(pools: Pools, fresh: Iterator[Place]) -> list[tuple[Point, bool]]:
    """The points of the second save of a store, counted in one that is not disturbed."""
    there = next(fresh)
    with pools.fresh(WORLD) as pool:
        pool.run(WORLD, save_on_ranks, there.url, there.options, 1)
        calls = pool.run(WORLD, save_on_ranks, there.url, there.options, 2)
    assert len(calls[0]) > 10
    assert [verb for verb, _ in calls[1]].count("put") > 1
    return points(calls)


def test_a_rank_killed_at_a_sample_of_its_operations(pools: Pools, fresh: Iterator[Place], every_point) -> None:
    there = next(fresh)
    chosen = random.Random(f"{SEED} {there.url[:4]}")  # other points on each backend
    decided = [entry for entry in every_point if entry[1]]
    undecided = [[entry for entry in every_point if entry[0].rank == rank and not entry[1]] for rank in range(WORLD)]
    for point, committed in (decided[0], *chosen.sample(undecided[0], 2), chosen.choice(undecided[1])):
        check(pools, next(fresh), point, committed=committed)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_a_rank_killed_at_any_of_its_operations(part: int, pools: Pools, fresh: Iterator[Place], every_point) -> None:
    for point, committed in every_point[part::8]:
        check(pools, next(fresh), point, committed=committed)
