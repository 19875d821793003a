"""The harness itself: a task runs on all ranks, errors come back typed, hangs and deaths are seen."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from workers import Pools, Rank, RankFailed


def sums(me: Rank, plus: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor([me.rank + plus])
    dist.all_reduce(total, group=me.group)
    return int(total)


def fails_on(me: Rank, rank: int) -> int:
    if me.rank == rank:
        raise LookupError(f"rank {rank}")
    return me.rank


def hangs(me: Rank) -> None:
    threading.Event().wait()


def dies_on(me: Rank, rank: int) -> Any:
    import os
    import signal

    if me.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return me.rank


def test_a_task_runs_on_the_first_ranks(pools: Pools) -> None:
    pool = pools.shared()
    assert pool.run(4, sums, 1) == [10, 10, 10, 10]
    assert pool.run(2, sums, 0) == [1, 1]


def test_an_error_comes_back_with_its_type(pools: Pools) -> None:
    outcomes = pools.shared().outcomes(3, fails_on, 1)
    assert isinstance(outcomes[1].error, LookupError)
    assert [outcome.value for outcome in outcomes] == [0, None, 2]
    with pytest.raises(RankFailed, match="rank 1"):
        pools.shared().run(3, fails_on, 1)


def test_a_hang_is_a_failure(pools: Pools) -> None:
    with pools.fresh(2) as pool, pytest.raises(TimeoutError):
        pool.run(2, hangs, deadline_s=0.5)


def test_a_lost_rank_is_seen(pools: Pools) -> None:
    with pools.fresh(2) as pool:
        outcomes = pool.outcomes(2, dies_on, 1)
    assert [outcome.lost for outcome in outcomes] == [False, True]
