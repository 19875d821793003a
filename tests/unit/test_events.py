"""Events, their observers, and the log that survives its writer."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore import errors, events
from txstore.errors import ConfigError, FormatError, IntegrityError, StateMismatch, TransientError
from txstore.event_log import EventLog, UnknownEvent, read_events
from txstore.events import (
    EVENT_NAMES,
    Event,
    Observers,
    Proved,
    RestoreReason,
    SaveFailed,
    SaveSkipped,
    error_fields,
    restore_reason,
)

KINDS = get_args(Event)


def skipped(step: int = 1, checkpoint: str | None = None) -> SaveSkipped:
    name = f"step-{step}" if checkpoint is None else checkpoint
    return SaveSkipped(at_s=1.5, rank=0, world_size=2, checkpoint=name, step=step, reason="in_flight")


def sample(kind: type[msgspec.Struct]) -> Event:
    """An event of this kind with a plain value in every field."""
    values = {"int": 7, "float": 0.25, "bool": True, "str": "text", "int | None": None, "float | None": 0.5}
    hints = {field.name: field.type for field in msgspec.structs.fields(kind)}
    chosen = {}
    for name, hint in hints.items():
        text = hint.__name__ if isinstance(hint, type) else str(hint)
        chosen[name] = values[text] if text in values else get_args(hint)[0]
    return kind(**chosen)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_is_read_as_it_was_written(path: Path, kind: type) -> None:
    event = sample(kind)
    with EventLog(path) as log:
        log(event)
    assert list(read_events(path)) == [event]
    line = json.loads(path.read_text())
    assert line["event"] in EVENT_NAMES
    assert {"at_s", "rank", "world_size", "checkpoint", "step"} <= line.keys()


def test_every_event_is_in_the_union_and_has_a_name_of_its_own() -> None:
    assert set(KINDS) == set(events._Event.__subclasses__())
    assert len(EVENT_NAMES) == len(KINDS) == 13


def test_events_are_values() -> None:
    assert skipped() == skipped()
    with pytest.raises(AttributeError):
        skipped().step = 5  # type: ignore[misc]


# -- errors -----------------------------------------------------------------------------------------


def test_the_facts_of_an_error_are_taken_whole() -> None:
    error = IntegrityError("3 blocks differ", key="data/a", rank=3)
    assert error_fields(error) == {
        "error_type": "IntegrityError",
        "message": "3 blocks differ",
        "key": "data/a",
        "failed_rank": 3,
    }
    foreign = error_fields(ValueError("bad"))
    assert (foreign["error_type"], foreign["message"], foreign["failed_rank"]) == (
        "ValueError",
        "ValueError: bad",
        None,
    )


def test_an_error_brings_no_secret_and_no_novel_into_an_event(path: Path) -> None:
    text = (
        "PUT https://user:hunter22@host/k?sig=hunter22 failed: \udcff " + "x " * 800 + "https://u:" + "hunter22" * 10**5
    )
    facts = error_fields(TransientError(text, key="s3://a:hunter22@b/c\udcff"))
    assert "hunter22" not in str(facts)
    with EventLog(path) as log:
        log(
            SaveFailed(
                at_s=1.0, rank=0, world_size=1, checkpoint="step-1", step=1, phase="write", consecutive=1, **facts
            )
        )
    assert path.stat().st_size < 4096
    (event,) = read_events(path)
    assert isinstance(event, SaveFailed)
    assert event.key.endswith("\\udcff")


def every_error(root: type[errors.TxStoreError] = errors.TxStoreError) -> list[type[errors.TxStoreError]]:
    return [root, *(found for child in root.__subclasses__() for found in every_error(child))]


@pytest.mark.parametrize("kind", [kind for kind in every_error() if kind.__module__ == "txstore.errors"])
def test_every_error_has_a_reason_of_the_closed_set(kind: type[errors.TxStoreError]) -> None:
    assert restore_reason(kind("it went wrong")) in get_args(RestoreReason)


def test_reasons() -> None:
    assert restore_reason(errors.CheckpointNotFound("gone")) == "not_found"
    assert restore_reason(errors.CheckpointRetired("gone")) == "not_found"
    assert restore_reason(IntegrityError("bits")) == "integrity"
    assert restore_reason(StateMismatch("keys")) == "mismatch"
    assert restore_reason(errors.AccessDeniedError("403")) == "store"
    assert restore_reason(errors.Incompatible("model")) == "incompatible"
    assert restore_reason(errors.NotProved("loss")) == "validation"
    assert restore_reason(errors.DeadlineExceeded("rank 3")) == "deadline"
    assert restore_reason(ValueError("bad")) == "other"


# -- observers --------------------------------------------------------------------------------------


def test_an_observer_that_raises_breaks_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise OSError(28, "No space left on device")

    def broken_too(event: Event) -> None:
        raise KeyError("labels")

    notify = Observers(broken, seen.append, broken_too)
    with caplog.at_level(logging.DEBUG, "txstore.events"):
        for step in range(3):
            notify(skipped(step))
    assert [event.step for event in seen] == [0, 1, 2]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert "save_skipped" in warned[0].getMessage()
    assert warned[0].exc_info
    assert len(caplog.records) == 6


def test_an_interrupt_is_no_failure_of_an_observer() -> None:
    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers(interrupted)(skipped())


def test_observers_are_an_observer() -> None:
    seen: list[Event] = []
    Observers(Observers(seen.append), seen.append)(skipped())
    assert seen == [skipped(), skipped()]


# -- the log ----------------------------------------------------------------------------------------


def test_a_log_is_appended_to(path: Path) -> None:
    for step in range(3):
        with EventLog(path) as log:
            log(skipped(step))
    assert [event.step for event in read_events(path)] == [0, 1, 2]


def test_one_event_is_one_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write, sync = os.write, os.fsync
    synced: list[int] = []
    monkeypatch.setattr(os, "write", lambda fd, data: sizes.append(len(data)) or write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd) or sync(fd))
    with EventLog(path) as log:
        log(skipped())
        log(skipped())
    assert sum(sizes) == path.stat().st_size
    assert len(sizes) == 2
    assert synced == []
    with EventLog(path, fsync=True) as log:
        log(skipped())
    assert len(synced) == 1


def test_threads_do_not_mix_lines(path: Path) -> None:
    with EventLog(path) as log:

        def write(rank: int) -> None:
            for step in range(200):
                log(skipped(step, "x" * 2000))

        threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(list(read_events(path))) == 800


WRITER = """
import sys
from txstore.event_log import EventLog
from txstore.events import SaveSkipped
log = EventLog(sys.argv[1])
for step in range(10**9):
    log(SaveSkipped(at_s=0.0, rank=0, world_size=1, checkpoint=f"step-{step}", step=step, reason="commit_lag"))
    if step == 100:
        print("going", flush=True)
