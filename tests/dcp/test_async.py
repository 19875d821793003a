"""`dcp.async_save` in both modes, saves at once through one writer, and cached plans."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Raise
from states import same
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from workers import Pool, Pools, Rank

from txstore.catalog import entries, find, newest
from txstore.dcp import StorageReader, StorageWriter
from txstore.dcp.world import World
from txstore.errors import AlreadyCommitted, Conflict, SaveError, StoreFullError
from txstore.registry import open_store

WAIT_S = 20


@pytest.fixture(autouse=True)
def _no_cached_plans() -> None:
    forget_plans()


def forget_plans() -> None:
    """DCP keeps cached plans on the class, for the whole process."""
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached"):
            cache.clear()


def stock_stager() -> DefaultStager:
    """DCP's own copy, new for each save: with it, and only with it, several saves are in progress at once."""
    return DefaultStager(StagingOptions(False, False, False, False))


def save_async(state: dict[str, Any], name: str, writer: StorageWriter, **options: Any) -> Future[Any]:
    future = dcp.async_save(state, checkpoint_id=name, storage_writer=writer, **options)
    return future.upload_completion if isinstance(future, AsyncSaveResponse) else future


def load(root: str, target: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(root), no_dist=True)
    return target


def failures(future: Future[Any]) -> dict[int, BaseException]:
    error = future.exception(WAIT_S)
    assert isinstance(error, CheckpointException)
    return {rank: wrapped[0] for rank, wrapped in error.failures.items()}


def full_state(number: int) -> dict[str, Any]:
    return {
        "w": torch.full((1000,), float(number)),
        "strided": torch.full((20, 30), number).t(),
        "list": [number, {"x": number}],
        "set": {number},
        "n": number,
    }


def blank_state() -> dict[str, Any]:
    return {
        "w": torch.zeros(1000),
        "strided": torch.zeros(30, 20, dtype=torch.int64),
        "list": [None, {"x": None}],
        "set": None,
        "n": None,
    }


def gated(root: str, part: str = ".safetensors") -> tuple[FaultyStore, threading.Event, threading.Event]:
    """A store whose put waits: (store, it waits, let it go)."""
    reached, go = threading.Event(), threading.Event()

    def action(store: Any, key: str, call: Any) -> Any:
        reached.set()
        assert go.wait(WAIT_S)
        return call()

    return FaultyStore(root, Fault(action, "put", part, forever=True)), reached, go


def test_the_snapshot_is_taken_before_the_call_returns(root: str) -> None:
    store, reached, go = gated(root)
    state = full_state(1)
    future = save_async(state, "step-1", StorageWriter(store), no_dist=True)
    state["w"].fill_(9)
    state["strided"].fill_(9)
    state["list"][1]["x"] = 9
    state["list"].append(9)
    state["set"].add(9)
    state["n"] = 9
    assert reached.wait(WAIT_S)
    assert not future.done()
    go.set()
    future.result(WAIT_S)
    same(load(root, blank_state()), {**full_state(1), "strided": torch.full((20, 30), 1).t()})


def test_an_error_reaches_the_future(root: str) -> None:
    store = FaultyStore(root, Fault(Raise("full"), "put", ".safetensors"))
    writer = StorageWriter(store)
    errors = failures(save_async(full_state(1), "step-1", writer, no_dist=True))
    assert isinstance(errors[0], StoreFullError)
    assert errors[0].rank == 0
    assert entries(open_store(root)) == []
    save_async(full_state(2), "step-2", writer, no_dist=True).result(WAIT_S)
    assert newest(open_store(root)).checkpoint == "step-2"
    # The failed attempt was settled, so that it can never commit.
    assert [(entry.decision.checkpoint, entry.state) for entry in entries(open_store(root))] == [
        ("step-1", "aborted"),
        ("step-2", "committed"),
    ]


def after_a_failed_decision(root: str, fault: Fault) -> tuple[FaultyStore, StorageWriter]:
    """A writer that saved step-0, and whose save of step-1 failed at its decision."""
    store = FaultyStore(root, fault)
    writer = StorageWriter(store)
    save_async(full_state(0), "step-0", writer, no_dist=True).result(WAIT_S)
    failures(save_async(full_state(1), "step-1", writer, no_dist=True))
    return store, writer


