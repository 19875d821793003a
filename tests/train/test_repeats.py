"""The same step saved twice: the save at the end of a loop whose last step was saved is that save, if nothing changed."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, FaultyStore, Raise
from workers import Pool, Rank

from tests.train.runs import Run
from txstore.catalog import entries
from txstore.errors import AlreadyCommitted, FormatError, PlanMismatch, StoreFullError, StoreReplaced
from txstore.events import Event
from txstore.registry import open_store
from txstore.retry import RetryPolicy
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
from txstore.train.state import TrainState

WORLD = 4
ONCE = RetryPolicy(attempts=1)


class Gate:
    """Holds a write until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, store: Any, key: str, call: Any) -> Any:
        assert self.open.wait(30)
        return call()


class Ema:
    """An extra whose weights are too large for a digest."""

    def __init__(self) -> None:
        self.weights = torch.ones(1 << 19)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


def trained(steps: int = 4) -> Run:
    """A run with something of every kind in its state."""
    run = Run()
    run.ema = Ema()  # type: ignore[attr-defined]
    run.state = TrainState(
        run.model,
        run.optimizer,
        schedulers=run.scheduler,
        extras={"ema": run.ema},  # type: ignore[attr-defined]
    )
    for _ in range(steps):
        run.step()
    return run


def slots(url: str) -> list[tuple[str, int]]:
    """Commits; a save that failed leaves an abort in the slot before."""
    with open_store(url) as store:
        found = [entry.decision for entry in entries(store)]
    return [(one.checkpoint, one.slot) for one in found if one.kind == "commit"]


def test_the_save_after_the_loop_is_the_last_one_of_the_loop(store_url: str) -> None:
    run, events = trained(0), list[Event]()
    with Checkpointer(store_url, run.state, observers=[events.append]) as saves:
        saves.resume()
        while run.state.progress.global_step < 4:
            saves.record(loss=run.step().loss)
            if run.state.progress.global_step % 2 == 0:
                last = saves.save()
        assert saves.save() is last
        assert [one.checkpoint for one in saves.wait()] == ["step-4"]
        told = len(events)
        assert saves.save() is last
        assert saves.save(4) is last
        assert saves.wait() == []
        assert len(events) == told, "nothing was asked of the store that a metric should count"
    assert slots(store_url) == [("step-2", 0), ("step-4", 0)]


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_a_save_on_its_way_is_not_waited_for(when_busy: Any, store_url: str) -> None:
    run, gate = trained(), Gate()
    store = FaultyStore(store_url, Fault(gate, "put", ".safetensors"))
    with Checkpointer(store, run.state, policy=SavePolicy(when_busy=when_busy)) as saves:
        first = saves.save()
        assert saves.save() is first
        assert not first.committed.done()
        gate.open.set()
        assert first.committed.result(30).checkpoint == "step-4"
        assert saves.save() is first
    assert slots(store_url) == [("step-4", 0)]


def test_a_loop_that_saves_and_then_records_may_end_with_a_save(store_url: str) -> None:
    run = trained()
    with Checkpointer(store_url, run.state) as saves:
        first = saves.save()
        saves.record(loss=1.0)
        assert saves.save() is first
        run.optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(AlreadyCommitted, match="since then optimizer changed"):
            saves.save()
    assert slots(store_url) == [("step-4", 0)]


def test_a_save_that_fails_after_it_was_repeated_is_raised_and_then_really_made(store_url: str) -> None:
    run, gate = trained(), Gate()

    def full(store: Any, key: str, call: Any) -> Any:
        gate(store, key, lambda: None)
        return Raise("full")(store, key, call)

    with Checkpointer(FaultyStore(store_url, Fault(full, "put", ".safetensors")), run.state, retry=ONCE) as saves:
        first = saves.save()
        assert saves.save() is first
        gate.open.set()
        with pytest.raises(StoreFullError):
            saves.wait()
        assert saves.saved_step == -1
        second = saves.save()
        assert second is not first
        assert saves.save() is second
    assert slots(store_url) == [("step-4", 1)]


def test_a_save_that_failed_is_no_save(store_url: str) -> None:
    run = trained()
    store = FaultyStore(store_url, Fault(Raise("full"), "put", ".safetensors"))
    with Checkpointer(store, run.state, policy=SavePolicy(max_failed_in_a_row=1), retry=ONCE) as saves:
        first = saves.save()
        assert isinstance(first.committed.exception(30), StoreFullError)
        saves.wait()
        second = saves.save()
        assert second.committed.result(30).slot == 1
    assert slots(store_url) == [("step-4", 1)]


