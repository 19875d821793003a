"""What each event makes of the metrics, and how they leave the process."""

from __future__ import annotations

import logging
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from txstore.errors import ConfigError
from txstore.events import (
    ChecksumFailed,
    Committed,
    Event,
    FellBack,
    Observers,
    Proved,
    Restored,
    RestoreFailed,
    RestoreReason,
    SaveFailed,
    SavePhase,
    SaveRequested,
    SaveSkipped,
    SkipReason,
    Staged,
    StepRecorded,
    Verified,
    Written,
)
from txstore.metrics import Metrics

MISSION = {
    "checkpoint_save_duration_seconds": "histogram",
    "checkpoint_async_staging_seconds": "histogram",
    "checkpoint_bytes_total": "counter",
    "checkpoint_commit_lag_seconds": "histogram",
    "checkpoint_inprogress_count": "gauge",
    "checkpoint_last_committed_step": "gauge",
    "checkpoint_restore_duration_seconds": "histogram",
    "checkpoint_restore_failures_total": "counter",
    "checkpoint_checksum_failures_total": "counter",
    "checkpoint_reprocessed_samples_total": "counter",
    "resume_loss_delta": "gauge",
    "resume_world_size_change_total": "counter",
}
BEYOND = {
    "checkpoint_saves_skipped_total": "counter",
    "checkpoint_save_failures_total": "counter",
    "checkpoint_consecutive_failures": "gauge",
    "checkpoint_saves_since_commit": "gauge",
    "checkpoint_waited_seconds_total": "counter",
    "checkpoint_last_committed_timestamp_seconds": "gauge",
    "checkpoint_last_verified_step": "gauge",
    "checkpoint_last_verified_timestamp_seconds": "gauge",
    "training_step": "gauge",
}


def at(step: int, at_s: float = 1000.0) -> dict:
    return {"at_s": at_s, "rank": 0, "world_size": 4, "checkpoint": f"step-{step}", "step": step}


def stepped(step: int) -> StepRecorded:
    return StepRecorded(**at(step), loss=1.0, consumed_samples=8 * step)


def requested(step: int, at_s: float = 1000.0) -> SaveRequested:
    return SaveRequested(**at(step, at_s), when_busy="wait")


def committed(step: int, at_s: float = 1000.0, lag_s: float = 40.0) -> Committed:
    return Committed(**at(step, at_s), bytes=4096, save_s=30.0, commit_s=0.5, lag_s=lag_s, slot=0, txn="f" * 32)


def failed(step: int, consecutive: int) -> SaveFailed:
    return SaveFailed(
        **at(step),
        phase="write",
        consecutive=consecutive,
        error_type="StoreFullError",
        message="ENOSPC",
        key="",
        failed_rank=2,
    )


def restored(step: int, at_s: float = 1000.0, saved_world_size: int = 4) -> Restored:
    return Restored(
        **at(step, at_s),
        bytes=1,
        restore_s=50.0,
        choose_s=1.0,
        judge_s=1.0,
        load_s=40.0,
        apply_s=5.0,
        validate_s=3.0,
        saved_world_size=saved_world_size,
    )


def verified(step: int, depth: str = "full", *, ok: bool = True, stood_at_s: float | None = None) -> Verified:
    return Verified(**at(step), depth=depth, ok=ok, bytes=1, verify_s=1.0, problems=int(not ok), stood_at_s=stood_at_s)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def types(metrics: Metrics) -> dict[str, str]:
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in metrics.registry.collect()
    }


def test_the_names_are_the_missions_and_a_few_more(metrics: Metrics) -> None:
    assert types(metrics) == MISSION | BEYOND


def test_every_label_is_of_a_closed_set_and_there_from_the_start(metrics: Metrics) -> None:
    labels = {
        (sample.name, name, text)
        for family in metrics.registry.collect()
        for sample in family.samples
        for name, text in sample.labels.items()
        if name != "le"
    }
    assert labels == {
        *(("checkpoint_restore_failures_total", "reason", one) for one in get_args(RestoreReason)),
        *(("checkpoint_saves_skipped_total", "reason", one) for one in get_args(SkipReason)),
        *(("checkpoint_save_failures_total", "phase", one) for one in get_args(SavePhase)),
    }


def test_nobody_gets_creation_times(metrics: Metrics) -> None:
    assert not [s.name for family in metrics.registry.collect() for s in family.samples if s.name.endswith("_created")]


