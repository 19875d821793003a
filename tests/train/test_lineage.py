"""What a run may add to a store: nothing that the next resume would not take, and nothing to a store that it lost."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Raise
from torch.distributed.checkpoint.api import CheckpointException
from workers import Pool, Rank

from tests.train.runs import Run
from txstore.catalog import entries
from txstore.dcp import StorageWriter
from txstore.errors import (
    AlreadyCommitted,
    Conflict,
    NotNewest,
    NotResumed,
    StoreFullError,
    StoreReplaced,
    TxStoreError,
)
from txstore.registry import open_store
from txstore.retry import RetryPolicy
from txstore.root import ensure_store
from txstore.slot_walk import TWO_JOBS, claim_abort, default_writer
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions

WORLD = 4


def at(step: int, seed: int = 3) -> Run:
    """A run that stands at a step."""
    run = Run(seed)
    run.state.progress.global_step = step
    return run


def saved(url: Any, *steps: int) -> None:
    """What an earlier process left: checkpoints of these steps."""
    run = at(0)
    with Checkpointer(url, run.state) as saves:
        for step in steps:
            run.state.progress.global_step = step
            saves.save()


def committed(url: str) -> list[str]:
    with open_store(url) as store:
        return [entry.decision.checkpoint for entry in entries(store) if entry.state == "committed"]


def written(store: FaultyStore) -> list[tuple[str, str]]:
    return [call for call in store.calls if call[0] in {"put", "create", "delete"}]


# a run that forgot to resume


@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_run_that_has_not_resumed_may_not_save_beside_checkpoints(step: int, store_url: str) -> None:
    saved(store_url, 6)
    store = FaultyStore(store_url)
    with Checkpointer(store, at(step).state) as saves:
        for _ in range(2):  # asking again does not help
            with pytest.raises(NotResumed, match=r"holds checkpoints, such as step-6.*call resume\(\)"):
                saves.save()
        assert saves.wait() == []
    assert written(store) == []
    assert committed(store_url) == ["step-6"]


def test_overwrite_is_not_a_resume(store_url: str) -> None:
    saved(store_url, 6)
    with Checkpointer(store_url, at(6).state, overwrite=True) as saves, pytest.raises(NotResumed):
        saves.save()


def test_a_resume_that_was_refused_is_none(store_url: str) -> None:
    saved(store_url, 6)
    run = at(2)
    run.state.pieces.pop("scheduler")
    with Checkpointer(store_url, run.state) as saves:
        with pytest.raises(TxStoreError):
            saves.resume()
        with pytest.raises(NotResumed):
            saves.save()


def test_a_record_that_cannot_be_read_may_be_a_checkpoint(store_url: str) -> None:
    saved(store_url, 6)
    path = root_of(store_url) / "commits" / "step-6.0.json"
    path.unlink()
    path.write_bytes(b"{")
    with Checkpointer(store_url, at(2).state) as saves, pytest.raises(NotResumed, match="step-6"):
        saves.save()


def test_an_aborted_save_is_no_checkpoint(store_url: str) -> None:
    with open_store(store_url) as store:
        ensure_store(store)
        claim_abort(store, "step-6", "0" * 32)
    saved(store_url, 3)
    assert committed(store_url) == ["step-3"]


def test_the_store_is_looked_at_once(store_url: str) -> None:
    run = at(1)
    store = FaultyStore(store_url)
    counts = []
    with Checkpointer(store, run.state) as saves:
        for step in (1, 2, 3):
            run.state.progress.global_step = step
            before = len(store.calls)
            saves.save()
            saves.wait()
            counts.append(sum(call == ("list", "commits/") for call in store.calls[before:]))
    assert counts == [1, 0, 0]


# a run that went on from an older checkpoint


def test_what_the_next_resume_would_not_take_is_not_saved(store_url: str) -> None:
    saved(store_url, 4, 6)
    run = at(0)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(checkpoint="step-4"))
        run.state.progress.global_step = 5
        for _ in range(2):
            with pytest.raises(NotNewest, match=r"step-5 is older than step-6: the next resume would not take it"):
                saves.save()
        run.state.progress.global_step = 8
        saves.save()
    assert committed(store_url) == ["step-4", "step-6", "step-8"]


def test_a_run_that_went_back_saves_to_a_root_of_its_own(store_url: str) -> None:
    """What the error and the guide advise."""
    saved(store_url, 4, 6)
    run = at(0)
    with Checkpointer(f"{store_url}-branch", run.state) as saves:
        assert saves.resume().fresh
        with Checkpointer(store_url, run.state) as past:
            assert past.resume(ResumeOptions(checkpoint="step-4")).proved
        run.state.progress.global_step += 1
        saves.save()
    assert committed(f"{store_url}-branch") == ["step-5"]


def test_a_run_that_counts_back_without_a_resume_is_refused(store_url: str) -> None:
    run = at(5)
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
        run.state.progress.global_step = 4
        with pytest.raises(NotNewest, match="step-4 is older than step-5"):
            saves.save()
        saves.resume()
        run.state.progress.global_step = 6
        saves.save()
    assert committed(store_url) == ["step-5", "step-6"]


def test_a_run_that_fell_back_may_save_below_what_is_damaged(store_url: str) -> None:
    """The next resume does not take the damaged one either: it says so, or passes over it again."""
    saved(store_url, 4, 6)
    (manifest,) = (root_of(store_url) / "data" / "step-6").rglob("manifest.json")
    manifest.unlink()
    run = at(0)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(fallback="previous"))
        run.state.progress.global_step = 5
        saves.save()
    with Checkpointer(store_url, at(0).state) as saves:
        with pytest.raises(TxStoreError, match=r"manifest\.json"):
            saves.resume()
        assert saves.resume(ResumeOptions(fallback="previous")).checkpoint == "step-5"


# two runs on one root


@pytest.mark.parametrize("first", [(), (2,)])
def test_a_commit_since_the_resume_is_somebody_elses(first: tuple[int, ...], store_url: str) -> None:
    if first:
        saved(store_url, *first)
    run = at(0)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume()
        with Checkpointer(store_url, at(0, seed=9).state) as other:
            other.resume()
            other.state.progress.global_step = 3
            other.save()
        run.state.progress.global_step = 4
        with pytest.raises(Conflict, match=r"step-3 was committed by .*another run saves to this root"):
            saves.save()
    assert committed(store_url) == [*(f"step-{step}" for step in first), "step-3"]


def test_a_step_that_was_saved_before_is_refused_and_says_why(store_url: str) -> None:
    saved(store_url, 4)
    with Checkpointer(store_url, at(0).state) as saves:
        saves.resume()
        saves.save()
        with pytest.raises(AlreadyCommitted, match="this run saved or resumed this step before") as refused:
            saves.wait()
    assert default_writer() in refused.value.message
    assert refused.value.next_step.startswith(TWO_JOBS)


# a store that goes away


@pytest.mark.parametrize("then", [(), (1,)])
def test_a_store_that_is_gone_or_another_one_after_the_resume_is_not_saved_to(
    then: tuple[int, ...], store_url: str
) -> None:
    saved(store_url, 4)
    run = at(0)
    store = FaultyStore(store_url)
    with Checkpointer(store, run.state) as saves:
        saves.resume()
        remove(store_url)
        if then:
            saved(store_url, *then)
        with pytest.raises(StoreReplaced, match="step-4, from which this run goes on, is gone"):
            saves.save()
    assert written(store) == []


def root_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def remove(url: str) -> None:
    shutil.rmtree(root_of(url))


def empty(url: str) -> None:
    remove(url)
    root_of(url).mkdir()


def unmark(url: str) -> None:
    (root_of(url) / "txstore.json").unlink()


def lose_commits(url: str) -> None:
    shutil.rmtree(root_of(url) / "commits")


def replace(url: str) -> None:
    """By another run's, with the same names."""
    remove(url)
    saved(url, 1)


