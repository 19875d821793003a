"""The events of a `Checkpointer`: each save and each resume tells its story, whole and in order."""

from __future__ import annotations

import os

import pytest
from faults import Fault, FaultyStore, Raise, path_of

from tests.train.runs import Run
from tests.train.test_checkpointer import ONCE, Gate, advance, gated
from txstore.errors import IntegrityError, NotProved, NotResumed, StoreFullError
from txstore.event_log import EventLog, read_events
from txstore.events import (
    ChecksumFailed,
    Committed,
    Event,
    FellBack,
    Proved,
    Restored,
    RestoreFailed,
    SaveFailed,
    SaveRequested,
    SaveSkipped,
    Staged,
    StepRecorded,
    Verified,
    Written,
)
from txstore.manifest import Description
from txstore.metrics import Metrics
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
from txstore.train.proof import ProofPolicy
from txstore.train.resume import ResumeOptions


def kinds(events: list[Event]) -> list[type]:
    return [type(event) for event in events]


def of(events: list[Event], kind: type) -> list:
    return [event for event in events if type(event) is kind]


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_save_tells_its_story(store_url):
    run, told = Run(), []
    with Checkpointer(store_url, run.state, observers=[told.append]) as saves:
        saves.record(loss=run.step().loss)
        decision = saves.save().committed.result(30)
    assert kinds(told) == [StepRecorded, SaveRequested, Staged, Written, Committed]
    step, requested, staged, written, committed = told
    assert (step.step, step.consumed_samples, step.loss) == (1, 8, run.losses[1])
    assert {(event.rank, event.world_size, event.checkpoint, event.step) for event in told[1:]} == {(0, 1, "step-1", 1)}
    assert requested.when_busy == "wait"
    assert staged.bytes > 1000
    assert staged.bytes >= written.bytes > 10_000, "one rank writes all that it has staged; buffers are rounded up"
    assert committed.bytes == decision.totals.bytes > written.bytes, "files also have headers"
    assert (committed.slot, committed.txn) == (decision.slot, decision.txn)
    durations = [staged.waited_s, staged.capture_s, staged.copy_s, written.plan_s, written.write_s, committed.commit_s]
    assert all(0 <= seconds < 30 for seconds in durations)
    assert sum(durations) <= committed.lag_s + 0.001
    assert committed.save_s <= committed.lag_s
    assert [event.at_s for event in told] == sorted(event.at_s for event in told)


def test_a_skipped_save_and_one_that_waited(store_url):
    run, told, gate = Run(), [], Gate()
    policy = SavePolicy(when_busy="skip")
    with Checkpointer(gated(store_url, gate), run.state, policy=policy, observers=[told.append]) as saves:
        saves.save()
        advance(run)
        saves.save()
        gate.open.set()
    (skipped,) = of(told, SaveSkipped)
    assert (skipped.checkpoint, skipped.reason) == ("step-1", "in_flight")
    assert [event.checkpoint for event in of(told, SaveRequested)] == ["step-0", "step-1"]


def test_failures_are_told_with_phase_and_number(store_url):
    run, told = Run(), []
    store = FaultyStore(store_url, *(Fault(Raise("full"), "put", ".safetensors", at=at) for at in (0, 1)))
    with (
        pytest.raises(StoreFullError),
        Checkpointer(
            store, run.state, retry=ONCE, observers=[told.append], policy=SavePolicy(max_failed_in_a_row=1)
        ) as saves,
    ):
        for _ in range(2):
            advance(run)
            saves.save()
    failed = of(told, SaveFailed)
    assert [(event.phase, event.error_type, event.failed_rank, event.consecutive) for event in failed] == [
        ("write", "StoreFullError", 0, 1),
        ("write", "StoreFullError", 0, 2),
    ]
    assert of(told, Committed) == of(told, Written) == []


def test_what_cannot_be_stored_is_told(store_url):
    run, told = Run(), []
    run.optimizer.param_groups[0]["hook"] = lambda: None
    saves = Checkpointer(store_url, run.state, observers=[told.append])
    with pytest.raises(Exception, match="hook"):
        saves.save()
    saves.close()
    (failed,) = of(told, SaveFailed)
    assert (failed.phase, failed.error_type) == ("capture", "UnsupportedValue")


def trained(url, steps=(3, 6)):
    run = Run()
    with Checkpointer(url, run.state) as saves:
        for step in range(1, max(steps) + 1):
            saves.record(loss=run.step().loss)
            if step in steps:
                saves.save()
    return run


def test_a_resume_tells_its_story(store_url):
    trained(store_url)
    run, told = Run(seed=5), []
    with Checkpointer(
        store_url, run.state, observers=[told.append], proof=ProofPolicy(steps=2, loss_spreads=50)
    ) as saves:
        report = saves.resume(ResumeOptions(depth="full"))
        assert kinds(told) == [Verified, Restored]
        for _ in range(3):
            saves.record(loss=run.step().loss)
    assert kinds(told) == [Verified, Restored, StepRecorded, StepRecorded, Proved, StepRecorded]
    verified, restored, proved = told[0], told[1], told[4]
    assert (verified.checkpoint, verified.depth, verified.ok) == ("step-6", "full", True)
    assert verified.bytes > 1000
    assert (restored.step, restored.saved_world_size, restored.world_size) == (6, 1, 1)
    assert restored.bytes > 1000
    phases = (restored.choose_s, restored.judge_s, restored.load_s, restored.apply_s, restored.validate_s)
    assert sum(phases) == pytest.approx(restored.restore_s)
    assert (proved.ok, proved.step, proved.loss_delta) == (True, 6, run.losses[7] - trained(f"{store_url}2").losses[6])
    assert report.loss_delta == proved.loss_delta