def test_a_save_from_request_to_commit(metrics: Metrics) -> None:
    metrics(requested(100, at_s=1000.0))
    assert value(metrics, "checkpoint_inprogress_count") == 1
    assert value(metrics, "checkpoint_saves_since_commit") == 1
    assert value(metrics, "training_step") == 100
    metrics(Staged(**at(100), bytes=4096, waited_s=9.0, capture_s=0.2, copy_s=0.6))
    assert value(metrics, "checkpoint_async_staging_seconds_sum") == pytest.approx(0.8)
    assert value(metrics, "checkpoint_waited_seconds_total") == 9
    metrics(Written(**at(100), bytes=1024, plan_s=0.1, write_s=20.0))
    assert value(metrics, "checkpoint_bytes_total") == 1024  # this rank's; Committed tells the sum of all
    assert value(metrics, "checkpoint_last_committed_step") == 0
    metrics(committed(100, at_s=1040.0, lag_s=40.0))
    assert value(metrics, "checkpoint_bytes_total") == 1024
    assert value(metrics, "checkpoint_last_committed_step") == 100
    assert value(metrics, "checkpoint_last_committed_timestamp_seconds") == 1000
    assert value(metrics, "checkpoint_save_duration_seconds_sum") == 30
    assert value(metrics, "checkpoint_commit_lag_seconds_sum") == 40
    assert value(metrics, "checkpoint_inprogress_count") == 0
    assert value(metrics, "checkpoint_saves_since_commit") == 0


def test_saves_since_the_commit_count_skipped_and_failed_ones(metrics: Metrics) -> None:
    metrics(requested(1))
    metrics(requested(2))
    metrics(SaveSkipped(**at(2), reason="in_flight"))
    metrics(requested(3))
    metrics(committed(1))
    # 2 and 3 were asked for after 1 was, and neither is committed.
    assert value(metrics, "checkpoint_saves_since_commit") == 2
    assert value(metrics, "checkpoint_inprogress_count") == 1
    metrics(failed(3, consecutive=1))
    metrics(requested(4))
    metrics(failed(4, consecutive=2))
    assert value(metrics, "checkpoint_saves_since_commit") == 3
    assert value(metrics, "checkpoint_consecutive_failures") == 2
    assert value(metrics, "checkpoint_save_failures_total", phase="write") == 2
    assert value(metrics, "checkpoint_saves_skipped_total", reason="in_flight") == 1
    assert value(metrics, "checkpoint_inprogress_count") == 0
    metrics(requested(5))
    metrics(committed(5))
    assert value(metrics, "checkpoint_saves_since_commit") == 0
    assert value(metrics, "checkpoint_consecutive_failures") == 0


def test_a_late_commit_of_an_older_step_takes_nothing_back(metrics: Metrics) -> None:
    for step in (1, 2):
        metrics(requested(step))
    metrics(committed(2, at_s=1010.0, lag_s=10.0))
    metrics(committed(1, at_s=1020.0, lag_s=25.0))
    assert value(metrics, "checkpoint_last_committed_step") == 2
    assert value(metrics, "checkpoint_last_committed_timestamp_seconds") == 1000
    assert value(metrics, "checkpoint_saves_since_commit") == 0


def test_until_the_first_commit_all_work_since_the_start_is_at_risk(metrics: Metrics) -> None:
    now_s = time.time()
    for name in ("committed", "verified"):
        assert now_s - 60 < (value(metrics, f"checkpoint_last_{name}_timestamp_seconds") or 0) <= now_s
        assert value(metrics, f"checkpoint_last_{name}_step") == 0


@pytest.mark.parametrize(
    ("depth", "counts"), [("documents", False), ("sample", False), ("full", True), ("drill", True)]
)
def test_what_counts_as_verified(metrics: Metrics, depth: str, counts: bool) -> None:
    metrics(committed(100, at_s=1040.0, lag_s=40.0))
    metrics(verified(100, depth))
    assert value(metrics, "checkpoint_last_verified_step") == (100 if counts else 0)
    if counts:
        assert value(metrics, "checkpoint_last_verified_timestamp_seconds") == 1000


def test_the_users_word_on_what_counts() -> None:
    strict = Metrics(verified_by=["drill"])
    strict(verified(100, "full"))
    assert value(strict, "checkpoint_last_verified_step") == 0
    with pytest.raises(ConfigError):
        Metrics(verified_by=["glance"])  # type: ignore[list-item]


