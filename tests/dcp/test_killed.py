"""Ranks that die in the middle of a save: survivors fail in time, the old one stands, the step is saved again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Kill
from workers import Pools, Rank

from txstore.catalog import entries, newest
from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import AlreadyCommitted
from txstore.registry import open_store

GLOO_TIMEOUT_S = 5


def state(me: Rank, number: float) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    number = float(number)
    return {
        "d": distribute_tensor(torch.full((7, 40), number), me.mesh, [Shard(0)], src_data_rank=None),
        "w": torch.full((100,), number),
        "o": [number],
    }


def save(me: Rank, store: Any, name: str, number: float) -> None:
    writer = StorageWriter(store, shard_bytes=200)
    dcp.save(state(me, number), checkpoint_id=name, storage_writer=writer, process_group=me.group)


def first(me: Rank, root: str) -> None:
    save(me, root, "step-1", 1)


def second(me: Rank, root: str, rank: int, fault: Fault) -> None:
    save(me, FaultyStore(root, fault) if me.rank == rank else root, "step-2", 2)


def load_alone(root: str) -> float:
    target = {"d": torch.zeros(7, 40), "w": torch.zeros(100), "o": [0.0]}
    dcp.load(target, storage_reader=StorageReader(root), no_dist=True)
    number = float(target["w"][0])
    assert torch.equal(target["d"], torch.full((7, 40), number))
    assert torch.equal(target["w"], torch.full((100,), number))
    assert target["o"] == [number]
    return number


# rank, verb, part of the key, after the call, whether the decision was made
POINTS = [
    (0, "put", "begin.json", False, False),
    (0, "put", "begin.json", True, False),
    (0, "put", "rank-00000-00000", False, False),
    (1, "put", "rank-00001-00001", True, False),
    (1, "put", "rank-00001-00000", False, False),
    (1, "put", "rank-00001-00000", True, False),
    (0, "head", "rank-00001", False, False),
    (0, "put", "index.msgpack", True, False),
    (0, "create", "commits/step-2.0", False, False),
    (0, "create", "commits/step-2.0", True, True),
    (0, "put", "latest.json", False, True),
]


@pytest.mark.parametrize(("rank", "verb", "part", "after", "decided"), POINTS)
def test_a_rank_is_killed(rank: int, verb: str, part: str, after: bool, decided: bool, pools: Pools, root: str) -> None:
    with pools.fresh(2, gloo_timeout_s=GLOO_TIMEOUT_S) as pool:
        pool.run(2, first, root)
        began = time.monotonic()
        outcomes = pool.outcomes(2, second, root, rank, Fault(Kill(after), verb, part))
        took_s = time.monotonic() - began
    assert outcomes[rank].lost
    survivor = outcomes[1 - rank]
    assert survivor.error is not None, "the survivor must not believe that it saved"
    assert took_s < 30

    store = open_store(root)
    assert newest(store).checkpoint == ("step-2" if decided else "step-1")
    assert load_alone(root) == (2 if decided else 1)
    states = [(entry.decision.checkpoint, entry.state) for entry in entries(store)]
    assert states == [("step-1", "committed"), ("step-2", "committed")][: 2 if decided else 1]

    # A new run saves the same step.
    again = {"d": torch.full((7, 40), 3.0), "w": torch.full((100,), 3.0), "o": [3.0]}
    writer = StorageWriter(root)
    if decided:
        with pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(again, checkpoint_id="step-2", storage_writer=writer, no_dist=True)
        assert isinstance(caught.value.failures[0][0], AlreadyCommitted)
        assert load_alone(root) == 2
    else:
        dcp.save(again, checkpoint_id="step-2", storage_writer=writer, no_dist=True)
        assert load_alone(root) == 3


def restarted(me: Rank, root: str) -> float:
    target = state(me, 0)
    dcp.load(target, storage_reader=StorageReader(root), process_group=me.group)
    found = float(target["w"][0])
    assert torch.equal(target["d"].full_tensor(), torch.full((7, 40), found))
    save(me, root, "step-2", 5)
    return found


def test_a_new_job_resumes_on_more_ranks(pools: Pools, root: str) -> None:
    with pools.fresh(2, gloo_timeout_s=GLOO_TIMEOUT_S) as pool:
        pool.run(2, first, root)
        pool.outcomes(2, second, root, 1, Fault(Kill(after=True), "put", "rank-00001-00000"))
    with pools.fresh(3) as pool:
        assert pool.run(3, restarted, root) == [1, 1, 1]
    assert load_alone(root) == 5
    attempts = list(Path(root.removeprefix("file://"), "data", "step-2").iterdir())
    assert len(attempts) == 2, "nothing was deleted: that is the sweep's to do"
