"""Ranks that need the same bytes read them once: the values, the bytes, and every way in which one of them fails."""

from __future__ import annotations

import logging
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import test_distributed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Kill, Raise
from states import bits
from test_distributed import NAME, build, gathered, value
from torch.distributed.checkpoint import CheckpointException
from workers import Pool, Pools, Rank

from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import ConfigError, IntegrityError, LoadError, StateMismatch, StoreFullError

MIB = 1 << 20


def shared(me: Rank, root: str, *faults: Fault, **options: Any) -> tuple[StorageReader, FaultyStore]:
    """A reader that shares over a group of its own, and its store, which counts."""
    store = FaultyStore(root, *faults)
    return StorageReader(store, share=me.mesh.get_group() if me.world > 1 else None, **options), store


def bytes_of_shards(store: FaultyStore) -> int:
    return sum(size for key, _, size in store.reads if key.endswith(".safetensors"))


def load_all_shared(me: Rank, root: str) -> int:
    state = build(me, False)
    reader, store = shared(me, root, strict=False)
    dcp.load(state, storage_reader=reader, process_group=me.group)
    for name, item in gathered(me, state).items():
        if name == "object":
            assert item == {"step": 7, "names": ["a", None]}
        else:
            known = test_distributed.SHARDED.get(name, (tuple(item.shape),))[0]
            assert bits(item) == bits(value(known, item.dtype)), name
    return bytes_of_shards(store)


def test_saved_on_n_loaded_on_m(pool: Pool, root: str) -> None:
    pool.run(3, test_distributed.save_all, root, 64 << 10)
    for loaders in (1, 2, 4):
        pool.run(loaders, load_all_shared, root)


SHAPES = {"weight": (500, 1031), "moment": (500, 1031), "norm": (1031,), "step": ()}


def mix(me: Rank, fill: bool, how: str) -> dict[str, Any]:
    """Matrices that are no whole blocks, vectors and scalars, each layer's beside one another."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    state: dict[str, Any] = {}
    for layer in range(6):
        for name, shape in SHAPES.items():
            made = value(shape) if fill else torch.zeros(shape)
            if shape:
                placement = {"rows": Shard(0), "columns": Shard(len(shape) - 1), "whole": Replicate()}[how]
                made = distribute_tensor(made, me.mesh, [placement], src_data_rank=None)
            state[f"{layer}.{name}"] = made
    return state


def save_mix(me: Rank, root: str) -> None:
    dcp.save(mix(me, True, "rows"), checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)


def load_mix(me: Rank, root: str, how: str) -> int:
    """Bytes that this rank read."""
    state = mix(me, False, how)
    reader, store = shared(me, root)
    dcp.load(state, storage_reader=reader, process_group=me.group)
    for name, item in gathered(me, state).items():
        assert bits(item) == bits(value(SHAPES[name.partition(".")[2]])), name
    return bytes_of_shards(store)


def stored_bytes(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root.removeprefix("file://")).rglob("*.safetensors"))


@pytest.mark.parametrize(("savers", "loaders", "how"), [(4, 3, "rows"), (2, 4, "columns"), (3, 4, "whole")])
def test_each_stored_byte_is_read_once_over_all_ranks(
    savers: int, loaders: int, how: str, pool: Pool, root: str
) -> None:
    pool.run(savers, save_mix, root)
    read = pool.run(loaders, load_mix, root, how)
    assert sum(read) <= 1.001 * stored_bytes(root)
    if how == "whole":
        assert max(read) <= 1.3 * stored_bytes(root) / loaders, "the ranks share the work"


# --- failures ----------------------------------------------------------------------------------------------------


def replicated(fill: bool) -> dict[str, Any]:
    return {f"w{number}": (value((MIB + 99,)) if fill else torch.zeros(MIB + 99)) for number in range(4)}


def save_replicated(me: Rank, root: str) -> None:
    dcp.save(replicated(True), checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)


def failing_load(me: Rank, root: str, faulty: int, faults: tuple[Fault, ...]) -> tuple[dict[int, Any], float]:
    """All ranks' errors as this rank sees them, and how long it took."""
    reader, _ = shared(me, root, *(faults if me.rank == faulty else ()))
    began = time.monotonic()
    try:
        dcp.load(replicated(False), storage_reader=reader, process_group=me.group)
    except CheckpointException as error:
        return {rank: wrapped[0] for rank, wrapped in error.failures.items()}, time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("name", "kind", "at"),
    [
        ("full", StoreFullError, 0),
        ("full", StoreFullError, 1),
        ("locked-store", StoreFullError, 1),
        ("bare", LoadError, 1),
    ],
)
def test_all_ranks_fail_with_the_error_of_the_rank_that_reads(
    name: str, kind: type[Exception], at: int, pool: Pool, root: str
) -> None:
    pool.run(3, save_replicated, root)
    fault = Fault(Raise(name), verb="read_into", part=".safetensors", at=at)
    for failures, took in pool.run(3, failing_load, root, 1, (fault,)):
        assert sorted(failures) == [0, 1, 2]
        for error in failures.values():
            assert type(error) is kind
            assert error.rank == 1
            assert "planted" in str(error)
        assert took < 10
    pool.run(3, load_again, root)


