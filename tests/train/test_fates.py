"""Saves that do not end in time: what is said of them is true, by type, on every rank that can know it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults import Fault, FaultyStore
from workers import Pool, Pools, Rank

from tests.train.runs import Run
from txstore.catalog import entries, newest
from txstore.errors import CommitUnknown, DeadlineExceeded, TxStoreError
from txstore.events import Committed, Event, Observer, SaveFailed
from txstore.registry import open_store
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy

SHORT = SavePolicy(deadline_s=1.0)


def decided(url: str) -> list[str]:
    with open_store(url) as store:
        return [f"{entry.decision.checkpoint} {entry.state}" for entry in entries(store)]


class Held:
    """An action that holds a call before, or after, it is carried out."""

    def __init__(self, *, after: bool = False) -> None:
        self.open = threading.Event()
        self.after = after

    def __call__(self, store: Any, key: str, call: Callable[[], Any]) -> Any:
        if self.after:
            found = call()
            assert self.open.wait(30)
            return found
        assert self.open.wait(30)
        return call()


class Dead(Held):
    """From the first call that it holds, the store answers nobody; then the thread that saves, but not one that aborts."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False
        self.end = threading.Event()

    def __call__(self, store: Any, key: str, call: Callable[[], Any]) -> Any:
        if "abort" in threading.current_thread().name:
            assert self.end.wait(30)
        return super().__call__(store, key, call)

    def faults(self, verb: str, part: str) -> list[Fault]:
        return [Fault(self.everything, forever=True), Fault(self.first, verb, part)]  # the last one counts

    def everything(self, store: Any, key: str, call: Callable[[], Any]) -> Any:
        return self(store, key, call) if self.begun else call()

    def first(self, store: Any, key: str, call: Callable[[], Any]) -> Any:
        self.begun = True
        return self(store, key, call)


@pytest.fixture
def held() -> Iterator[list[Held]]:
    made: list[Held] = []
    yield made
    for one in made:
        one.open.set()
        if isinstance(one, Dead):
            one.end.set()


def stuck(store: Any, *observers: Observer) -> tuple[Checkpointer, Any, TxStoreError]:
    """A save that does not end in time; the checkpointer, its handle, and what is raised."""
    run = Run()
    run.step()
    saves = Checkpointer(store, run.state, policy=SHORT, observers=observers)
    handle = saves.save()
    with pytest.raises(TxStoreError) as raised:
        saves.wait()
    assert type(raised.value) in {DeadlineExceeded, CommitUnknown}
    return saves, handle, raised.value


def wake(saves: Checkpointer, hold: Held) -> None:
    """The store answers again, and the thread that was stuck goes on to its end."""
    hold.open.set()
    assert saves._saves.close(20)


def test_a_decision_that_an_abort_forestalled_is_none(store_url: str, held: list[Held]) -> None:
    held.append(hold := Held())
    told: list[Event] = []
    saves, handle, error = stuck(FaultyStore(store_url, Fault(hold, "create", "commits/")), told.append)
    assert isinstance(failed := told[-1], SaveFailed)
    assert (failed.checkpoint, failed.phase, failed.error_type) == ("step-1", "commit", "DeadlineExceeded")
    assert type(error) is DeadlineExceeded
    assert "in create of commits/step-1.0.json" in str(error)
    assert "step-1 is not committed and will not be" in str(error)
    assert handle.committed.exception(0) is error
    wake(saves, hold)
    assert decided(store_url) == ["step-1 aborted"]
    assert told[-1] is failed, "told once, and not again by the thread that woke up"


@pytest.mark.parametrize(("verb", "part", "after"), [("create", "commits/", True), ("put", "latest.json", False)])
def test_a_commit_that_stands_is_told_though_the_save_does_not_end(
    verb: str, part: str, after: bool, store_url: str, held: list[Held]
) -> None:
    held.append(hold := Held(after=after))
    told: list[Event] = []
    saves, handle, error = stuck(FaultyStore(store_url, Fault(hold, verb, part)), told.append)
    assert isinstance(committed := told[-1], Committed)
    assert (committed.checkpoint, committed.slot) == ("step-1", 0)
    assert type(error) is DeadlineExceeded
    assert "step-1 is committed" in str(error)
    with open_store(store_url) as store:
        assert handle.committed.result(0) == newest(store)
    with pytest.raises(DeadlineExceeded, match="step-1 is committed"):
        saves.save()
    wake(saves, hold)
    assert decided(store_url) == ["step-1 committed"]
    assert [event for event in told if isinstance(event, Committed)] == [committed]


