"""`Checkpointer`: saves beside training and resumes; limits, failures and deadlines, none of which can be overlooked."""

from __future__ import annotations

import io
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from faults import Fault, FaultyStore, Raise
from rich.console import Console

from tests.train.runs import Run
from txstore.catalog import entries, find, newest
from txstore.errors import (
    ConfigError,
    DeadlineExceeded,
    SaveBusy,
    SnapshotTooLarge,
    StoreFullError,
    TransactionStateError,
    UnsupportedValue,
)
from txstore.manifest import Description
from txstore.registry import open_store
from txstore.retry import RetryPolicy
from txstore.train import exit_guard
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
from txstore.train.proof import Check

ONCE = RetryPolicy(attempts=1)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def committed(url):
    with open_store(url) as store:
        return [entry.decision.checkpoint for entry in entries(store) if entry.state == "committed"]


class Gate:
    """An action that holds a call until it is opened."""

    def __init__(self):
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, store, key, call):
        self.reached.set()
        assert self.open.wait(30)
        return call()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


def gated(url, gate, **where):
    return FaultyStore(url, Fault(gate, **{"verb": "put", "part": ".safetensors", **where}))


def advance(run, steps=1):
    for _ in range(steps):
        run.step()


# the whole way


def test_a_killed_run_goes_on_as_if_nothing_had_happened(store_url):
    control = Run()
    advance(control, 12)
    first = Run()
    with Checkpointer(store_url, first.state) as saves:
        assert saves.resume().fresh
        for _ in range(7):
            first.step()
            if first.state.progress.global_step % 2 == 0:
                saves.save()
    second = Run(seed=99)
    with Checkpointer(store_url, second.state) as saves:
        report = saves.resume()
        assert (report.checkpoint, report.step, report.fresh, report.proved) == ("step-6", 6, False, True)
        advance(second, 6)
    assert second.losses == {step: loss for step, loss in control.losses.items() if step > 6}
    assert same(second.values(), control.values())


def test_a_report_is_told_to_people_and_as_json(store_url):
    run = Run()
    with Checkpointer(store_url, run.state) as saves:
        fresh = saves.resume()
        advance(run)
        saves.save()
    with Checkpointer(store_url, Run(seed=4).state) as saves:
        report = saves.resume()
    told = json.loads(report.to_json())
    assert (told["checkpoint"], told["step"], told["fresh"], told["proved"]) == ("step-1", 1, False, True)
    assert {check["name"] for check in told["checks"]} >= {"global step", "learning rates", "moment tensors"}
    assert told["seconds"].keys() == {"choose", "examine", "judge", "load", "restore", "validate"}
    assert json.loads(fresh.to_json())["fresh"] is True
    console = Console(file=io.StringIO(), width=200)
    console.print(report)
    shown = console.file.getvalue()
    assert "resumed step-1" in shown
    assert all(check.name in shown for check in report.checks)
    assert re.search(r"^\d+ checks hold$", str(report), re.MULTILINE)
    report.checks += [Check("loss", ok=False, detail="9"), Check("next batch", ok=None, detail="this data cannot tell")]
    assert re.search(r"^FAILED: loss \(9\)$", str(report), re.MULTILINE)
    assert str(report).endswith(" checks hold; 1 could not be made: next batch (this data cannot tell)")
    assert "a fresh start" in str(fresh)


def test_a_save_holds_the_values_of_its_call(store_url, gate):
    """Failure case C3: step, cursor and tensors are those of the call, however slow the store."""
    run = Run()
    advance(run, 5)
    at_call = run.values()
    with Checkpointer(gated(store_url, gate), run.state) as saves:
        handle = saves.save(5)
        assert handle.staged.done()
        assert not handle.committed.done()
        advance(run, 3)
        gate.open.set()
        assert handle.committed.result(30).checkpoint == "step-5"
    resumed = Run(seed=1)
    with Checkpointer(store_url, resumed.state) as saves:
        saves.resume()
    assert resumed.state.progress.global_step == 5
    assert resumed.state.progress.consumed_samples == 40
    assert same(resumed.values(), at_call)