@pytest.mark.parametrize("harm", [remove, empty, unmark, lose_commits, replace])
def test_a_store_that_goes_away_between_saves_is_not_made_anew(harm: Any, store_url: str) -> None:
    run = at(1)
    store = FaultyStore(store_url)
    with Checkpointer(store, run.state) as saves:
        saves.save()
        saves.wait()
        harm(store_url)
        before = sorted(path for path in root_of(store_url).rglob("*") if path.is_file())
        made = len(written(store))
        for step in (2, 3):  # and it stays so
            run.state.progress.global_step = step
            handle = saves.save()
            with pytest.raises(StoreReplaced, match=r"was deleted, emptied or replaced while this writer used it"):
                saves.wait()
            assert isinstance(handle.committed.exception(), StoreReplaced)
    assert written(store)[made:] == []
    assert sorted(path for path in root_of(store_url).rglob("*") if path.is_file()) == before


def test_a_store_that_goes_away_before_its_first_commit_is_not_made_anew(store_url: str) -> None:
    run = at(1)
    store = FaultyStore(store_url, Fault(Raise("full"), "put", ".safetensors"))
    with Checkpointer(store, run.state, retry=RetryPolicy(attempts=1)) as saves:
        saves.save()
        with pytest.raises(StoreFullError):
            saves.wait()
        remove(store_url)
        saves.save()
        with pytest.raises(StoreReplaced, match=r"format document is gone: key='txstore\.json'"):
            saves.wait()
    assert not root_of(store_url).exists()