@pytest.mark.parametrize("lands", [True, False])
def test_a_decision_that_was_sent_to_a_store_that_does_not_answer_is_unknown(
    lands: bool, store_url: str, held: list[Held]
) -> None:
    held.append(dead := Dead())
    dead.after = lands
    saves, handle, error = stuck(FaultyStore(store_url, *dead.faults("create", "commits/")))
    assert type(error) is CommitUnknown
    assert "whether step-1 is committed is not known" in str(error)
    assert handle.committed.exception(0) is error
    assert decided(store_url) == ["step-1 committed"] * lands
    wake(saves, dead)


@pytest.mark.parametrize(("verb", "part"), [("put", ".safetensors"), ("put", "manifest.json"), ("put", "begin.json")])
def test_a_save_that_never_sent_its_decision_is_not_unknown_though_the_store_is_dead(
    verb: str, part: str, store_url: str, held: list[Held]
) -> None:
    held.append(dead := Dead())
    saves, handle, error = stuck(FaultyStore(store_url, *dead.faults(verb, part)))
    assert type(error) is DeadlineExceeded
    assert "step-1 is not committed and will not be" in str(error)
    assert handle.committed.exception(0) is error
    wake(saves, dead)
    assert "step-1 committed" not in decided(store_url)


def test_of_several_saves_each_is_told(store_url: str, held: list[Held]) -> None:
    """The second save of one name waits behind the first: the commit of that is not its own."""
    held.append(hold := Held())
    run = Run()
    run.state.progress.global_step = 1
    policy = SavePolicy(deadline_s=1.0, max_in_flight=3)
    saves = Checkpointer(FaultyStore(store_url, Fault(hold, "put", "latest.json")), run.state, policy=policy)
    first = saves.save()
    run.state.progress.consumed_samples += 8  # else it would be the same save
    second = saves.save()
    with pytest.raises(DeadlineExceeded, match="step-1 is committed; step-1 is not committed and will not be"):
        saves.wait()
    assert first.committed.result(0).checkpoint == "step-1"
    assert isinstance(second.committed.exception(0), DeadlineExceeded)
    wake(saves, hold)
    assert decided(store_url) == ["step-1 committed", "step-1 aborted"]


def test_a_save_that_is_stuck_when_training_fails_is_given_up_too(store_url: str, held: list[Held]) -> None:
    held.append(hold := Held())
    run = Run()
    with (
        pytest.raises(KeyError) as raised,
        Checkpointer(FaultyStore(store_url, Fault(hold, "put", ".safetensors")), run.state, policy=SHORT) as saves,
    ):
        saves.save()
        raise KeyError("mine")
    assert "step-0 is not committed and will not be" in raised.value.__notes__[0]
    wake(saves, hold)
    assert decided(store_url) == ["step-0 aborted"]


# verification has a time of its own