def test_a_verified_step_that_turns_out_damaged_does_not_count_any_more(metrics: Metrics) -> None:
    for step in (100, 200):
        metrics(committed(step, at_s=1000.0 + step, lag_s=0.0))
        metrics(verified(step))
    assert value(metrics, "checkpoint_last_verified_step") == 200
    metrics(verified(200, "documents", ok=False))
    assert value(metrics, "checkpoint_last_verified_step") == 100
    assert value(metrics, "checkpoint_last_verified_timestamp_seconds") == 1100
    metrics(verified(50))
    assert value(metrics, "checkpoint_last_verified_step") == 100


def test_the_verifier_may_know_when_training_stood_there(metrics: Metrics) -> None:
    metrics(verified(100, stood_at_s=777.0))
    assert value(metrics, "checkpoint_last_verified_timestamp_seconds") == 777


def test_a_resume(metrics: Metrics) -> None:
    metrics(requested(300))
    metrics(failed(300, consecutive=1))
    metrics(restored(200, at_s=2000.0, saved_world_size=8))
    assert value(metrics, "checkpoint_restore_duration_seconds_sum") == 50
    assert value(metrics, "resume_world_size_change_total") == 1
    assert value(metrics, "training_step") == 200
    assert value(metrics, "checkpoint_last_committed_step") == 200
    assert value(metrics, "checkpoint_last_committed_timestamp_seconds") == 2000
    assert value(metrics, "checkpoint_last_verified_step") == 0
    assert value(metrics, "checkpoint_consecutive_failures") == 0
    metrics(Proved(**at(200, 2060.0), ok=True, loss_delta=-0.25, reprocessed_samples=512))
    assert value(metrics, "resume_loss_delta") == -0.25
    assert value(metrics, "checkpoint_reprocessed_samples_total") == 512
    assert value(metrics, "checkpoint_last_verified_step") == 200
    assert value(metrics, "checkpoint_last_verified_timestamp_seconds") == 2000
    metrics(restored(200))
    assert value(metrics, "resume_world_size_change_total") == 1


def test_a_proof_that_fails_verifies_nothing(metrics: Metrics) -> None:
    metrics(restored(200))
    metrics(Proved(**at(200), ok=False, loss_delta=float("nan")))
    assert value(metrics, "checkpoint_last_verified_step") == 0
    assert str(value(metrics, "resume_loss_delta")) == "nan"


def test_failures_of_a_resume(metrics: Metrics) -> None:
    facts = {"error_type": "IntegrityError", "message": "", "key": "data/a", "failed_rank": None}
    metrics(RestoreFailed(**at(300), reason="integrity", **facts))
    metrics(ChecksumFailed(**at(300), key="data/a"))
    metrics(FellBack(**at(200), from_checkpoint="step-300", reason="integrity"))
    assert value(metrics, "checkpoint_restore_failures_total", reason="integrity") == 1
    assert value(metrics, "checkpoint_checksum_failures_total") == 1


def test_a_recorded_step_moves_the_step_between_saves(metrics: Metrics) -> None:
    metrics(requested(100))
    metrics(stepped(150))
    assert value(metrics, "training_step") == 150
    metrics(requested(150))
    metrics(stepped(120))  # a rewound run
    assert value(metrics, "training_step") == 120


SAVE = st.integers(1, 30).flatmap(
    lambda step: st.sampled_from(
        [requested(step), committed(step), failed(step, 1), SaveSkipped(**at(step), reason="in_flight"), verified(step)]
    )
)


@given(st.lists(SAVE, max_size=40))
def test_whatever_the_order_nothing_is_negative_and_nothing_goes_back(told: list[Event]) -> None:
    metrics, newest = Metrics(), 0.0
    for event in told:
        metrics(event)
        step = value(metrics, "checkpoint_last_committed_step") or 0.0
        assert step >= newest
        newest = step
        for name in ("checkpoint_inprogress_count", "checkpoint_saves_since_commit", "checkpoint_last_verified_step"):
            assert (value(metrics, name) or 0) >= 0


def test_threads_lose_nothing(metrics: Metrics) -> None:
    def count() -> None:
        for step in range(300):
            metrics(Written(**at(step), bytes=1, plan_s=0.0, write_s=0.0))
            metrics(stepped(step))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(metrics, "checkpoint_bytes_total") == 1200