def test_a_store_that_goes_away_in_the_middle_of_a_save_gets_no_commit(store_url: str) -> None:
    """The shard that is written afterwards lies there: without a look the commit would stand in a store without a root."""

    def gone(store: Any, key: str, call: Any) -> Any:
        remove(store_url)
        return call()

    with Checkpointer(FaultyStore(store_url, Fault(gone, "put", ".safetensors")), at(1).state) as saves:
        saves.save()
        with pytest.raises(StoreReplaced):
            saves.wait()
    assert not (root_of(store_url) / "commits").exists()


def test_what_was_resumed_must_be_in_the_store_that_is_saved_to(store_url: str) -> None:
    saved(store_url, 4)
    run = at(0)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(ResumeOptions(checkpoint="step-4"))
        remove(store_url)
        saved(store_url, 4)
        run.state.progress.global_step = 5
        saves.save()
        with pytest.raises(StoreReplaced, match=r"the decision step-4\.0 is now that of"):
            saves.wait()
    assert committed(store_url) == ["step-4"]


def test_a_damaged_record_does_not_stop_the_saves(store_url: str) -> None:
    run = at(1)
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
        saves.wait()
        path = root_of(store_url) / "commits" / "step-1.0.json"
        path.unlink()
        path.write_bytes(b"{")
        run.state.progress.global_step = 2
        saves.save()
        assert [decision.checkpoint for decision in saves.wait()] == ["step-2"]


def test_a_plain_writer_knows_its_store_too(store_url: str) -> None:
    writer = StorageWriter(store_url)
    state = {"x": torch.ones(3)}
    dcp.save(state, storage_writer=writer, checkpoint_id="step-1", no_dist=True)
    dcp.save(state, storage_writer=pickle.loads(pickle.dumps(writer)), checkpoint_id="step-2", no_dist=True)
    remove(store_url)
    for one in (writer, pickle.loads(pickle.dumps(writer))):
        with pytest.raises(CheckpointException, match="StoreReplaced"):
            dcp.save(state, storage_writer=one, checkpoint_id="step-3", no_dist=True)
    assert not root_of(store_url).exists()
    dcp.save(state, storage_writer=StorageWriter(store_url), checkpoint_id="step-3", no_dist=True)


# ranks


def forgetful(me: Rank, url: str) -> Any:
    with Checkpointer(url, at(3).state) as saves, pytest.raises(NotResumed) as raised:
        saves.save()
    return type(raised.value).__name__, str(raised.value), raised.value.rank


def saved_together(me: Rank, url: str) -> None:
    saved(url, 6)


def test_all_ranks_are_refused_alike_and_only_the_coordinator_looks(pool: Pool, store_url: str) -> None:
    pool.run(WORLD, saved_together, store_url)
    found = pool.run(WORLD, forgetful, store_url)
    assert found == [found[0]] * WORLD
    assert found[0][2] == 0


def losing_the_store(me: Rank, url: str) -> Any:
    run = at(1)
    with Checkpointer(url, run.state) as saves:
        saves.save()
        saves.wait()
        if me.rank == 0:
            remove(url)
        run.state.progress.global_step = 2
        saves.save()
        with pytest.raises(StoreReplaced) as raised:
            saves.wait()
    return str(raised.value), raised.value.rank


def test_a_store_that_goes_away_is_the_same_error_on_all_ranks(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, losing_the_store, store_url)
    assert found == [found[0]] * WORLD
    assert not root_of(store_url).exists()
