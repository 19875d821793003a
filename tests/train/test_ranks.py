"""`Checkpointer` on real ranks: one outcome for all, whatever happens on one of them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Fault, FaultyStore, Raise
from torch import nn
from workers import Pool, Rank

from tests.train.runs import Run
from txstore.catalog import entries
from txstore.errors import (
    AccessDeniedError,
    DeadlineExceeded,
    NotProved,
    PlanMismatch,
    SaveBusy,
    StoreFullError,
    TxStoreError,
    UnsupportedValue,
)
from txstore.registry import open_store
from txstore.retry import RetryPolicy
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

WORLD = 4
ONCE = RetryPolicy(attempts=1)


def committed(url: str) -> list[str]:
    with open_store(url) as store:
        return [entry.decision.checkpoint for entry in entries(store) if entry.state == "committed"]


def told(error: TxStoreError) -> tuple[str, str, int | None]:
    return type(error).__name__, str(error), error.rank


def ranked(me: Rank) -> Run:
    """A data-parallel run: the same model everywhere, random streams of their own."""
    run = Run()
    torch.manual_seed(100 + me.rank)
    return run


def one_fails(me: Rank, url: str) -> Any:
    run = ranked(me)
    store = FaultyStore(url, *([Fault(Raise("full"), "put", ".safetensors")] if me.rank == 2 else []))
    saves = Checkpointer(store, run.state, retry=ONCE)
    handle = saves.save()
    with pytest.raises(StoreFullError) as seen:
        handle.committed.result(30)
    with pytest.raises(StoreFullError) as raised:
        saves.wait()
    run.state.progress.global_step = 1
    saves.save()
    saves.close()
    return told(seen.value), told(raised.value)


def test_a_failure_on_one_rank_is_the_same_error_on_all(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, one_fails, store_url)
    assert found[0][0] == found[0][1]
    assert found[0][0][2] == 2, "the rank that failed is named"
    assert all(one == found[0] for one in found)
    assert committed(store_url) == ["step-1"]


def disagreeing(me: Rank, url: str) -> Any:
    run = ranked(me)
    run.state.progress.global_step = 5 if me.rank == 3 else 4
    with Checkpointer(url, run.state) as saves:
        with pytest.raises(PlanMismatch, match="rank 3 saves step-5, rank 0 step-4"):
            saves.save()
        run.state.progress.global_step = 4
        saves.save()


def test_ranks_that_stand_at_different_steps_are_refused_before_anything_is_copied(pool: Pool, store_url: str) -> None:
    pool.run(WORLD, disagreeing, store_url)
    assert committed(store_url) == ["step-4"]


def unstorable(me: Rank, url: str) -> Any:
    run = ranked(me)
    if me.rank == 1:
        run.optimizer.param_groups[0]["hook"] = lambda: None
    with Checkpointer(url, run.state) as saves:
        with pytest.raises(UnsupportedValue, match="hook") as raised:
            saves.save()
        run.optimizer.param_groups[0].pop("hook", None)
        saves.save()
    return told(raised.value)


def test_state_that_one_rank_cannot_store_is_an_error_of_the_save_on_all(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, unstorable, store_url)
    assert found == [found[0]] * WORLD
    assert found[0][2] == 1
    assert committed(store_url) == ["step-0"]


class Hold:
    """Holds the store of one rank until the file appears."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, store: Any, key: str, call: Any) -> Any:
        time.sleep(self.seconds)
        return call()


def busy_on_one(me: Rank, url: str, when_busy: str) -> Any:
    run = ranked(me)
    store = FaultyStore(url, *([Fault(Hold(1.0), "put", ".safetensors")] if me.rank == 1 else []))
    with Checkpointer(store, run.state, policy=SavePolicy(when_busy=when_busy)) as saves:
        saves.save()
        run.state.progress.global_step = 1
        if when_busy == "raise":
            with pytest.raises(SaveBusy):
                saves.save()
            return ""
        return saves.save().skipped


@pytest.mark.parametrize(("when_busy", "names"), [("skip", [0]), ("raise", [0]), ("wait", [0, 1])])
def test_all_ranks_take_the_same_way_when_one_is_slow(pool: Pool, store_url: str, when_busy: str, names: Any) -> None:
    found = pool.run(WORLD, busy_on_one, store_url, when_busy)
    assert found == [found[0]] * WORLD
    assert committed(store_url) == [f"step-{step}" for step in names]


def stuck_on_one(me: Rank, url: str) -> Any:
    run = ranked(me)
    held = threading.Event()

    def hold(store: Any, key: str, call: Any) -> Any:
        held.wait(20)
        return call()

    store = FaultyStore(url, *([Fault(hold, "put", ".safetensors")] if me.rank == 1 else []))
    saves = Checkpointer(store, run.state, policy=SavePolicy(deadline_s=1.5))
    saves.save()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as raised:
        saves.wait()
    took_s = time.monotonic() - started
    held.set()
    time.sleep(0.5)
    with pytest.raises(DeadlineExceeded):
        saves.close()
    return told(raised.value), took_s