def load_again(me: Rank, root: str) -> None:
    """The group is as good as before, and every value is right."""
    dcp.save(replicated(True), checkpoint_id="step-2", storage_writer=StorageWriter(root), process_group=me.group)
    reader, _ = shared(me, root)
    state = replicated(False)
    dcp.load(state, storage_reader=reader, process_group=me.group)
    assert all(torch.equal(state[name], item) for name, item in replicated(True).items())


def test_damage_is_named_on_all_ranks(pool: Pool, root: str) -> None:
    pool.run(2, save_replicated, root)
    path = max(Path(root.removeprefix("file://")).rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[MIB + 17] ^= 4
    path.write_bytes(data)
    for failures, _ in pool.run(4, failing_load, root, 0, ()):
        assert sorted(failures) == [0, 1, 2, 3]
        for error in failures.values():
            assert isinstance(error, IntegrityError)
            assert error.key.endswith(path.name)
            assert "block 1 " in str(error)


def misfit(me: Rank, root: str) -> tuple[dict[int, Any], float, float]:
    """One rank's target has another dtype: it refuses before it reads, and the others must not wait for it."""
    reader, _ = shared(me, root)
    state = replicated(False)
    if me.rank == 1:
        state["w2"] = state["w2"].to(torch.bfloat16)
    began = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, process_group=me.group)
    failures = {rank: wrapped[0] for rank, wrapped in caught.value.failures.items()}
    return failures, time.monotonic() - began, float(state["w2"].sum()) if me.rank == 1 else 0.0


def test_a_target_that_does_not_fit_on_one_rank_fails_all(pool: Pool, root: str) -> None:
    pool.run(3, save_replicated, root)
    for failures, took, touched in pool.run(3, misfit, root):
        assert isinstance(failures[1], StateMismatch)
        assert all(isinstance(error, StateMismatch) and error.rank == 1 for error in failures.values())
        assert took < 10
        assert touched == 0


def disagree(me: Rank, root: str) -> dict[int, Any]:
    """Ranks that found different checkpoints share nothing, and are refused as ever."""
    reader, _ = shared(me, root)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(replicated(False), checkpoint_id=f"step-{1 + me.rank}", storage_reader=reader, process_group=me.group)
    return {rank: type(wrapped[0]).__name__ for rank, wrapped in caught.value.failures.items()}


def save_two(me: Rank, root: str) -> None:
    for step in (1, 2):
        dcp.save(
            replicated(True), checkpoint_id=f"step-{step}", storage_writer=StorageWriter(root), process_group=me.group
        )


def test_ranks_that_found_different_checkpoints(pool: Pool, root: str) -> None:
    pool.run(2, save_two, root)
    assert pool.run(2, disagree, root) == [{1: "PlanMismatch"}] * 2


def test_a_rank_that_dies_ends_the_load_of_the_others(pools: Pools, pool: Pool, root: str) -> None:
    pool.run(3, save_replicated, root)
    kill = Fault(Kill(after=False), verb="read_into", part=".safetensors", at=1)
    with pools.fresh(3, gloo_timeout_s=5) as own:
        own.start(3, survive, root, 1, (kill,))
        for outcome in own.collect([0, 2], deadline_s=25.0):
            kind, took = outcome.value
            assert kind == "DeadlineExceeded"
            assert took < 20


def survive(me: Rank, root: str, faulty: int, faults: tuple[Fault, ...]) -> tuple[str, float]:
    reader, _ = shared(me, root, *(faults if me.rank == faulty else ()))
    seen: list[str] = []
    read_data = reader.read_data

    def noted(*args: Any) -> Any:
        try:
            return read_data(*args)
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    reader.read_data = noted  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(BaseException):  # DCP's own collective fails, too
        dcp.load(replicated(False), storage_reader=reader, process_group=me.group)
    return seen[0], time.monotonic() - began


def late(me: Rank, root: str, wait_s: float) -> str:
    """A rank that waits for the store longer than the group's timeout."""

    def slow(store: Any, key: str, call: Any) -> Any:
        time.sleep(wait_s)
        return call()

    faults = [Fault(slow, verb="read_into", part=".safetensors", at=1)] if me.rank == 0 else []
    reader, _ = shared(me, root, *faults)
    with pytest.raises(BaseException) as caught:
        dcp.load(replicated(False), storage_reader=reader, process_group=me.group)
    failures = getattr(caught.value, "failures", {})
    return type(failures[1][0]).__name__ if 1 in failures else type(caught.value).__name__


