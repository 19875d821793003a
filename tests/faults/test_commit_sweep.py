"""Every store operation of a save, a sweep and a retirement, failed in every way: all or nothing, nothing lost."""

from __future__ import annotations

import itertools
import os
import tempfile

import pytest

import txstore_posix
from txstore.catalog import find, newest
from txstore.errors import CheckpointNotFound, CheckpointRetired, CommitUnknown, StoreError, TxStoreError
from txstore.keys import DATA_PREFIX, parse_attempt
from txstore.memory import MemoryStore
from txstore.retry import RetryingStore, RetryPolicy
from txstore.slot_walk import resolve
from txstore.store import BytesSource
from txstore.sweep import retire, sweep
from txstore.testing.faults import MODES, Crashed, FaultyStore
from txstore.testing.invariants import check_content
from txstore.testing.saves import contents, load, save
from txstore.transaction import begin, write_shard

OLD, NEW = [b"old 0", b"old 1"], [b"new 0" * 100, b"new 1"]


@pytest.fixture(params=["memory", "posix"])
def make_store(request, tmp_path):
    """A factory of empty stores. On a memory file system where there is one: hundreds of saves, and no power cut."""
    if request.param == "memory":
        yield MemoryStore
        return
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        yield lambda: txstore_posix.open_store(f"file://{folder}/{next(numbers)}")


def retrying(store, attempts):
    policy = RetryPolicy(attempts=attempts, deadline_s=1e9, first_wait_s=0, longest_wait_s=0)
    return RetryingStore(store, policy, sleep=lambda _s: None, clock=lambda: 0.0)


def data_keys(store):
    return {key for key in contents(store) if key.startswith(DATA_PREFIX)}


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("times", [1, 99], ids=["once", "from then on"])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_is_all_or_nothing(make_store, mode, times, overwrite):
    checkpoint = "step-1" if overwrite else "step-2"
    at = 0
    while True:
        store = make_store()
        old = save(store, "step-1", OLD)
        before = contents(store)
        faulty = FaultyStore(store, at, mode, times=times)
        outcome = None
        try:
            outcome = save(retrying(faulty, attempts=2), checkpoint, NEW, overwrite=overwrite)
        except (TxStoreError, Crashed) as error:
            outcome = error
        if len(faulty.log) <= at:
            assert at > 10, "the save has fewer operations than it must"
            assert outcome.kind == "commit"
            break
        after_failure(store, before, old, outcome, checkpoint, f"operation {at} {faulty.log[at]}")
        if mode in ("before", "after", "unknown") and times == 1:
            assert not isinstance(outcome, BaseException), f"one retry was enough for operation {at}: {outcome!r}"
        at += 1


def after_failure(store, before, old, outcome, checkpoint, where):
    now = contents(store)
    assert before.keys() <= now.keys(), f"{where}: something was deleted"
    check_content(now)
    # The previous checkpoint, untouched, and the newest is it or the new one whole.
    assert load(store, old) == OLD, where
    first = newest(store)
    assert load(store, first) == (OLD if first == old else NEW), where
    committed = first != old
    if isinstance(outcome, CommitUnknown):
        answer = resolve(store, checkpoint, outcome.txn, force=True)
        assert answer.kind == ("commit" if committed else "abort"), where
    elif isinstance(outcome, Crashed):
        # The next process knows no txn; what it finds decides.
        for _, txn in {parse_attempt(key) for key in data_keys(store) - before.keys()}:
            assert resolve(store, checkpoint, txn, force=True).kind == ("commit" if committed else "abort"), where
    elif isinstance(outcome, BaseException):
        assert not committed, f"{where}: {outcome!r} said no, and it was committed"
    else:
        assert committed, f"{where}: it said yes, and it was not committed"
    # One answer, forever, and the dead are reclaimed.
    sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
    check_content(contents(store))
    assert newest(store) == first, where
    assert load(store, first) == (OLD if first == old else NEW), where
    live = {old.txn, first.txn}
    assert {parse_attempt(key)[1] for key in data_keys(store)} == live, where
    if not committed:
        assert load(store, save(store, "step-3", NEW)) == NEW


@pytest.mark.parametrize("mode", MODES)
def test_a_sweep_can_stop_anywhere_and_run_again(make_store, mode):
    at = 0
    while True:
        store = make_store()
        old = save(store, "step-1", OLD)
        stalled = begin(store, "step-2", world_size=1)
        write_shard(store, stalled.ticket, 0, 0, BytesSource(b"late"))
        faulty = FaultyStore(store, at, mode, times=99)
        try:
            sweep(retrying(faulty, 2), grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
        except (TxStoreError, Crashed):
            pass
        if len(faulty.log) <= at:
            assert at > 8
            break
        check_content(contents(store))
        assert load(store, newest(store)) == OLD
        sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
        assert {parse_attempt(key)[1] for key in data_keys(store)} == {old.txn}, faulty.log[at]
        assert sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12) == []
        at += 1


@pytest.mark.parametrize("mode", MODES)
def test_a_retirement_can_stop_anywhere_and_run_again(make_store, mode):
    at = 0
    while True:
        store = make_store()
        old = save(store, "step-1", OLD)
        new = save(store, "step-2", NEW)
        faulty = FaultyStore(store, at, mode, times=99)
        try:
            retire(retrying(faulty, 2), old)
        except (StoreError, Crashed):
            pass
        if len(faulty.log) <= at:
            assert at > 8
            break
        check_content(contents(store))
        try:
            assert load(store, find(store, "step-1")) == OLD
        except CheckpointRetired:
            pass
        retire(store, old)
        assert {parse_attempt(key)[1] for key in data_keys(store)} == {new.txn}, faulty.log[at]
        with pytest.raises(CheckpointRetired):
            find(store, "step-1")
        with pytest.raises(CheckpointRetired):
            load(store, old)
        assert load(store, newest(store)) == NEW
        at += 1


def test_a_failed_first_save_leaves_no_checkpoint(make_store):
    store = make_store()
    with pytest.raises(Crashed):
        save(FaultyStore(store, 0, "crash-before", verb="create"), "step-1", NEW)
    with pytest.raises(CheckpointNotFound):
        newest(store)
