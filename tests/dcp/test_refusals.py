"""Refusals: a typed, picklable error of rank, key and cause on all ranks; nothing committed; the old loads; no hang."""

from __future__ import annotations

import dataclasses
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Raise, path_of
from states import same
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from workers import Pool, Rank

from txstore.catalog import entries, find, newest
from txstore.dcp import StorageReader, StorageWriter, StrictLoadPlanner
from txstore.errors import (
    AlreadyCommitted,
    CheckpointNotFound,
    CommitUnknown,
    ConfigError,
    Conflict,
    FormatError,
    IntegrityError,
    PlanMismatch,
    SaveError,
    StateMismatch,
    StoreError,
    StoreFullError,
    TxStoreError,
    UnsafeObject,
)
from txstore.manifest import Description
from txstore.registry import open_store
from txstore.retry import RetryPolicy
from txstore.slot_walk import resolve
from txstore.transaction import Visibility

ONCE = RetryPolicy(attempts=1)
SOON = Visibility(wait_s=0.1, poll_s=0.02)
WORLD = 3


def state(me: Rank, number: float) -> dict[str, Any]:
    from torch.distributed.tensor import Shard, distribute_tensor

    number = float(number)
    return {
        "d": distribute_tensor(torch.full((7, 400), number), me.mesh, [Shard(0)], src_data_rank=None),
        "w": torch.full((1000,), number),
        f"own{me.rank}": torch.tensor([number]),
        "o": [number],
    }


def check_loads(me: Rank, root: str, name: str, number: float) -> None:
    target = state(me, 0)
    dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(root), process_group=me.group)
    assert torch.equal(target["d"].full_tensor(), torch.full((7, 400), number))
    assert torch.equal(target["w"], torch.full((1000,), number))
    assert float(target[f"own{me.rank}"]) == number
    assert target["o"] == [number]


def save(me: Rank, root: Any, name: Any, number: float, **options: Any) -> None:
    call = {key: options.pop(key) for key in ("planner", "use_collectives") if key in options}
    writer = options.pop("writer", None) or StorageWriter(root, retry=ONCE, visibility=SOON, **options)
    dcp.save(state(me, number), checkpoint_id=name, storage_writer=writer, process_group=me.group, **call)


def failures(action: Callable[[], Any]) -> dict[int, BaseException]:
    """What the ranks' failures are, as this rank learns them; each is typed, names its rank, and travels again."""
    with pytest.raises(CheckpointException) as caught:
        action()
    found = {rank: wrapped[0] for rank, wrapped in caught.value.failures.items()}
    for error in found.values():
        if isinstance(error, TxStoreError):
            assert error.rank is not None  # where it happened; the coordinator finds what others did wrong
            assert f"[rank {error.rank}]" in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return found


def store_faults(me: Rank, root: str, rank: int, *faults: Fault) -> Any:
    return FaultyStore(root, *faults) if me.rank == rank else root


def refused_save(me: Rank, root: str, attempt: Callable[[], None]) -> dict[int, BaseException]:
    """Step 1 stands; an attempt at step 2 is refused; step 1 is the newest and loads; step 2 can then be saved."""
    import torch.distributed as dist

    save(me, root, "step-1", 1)
    found = failures(attempt)
    dist.barrier(me.group)
    assert newest(open_store(root)).checkpoint == "step-1"
    with pytest.raises(CheckpointNotFound):
        find(open_store(root), "step-2")
    check_loads(me, root, "step-1", 1)
    save(me, root, "step-2", 2)
    check_loads(me, root, "step-2", 2)
    return found


def agreed(outcomes: list[dict[int, BaseException]]) -> dict[int, BaseException]:
    """All ranks saw the same failures."""
    texts = [{rank: (type(error), str(error)) for rank, error in one.items()} for one in outcomes]
    assert all(one == texts[0] for one in texts)
    return outcomes[0]


# --- a rank that fails, in every phase ----------------------------------------------------------------------------