"""


def test_a_killed_writer_leaves_whole_events_and_the_next_one_goes_on(path: Path) -> None:
    total = 0
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout
        assert writer.stdout.readline() == b"going\n"
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(30) == -signal.SIGKILL
        writer.stdout.close()
        steps = [event.step for event in read_events(path)]
        assert steps[total:] == list(range(len(steps) - total))
        assert len(steps) >= total + 101
        total = len(steps)


def test_a_log_has_one_writer(path: Path) -> None:
    with (
        EventLog(path),
        pytest.raises(ConfigError, match="this process or another one writes this event log") as caught,
    ):
        EventLog(path)
    assert caught.value.key == str(path)
    EventLog(path).close()


def test_a_filesystem_without_locks_will_do(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with EventLog(path) as log:
        log(skipped())
    assert list(read_events(path)) == [skipped()]


def test_a_closed_log_says_so(path: Path) -> None:
    log = EventLog(path)
    log.close()
    log.close()
    with pytest.raises(ConfigError, match="closed"):
        log(skipped())


def test_a_log_in_no_directory_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder of the event log does not exist"):
        EventLog(tmp_path / "absent" / "events.jsonl")
    with pytest.raises(FileNotFoundError):
        list(read_events(tmp_path / "absent"))


@given(st.data())
def test_every_torn_tail_is_read_and_sealed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    with EventLog(path) as log:
        log(skipped(1))
        log(skipped(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    cut = data.draw(st.integers(first, len(whole)))
    path.write_bytes(whole[:cut])
    before = [1] if cut < len(whole) - 1 else [1, 2]  # without its newline alone, an event is still whole
    assert [event.step for event in read_events(path)] == before
    with EventLog(path) as log:
        log(skipped(3))
        log(skipped(4))
    after = [event.step for event in read_events(path)]
    assert after == [1, *([2] if cut == len(whole) else []), 3, 4]


def test_a_full_disk_tears_a_line_and_no_other(path: Path) -> None:
    """A real short write: the file may not grow beyond a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    log = EventLog(path)
    try:
        log(skipped(1))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + size // 2, hard))
        with pytest.raises(OSError, match="bytes of an event"):
            log(skipped(2))
        with pytest.raises(OSError, match="File too large"):
            log(skipped(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log(skipped(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
        log.close()
    assert [event.step for event in read_events(path)] == [1, 4]


@pytest.mark.parametrize(
    "garbage",
    [
        b"garbage\n",
        b"\n",
        b'{"event": "save_skipped", "at_s": 1.5\n',
        b'{"event": "save_skipped"}\n',
        b'{"event": "save_skipped", "at_s": 1.5, "rank": "0", "world_size": 1, "checkpoint": "", "step": 1, "reason": "in_flight"}\n',
        b'{"at_s": 1.5}\n',
        b'{"event": 5}\n',
        b"[]\n",
        b"\xff\xfe\n",
        b"\0" * 100 + b"\n",
        b"x" * (1 << 20) + b"x\n",
    ],
    ids=lambda garbage: repr(garbage[:30]),
)
def test_garbage_in_the_middle_is_refused_with_its_line(path: Path, garbage: bytes) -> None:
    with EventLog(path) as log:
        log(skipped(1))
    path.write_bytes(path.read_bytes() + garbage)
    with EventLog(path) as log:
        log(skipped(2))
    found = []
    with pytest.raises(FormatError) as caught:
        found += list(read_events(path))
    assert caught.value.key == f"{path}:2"
    assert "cut it off before this line" in caught.value.next_step


def test_what_comes_before_garbage_is_yielded(path: Path) -> None:
    with EventLog(path) as log:
        log(skipped(1))
    path.write_bytes(path.read_bytes() + b"garbage\n")
    reader = read_events(path)
    assert next(reader) == skipped(1)
    with pytest.raises(FormatError):
        next(reader)


def test_an_endless_line_does_not_fill_the_memory(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(FormatError):
        list(read_events(path))


def test_events_of_a_newer_release_are_told_apart_and_never_dropped(path: Path) -> None:
    known = json.loads(msgspec.json.encode(skipped(1)))
    lines = [{**known, "new_field": [1, 2]}, {"event": "replicated", "at_s": 2.0, "to": "s3"}, known]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second, third = read_events(path)
    assert first == third == skipped(1)
    assert second == UnknownEvent(event="replicated", fields=lines[1])


def test_a_loss_that_is_no_number_can_be_logged(path: Path) -> None:
    with EventLog(path) as log:
        log(Proved(at_s=1.0, rank=0, world_size=1, checkpoint="step-1", step=1, ok=False, loss_delta=float("nan")))
    (event,) = read_events(path)
    assert isinstance(event, Proved)
    assert (event.ok, event.loss_delta) == (False, None)


def test_importing_events_is_light() -> None:
    code = "import sys, txstore.event_log; print({'torch', 'numpy', 'prometheus_client', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