def test_a_jump_after_a_resume_is_told_and_raised(store_url):
    trained(store_url)
    run, told = Run(seed=5), []
    with Checkpointer(store_url, run.state, observers=[told.append]) as saves:
        saves.resume()
        run.step()
        with pytest.raises(NotProved, match=r"step 7, 1 after the resume from step-6: loss: .*1000"):
            saves.record(loss=1000.0)
    (proved,) = of(told, Proved)
    assert not proved.ok
    assert proved.loss_delta > 900


def damage(url, checkpoint):
    folder = path_of(url, f"data/{checkpoint}")
    (attempt,) = os.listdir(folder)
    shard = next(name for name in os.listdir(f"{folder}/{attempt}") if name.endswith(".safetensors"))
    with open(f"{folder}/{attempt}/{shard}", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    return f"data/{checkpoint}/{attempt}/{shard}"


def test_a_fall_back_tells_what_was_wrong(store_url):
    trained(store_url)
    key = damage(store_url, "step-6")
    run, told = Run(seed=5), []
    with Checkpointer(store_url, run.state, observers=[told.append]) as saves:
        with pytest.raises(IntegrityError):
            saves.resume()
        assert [event.reason for event in of(told, RestoreFailed)] == ["integrity"]
        told.clear()
        report = saves.resume(ResumeOptions(fallback="previous"))
    assert (report.checkpoint, [one.checkpoint for one in report.fell_back]) == ("step-3", ["step-6"])
    (failed,), (back,), (sum_,) = of(told, RestoreFailed), of(told, FellBack), of(told, ChecksumFailed)
    assert (failed.checkpoint, failed.reason, sum_.key) == ("step-6", "integrity", key)
    assert (back.checkpoint, back.from_checkpoint, back.reason) == ("step-3", "step-6", "integrity")
    assert [event.checkpoint for event in of(told, Restored)] == ["step-3"]


def test_metrics_and_log_see_a_run_and_a_broken_observer_hurts_nobody(store_url, tmp_path):
    def broken(event):
        raise OSError("no space for my notes")

    path = tmp_path / "events.jsonl"
    run = Run()
    with Metrics() as metrics, EventLog(path) as log:
        with Checkpointer(store_url, run.state, observers=[broken, metrics, log]) as saves:
            for _ in range(4):
                saves.record(loss=run.step().loss)
                saves.save()
        assert value(metrics, "checkpoint_last_committed_step") == 4
        assert value(metrics, "training_step") == 4
        assert value(metrics, "checkpoint_save_duration_seconds_count") == 4
        assert value(metrics, "checkpoint_inprogress_count") == 0
        assert value(metrics, "checkpoint_bytes_total") > 4000
        again = Run(seed=5)
        with Checkpointer(store_url, again.state, observers=[metrics]) as saves:
            saves.resume()
        assert value(metrics, "checkpoint_restore_duration_seconds_count") == 1
    assert [type(event) for event in read_events(path)].count(Committed) == 4


def test_a_checkpoint_is_read_back_if_that_is_wanted(store_url):
    run, told = Run(), []
    with Checkpointer(store_url, run.state, policy=SavePolicy(verify="full"), observers=[told.append]) as saves:
        advance(run)
        saves.save()
    (verified,) = of(told, Verified)
    assert (verified.checkpoint, verified.depth, verified.ok) == ("step-1", "full", True)
    assert verified.bytes > 10_000
    assert kinds(told)[-2:] == [Committed, Verified]


def test_what_is_damaged_on_the_way_to_the_disk_is_raised_like_a_failed_save(store_url):
    def flip(store, key, call):
        info = call()
        with open(path_of(store_url, key), "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        return info

    run, told = Run(), []
    store = FaultyStore(store_url, Fault(flip, "put", ".safetensors"))
    saves = Checkpointer(store, run.state, policy=SavePolicy(verify="full"), observers=[told.append])
    handle = saves.save()
    assert handle.committed.result(30).checkpoint == "step-0"
    with pytest.raises(IntegrityError, match=r"step-0 is damaged: data/step-0/.*safetensors"):
        saves.wait()
    saves.close()
    assert [event.ok for event in of(told, Verified)] == [False]
    assert ".safetensors" in of(told, ChecksumFailed)[0].key
    with pytest.raises(Exception, match="verify='some'"):
        SavePolicy(verify="some")


def test_a_described_world_is_the_real_one(store_url):
    with pytest.raises(Exception, match="a world of 64, there are 1 ranks"):
        Checkpointer(store_url, Run().state, description=Description(topology={"world": 64, "dp": 64}))


def test_a_run_that_did_not_resume_is_told_so(store_url):
    trained(store_url)
    run, told = Run(), []
    with Checkpointer(store_url, run.state, observers=[told.append]) as saves:
        advance(run, 3)
        with pytest.raises(NotResumed):
            saves.save()
    (failed,) = of(told, SaveFailed)
    assert (failed.phase, failed.error_type, failed.checkpoint) == ("wait", "NotResumed", "step-3")