def test_a_rank_that_is_late(pools: Pools, pool: Pool, root: str) -> None:
    pool.run(2, save_replicated, root)
    with pools.fresh(2, gloo_timeout_s=2) as own:
        own.start(2, late, root, 3.0)
        assert [outcome.value for outcome in own.collect([0, 1], deadline_s=25.0)] == ["DeadlineExceeded"] * 2


def damaged_on_the_way(me: Rank, root: str) -> list[tuple[str, bool]]:
    """A bit that flips between two ranks: what arrives is verified again."""
    save_replicated(me, root)
    send = dist.isend

    def flip(tensor: torch.Tensor, **place: Any) -> Any:
        if tensor.numel() > MIB and me.rank == 0:
            tensor = tensor.clone()
            tensor[MIB - 5] ^= 1
        return send(tensor, **place)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointException) as caught:
        patch.setattr(dist, "isend", flip)
        reader, _ = shared(me, root)
        dcp.load(replicated(False), storage_reader=reader, process_group=me.group)
    return [
        (type(wrapped[0]).__name__, "arrived damaged" in str(wrapped[0])) for wrapped in caught.value.failures.values()
    ]


def test_bytes_that_change_on_the_way_are_refused(pool: Pool, root: str) -> None:
    for failures in pool.run(2, damaged_on_the_way, root):
        assert failures == [("LoadError", True)] * 2


# --- where nothing is shared -------------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def unshared(me: Rank, root: str, how: str) -> tuple[int, str]:
    lines = Lines()
    logging.getLogger("txstore.dcp.reader").addHandler(lines)
    group = me.mesh.get_group()
    store = FaultyStore(root)
    options: dict[str, Any] = {"process_group": me.group}
    if how == "some":
        group = group if me.rank else None
    elif how == "no_dist":
        options = {"no_dist": True}
    elif how == "larger group":
        group = dist.group.WORLD
    reader = StorageReader(store, share=group)
    if how == "pickled":
        reader = pickle.loads(pickle.dumps(reader))
        store = reader.store.inner  # type: ignore[attr-defined]
    state = replicated(False)
    dcp.load(state, storage_reader=reader, **options)
    logging.getLogger("txstore.dcp.reader").removeHandler(lines)
    assert all(torch.equal(state[name], item) for name, item in replicated(True).items())
    return bytes_of_shards(store), lines.text


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("some", "1 of 2 ranks offer nothing"),
        ("no_dist", "1 ranks load, the group has 2"),
        ("larger group", "2 ranks load, the group has 4"),
        ("pickled", ""),
    ],
)
def test_where_the_offers_do_not_fit_each_rank_reads_by_itself(how: str, why: str, pool: Pool, root: str) -> None:
    pool.run(2, save_replicated, root)
    found = pool.run(2, unshared, root, how)
    assert all(count == stored_bytes(root) for count, _ in found)
    assert why in found[0][1]
    assert bool(found[0][1]) == bool(why)


class Later(dcp.DefaultLoadPlanner):
    """Asks for less at first than it reads in the end."""

    def create_local_plan(self) -> Any:
        self.full = super().create_local_plan()
        return type(self.full)(self.full.items[:1], planner_data=self.full.planner_data)

    def finish_plan(self, central_plan: Any) -> Any:
        return type(central_plan)(self.full.items, storage_data=central_plan.storage_data)


def load_later(me: Rank, root: str) -> None:
    reader, _ = shared(me, root, strict=False)
    state = replicated(False)
    dcp.load(state, storage_reader=reader, planner=Later(), process_group=me.group)
    assert all(torch.equal(state[name], item) for name, item in replicated(True).items())


def test_a_planner_that_changes_its_mind(pool: Pool, root: str) -> None:
    pool.run(2, save_replicated, root)
    pool.run(2, load_later, root)


def in_tail_group(me: Rank, root: str) -> None:
    """A sub-group whose ranks have other numbers in the world."""
    if me.rank < 2:
        return
    store = FaultyStore(root)
    state = replicated(False)
    reader = StorageReader(store, share=me.tail)
    dcp.load(state, storage_reader=reader, process_group=me.tail)
    assert all(torch.equal(state[name], item) for name, item in replicated(True).items())
    assert bytes_of_shards(store) < 0.7 * stored_bytes(root)


def test_a_sub_group_that_shares_over_the_groups_own(pool: Pool, root: str) -> None:
    pool.run(2, save_replicated, root)
    pool.run(4, in_tail_group, root)


def test_a_share_that_is_no_group_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="share="):
        StorageReader(root, share="gloo")  # type: ignore[arg-type]