def test_a_rank_that_is_stuck_is_named_on_all_and_nothing_commits(pools: Any, store_url: str) -> None:
    with pools.fresh(3) as pool:
        found = pool.run(3, stuck_on_one, store_url)
    assert [one[0] for one in found] == [found[0][0]] * 3
    _, text, rank = found[0][0]
    assert rank == 1
    assert "rank 1 is in put of data/step-0" in text
    assert max(took_s for _, took_s in found) < 8
    assert committed(store_url) == []


def interleaved(me: Rank, url: str, steps: int) -> Any:
    """Failure case D1: collectives of training on the user's group, saves back to back beside them."""
    run = ranked(me)
    sums = []
    with Checkpointer(url, run.state, policy=SavePolicy(when_busy="skip")) as saves:
        for step in range(steps):
            run.state.progress.global_step = step
            saves.save()
            value = torch.tensor([float(me.rank + step)])
            dist.all_reduce(value, group=me.group)
            sums.append(value.item())
            if step % 5 == 0:
                dist.barrier(group=me.group)
    return sums


def test_saves_never_meet_the_collectives_of_training(pool: Pool, store_url: str) -> None:
    steps = 60
    found = pool.run(WORLD, interleaved, store_url, steps, deadline_s=60)
    assert found == [[float(6 + WORLD * step) for step in range(steps)]] * WORLD
    assert committed(store_url)[0] == "step-0"


def train_and_save(me: Rank, url: str) -> Any:
    run = Run()
    with Checkpointer(url, run.state) as saves:
        assert saves.resume().fresh
        for _ in range(3):
            run.step()
        torch.manual_seed(100 + me.rank)
        saves.save()
        return torch.rand(3).tolist()


def resume_and_draw(me: Rank, url: str) -> Any:
    run = Run(seed=7)
    with Checkpointer(url, run.state) as saves:
        report = saves.resume()
        assert report.proved, str(report)
    return torch.rand(3).tolist(), run.state.progress.global_step, report.checkpoint


def test_every_rank_gets_its_own_random_streams_back(pool: Pool, store_url: str) -> None:
    """Failure case H1."""
    draws = pool.run(WORLD, train_and_save, store_url)
    assert len({tuple(one) for one in draws}) == WORLD
    assert pool.run(WORLD, resume_and_draw, store_url) == [(one, 3, "step-3") for one in draws]


def drifted(me: Rank, url: str, what: str) -> Any:
    run = Run()
    run.step()
    if me.rank == 2:
        with torch.no_grad():
            if what == "parameters":
                run.model.last.weight += 1e-6
            else:
                run.optimizer.state[run.model.last.weight]["exp_avg_sq"] += 1e-9
    refused = pytest.raises(PlanMismatch, match=f"differs between rank 0 and rank 2: {what}")
    with Checkpointer(url, run.state) as saves, refused:
        saves.save()


@pytest.mark.parametrize("what", ["parameters", "moments"])
def test_replicas_that_differ_are_refused_and_not_mixed(pool: Pool, store_url: str, what: str) -> None:
    """Failure case E1: of equal keys DCP keeps one, and not of the same rank for each."""
    pool.run(WORLD, drifted, store_url, what)
    assert committed(store_url) == []


def own_records(me: Rank, url: str, what: str) -> Any:
    run = Run()
    with Checkpointer(url, run.state) as saves:
        for step in range(1, 4):
            run.step()
            if what != "missing" or me.rank == 0 or step < 3:
                loss = float("nan") if step == 1 else 0.5 + (me.rank / 10 if what == "loss" and step > 1 else 0)
                saves.record(loss=loss, batch_id=f"b{me.rank if what == 'batch_id' and step == 3 else 0}")
        with pytest.raises(PlanMismatch) as raised:
            saves.save()
    return told(raised.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("loss", "step 2: rank 0 recorded loss=0.5, rank 1 0.6"),
        ("batch_id", "step 3: rank 0 recorded batch_id='b0', rank 1 'b1'"),
        ("missing", "step 3: rank 0 recorded step=3, rank 1 nothing"),
    ],
)
def test_values_that_each_rank_records_for_itself_are_told_by_name(
    pool: Pool, store_url: str, what: str, text: str
) -> None:
    """The loss of a DDP loop is each rank's own: whoever records it as it is must hear what to do."""
    (error,) = set(pool.run(WORLD, own_records, store_url, what))
    assert text in error[1]
    assert "all_reduce" in error[1]
    assert committed(store_url) == []


def anothers_streams(me: Rank, url: str) -> Any:
    """Rank 2 gets the streams that rank 0 had, as if they were equal on all ranks."""
    run = Run(seed=7)
    inner = run.state.pieces["proof"]

    class Last:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def restore(self, loaded: Any) -> Any:
            if me.rank == 2:
                torch.manual_seed(100)
            return inner.restore(loaded)

    run.state.pieces["proof"] = Last()
    with Checkpointer(url, run.state) as saves, pytest.raises(NotProved) as raised:
        saves.resume()
    return told(raised.value)


