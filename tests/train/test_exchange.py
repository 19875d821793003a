"""The ranks' agreements: one outcome everywhere, in bounded time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from workers import Pool, Rank

from txstore.errors import ConfigError, DeadlineExceeded, PlanMismatch, SaveError, StoreError, TxStoreError
from txstore.train.exchange import Exchange

WORLD = 4


def exchange(me: Rank, deadline_s: float = 10) -> Exchange:
    return Exchange("test", deadline_s)


def gathering(me: Rank) -> Any:
    talk = exchange(me)
    try:
        return talk.rank, talk.world_size, talk.gather("names", f"rank {me.rank}"), talk.decide("one", lambda: me.rank)
    finally:
        talk.close()


def test_values_arrive_in_rank_order_and_the_coordinator_decides(pool: Pool) -> None:
    names = [f"rank {rank}" for rank in range(WORLD)]
    assert pool.run(WORLD, gathering) == [(rank, WORLD, names, 0) for rank in range(WORLD)]


def failing(me: Rank, failures: dict[int, BaseException]) -> list[Any]:
    talk = exchange(me)

    def work() -> int:
        if me.rank in failures:
            raise failures[me.rank]
        return me.rank

    found: list[Any] = []
    try:
        talk.attempt("work", work)
    except TxStoreError as error:
        found = [type(error), error.key, error.rank, str(error)]
    # The group is in step: the next exchange works.
    return [*found, talk.gather("after", me.rank)]


@pytest.mark.parametrize(
    ("failures", "kind", "key", "rank"),
    [
        ({1: StoreError("full", key="data/x")}, StoreError, "data/x", 1),
        ({0: SaveError("plain"), 2: StoreError("full", key="data/x")}, StoreError, "data/x", 2),
        ({1: SaveError("first"), 2: SaveError("second")}, SaveError, "", 1),
        ({2: ValueError("foreign")}, SaveError, "", 2),
    ],
)
def test_one_ranks_error_is_everybodys(pool: Pool, failures: Any, kind: Any, key: str, rank: int) -> None:
    answers = pool.run(WORLD, failing, failures)
    assert answers[0][:3] == [kind, key, rank]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][-1] == list(range(WORLD))


def deciding(me: Rank) -> Any:
    talk = exchange(me)

    def refuse() -> None:
        raise OSError(f"on rank {me.rank}")

    with pytest.raises(SaveError, match="on rank 0"):
        talk.decide("choice", refuse)
    return talk.gather("after", 1)


def test_the_coordinators_error_is_everybodys(pool: Pool) -> None:
    assert pool.run(WORLD, deciding) == [[1] * WORLD] * WORLD


def crossing(me: Rank) -> None:
    talk = exchange(me)
    with pytest.raises(PlanMismatch, match=r"'save'.*'wait'|'wait'.*'save'") as caught:
        talk.gather("wait" if me.rank == 1 else "save", None)
    assert caught.value.rank == (0 if me.rank == 1 else 1)


def test_ranks_at_different_points_are_told_so(pool: Pool) -> None:
    pool.run(WORLD, crossing)


def absent(me: Rank) -> float:
    talk = exchange(me, deadline_s=1.0)
    if me.rank == 3:
        time.sleep(2.5)
        with pytest.raises(DeadlineExceeded, match=r"the other ranks are gone: .* they gave up after 1 s without this"):
            talk.gather("waiting", None)
        return 0.0
    started = time.monotonic()
    for _ in range(2):  # the second at once: the group is out of step
        with pytest.raises(
            DeadlineExceeded, match=r"test, waiting: another rank did not answer within [12]\.\d s"
        ) as caught:
            talk.gather("waiting", None)
        assert caught.value.rank == me.rank
    took_s = time.monotonic() - started
    talk.close()
    return took_s


def test_nobody_waits_longer_than_the_deadline(pools: Any) -> None:
    with pools.fresh(WORLD) as pool:
        assert max(pool.run(WORLD, absent)) < 2.4


def among_some(me: Rank) -> Any:
    if me.rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    if me.rank:
        with pytest.raises(ConfigError, match=r"own_groups=\(a, b\)"):
            Exchange("test", 5, me.tail)
    return Exchange("test", 5, me.group, own=me.group).gather("names", me.rank)


def among_equals(me: Rank) -> Any:
    if me.rank == 0:
        return None
    known: list[Any] = [None, None]
    while True:  # torch counts a rank's groups in its own way: until it would give both the same name
        mine = (len(dist.distributed_c10d._world.pg_names), dist.distributed_c10d._hash_ranks_to_str([1, 2]))
        dist.all_gather_object(known, mine, group=me.tail)
        if known[0][1] == known[1][1]:
            break
        if mine == min(known):
            dist.new_group([me.rank], use_local_synchronization=True)
    talk = Exchange("test", 5, me.tail)
    return talk.rank, talk.gather("names", me.rank)


def test_a_sub_group_whose_members_know_different_groups_is_refused_before_it_hangs(pools: Any) -> None:
    with pools.fresh(3) as pool:
        assert pool.run(3, among_some) == [[0, 1, 2]] * 3


def test_a_sub_group_of_equals_gets_a_group_of_its_own(pools: Any) -> None:
    with pools.fresh(3) as pool:
        assert pool.run(3, among_equals) == [None, (0, [1, 2]), (1, [1, 2])]


def test_without_a_process_group_this_process_is_the_world() -> None:
    talk = Exchange("test", 1)
    assert (talk.rank, talk.world_size, talk.gather("x", 5), talk.decide("y", lambda: 6)) == (0, 1, [5], 6)
    with pytest.raises(SaveError, match="foreign"):
        talk.attempt("z", lambda: (_ for _ in ()).throw(ValueError("foreign")))
    talk.close()


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan")])
def test_a_deadline_is_a_positive_time(deadline_s: float) -> None:
    with pytest.raises(ConfigError):
        Exchange("test", deadline_s)