def test_a_save_that_was_refused_and_cannot_be_aborted_does_not_stop_the_next(root: str) -> None:
    """A directory that takes no more names: step-1 gets no commit, and no abort either."""
    store, writer = after_a_failed_decision(root, Fault(Raise("full"), "create", "commits/step-1", forever=True))
    save_async(full_state(2), "step-2", writer, no_dist=True).result(WAIT_S)
    assert newest(open_store(root)).checkpoint == "step-2"
    store.faults = ()
    save_async(full_state(3), "step-3", writer, no_dist=True).result(WAIT_S)
    states = [(entry.decision.checkpoint, entry.state) for entry in entries(open_store(root))]
    assert ("step-1", "aborted") in states  # as soon as that is possible: a sweep need not wait


def test_a_store_that_stays_full_is_full_for_each_save(root: str) -> None:
    _, writer = after_a_failed_decision(root, Fault(Raise("full"), "create", "commits/", at=1, forever=True))
    for name in ("step-2", "step-3"):
        error = failures(save_async(full_state(2), name, writer, no_dist=True))[0]
        assert type(error) is StoreFullError
        assert "step-1" not in str(error)


def test_a_save_that_may_have_committed_stops_the_next_which_is_not_in_doubt_itself(root: str) -> None:
    _, writer = after_a_failed_decision(root, Fault(Raise("lost"), "create", "commits/step-1", forever=True))
    error = failures(save_async(full_state(2), "step-2", writer, no_dist=True))[0]
    assert type(error) is SaveError
    assert "step-2 was not begun" in str(error)
    assert "whether step-1 was decided is not known" in str(error)
    assert newest(open_store(root)).checkpoint == "step-0"


def test_two_saves_at_once_through_one_writer(root: str) -> None:
    both = threading.Barrier(2, timeout=WAIT_S)

    def meet(store: Any, key: str, call: Any) -> Any:
        both.wait()
        return call()

    writer = StorageWriter(FaultyStore(root, Fault(meet, "put", "00000.safetensors", forever=True)))
    futures = [
        save_async(full_state(number), f"step-{number}", writer, no_dist=True, async_stager=stock_stager())
        for number in (1, 2)
    ]
    for future in futures:
        future.result(WAIT_S)
    for number in (1, 2):
        same(load(root, blank_state(), f"step-{number}"), full_state(number))