def test_a_rank_with_the_streams_of_another_is_not_proved(pool: Pool, store_url: str) -> None:
    pool.run(WORLD, train_and_save, store_url)
    found = pool.run(WORLD, anothers_streams, store_url)
    assert found == [found[0]] * WORLD
    assert found[0][2] == 2
    assert "random streams" in found[0][1]


def leaving_early(me: Rank, url: str) -> Any:
    run = ranked(me)
    gone = threading.Event()

    def when_it_is_gone(store: object, key: str, call: Any) -> Any:
        assert threading.current_thread().name != "txstore-saves" or gone.wait(30)
        return call()

    store = FaultyStore(url, Fault(when_it_is_gone, "list", "", forever=True))
    # A rank that is left in a collective, since the other went first, waits for the deadline.
    saves = Checkpointer(store, run.state, policy=SavePolicy(deadline_s=8))
    saves.save()
    dist.destroy_process_group()
    gone.set()
    with pytest.raises(TxStoreError) as raised:
        saves.close()
    return type(raised.value).__name__


def test_ranks_that_destroy_their_group_commit_nothing(pools: Any, store_url: str) -> None:
    """DCP takes a process without a group for the whole world: each rank would commit a part as if it were all."""
    with pools.fresh(2) as pool:
        pool.run(2, leaving_early, store_url)
    assert committed(store_url) == []


def stages(me: Rank, url: str) -> Any:
    """Each rank holds a part of the model, under its name in the whole, and an optimizer of its own kind."""
    module = nn.ModuleDict({str(me.rank): nn.Linear(2, 2)})
    kind = torch.optim.SGD if me.rank else torch.optim.AdamW
    state = TrainState(module, kind(module.parameters()))
    with Checkpointer(url, state) as saves, pytest.raises(PlanMismatch) as raised:
        saves.save()
    return told(raised.value), raised.value.next_step


def test_pipeline_stages_are_refused_by_that_name(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, stages, store_url)
    assert found == [found[0]] * WORLD
    ((_, text, rank), next_step) = found[0]
    assert "differs between rank 0 and rank 1: model, names of parameters, optimizer" in text
    assert rank == 1
    assert "pipeline stages" in next_step
    assert committed(store_url) == []


def asking_differently(me: Rank, url: str) -> Any:
    with Checkpointer(url, ranked(me).state) as saves:
        saves.save()
    with Checkpointer(url, ranked(me).state) as saves:
        with pytest.raises(PlanMismatch, match="rank 2 resumes with other options"):
            saves.resume(ResumeOptions(fresh=["optimizer"] if me.rank == 2 else []))
        assert saves.resume(ResumeOptions(accept={"b", "a"})).step == 0


def test_options_that_differ_between_ranks_are_refused(pool: Pool, store_url: str) -> None:
    pool.run(WORLD, asking_differently, store_url)


def resumed(me: Rank, url: str, distant: bool) -> int:
    """Bytes of shards that this rank's resume reads."""
    run = ranked(me)
    with Checkpointer(url, run.state) as saves:
        saves.save()
    values = run.values()
    with torch.no_grad():
        run.model.last.weight.zero_()
    store = FaultyStore(url)
    store.distant = distant
    with Checkpointer(store, run.state) as saves:
        saves.resume()
    assert all(torch.equal(run.values()[name], value) for name, value in values.items())
    return sum(size for key, _, size in store.reads if key.endswith(".safetensors"))


def test_a_resume_from_a_service_reads_what_all_ranks_need_once(pool: Pool, store_url: str) -> None:
    alone = pool.run(WORLD, resumed, f"{store_url}/alone", False)
    shared = pool.run(WORLD, resumed, f"{store_url}/shared", True)
    assert sum(shared) < 0.5 * sum(alone)


def refused_from_afar(me: Rank, url: str) -> Any:
    run = ranked(me)
    store = FaultyStore(url, *([Fault(Raise("denied"), "read_into", ".safetensors")] if me.rank == 2 else []))
    with Checkpointer(store, run.state, retry=ONCE) as saves, pytest.raises(AccessDeniedError) as raised:
        saves.resume()
    store.faults = ()
    with Checkpointer(store, run.state, retry=ONCE) as saves:
        assert saves.resume().step == 0
    return told(raised.value)


def test_a_rank_that_cannot_read_fails_the_resume_of_those_it_reads_for(pool: Pool, store_url: str) -> None:
    pool.run(WORLD, saved, store_url)
    found = pool.run(WORLD, refused_from_afar, store_url)
    assert found == [found[0]] * WORLD
    assert found[0][2] == 2


def saved(me: Rank, url: str) -> None:
    with Checkpointer(url, ranked(me).state) as saves:
        saves.save()