# -- registries, labels, export ---------------------------------------------------------------------


def test_two_runs_in_one_process_do_not_clash() -> None:
    one, two = Metrics(), Metrics()
    one(committed(5))
    assert value(two, "checkpoint_last_committed_step") == 0


def test_a_given_registry_takes_one_run() -> None:
    registry = CollectorRegistry()
    Metrics(registry=registry)(committed(5))
    assert registry.get_sample_value("checkpoint_last_committed_step") == 5
    with pytest.raises(ConfigError, match="of these names already"):
        Metrics(registry=registry)
    Gauge("training_step", "taken", registry=(taken := CollectorRegistry()))
    with pytest.raises(ConfigError, match="training_step"):
        Metrics(registry=taken)


def test_fixed_labels_are_on_every_sample() -> None:
    metrics = Metrics(labels={"run": "run-1", "rank": "3"})
    metrics(SaveSkipped(**at(1), reason="commit_lag"))
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    assert all(sample.labels["run"] == "run-1" and sample.labels["rank"] == "3" for sample in samples)
    assert value(metrics, "checkpoint_saves_skipped_total", run="run-1", rank="3", reason="commit_lag") == 1


@pytest.mark.parametrize("name", ["reason", "le", "phase", "__x", "a-b", "1", ""])
def test_labels_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="label"):
        Metrics(labels={name: "x"})


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError) as caught:
        Metrics()
    assert "pip install '.[metrics]' in txstore's checkout" in str(caught.value)


def read(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def test_metrics_over_http_until_closed() -> None:
    with Metrics() as metrics:
        port = metrics.serve()
        metrics(committed(42))
        url = f"http://127.0.0.1:{port}/metrics"
        assert read(url)["checkpoint_last_committed_step"] == 42
        metrics(stepped(43))
        assert read(url)["training_step"] == 43
        with pytest.raises(OSError, match="in use"):
            metrics.serve(port)
    with pytest.raises(urllib.error.URLError):
        read(url)
    metrics.close()
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def test_only_this_machine_is_served_unless_told() -> None:
    with Metrics() as metrics:
        metrics.serve()
        ((server, _),) = metrics._servers
        assert server.server_address[0] == "127.0.0.1"


def parsed(path: Path) -> dict[str, float]:
    families = text_string_to_metric_families(path.read_text())
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def test_a_text_file_follows_the_events(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    metrics = Metrics(textfile=path)
    assert parsed(path)["checkpoint_last_committed_step"] == 0  # a run that dies before its first save is seen, too
    metrics(committed(7))
    assert parsed(path)["checkpoint_last_committed_step"] == 7
    assert [one.name for one in tmp_path.iterdir()] == ["run.prom"]


def test_progress_does_not_write_at_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    slow = Metrics(textfile=path, textfile_every_s=3600.0)
    slow(stepped(5))
    assert parsed(path)["training_step"] == 0
    eager = Metrics(textfile=path, textfile_every_s=0.0)
    eager(stepped(6))
    assert parsed(path)["training_step"] == 6


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    metrics = Metrics(textfile=path, textfile_every_s=0.0)
    whole = len(parsed(path))
    done = threading.Event()

    def write() -> None:
        for step in range(300):
            metrics(stepped(step))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert len(parsed(path)) == whole
    writer.join()


def test_the_text_file_of_a_run_that_ended_well_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    with Metrics(textfile=path) as metrics:
        metrics(committed(7))
    assert not path.exists()
    metrics(committed(8))
    metrics(stepped(9))
    assert not path.exists()


def test_the_text_file_of_a_run_that_failed_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    with pytest.raises(ValueError, match="boom"), Metrics(textfile=path, textfile_every_s=3600.0) as metrics:
        metrics(stepped(9))
        raise ValueError("boom")
    assert parsed(path)["training_step"] == 9


def test_a_text_file_that_cannot_be_written_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "absent"
    with caplog.at_level(logging.DEBUG, "txstore.metrics"):
        metrics = Metrics(textfile=folder / "run.prom", textfile_every_s=0.0)
        metrics(stepped(1))
        Observers(metrics)(committed(1))
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    folder.mkdir()
    metrics(stepped(2))
    assert parsed(folder / "run.prom")["training_step"] == 2


def test_a_text_file_that_node_exporter_would_not_read() -> None:
    with pytest.raises(ConfigError, match=r"\.prom"):
        Metrics(textfile="run.txt")