def test_the_manifest_tells_progress_and_description(store_url):
    run = Run()
    advance(run, 2)
    today = Description(topology={"world": 1, "dp": 1}, settings={"batch_size": 8})
    with Checkpointer(store_url, run.state, description=today) as saves:
        saves.save()
    with open_store(store_url) as store:
        from txstore.decisions import read_manifest

        told = read_manifest(store, newest(store)).description
    assert (told.topology, told.settings) == (today.topology, today.settings)
    assert (told.progress.global_step, told.progress.consumed_samples) == (2, 16)


def test_the_step_is_what_is_counted(store_url):
    run = Run()
    advance(run, 2)
    with Checkpointer(store_url, run.state) as saves:
        with pytest.raises(ConfigError, match=r"save\(3\), but state.progress.global_step is 2"):
            saves.save(3)
        saves.save(2)
    assert committed(store_url) == ["step-2"]


# back-pressure


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_busy_checkpointer_skips(store_url, gate, in_flight):
    run = Run()
    with Checkpointer(
        gated(store_url, gate), run.state, policy=SavePolicy(when_busy="skip", max_in_flight=in_flight)
    ) as saves:
        handles = []
        for _ in range(4):
            advance(run)
            handles.append(saves.save())
        assert [bool(handle.skipped) for handle in handles] == [False] * in_flight + [True] * (4 - in_flight)
        with pytest.raises(CancelledError):
            handles[-1].committed.result(0)
        gate.open.set()
    assert committed(store_url) == [f"step-{step}" for step in range(1, in_flight + 1)]


def test_a_busy_checkpointer_raises(store_url, gate):
    run = Run()
    with Checkpointer(gated(store_url, gate), run.state, policy=SavePolicy(when_busy="raise")) as saves:
        advance(run)
        saves.save()
        advance(run)
        with pytest.raises(SaveBusy, match="1 saves are on their way"):
            saves.save()
        gate.open.set()
        saves.wait()
        saves.save()
    assert committed(store_url) == ["step-1", "step-2"]


def test_a_busy_checkpointer_waits_and_never_overwrites_the_snapshot(store_url, gate):
    run = Run()
    advance(run)
    values = [run.values()]
    with Checkpointer(gated(store_url, gate), run.state) as saves:
        saves.save()
        advance(run)
        values.append(run.values())
        second = threading.Thread(target=saves.save)
        second.start()
        assert gate.reached.wait(10)
        second.join(0.3)
        assert second.is_alive(), "the second save must wait for the first"
        gate.open.set()
        second.join(30)
    assert committed(store_url) == ["step-1", "step-2"]
    for step in (1, 2):
        resumed = Run(seed=5)
        with Checkpointer(store_url, resumed.state) as saves:
            from txstore.train.resume import ResumeOptions

            saves.resume(ResumeOptions(checkpoint=f"step-{step}"))
        assert same(resumed.values(), values[step - 1])


def test_a_late_save_counts_as_busy(store_url, gate):
    run = Run()
    policy = SavePolicy(when_busy="skip", max_in_flight=3, max_commit_lag_s=0.2)
    with Checkpointer(gated(store_url, gate), run.state, policy=policy) as saves:
        advance(run)
        assert not saves.save().skipped
        advance(run)
        assert not saves.save().skipped
        time.sleep(0.3)
        advance(run)
        assert saves.save().skipped == "commit_lag"
        gate.open.set()


def test_memory_is_asked_for_before_it_is_used(store_url):
    run = Run()
    advance(run)
    policy = SavePolicy(max_staging_bytes=1000, max_in_flight=2)
    with (
        Checkpointer(store_url, run.state, policy=policy) as saves,
        pytest.raises(SnapshotTooLarge, match="2 snapshots"),
    ):
        saves.save()
    assert committed(store_url) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_in_flight": 0},
        {"when_busy": "drop"},
        {"max_staging_bytes": 0},
        {"max_commit_lag_s": -1.0},
        {"max_failed_in_a_row": -1},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
    ],
)
def test_a_policy_is_validated(wrong):
    with pytest.raises(ConfigError):
        SavePolicy(**wrong)


# failures


def failing(url, at=0, **fault):
    return FaultyStore(url, Fault(Raise("full"), verb="put", part=".safetensors", at=at, **fault))