@pytest.mark.parametrize("together", [True, False])
def test_two_saves_of_one_name(together: bool, root: str) -> None:
    for turn in range(10):
        barrier = threading.Barrier(2, timeout=WAIT_S)

        def meet(store: Any, key: str, call: Any, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return call()

        faults = [Fault(meet, "put", "begin.json", forever=True)] if together else []
        writer = StorageWriter(FaultyStore(root, *faults))
        futures = [
            save_async(full_state(number), f"step-{turn}", writer, no_dist=True, async_stager=stock_stager())
            for number in (1, 2)
        ]
        errors = [future.exception(WAIT_S) for future in futures]
        assert [error is None for error in errors].count(True) == 1, errors
        winner = 1 + errors.index(None)
        lost = failures(futures[2 - winner])[0]
        assert isinstance(lost, Conflict if together else (Conflict, AlreadyCommitted))
        same(load(root, blank_state(), f"step-{turn}"), full_state(winner))


def test_a_pickled_writer_saves(root: str) -> None:
    writer = StorageWriter(root, shard_bytes=5000, threads=1)
    writer.reset("step-1")
    copied = pickle.loads(pickle.dumps(writer))
    dcp.save(full_state(3), checkpoint_id="step-3", storage_writer=copied, no_dist=True)
    same(load(root, blank_state()), full_state(3))
    assert copied.checkpoint_id == f"{root}/step-3"
    assert writer.checkpoint_id == f"{root}/step-1"


def on_ranks(me: Rank, root: str, mode: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mode = AsyncCheckpointerType[mode]
    options: dict[str, Any] = {"process_group": me.group, "async_checkpointer_type": mode}

    def build(number: float) -> dict[str, Any]:
        whole = torch.full((7, 3), number)
        return {
            "d": distribute_tensor(whole, me.mesh, [Shard(0)], src_data_rank=None),
            "w": torch.full((5,), number),
            f"own{me.rank}": torch.tensor([number]),
            "list": [number],
        }

    def check(name: str, number: float) -> None:
        target = build(0)
        dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(root), process_group=me.group)
        assert torch.equal(target["d"].full_tensor(), torch.full((7, 3), number))
        assert torch.equal(target["w"], torch.full((5,), number))
        assert float(target[f"own{me.rank}"]) == number
        assert target["list"] == [number]

    writer = StorageWriter(root)
    for step in (1, 2):
        state = build(step)
        future = save_async(state, f"step-{step}", writer, **options)
        state["d"].to_local().fill_(99)
        state["w"].fill_(99)
        state[f"own{me.rank}"].fill_(99)
        state["list"].append(99)
        metadata = future.result(WAIT_S)
        assert metadata.storage_meta.checkpoint_id == f"{root}/step-{step}"
        check(f"step-{step}", step)
    assert isinstance(failures(save_async(build(3), "step-2", writer, **options))[0], AlreadyCommitted)

    # One rank fails in the background: the future of every rank says which and why.
    store = FaultyStore(root, Fault(Raise("locked"), "put", ".safetensors"))
    wrong = StorageWriter(store if me.rank == 1 else root)
    errors = failures(save_async(build(4), "step-4", wrong, **options))
    assert list(errors) == [1]
    assert isinstance(errors[1], SaveError)
    assert errors[1].rank == 1
    assert "planted" in str(errors[1])
    assert newest(open_store(root)).checkpoint == "step-2"
    check("step-2", 2)


def in_process_mode(me: Rank, root: str) -> None:
    on_ranks(me, root, "PROCESS")
    # The process that saves has a group of its own: it is whole, whatever becomes of ours.
    options: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    future = save_async({f"own{me.rank}": torch.ones(3)}, "step-5", StorageWriter(root), **options)
    dist.destroy_process_group()
    future.result(WAIT_S)


def test_thread_mode_on_ranks(pool: Pool, root: str) -> None:
    pool.run(3, on_ranks, root, "THREAD")


def test_process_mode_on_ranks(pools: Pools, root: str) -> None:
    with pools.fresh(2) as pool:
        pool.run(2, in_process_mode, root, deadline_s=90)
    whole = load(root, {"own0": torch.zeros(3), "own1": torch.zeros(3)}, "step-5")
    assert float(whole["own0"].sum() + whole["own1"].sum()) == 6


def destroyed(me: Rank, root: str, kind: str) -> Any:
    """The group is destroyed after `async_save` has returned, and before its thread has begun to save."""
    from torch.distributed.checkpoint import _async_thread_executor as executor

    go, save = threading.Event(), executor.save_wrapper

    def later(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(WAIT_S)
        return save(*args, **kwargs)

    executor.save_wrapper = later
    made_early = StorageWriter(root)
    made_early._world = World.__new__(World)  # as if made before the group was
    made_early._world._group = None
    writer = made_early if kind == "made before the group" else StorageWriter(root)
    options = {"async_stager": stock_stager()} if kind == "a stager of DCP's" else {}
    state = {"w": torch.ones(3), f"own{me.rank}": torch.ones(3)}
    future = save_async(state, "step-1", writer, **options)
    dist.destroy_process_group()
    go.set()
    errors = failures(future)
    with pytest.raises(CheckpointException):
        dcp.save(state, checkpoint_id="step-2", storage_writer=writer)
    return [(type(error).__name__, str(error)) for error in errors.values()]


@pytest.mark.parametrize("kind", ["", "made before the group", "a stager of DCP's"])
def test_ranks_whose_group_is_destroyed_before_the_save_commit_nothing(kind: str, pools: Pools, root: str) -> None:
    with pools.fresh(2) as pool:
        for ((name, text),) in pool.run(2, destroyed, root, kind):
            assert name == "PlanMismatch"
            assert "wait for all saves before torch.distributed is destroyed" in text
    assert entries(open_store(root)) == []


def alone_afterwards(me: Rank, root: str) -> None:
    dist.destroy_process_group()
    if me.rank == 0:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=StorageWriter(root))


def test_a_new_writer_saves_alone_when_the_group_is_gone(pools: Pools, root: str) -> None:
    with pools.fresh(2) as pool:
        pool.run(2, alone_afterwards, root)
    assert [one.decision.checkpoint for one in entries(open_store(root))] == ["step-1"]


def cached(**options: Any) -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(enable_plan_caching=True, **options)


def test_cached_plans(root: str, tmp_path: Path) -> None:
    forget_plans()
    writer, other = StorageWriter(root), StorageWriter(f"{root}-other")

    def go(name: str, number: int, to: StorageWriter, *extra: str) -> None:
        state = full_state(number) | {key: torch.tensor([number]) for key in extra}
        dcp.save(state, checkpoint_id=name, storage_writer=to, planner=cached(), no_dist=True)
        target = blank_state() | {key: torch.tensor([0]) for key in extra}
        same(load(f"{root}-other" if to is other else root, target, name), state)

    # A stock writer first: its storage data is what the cache then holds.
    stock = FileSystemWriter(tmp_path / "stock")
    dcp.save(full_state(0), storage_writer=stock, planner=cached(), no_dist=True)
    for number in (1, 2):
        go(f"step-{number}", number, writer)
        go(f"step-{number}", 10 + number, other)
    go("step-3", 3, writer, "new")
    go("step-4", 4, writer, "new")
    go("step-5", 5, writer)
    go("step-6", 6, other)


def cached_on_ranks(me: Rank, root: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    def build(number: float, *extra: str) -> dict[str, Any]:
        whole = torch.full((5, 3), number)
        state: dict[str, Any] = {
            "d": distribute_tensor(whole, me.mesh, [Shard(0)], src_data_rank=None),
            "w": torch.full((2,), number),
        }
        return state | {key: torch.tensor([number]) for key in extra}

    planner = cached()
    roots = (root, f"{root}-other")
    writers = [StorageWriter(one) for one in roots]
    # Unchanged; then a new key on rank 1 alone; then unchanged again; two roots in turn.
    extras = [(), (), (), ("late",) * (me.rank == 1), ("late",) * (me.rank == 1), ()]
    for step, extra in enumerate(extras):
        which = step % 2
        use = planner if step < 3 else cached()
        state = build(step, *extra)
        dcp.save(state, checkpoint_id=f"s-{step}", storage_writer=writers[which], planner=use, process_group=me.group)
        target = build(-1, *extra)
        dcp.load(target, checkpoint_id=f"s-{step}", storage_reader=StorageReader(roots[which]), process_group=me.group)
        assert torch.equal(target["d"].full_tensor(), torch.full((5, 3), float(step)))
        assert torch.equal(target["w"], torch.full((2,), float(step)))
        for key in extra:
            assert float(target[key]) == step


def test_cached_plans_on_ranks(pool: Pool, root: str) -> None:
    pool.run(3, cached_on_ranks, root)


class Brooding(dcp.DefaultSavePlanner):
    """Keeps plans of earlier saves and copies them at every chance, as a planner with a cache of its own might."""

    kept: ClassVar[list[Any]] = []

    def brood(self) -> None:
        for plan in reversed(self.kept):  # the oldest comes last
            copy.deepcopy(plan)
            pickle.loads(pickle.dumps(plan))

    def create_local_plan(self) -> Any:
        self.brood()
        return super().create_local_plan()

    def finish_plan(self, new_plan: Any) -> Any:
        self.kept.append(new_plan)
        self.brood()
        return self.kept[0]

    def resolve_data(self, write_item: Any) -> Any:
        self.brood()
        return super().resolve_data(write_item)


def brooding(me: Rank, root: str) -> None:
    Brooding.kept = []
    for step in (1, 2, 3):
        state = {"w": torch.full((4,), float(step)), f"own{me.rank}": torch.tensor([step])}
        dcp.save(
            state,
            checkpoint_id=f"step-{step}",
            storage_writer=StorageWriter(root),
            planner=Brooding(),
            process_group=me.group,
        )
        store = open_store(root)
        decision = find(store, f"step-{step}")
        keys = [info.key for info in store.list(f"data/step-{step}/") if info.key.endswith(".safetensors")]
        assert keys
        assert all(decision.txn in key for key in keys)


def test_a_planner_that_copies_old_plans(pool: Pool, root: str) -> None:
    pool.run(2, brooding, root)


def test_a_failed_plan_leaves_the_cache_usable(root: str) -> None:
    writer = StorageWriter(root)

    class Refusing(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            raise ValueError("planted")

    refusing = Refusing(enable_plan_caching=True)
    refusing._cached_plans_key = "DefaultSavePlanner"
    with pytest.raises(CheckpointException, match="planted"):
        dcp.save(full_state(1), checkpoint_id="step-1", storage_writer=writer, planner=refusing, no_dist=True)
    dcp.save(full_state(2), checkpoint_id="step-2", storage_writer=writer, planner=cached(), no_dist=True)
    same(load(root, blank_state()), full_state(2))


def test_stock_after_ours_with_one_cache_is_no_silent_success(root: str, tmp_path: Path) -> None:
    """DCP's cache is global: a stock writer after ours meets our storage data. It must fail loudly, or be right."""
    dcp.save(full_state(1), checkpoint_id="step-1", storage_writer=StorageWriter(root), planner=cached(), no_dist=True)
    stock = FileSystemWriter(tmp_path / "stock")
    try:
        dcp.save(full_state(2), storage_writer=stock, planner=cached(), no_dist=True)
    except CheckpointException:
        return
    target = blank_state()
    dcp.load(target, storage_reader=FileSystemReader(tmp_path / "stock"), no_dist=True)
    same(target, full_state(2))