class Slow:
    """Holds a call for some time, once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, store: Any, key: str, call: Callable[[], Any]) -> Any:
        time.sleep(self.seconds)
        return call()


def test_a_verification_does_not_use_up_the_time_of_its_save(store_url: str) -> None:
    store = FaultyStore(
        store_url, Fault(Slow(1.2), "put", ".safetensors"), Fault(Slow(1.2), "read_into", ".safetensors")
    )
    with Checkpointer(store, Run().state, policy=SavePolicy(deadline_s=2.0, verify="full")) as saves:
        saves.save()
        assert [decision.checkpoint for decision in saves.wait()] == ["step-0"]
    assert any(verb == "read_into" for verb, _ in store.calls)


def test_a_verification_that_does_not_end_leaves_the_commit_told(store_url: str, held: list[Held]) -> None:
    held.append(hold := Held())
    store = FaultyStore(store_url, Fault(hold, "read_into", ".safetensors"))
    saves = Checkpointer(store, Run().state, policy=SavePolicy(deadline_s=0.7, verify="full"))
    handle = saves.save()
    with pytest.raises(DeadlineExceeded, match=r"the verification of step-0 did not end .*; step-0 is committed"):
        saves.wait()
    assert handle.committed.result(0).checkpoint == "step-0"
    wake(saves, hold)


# ranks


@pytest.fixture(scope="module")
def pair(pools: Pools) -> Iterator[Pool]:
    with pools.fresh(2) as pool:
        yield pool


def together(me: Rank, url: str, at: int, verb: str, part: str, after: bool, dead: bool) -> Any:
    """All ranks wait for a save that is stuck on rank `at`."""
    hold = Dead()
    hold.after = after
    faults = hold.faults(verb, part) if dead else [Fault(hold.first, verb, part)]
    store = FaultyStore(url, *(faults if me.rank == at else []))
    saves = Checkpointer(store, Run().state, policy=SHORT)
    handle = saves.save()
    with pytest.raises(TxStoreError) as raised:
        saves.wait()
    error = handle.committed.exception(0)
    told = handle.committed.result(0).txn if error is None else (type(error).__name__, str(error))
    hold.open.set()
    assert saves._saves.close(20)
    hold.end.set()
    return (type(raised.value).__name__, str(raised.value), raised.value.rank), told


@pytest.mark.parametrize(
    ("at", "verb", "part", "after", "dead", "kind", "text"),
    [
        (0, "create", "commits/", False, True, "CommitUnknown", "whether step-0 is committed is not known"),
        (0, "create", "commits/", True, False, "DeadlineExceeded", "step-0 is committed"),
        (0, "put", "manifest.json", False, True, "DeadlineExceeded", "step-0 is not committed and will not be"),
        (1, "put", ".safetensors", False, True, "DeadlineExceeded", "step-0 is not committed and will not be"),
    ],
)
def test_all_ranks_are_told_the_same(
    at: int, verb: str, part: str, after: bool, dead: bool, kind: str, text: str, pair: Pool, store_url: str
) -> None:
    found = pair.run(2, together, store_url, at, verb, part, after, dead)
    assert found == [found[0]] * 2
    raised, told = found[0]
    assert raised[0] == kind
    assert text in raised[1]
    assert raised[2] == at
    with open_store(store_url) as store:
        states = {entry.decision.txn: entry.state for entry in entries(store)}
    if text == "step-0 is committed":
        assert states == {told: "committed"}
    else:
        assert told == raised[:2]
    if kind == "DeadlineExceeded" and text != "step-0 is committed":
        assert "committed" not in states.values()


def without_an_answer(me: Rank, url: str, at: int, verb: str, part: str) -> Any:
    """Rank 0 is busy elsewhere and answers nobody, while its own save goes on as soon as the store does."""
    hold = Slow(2.8)
    store = FaultyStore(url, *([Fault(hold, verb, part)] if me.rank == at else []))
    saves = Checkpointer(store, Run().state, policy=SHORT)
    handle = saves.save()
    if me.rank == 0:
        time.sleep(3.0)
        error = handle.committed.exception(20)
        return type(error).__name__, ""
    with pytest.raises(TxStoreError) as raised:
        saves.wait()
    assert saves._saves.close(20)
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize(
    ("at", "verb", "part", "kinds"),
    [
        # Rank 1 has handed its part over: whether rank 0 has committed it cannot know.
        (0, "create", "commits/", ("NoneType", "CommitUnknown")),
        # Rank 1 has not, and will not: nobody can commit.
        (1, "put", ".safetensors", (None, "DeadlineExceeded")),
    ],
)
def test_a_rank_that_gets_no_answer_says_what_it_can_prove(
    at: int, verb: str, part: str, kinds: Any, pair: Pool, store_url: str
) -> None:
    found = pair.run(2, without_an_answer, store_url, at, verb, part)
    assert found[1][0] == kinds[1], found
    assert kinds[0] in {None, found[0][0]}, found
    assert decided(store_url) in ([["step-0 committed"]] if at == 0 else [[], ["step-0 aborted"]])


def leaving(me: Rank, url: str) -> Any:
    """Rank 1 fails in training, does not get its part written in time, and leaves; the part is written all the same."""
    store = FaultyStore(url, *([Fault(Slow(1.25), "put", ".safetensors")] if me.rank == 1 else []))
    with pytest.raises(KeyError) as raised, Checkpointer(store, Run().state, policy=SHORT) as saves:
        handle = saves.save()
        if me.rank == 0:
            handle.committed.exception(20)
        raise KeyError("mine")
    assert saves._saves.close(20)
    return raised.value.__notes__[0]


def test_what_a_rank_gave_up_is_not_committed_by_the_others(pair: Pool, store_url: str) -> None:
    found = pair.run(2, leaving, store_url)
    assert "step-0 is not committed and will not be" in found[1], found
    assert "committed" not in " ".join(decided(store_url)), found