@pytest.mark.parametrize("then", ["save", "wait", "close", "exit"])
def test_a_failed_save_is_raised_by_the_next_call(store_url, then):
    run = Run()
    advance(run)
    saves = Checkpointer(failing(store_url), run.state, retry=ONCE)
    handle = saves.save()
    with pytest.raises(StoreFullError):
        handle.committed.result(30)
    time.sleep(0.05)
    advance(run)
    with pytest.raises(StoreFullError, match="no space left"):
        if then == "exit":
            with saves:
                pass
        else:
            getattr(saves, then)()
    if then in {"save", "wait"}:  # told once; training may go on if the caller says so
        saves.save()
        saves.close()
        assert committed(store_url) == ["step-2"]
    else:
        with pytest.raises(TransactionStateError):
            saves.save()


def test_some_failures_in_a_row_are_tolerated(store_url):
    run = Run()
    store = FaultyStore(store_url, *(Fault(Raise("full"), "put", ".safetensors", at=at) for at in (0, 1, 3, 4, 5)))
    saves = Checkpointer(store, run.state, retry=ONCE, policy=SavePolicy(max_failed_in_a_row=2))
    raised = []
    for step in range(1, 8):
        advance(run)
        saves.save()
        try:
            saves.wait()
        except StoreFullError:
            raised.append(step)
    saves.close()
    assert raised == [6], "steps 4 to 6 are the first three failures in a row"
    assert committed(store_url) == ["step-3", "step-7"]


def lost_at_the_end(url, at=(1,)):
    return FaultyStore(url, *(Fault(Raise("full"), "put", ".safetensors", at=one) for one in at))


@pytest.mark.parametrize("end", ["close", "exit"])
@pytest.mark.parametrize("seen_by", [None, "wait", "save"])
def test_the_last_save_is_not_tolerated(store_url, end, seen_by):
    """Nothing comes after it that could make it good: a clean end would be a run that lost its last steps, or all."""
    run = Run()
    store = lost_at_the_end(store_url, (0, 1) if seen_by == "save" else (1,))
    saves = Checkpointer(store, run.state, retry=ONCE, policy=SavePolicy(max_failed_in_a_row=2))
    for _ in range(2):
        advance(run)
        saves.save()
        if seen_by == "wait":
            saves.wait()  # in the middle it is
    with pytest.raises(StoreFullError, match="no space left") as caught:
        if end == "close":
            saves.close()
        else:
            with saves:
                pass
    assert (seen_by == "save") == bool(getattr(caught.value, "__notes__", []))
    assert committed(store_url) == ([] if seen_by == "save" else ["step-1"])
    saves.close()  # told once


def test_a_last_save_that_was_tolerated_is_a_note_on_an_exception_and_dealt_with_by_a_later_commit(store_url):
    run = Run()
    advance(run)
    policy = SavePolicy(max_failed_in_a_row=2)
    with (
        pytest.raises(KeyError, match="mine") as caught,
        Checkpointer(failing(store_url), run.state, retry=ONCE, policy=policy) as saves,
    ):
        saves.save()
        saves.wait()
        raise KeyError("mine")
    assert "the save of step-1 failed: " in caught.value.__notes__[0]
    assert [(one.url, one.step) for one in exit_guard._noted] == [(saves.store.url, 1)]
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    assert exit_guard._noted == []


def test_a_tolerated_failure_that_was_made_good_is_nothing_to_tell(store_url):
    run = Run()
    policy = SavePolicy(max_failed_in_a_row=1, max_in_flight=2)
    saves = Checkpointer(failing(store_url), run.state, retry=ONCE, policy=policy)
    handles = []
    for _ in range(2):
        advance(run)
        handles.append(saves.save())
    handles[-1].committed.result(30)
    assert saves.overlooked() == ""
    saves.close()


def test_what_cannot_be_stored_is_an_error_of_the_save(store_url):
    run = Run()
    run.optimizer.param_groups[0]["hook"] = lambda: None
    with Checkpointer(store_url, run.state) as saves:
        with pytest.raises(UnsupportedValue, match="hook"):
            saves.save()
        del run.optimizer.param_groups[0]["hook"]
        saves.save()
    assert committed(store_url) == ["step-0"]


def test_an_error_inside_the_with_is_not_hidden_by_a_failed_save(store_url):
    run = Run()
    with (
        pytest.raises(KeyError, match="mine") as caught,
        Checkpointer(failing(store_url), run.state, retry=ONCE) as saves,
    ):
        saves.save()
        raise KeyError("mine")
    assert "no space left" in caught.value.__notes__[0]