class Faulty(dcp.DefaultSavePlanner):
    """A planner that raises in one phase, on one rank, with one kind of error."""

    def __init__(self, phase: str, at: int = 0) -> None:
        super().__init__()
        self.phase = phase
        self.left = at

    def fail(self, phase: str) -> None:
        if self.phase == phase:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError(f"planted in {phase}")

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.fail("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self.fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self.fail("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self.fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self.fail("resolve_data")
        return super().resolve_data(write_item)


def planner_fails(me: Rank, root: str, rank: int, phase: str, at: int) -> dict[int, BaseException]:
    planner = Faulty(phase if me.rank == rank else "", at)
    return refused_save(me, root, lambda: save(me, root, "step-2", 2, planner=planner))


@pytest.mark.parametrize(
    ("phase", "rank", "at"),
    [
        ("set_up_planner", 0, 0),
        ("set_up_planner", 1, 0),
        ("create_local_plan", 2, 0),
        ("create_global_plan", 0, 0),
        ("finish_plan", 0, 0),
        ("finish_plan", 1, 0),
        ("resolve_data", 0, 1),
        ("resolve_data", 1, 0),
        ("resolve_data", 1, 3),
    ],
)
def test_a_planner_that_fails(phase: str, rank: int, at: int, pool: Pool, root: str) -> None:
    found = agreed(pool.run(WORLD, planner_fails, root, rank, phase, at))
    assert list(found) == [rank]
    assert f"planted in {phase}" in str(found[rank])
    if phase == "resolve_data":
        assert isinstance(found[rank], SaveError)


def store_fails(me: Rank, root: str, rank: int, error: str, verb: str, part: str) -> dict[int, BaseException]:
    faulty = store_faults(me, root, rank, Fault(Raise(error), verb, part, forever=True))
    return refused_save(me, root, lambda: save(me, faulty, "step-2", 2))


@pytest.mark.parametrize(
    "error", ["plain", "locked", "picky", "locked-store", "bare", "oserror", "full", "denied", "lost"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_cannot_be_written(error: str, rank: int, pool: Pool, root: str) -> None:
    found = agreed(pool.run(WORLD, store_fails, root, rank, error, "put", ".safetensors"))
    assert list(found) == [rank]
    assert isinstance(found[rank], StoreFullError if error in {"full", "locked-store"} else (SaveError, StoreError))
    assert "planted" in str(found[rank])


@pytest.mark.parametrize(
    ("verb", "part"),
    [
        ("read", "commits/step-2.0"),
        ("put", "begin.json"),
        ("head", "rank-00001"),
        ("put", "index.msgpack"),
        ("put", "manifest.json"),
        ("create", "commits/"),
    ],
)
@pytest.mark.parametrize("error", ["locked", "full"])
def test_a_coordinator_that_fails(verb: str, part: str, error: str, pool: Pool, root: str) -> None:
    found = agreed(pool.run(WORLD, store_fails, root, 0, error, verb, part))
    assert list(found) == [0]
    assert isinstance(found[0], StoreFullError if error == "full" else SaveError)


def failed_save(action: Callable[[], None]) -> dict[int, BaseException] | None:
    """The failures of a save, or None if it went through."""
    try:
        action()
    except CheckpointException as error:
        return {rank: wrapped[0] for rank, wrapped in error.failures.items()}
    return None


def nth_operation_fails(me: Rank, root: str, rank: int, error: str) -> int:
    """Fail the n-th store call of one rank, for every n, until a save goes through."""
    import torch.distributed as dist

    save(me, root, "step-1", 1)
    for number in range(60):
        faulty = store_faults(me, root, rank, Fault(Raise(error), at=number, forever=True))
        name = f"step-{10 + number}"
        failed = failed_save(lambda faulty=faulty, name=name: save(me, faulty, name, 2))
        if failed is None:
            check_loads(me, root, name, 2)
            return number
        assert list(failed) == [rank]
        assert isinstance(failed[rank], TxStoreError)
        dist.barrier(me.group)
        assert newest(open_store(root)).checkpoint == "step-1"
    raise AssertionError("never went through")


@pytest.mark.parametrize(("rank", "error"), [(0, "full"), (0, "plain"), (1, "locked")])
def test_every_store_operation_of_a_rank_fails_in_turn(rank: int, error: str, pool: Pool, root: str) -> None:
    reached = pool.run(WORLD, nth_operation_fails, root, rank, error)
    assert reached[0] >= (8 if rank == 0 else 1)


def commit_unknown(me: Rank, root: str) -> str:
    """The reply to the decision is lost and nothing can be read back: nobody may say that it failed or held."""
    save(me, root, "step-1", 1)

    def lose(store: Any, key: str, call: Any) -> Any:
        call()
        Raise("lost")(store, key, call)

    faulty = store_faults(
        me,
        root,
        0,
        Fault(lose, "create", "commits/"),
        Fault(Raise("lost"), "read", "step-2.0.json", at=2, forever=True),
    )
    found = failures(lambda: save(me, faulty, "step-2", 2))
    error = found[0]
    assert isinstance(error, CommitUnknown), error
    decision = resolve(open_store(root), "step-2", error.txn)
    assert decision is not None
    assert decision.kind == "commit"
    check_loads(me, root, "step-2", 2)
    return error.txn


def test_an_unknown_commit_says_so_on_all_ranks(pool: Pool, root: str) -> None:
    assert len(set(pool.run(WORLD, commit_unknown, root))) == 1


def third_shard(me: Rank, root: str, threads: int, part: str) -> dict[int, BaseException]:
    """One of several files of one rank fails on a helper thread."""
    faulty = store_faults(me, root, 1, Fault(Raise("locked"), "put", part))
    found = refused_save(me, root, lambda: save(me, faulty, "step-2", 2, shard_bytes=100, threads=threads))
    assert "planted" in str(found[1]), "the cause, not only that something is missing"
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_no_error_of_a_helper_thread_is_dropped(threads: int, pool: Pool, root: str) -> None:
    found = agreed(pool.run(2, third_shard, root, threads, "rank-00001-00001"))
    assert list(found) == [1]


def limited(me: Rank, root: str) -> dict[int, BaseException]:
    """A real limit of the system on one rank: no file may exceed 5,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def attempt() -> None:
        if me.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        try:
            save(me, root, "step-2", 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return refused_save(me, root, attempt)


def test_a_real_limit_on_one_rank(pool: Pool, root: str) -> None:
    found = agreed(pool.run(2, limited, root))
    assert list(found) == [1]
    assert isinstance(found[1], StoreError)
    assert "rank-00001" in found[1].key


def to_bad_root(me: Rank, root: str) -> dict[int, BaseException]:
    return failures(lambda: save(me, root, "step-1", 1))


def test_a_root_that_cannot_be_written(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    found = agreed(pool.run(2, to_bad_root, f"file://{tmp_path}/file/store"))
    assert isinstance(found[0], TxStoreError)
    assert "is no directory" in str(found[0])


# --- results that are not what was planned ------------------------------------------------------------------------


class Tampering(StorageWriter):
    """Reports something else than it wrote."""

    how: str = ""

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner).value()
        future: Future[Any] = Future()
        future.set_result(TAMPER[self.how](self, results))
        return future


def _replace(result: WriteResult, **changes: Any) -> WriteResult:
    return dataclasses.replace(result, storage_data=dataclasses.replace(result.storage_data, **changes))


def _own(results: list[WriteResult]) -> WriteResult:
    return next(result for result in results if result.index.fqn.startswith("own"))


def _but(results: list[WriteResult], changed: WriteResult) -> list[WriteResult]:
    return [changed if result.index == changed.index else result for result in results]


def _with_shard(results: list[WriteResult], **changes: Any) -> list[WriteResult]:
    shard = dataclasses.replace(results[0].storage_data.shard, **changes)
    return [_replace(result, shard=shard) for result in results]


def _file(writer: StorageWriter, results: list[WriteResult]) -> str:
    return path_of(writer.store.url, results[0].storage_data.shard.key)


def _removed(writer: StorageWriter, results: list[WriteResult]) -> list[WriteResult]:
    os.unlink(_file(writer, results))
    return results


def _truncated(writer: StorageWriter, results: list[WriteResult]) -> list[WriteResult]:
    os.truncate(_file(writer, results), 100)
    return results


TAMPER: dict[str, Callable[[StorageWriter, list[WriteResult]], Any]] = {
    "missing": lambda writer, results: results[:-1],
    "none": lambda writer, results: [],
    "doubled": lambda writer, results: [*results, results[0]],
    "foreign": lambda writer, results: [*results, dataclasses.replace(results[0], index=MetadataIndex("x", None))],
    "renamed": lambda writer, results: _but(
        results[:-1], dataclasses.replace(results[-1], index=MetadataIndex("x", None))
    ),
    "size": lambda writer, results: _but(
        results, dataclasses.replace(_own(results), size_in_bytes=_own(results).size_in_bytes + 1)
    ),
    "length": lambda writer, results: _but(
        results, dataclasses.replace(_replace(_own(results), length=2), size_in_bytes=2)
    ),
    "negative": lambda writer, results: _but(results, _replace(_own(results), start=-4)),
    "beyond": lambda writer, results: _but(results, _replace(_own(results), start=1 << 40)),
    "no-place": lambda writer, results: _but(results, dataclasses.replace(_own(results), storage_data=None)),
    "other-rank": lambda writer, results: _with_shard(results, rank=0),
    "other-attempt": lambda writer, results: _with_shard(results, key=f"data/step-1/{'0' * 32}/rank-00001.safetensors"),
    "larger": lambda writer, results: _with_shard(results, size=results[0].storage_data.shard.size + 1),
    "blocks": lambda writer, results: _with_shard(results, blocks=()),
    "block-values": lambda writer, results: _with_shard(results, blocks=(1 << 32,)),
    "removed": _removed,
    "truncated": _truncated,
}


def tampered(me: Rank, root: str, how: str) -> dict[int, BaseException]:
    writer = Tampering(root, retry=ONCE, visibility=SOON) if me.rank == 1 else StorageWriter(root, visibility=SOON)
    if me.rank == 1:
        writer.how = how
    return refused_save(me, root, lambda: save(me, root, "step-2", 2, writer=writer))


@pytest.mark.parametrize("how", TAMPER)
def test_results_that_are_not_the_plan(how: str, pool: Pool, root: str) -> None:
    found = agreed(pool.run(WORLD, tampered, root, how))
    (error,) = found.values()
    assert isinstance(error, (PlanMismatch, IntegrityError, FormatError, SaveError)), error
    assert list(found) == [0]
    assert error.rank == (1 if isinstance(error, (PlanMismatch, IntegrityError)) else 0)


def test_a_description_that_would_not_be_readable_is_refused(root: str) -> None:
    wrong = Description(topology={"dp": 1.5}, fingerprints={"code": 7})  # type: ignore[dict-item]
    writer = StorageWriter(root)
    writer.description = wrong  # past the constructor, which would have refused it
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    assert isinstance(caught.value.failures[0][0], TxStoreError)
    assert entries(open_store(root)) == []


# --- ranks that disagree ------------------------------------------------------------------------------------------


def disagree(me: Rank, root: str, what: str) -> dict[int, BaseException]:
    def attempt() -> None:
        odd = me.rank == 1
        if what == "root":
            save(me, f"{root}-other" if odd else root, "step-2", 2)
        elif what == "name":
            save(me, root, "step-3" if odd else "step-2", 2)
        elif what == "bad-name":
            save(me, root, "no/such//.name" if odd else "step-2", 2)
        elif what == "other-url":
            save(me, root, f"{root}-other/step-2" if odd else "step-2", 2)
        elif what == "not-a-name":
            save(me, root, 7 if odd else "step-2", 2)
        elif what == "unnamed":
            save(me, root, None if odd else "step-2", 2)

    return refused_save(me, root, attempt)


@pytest.mark.parametrize("what", ["root", "name", "bad-name", "other-url", "not-a-name", "unnamed"])
def test_ranks_that_disagree_on_what_is_saved(what: str, pool: Pool, root: str) -> None:
    found = agreed(pool.run(WORLD, disagree, root, what))
    assert list(found) == [1]
    assert isinstance(found[1], (PlanMismatch, ConfigError, SaveError))


def disagree_on_load(me: Rank, root: str, what: str) -> dict[int, BaseException]:
    save(me, root, "step-1", 1)
    save(me, root, "step-2", 2)
    save(me, f"{root}-other", "step-2", 3)
    odd = me.rank == 1
    reader = StorageReader(f"{root}-other" if odd and what == "root" else root)
    name = {"root": "step-2", "name": "step-1", "missing": "step-9", "bad-name": "no/such//.name", "newest": None}[what]
    target = state(me, 0)

    def load() -> None:
        asked = name if odd else "step-2"
        if what == "newest" and odd:
            asked = "step-1"
        dcp.load(target, checkpoint_id=asked, storage_reader=reader, process_group=me.group)

    found = failures(load)
    if odd:
        assert float(target["w"].sum()) == 0
    return found


@pytest.mark.parametrize("what", ["root", "name", "missing", "bad-name"])
def test_ranks_that_disagree_on_what_is_loaded(what: str, pool: Pool, root: str) -> None:
    found = agreed(pool.run(WORLD, disagree_on_load, root, what))
    assert list(found) == [1]
    assert isinstance(found[1], {"missing": CheckpointNotFound, "bad-name": ConfigError}.get(what, PlanMismatch))


def without_collectives(me: Rank, root: str) -> str:
    with pytest.raises(ConfigError) as caught:
        save(me, root, "step-1", 1, use_collectives=False)
    assert entries(open_store(root)) == []
    return str(caught.value)


def test_without_collectives(pool: Pool, root: str) -> None:
    assert all("use_collectives" in text for text in pool.run(2, without_collectives, root))


# --- names that are taken -----------------------------------------------------------------------------------------


def taken(me: Rank, root: str) -> None:
    save(me, root, "step-1", 1)
    assert isinstance(failures(lambda: save(me, root, "step-1", 2))[0], AlreadyCommitted)
    check_loads(me, root, "step-1", 1)
    # An overwrite that fails half-way leaves the old one readable; one that succeeds takes the next slot.
    faulty = store_faults(me, root, 1, Fault(Raise("full"), "put", ".safetensors"))
    assert isinstance(failures(lambda: save(me, faulty, "step-1", 3, overwrite=True))[1], StoreFullError)
    check_loads(me, root, "step-1", 1)

    def look(store: Any, key: str, call: Any) -> Any:
        target = {"w": torch.zeros(1000)}
        dcp.load(target, checkpoint_id="step-1", storage_reader=StorageReader(root, strict=False), no_dist=True)
        assert torch.equal(target["w"], torch.ones(1000))
        return call()

    watched = store_faults(me, root, 0, Fault(look, "create", "commits/"))
    save(me, watched, "step-1", 4, overwrite=True)
    check_loads(me, root, "step-1", 4)
    states = [(entry.decision.slot, entry.state) for entry in entries(open_store(root))]
    assert states == [(0, "superseded"), (1, "committed")]


def test_a_name_that_is_taken(pool: Pool, root: str) -> None:
    pool.run(2, taken, root)


def race(me: Rank, root: str, rounds: int) -> list[str]:
    """Two jobs of two ranks save the same steps."""
    import torch.distributed as dist

    group = me._groups[2] if me.rank < 2 else me.tail
    job = me.rank // 2
    won = []
    for step in range(rounds):
        dist.barrier(me.group)
        payload = {"job": torch.tensor([job]), f"own{dist.get_rank(group)}": torch.full((500,), float(job))}
        writer = StorageWriter(root)
        name = f"step-{step}"
        failed = failed_save(
            lambda payload=payload, writer=writer, name=name: dcp.save(
                payload, checkpoint_id=name, storage_writer=writer, process_group=group
            )
        )
        if failed is not None:
            assert list(failed) == [0]
            assert isinstance(failed[0], (Conflict, AlreadyCommitted)), failed
        won.append("won" if failed is None else "lost")
        dist.barrier(me.group)
        target = {"job": torch.tensor([-1]), "own0": torch.zeros(500), "own1": torch.zeros(500)}
        dcp.load(target, checkpoint_id=f"step-{step}", storage_reader=StorageReader(root), no_dist=True)
        winner = float(target["job"])
        assert (winner == job) == (won[-1] == "won")
        assert torch.equal(target["own0"], torch.full((500,), winner))
        assert torch.equal(target["own1"], torch.full((500,), winner))
    return won


def test_two_jobs_that_race_for_one_step(pool: Pool, root: str) -> None:
    found = pool.run(4, race, root, 8)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert all({one, other} == {"won", "lost"} for one, other in zip(found[0], found[2], strict=True))


# --- loads --------------------------------------------------------------------------------------------------------

SAVED = {"a": torch.arange(10.0), "b": torch.ones(3, 4), "n": 5}
MISFITS: dict[str, tuple[dict[str, Any], type[BaseException]]] = {
    "dtype": ({"a": torch.zeros(10), "b": torch.zeros(3, 4, dtype=torch.float64), "n": 0}, StateMismatch),
    "narrow-dtype": ({"a": torch.zeros(10), "b": torch.zeros(3, 4, dtype=torch.int8), "n": 0}, StateMismatch),
    "shape": ({"a": torch.zeros(10), "b": torch.zeros(4, 3), "n": 0}, ValueError),
    "missing": ({"a": torch.zeros(10), "b": torch.zeros(3, 4), "n": 0, "more": torch.zeros(2)}, StateMismatch),
    "unexpected": ({"a": torch.zeros(10), "n": 0}, StateMismatch),
    "object-for-tensor": ({"a": torch.zeros(10), "b": 7, "n": 0}, Exception),
}


def misfit(me: Rank, root: str, kind: str) -> dict[int, BaseException]:
    wrong, _ = MISFITS[kind]
    fine = {"a": torch.zeros(10), "b": torch.zeros(3, 4), "n": 0}
    dcp.save(SAVED, checkpoint_id="step-1", storage_writer=StorageWriter(root), process_group=me.group)
    target = wrong if me.rank == 1 or kind == "unexpected" else fine
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in target.items()}
    found = failures(lambda: dcp.load(target, storage_reader=StorageReader(root), process_group=me.group))
    if target is wrong:
        same(target, before)
    target = dict(fine)
    dcp.load(target, storage_reader=StorageReader(root), process_group=me.group)
    same(target, SAVED)
    return found


@pytest.mark.parametrize("kind", MISFITS)
def test_a_target_that_does_not_fit_is_left_alone(kind: str, pool: Pool, root: str) -> None:
    found = agreed(pool.run(2, misfit, root, kind))
    assert list(found) == [0 if kind == "unexpected" else 1]
    (error,) = found.values()
    assert isinstance(error, MISFITS[kind][1]), error
    assert {"missing": "more"}.get(kind, "b") in str(error)


def test_a_part_is_loaded_on_purpose_only(root: str) -> None:
    dcp.save(SAVED, checkpoint_id="step-1", storage_writer=StorageWriter(root), no_dist=True)
    target = {"b": torch.zeros(3, 4)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=StorageReader(root), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, StateMismatch)
    assert "'a'" in str(error)
    assert "'n'" in str(error)
    assert float(target["b"].sum()) == 0
    dcp.load(target, storage_reader=StorageReader(root, strict=False), no_dist=True)
    assert torch.equal(target["b"], torch.ones(3, 4))


def unreadable(me: Rank, root: str, error: str, verb: str, part: str) -> dict[int, BaseException]:
    save(me, root, "step-1", 1)
    faulty = store_faults(me, root, 1, Fault(Raise(error), verb, part, forever=True))
    reader = StorageReader(faulty, retry=ONCE, threads=2)
    found = failures(lambda: dcp.load(state(me, 0), storage_reader=reader, process_group=me.group))
    check_loads(me, root, "step-1", 1)
    return found


@pytest.mark.parametrize("error", ["locked", "picky", "bare", "locked-store", "denied"])
@pytest.mark.parametrize(
    ("verb", "part"),
    [("read", "commits/"), ("list", "commits/"), ("read", "manifest.json"), ("read_into", ".safetensors")],
)
def test_a_rank_that_cannot_read(error: str, verb: str, part: str, pool: Pool, root: str) -> None:
    found = agreed(pool.run(2, unreadable, root, error, verb, part))
    assert list(found) == [1]
    assert isinstance(found[1], TxStoreError)
    assert "planted" in str(found[1])


# --- objects ------------------------------------------------------------------------------------------------------


class Canary:
    """Unpickling it runs code."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class Harmless:
    """Outside the allow-list, and harmless."""

    def __init__(self, value: int) -> None:
        self.value = value


def save_quietly(payload: dict[str, Any], root: str) -> None:
    dcp.save(payload, checkpoint_id="step-1", storage_writer=StorageWriter(root), no_dist=True)


def test_code_in_an_object_is_not_run(root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trap = tmp_path / "canary"
    save_quietly({"w": torch.ones(5), "o": Canary(str(trap)), "z": [1]}, root)
    assert "'o'" in caplog.text, "the save warns"
    assert not trap.exists()
    target = {"w": torch.zeros(5), "o": None, "z": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=StorageReader(root), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, UnsafeObject)
    assert error.key == "o"
    assert not trap.exists()
    same(target, {"w": torch.zeros(5), "o": None, "z": None})
    dcp.load(target, storage_reader=StorageReader(root, trust_objects=True), no_dist=True)
    assert trap.exists()
    assert torch.equal(target["w"], torch.ones(5))


def test_allowed_classes_load(root: str) -> None:
    save_quietly({"o": Harmless(7)}, root)
    target = {"o": None}
    with pytest.raises(CheckpointException):
        dcp.load(target, storage_reader=StorageReader(root), no_dist=True)
    with torch.serialization.safe_globals([Harmless]):
        dcp.load(target, storage_reader=StorageReader(root), no_dist=True)
    assert target["o"].value == 7  # type: ignore[attr-defined]


class RawPlanner(dcp.DefaultSavePlanner):
    """Writes objects in an encoding of its own."""

    def resolve_data(self, write_item: Any) -> Any:
        import io

        found = self.lookup_object(write_item.index)
        return found if isinstance(found, torch.Tensor) else io.BytesIO(repr(found).encode())


class RawLoader(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.getvalue()


def test_a_planner_with_an_encoding_of_its_own(root: str) -> None:
    writer = StorageWriter(root)
    dcp.save({"o": 5}, checkpoint_id="step-1", storage_writer=writer, planner=RawPlanner(), no_dist=True)
    target = {"o": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=StorageReader(root), planner=RawLoader(), no_dist=True)
    assert isinstance(caught.value.failures[0][0], UnsafeObject)
    reader = StorageReader(root, trust_objects=True)
    dcp.load(target, storage_reader=reader, planner=RawLoader(), no_dist=True)
    assert target["o"] == b"5"


def test_state_that_changes_while_it_is_written(root: str) -> None:
    tensor = torch.zeros(100)

    def change(store: Any, key: str, call: Any) -> Any:
        call()
        tensor.add_(1)
        Raise("lost")(store, key, call)

    faulty = FaultyStore(root, Fault(change, "put", ".safetensors"))
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": tensor}, checkpoint_id="step-1", storage_writer=StorageWriter(faulty), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, PlanMismatch)
    assert "changed" in str(error)
    assert entries(open_store(root)) == []


@pytest.mark.parametrize("where", [0.5, 1.0])
def test_state_that_changes_between_checksum_and_write(where: float, root: str) -> None:
    """The bytes on disk would then fail their own checksum: committed, and readable by nobody."""
    from txstore_posix.config import PosixConfig
    from txstore_posix.store import PosixStore
    from txstore_posix.syscalls import Syscalls

    tensor = torch.zeros(10 << 20)
    element = min(int(len(tensor) * where), len(tensor) - 1)

    class Training(Syscalls):
        def pwrite(self, fd: int, data: Any, offset: int) -> int:
            if offset <= 4096 + 4 * element < offset + len(data):
                tensor[element] += 1
            return super().pwrite(fd, data, offset)

    store = PosixStore(PosixConfig.from_url(root), Training())
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"w": tensor}, checkpoint_id="step-1", storage_writer=StorageWriter(store), no_dist=True)
    assert isinstance(caught.value.failures[0][0], PlanMismatch)
    assert "changed" in str(caught.value)
    assert float(tensor.sum()) == 1, "it was caught at once"
    assert entries(open_store(root)) == []


def test_the_strict_planner_lists_all_differences(root: str) -> None:
    save_quietly({"model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "n": 5}}, root)
    wrong = {
        "model": {
            "_orig_mod.a": torch.zeros(2),
            "b": torch.zeros(7),
            "c": torch.zeros(4, dtype=torch.int32),
            "n": torch.zeros(1),
        }
    }
    with pytest.raises(CheckpointException) as caught:
        dcp.load(wrong, storage_reader=StorageReader(root), planner=StrictLoadPlanner(), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, StateMismatch)
    assert error.key == "model._orig_mod.a"
    for text in (
        "the checkpoint has 'model.a'",
        "shape (7,), (3,)",
        "torch.int32, torch.float32",
        "'model.n' is a tensor",
    ):
        assert text in str(error)
    right = {"model": {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4), "n": None}}
    dcp.load(right, storage_reader=StorageReader(root), planner=StrictLoadPlanner(), no_dist=True)
    same(right["model"]["b"], torch.ones(3))