def test_a_save_that_was_skipped_is_no_save(store_url: str) -> None:
    run, gate = trained(), Gate()
    store = FaultyStore(store_url, Fault(gate, "put", ".safetensors"))
    with Checkpointer(store, run.state, policy=SavePolicy(when_busy="skip")) as saves:
        saves.save()
        run.step()
        assert saves.save().skipped == "in_flight"
        assert saves.save().skipped == "in_flight"
        assert saves.saved_step == 4
        gate.open.set()
        saves.wait()
        assert not saves.save().skipped
        assert saves.saved_step == 5
    assert slots(store_url) == [("step-4", 0), ("step-5", 0)]


def set_first(tensor: torch.Tensor, value: float) -> None:
    tensor.data.view(-1)[0] = value


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "weights": (lambda run: set_first(run.model.first.weight, 7.0), "model"),
    "sign of a zero": (lambda run: set_first(run.model.last.bias, -0.0), "model"),
    "buffer": (lambda run: set_first(run.model.norm.running_mean, 7.0), "model"),
    "requires_grad": (lambda run: run.model.last.bias.requires_grad_(requires_grad=False), "model"),
    "moments": (lambda run: set_first(run.optimizer.state[run.model.first.weight]["exp_avg"], 7.0), "optimizer"),
    "learning rate": (lambda run: run.optimizer.param_groups[0].update(lr=0.5), "optimizer"),
    "scheduler": (lambda run: run.scheduler.step(), "scheduler"),
    "python's random stream": (lambda run: random.random(), "rng"),
    "torch's random stream": (lambda run: torch.rand(1), "rng"),
    "extra": (lambda run: set_first(run.ema.weights, 7.0), "extras"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wait", [True, False])
def test_a_state_that_changed_under_the_same_step_is_refused_by_name(change: str, wait: bool, store_url: str) -> None:
    run, gate = trained(), Gate()
    set_first(run.model.last.bias, 0.0)
    work, piece = CHANGES[change]
    store = FaultyStore(store_url, Fault(gate, "put", ".safetensors"))
    with Checkpointer(store, run.state) as saves:
        first = saves.save()
        if wait:
            gate.open.set()
            saves.wait()
        work(run)
        for _ in range(2):  # and it stays so
            with pytest.raises(AlreadyCommitted) as raised:
                saves.save()
        assert raised.value.key == "step-4"
        assert piece in raised.value.message
        assert f"step-4 is {'committed' if wait else 'on its way'}: this run saved it" in str(raised.value)
        assert "changed, while progress.global_step is still 4" in str(raised.value)
        assert "count it in state.progress.global_step" in raised.value.next_step
        gate.open.set()
        run.state.progress.global_step = 5  # what the message says
        saves.save()
        assert first.committed.result(30).checkpoint == "step-4"
    assert slots(store_url) == [("step-4", 0), ("step-5", 0)]


def test_not_a_number_is_itself(store_url: str) -> None:
    run = trained()
    set_first(run.model.first.weight, float("nan"))
    with Checkpointer(store_url, run.state) as saves:
        first = saves.save()
        assert saves.save() is first


def test_a_counter_that_moved_makes_another_recovery_point(store_url: str) -> None:
    run = trained()
    with Checkpointer(store_url, run.state) as saves:
        first = saves.save()
        run.state.progress.consumed_samples += 1
        second = saves.save()
        assert second is not first
        assert saves.save() is second
    assert slots(store_url) == [("step-4", 0), ("step-4", 1)]


def test_overwrite_asks_for_another_one(store_url: str) -> None:
    with Checkpointer(store_url, trained().state, overwrite=True) as saves:
        assert saves.save() is not saves.save()
    assert slots(store_url) == [("step-4", 0), ("step-4", 1)]


def test_what_was_resumed_is_not_saved_again_and_saved_step_says_so(store_url: str) -> None:
    """Nothing was copied then, so nothing proves that it is the same: a job that restarts after its last step asks."""
    with Checkpointer(store_url, trained().state) as saves:
        assert saves.saved_step == -1
        saves.save()
        assert saves.saved_step == 4
    run = trained(0)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume()
        assert saves.saved_step == run.state.progress.global_step == 4
        saves.save()
        with pytest.raises(AlreadyCommitted, match=r"this run saved or resumed this step before.*saves\.saved_step"):
            saves.wait()
        run.step()
        first = saves.save()
        saves.resume()  # what was copied is no longer what the state is
        assert saves.save() is not first
        with pytest.raises(AlreadyCommitted):
            saves.wait()


def test_a_store_that_was_replaced_meanwhile_is_told(store_url: str) -> None:
    with Checkpointer(store_url, trained().state) as saves:
        saves.save()
        saves.wait()
        shutil.rmtree(store_url.removeprefix("file://"))
        with pytest.raises(StoreReplaced):
            saves.save()


def test_a_record_that_was_damaged_meanwhile_is_told(store_url: str) -> None:
    with Checkpointer(store_url, trained().state) as saves:
        saves.save()
        saves.wait()
        path = Path(store_url.removeprefix("file://")) / "commits" / "step-4.0.json"
        path.unlink()
        path.write_bytes(b"{")
        with pytest.raises(FormatError):
            saves.save()


# ranks


def repeated(me: Rank, url: str) -> Any:
    """Each rank has random streams of its own; the last rank's learns late that a save has ended."""
    run = trained()
    torch.manual_seed(me.rank)
    with Checkpointer(url, run.state) as saves:
        first = saves.save()
        if me.rank == 0:
            first.committed.result(30)
        same = [saves.save() is first]
        saves.wait()
        same.append(saves.save() is first)
        if me.rank == 2:
            torch.rand(1)
        with pytest.raises(AlreadyCommitted) as raised:
            saves.save()
        return same, saves.saved_step, str(raised.value), raised.value.rank


def test_all_ranks_decide_alike(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, repeated, store_url)
    assert found == [found[0]] * WORLD
    assert found[0][:2] == ([True, True], 4)
    assert "since then rng changed" in found[0][2]
    assert found[0][3] == 2
    assert slots(store_url) == [("step-4", 0)]


def failing(me: Rank, url: str) -> Any:
    run = trained()
    store = FaultyStore(url, *([Fault(Raise("full"), "put", ".safetensors")] if me.rank == 1 else []))
    with Checkpointer(store, run.state, policy=SavePolicy(max_failed_in_a_row=1), retry=ONCE) as saves:
        first = saves.save()
        if me.rank == 3:
            first.committed.exception(30)
        second = (
            saves.save()
        )  # on its way as far as all ranks know, or known to have failed: one of the two, everywhere
        saves.wait()
        third = saves.save()
        return second is first, third is second, third.committed.result(30).checkpoint


def test_a_failure_that_some_ranks_know_already_is_decided_alike(pool: Pool, store_url: str) -> None:
    found = pool.run(WORLD, failing, store_url)
    assert found == [found[0]] * WORLD
    assert slots(store_url) == [("step-4", 1)]


def apart(me: Rank, url: str) -> Any:
    """A counter moves on one rank: no repetition, and no hang. The copy that was staged for it is no proof of anything."""
    run = trained()
    with Checkpointer(url, run.state) as saves:
        first = saves.save()
        saves.wait()
        if me.rank == 1:
            run.state.progress.consumed_samples += 1
        with pytest.raises(PlanMismatch, match="progress"):
            saves.save()
        if me.rank == 1:
            run.state.progress.consumed_samples -= 1
        again = saves.save()
        with pytest.raises(AlreadyCommitted):
            saves.wait()
        return again is first


def test_a_counter_that_moved_on_one_rank_is_no_repetition(pool: Pool, store_url: str) -> None:
    assert pool.run(WORLD, apart, store_url) == [False] * WORLD


def sharded(me: Rank, url: str) -> Any:
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(8, 8), mesh=me.mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state.progress.global_step = 1
    with Checkpointer(url, state) as saves:
        first = saves.save()
        same = saves.save() is first
        if me.rank == 3:
            model.weight.to_local().data[0, 0] += 1
        with pytest.raises(AlreadyCommitted, match="since then model changed") as raised:
            saves.save()
        return same, raised.value.rank


def test_shards_are_compared_by_the_ranks_that_have_them(pool: Pool, store_url: str) -> None:
    assert pool.run(WORLD, sharded, store_url) == [(True, 3)] * WORLD