def test_a_save_on_its_way_is_committed_when_training_fails(store_url, gate):
    run = Run()
    threading.Timer(0.3, gate.open.set).start()
    with pytest.raises(KeyError), Checkpointer(gated(store_url, gate), run.state) as saves:
        saves.save()
        raise KeyError("mine")
    assert committed(store_url) == ["step-0"]


# deadlines


def test_a_stuck_store_is_named_and_the_save_never_commits(store_url, gate):
    """Failure case C11: rank, object and phase in the error; and what was given up stays given up."""
    run = Run()
    advance(run)
    saves = Checkpointer(gated(store_url, gate), run.state, policy=SavePolicy(deadline_s=1.0))
    handle = saves.save()
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"step-1 did not end within 1 s: rank 0 is in put of data/step-1.*, for \d"
    ) as caught:
        saves.wait()
    assert time.monotonic() - started < 5
    assert caught.value.rank == 0
    assert ".safetensors" in caught.value.key
    with pytest.raises(DeadlineExceeded):
        saves.save()
    with pytest.raises(DeadlineExceeded, match="step-1 is not committed and will not be"):
        handle.committed.result(0)
    gate.open.set()  # the store comes back, and the thread goes on
    saves._saves.close(30)
    with pytest.raises(DeadlineExceeded):
        saves.close()
    assert committed(store_url) == []
    fresh = Run()
    advance(fresh)
    with Checkpointer(store_url, fresh.state) as again:
        again.save()
    assert committed(store_url) == ["step-1"]


def test_a_save_that_is_stuck_before_it_has_begun_cannot_begin_later(store_url, gate):
    run = Run()
    held = gated(store_url, gate, verb="list", part="commits/step-")  # the slot walk of the save
    saves = Checkpointer(held, run.state, policy=SavePolicy(deadline_s=0.5))
    handle = saves.save()
    with pytest.raises(DeadlineExceeded, match=r"rank 0 is in list of"):
        saves.wait()
    gate.open.set()
    assert saves._saves.close(30)
    assert isinstance(handle.committed.exception(0), DeadlineExceeded)
    assert committed(store_url) == []


# the end of the process


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from faults import Fault, FaultyStore, Raise
from tests.train.runs import Run
from txstore.retry import RetryPolicy
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
run = Run()
run.step()
store = FaultyStore({url!r}, *([Fault(Raise("full"), "put", ".safetensors")] if {fails} else []))
saves = Checkpointer(store, run.state, retry=RetryPolicy(attempts=1), policy=SavePolicy(max_failed_in_a_row={tolerated}))
saves.save()
if {tolerated}:
    saves.wait()
print("trained to the end")
"""


@pytest.mark.parametrize(("fails", "tolerated", "status"), [(True, 0, 70), (True, 2, 70), (False, 0, 0)])
def test_nobody_looks(store_url, fails, tolerated, status):
    """Failure case C7: a run whose saves failed must not end green; one whose saves are on their way must not lose them."""
    here = Path(__file__).parent
    script = SCRIPT.format(
        paths=[str(here.parents[1]), str(here.parent / "dcp")], url=store_url, fails=fails, tolerated=tolerated
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "trained to the end\n"
    assert done.returncode == status, done.stderr
    assert ("txstore: the save of step-1 failed: " in done.stderr) == fails
    if not fails:
        with open_store(store_url) as store:
            assert find(store, "step-1").step == 1


@pytest.mark.parametrize("verb", ["list", "read", "read_into"])
def test_a_resume_from_a_store_that_does_not_answer_ends(store_url, gate, verb):
    run = Run()
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    stuck = gated(store_url, gate, verb=verb, part="")
    saves = Checkpointer(stuck, Run(seed=2).state, policy=SavePolicy(deadline_s=0.5))
    with pytest.raises(DeadlineExceeded, match=rf"did not end within 0.5 s: in {verb} of "):
        saves.resume()
    gate.open.set()
    saves.close()


def test_a_forked_process_does_not_wait_for_the_saves_of_its_parent(store_url, gate):
    """A data loader's worker is forked while a save is on its way, and ends as if there were none."""
    run = Run()
    with Checkpointer(gated(store_url, gate), run.state) as saves:
        saves.save()
        assert gate.reached.wait(10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a later Python warns of threads
            worker = multiprocessing.get_context("fork").Process(target=int)
            worker.start()
        worker.join(20)
        code = worker.exitcode
        worker.kill()
        gate.open.set()
    assert code == 0


def in_a_fork(work):
    """What `work` gives in a forked process, as text; "hangs" if it does not end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later Python warns of threads
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=lambda: theirs.send(work()))
        process.start()
    told = ours.recv() if ours.poll(10) else "hangs"
    process.kill()
    process.join()
    return told


@pytest.mark.parametrize("call", ["save", "wait", "resume"])
def test_a_fork_saves_nothing_with_the_checkpointer_of_its_parent(store_url, gate, call):
    """It has no thread that saves: it waited for its deadline, and then gave up the save of the process that trains."""
    run = Run()

    def work():
        with pytest.raises(TransactionStateError) as caught:
            getattr(saves, call)()
        return str(caught.value)

    with Checkpointer(gated(store_url, gate), run.state) as saves:
        saves.save()
        assert gate.reached.wait(10)
        told = in_a_fork(work)
        gate.open.set()
    assert "this is a fork of it" in told
    assert "its own Checkpointer" in told
    assert committed(store_url) == ["step-0"]


@pytest.mark.parametrize("error", [None, KeyError("of the fork")])
def test_a_fork_leaves_the_block_of_its_parent_at_once(store_url, gate, error):
    run = Run()

    def work():
        saves.__exit__(type(error) if error else None, error, None)
        saves.close()
        return "left"

    with Checkpointer(gated(store_url, gate), run.state) as saves:
        saves.save()
        assert gate.reached.wait(10)
        told = in_a_fork(work)
        gate.open.set()
    assert told == "left"
    assert committed(store_url) == ["step-0"]


def test_a_handle_says_what_became_of_it(store_url):
    run = Run()
    saves = Checkpointer(failing(store_url), run.state, retry=ONCE)
    handle = saves.save()
    with pytest.raises(StoreFullError):
        saves.wait()
    assert repr(handle) == "SaveHandle(step-0, failed)"
    advance(run)
    handle = saves.save()
    saves.close()
    assert repr(handle) == "SaveHandle(step-1, committed)"


@pytest.mark.parametrize(
    "wrong",
    [{"loss": "x"}, {"loss": None}, {"loss": 10**400}, {"loss": 1, "batch_id": "\ud800"}, {"loss": 1, "batch_id": 5}],
)
def test_a_record_is_refused_where_it_is_made(store_url, wrong):
    run = Run()
    with Checkpointer(store_url, run.state) as saves:
        advance(run)
        with pytest.raises(ConfigError, match="not a record of step 1"):
            saves.record(**wrong)
        saves.save()


@pytest.mark.parametrize(("step", "status"), [(0, 70), (1, 0)])
def test_a_failure_that_was_caught_is_told_unless_the_work_was_saved_after_all(store_url, step, status):
    """A loop that trains again after an error: at the end everything is committed, or the failed step is not."""
    here = Path(__file__).parent
    script = SCRIPT.format(
        paths=[str(here.parents[1]), str(here.parent / "dcp")], url=store_url, fails=True, tolerated=0
    )
    script = script.replace(
        "saves.save()",
        f"""
try:
    with saves:
        saves.save()
        raise KeyError("mine")
except KeyError:
    pass
again = Run()
again.state.progress.global_step = {step}
with Checkpointer({store_url!r}, again.state) as saves:
    saves.save()
""",
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
    assert ("txstore: the save of step-1 failed: " in done.stderr) == (status == 70)


def test_a_failure_behind_a_green_exit_is_told(store_url):
    """``sys.exit(0)`` inside the block: the failed save is a note on an exception that nobody prints."""
    here = Path(__file__).parent
    script = SCRIPT.format(
        paths=[str(here.parents[1]), str(here.parent / "dcp")], url=store_url, fails=True, tolerated=0
    )
    script = script.replace("saves.save()", "with saves:\n    saves.save()\n    sys.exit(0)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 70, done.stderr
    assert "txstore: the save of step-1 failed: " in done.stderr
