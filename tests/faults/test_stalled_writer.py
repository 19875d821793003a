"""A writer that stalls, dies or comes back late, against aborts, sweeps, retention and readers.

The explorer (tests/model) goes through every order of these on a small scale; here each story is told once, on a
memory store, on POSIX files and on the server of each cloud backend. The numbers in brackets are those of the protocol's fault scenarios.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from tests.servers.fixtures import CLOUDS, empty_place
from txstore import open_store
from txstore.catalog import find, newest
from txstore.checksum import BLOCK_BYTES
from txstore.errors import (
    Aborted,
    CheckpointNotFound,
    CheckpointRetired,
    CommitUnknown,
    Conflict,
    FormatError,
    IntegrityError,
    OutcomeUnknownError,
    UnknownVersion,
)
from txstore.keys import COMMITS_PREFIX, DATA_PREFIX, decision_key, parse_attempt, retired_key
from txstore.manifest import Tombstone, encode
from txstore.memory import MemoryStore
from txstore.retry import RetryingStore, RetryPolicy
from txstore.slot_walk import claim_abort, resolve
from txstore.store import BytesSource
from txstore.sweep import retire, sweep
from txstore.testing.faults import Crashed, FaultyStore
from txstore.testing.invariants import check_content
from txstore.testing.saves import AT_ONCE, contents, index_of, load, save
from txstore.transaction import begin, write_shard


@pytest.fixture(params=["memory", "posix", *CLOUDS])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryStore()
        return
    url, options = f"file://{tmp_path}/root", {}
    if request.param in CLOUDS:
        place = empty_place(request, request.param)
        url, options = place.url, place.options
    with open_store(url, **options) as store:
        yield store


class Delaying(FaultyStore):
    """Holds one create in flight: the sender is told "unknown", `land` sends it later."""

    def __init__(self, inner):
        super().__init__(inner)
        self.held = []

    def create(self, key, data):
        if key.startswith(COMMITS_PREFIX):
            self.held.append((key, data))
            raise OutcomeUnknownError("timed out", key=key)
        super().create(key, data)

    def land(self):
        key, data = self.held[0]
        self._inner.create(key, data)


def stall(store, checkpoint="step-1", value=b"stalled", **options):
    attempt = begin(store, checkpoint, world_size=1, **options)
    return attempt, [write_shard(store, attempt.ticket, 0, 0, BytesSource(value))]


def commit(attempt, shards):
    return attempt.commit(shards, index_of(shards), visibility=AT_ONCE)


def sweep_now(store):
    return sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)


def attempts(store):
    return {parse_attempt(info.key)[1] for info in store.list(DATA_PREFIX)}


def retrying(store):
    policy = RetryPolicy(attempts=2, deadline_s=1e9, first_wait_s=0, longest_wait_s=0)
    return RetryingStore(store, policy, sleep=lambda _s: None, clock=lambda: 0.0)


def test_a_late_request_loses_to_an_abort(store):
    """[10] The request times out unapplied, an abort claims the slot, the request lands."""
    delaying = Delaying(store)
    attempt, shards = stall(retrying(delaying))
    with pytest.raises(CommitUnknown) as caught:
        commit(attempt, shards)
    assert resolve(store, "step-1", caught.value.txn) is None
    sweep_now(store)
    with pytest.raises(FileExistsError):
        delaying.land()
    assert resolve(store, "step-1", caught.value.txn).kind == "abort"
    with pytest.raises(CheckpointNotFound):
        find(store, "step-1")
    assert attempts(store) == set()


def test_a_late_request_that_lands_first_is_the_commit(store):
    """[10, 11] The abort then finds the commit, and nothing is deleted."""
    delaying = Delaying(store)
    attempt, shards = stall(retrying(delaying))
    with pytest.raises(CommitUnknown) as caught:
        commit(attempt, shards)
    delaying.land()
    assert sweep_now(store) == []
    assert claim_abort(store, "step-1", caught.value.txn).kind == "commit"
    assert load(store, find(store, "step-1")) == [b"stalled"]


def test_a_lost_commit_that_its_writer_aborts_stays_committed(store):
    faulty = FaultyStore(store, mode="after", times=99, verb="create")
    attempt, shards = stall(faulty)
    faulty._at = len(faulty.log)
    with pytest.raises(CommitUnknown):
        commit(attempt, shards)
    faulty._at = None  # the network is back
    assert attempt.abort().kind == "commit"
    assert load(store, newest(store)) == [b"stalled"]


def test_a_sweep_takes_a_stalled_writer_that_is_told_so(store):
    """[21] Stopped between its last shard and its claim, no grace."""
    attempt, shards = stall(store)
    sweep_now(store)
    with pytest.raises(Aborted):
        commit(attempt, shards)
    check_content(contents(store))
    assert save(store, "step-1", [b"again"]).slot == 1
    assert load(store, find(store, "step-1")) == [b"again"]


def test_a_late_shard_of_an_aborted_writer_is_reclaimed(store):
    """[25] Again and again, since a stalled rank may write after every sweep."""
    attempt, _ = stall(store)
    kept = save(store, "step-2", [b"kept"])
    sweep_now(store)
    for number in range(3):
        write_shard(store, attempt.ticket, 1, number, BytesSource(b"late"))
        assert [orphan.why for orphan in sweep_now(store)] == ["aborted"]
        assert attempts(store) == {kept.txn}


def test_a_stalled_writer_cannot_pass_a_retired_commit_on_swept_shards(store):
    """Why a sweep aborts first even when another's commit holds the slot: that commit may be retired."""
    stalled, shards = stall(store)
    winner = save(store, "step-1", [b"winner"])
    save(store, "step-2", [b"newer"])
    assert [orphan.why for orphan in sweep_now(store)] == ["undecided"]
    retire(store, winner)
    with pytest.raises(Aborted):
        commit(stalled, shards)
    check_content(contents(store))


def test_a_stalled_writer_may_pass_a_retired_commit_on_its_own_shards(store):
    stalled, shards = stall(store)
    winner, _ = save(store, "step-1", [b"winner"]), save(store, "step-2", [b"newer"])
    retire(store, winner)
    assert commit(stalled, shards).slot == 1
    assert load(store, find(store, "step-1")) == [b"stalled"]


def test_a_sweep_meets_a_commit_that_lands_while_it_looks(store):
    """[22] Between the sweep's look and its abort."""
    attempt, shards = stall(store)

    class Meanwhile(FaultyStore):
        def create(self, key, data):
            if not committed:
                committed.append(commit(attempt, shards))
            super().create(key, data)

    committed = []
    assert sweep_now(Meanwhile(store)) == []
    assert load(store, find(store, "step-1")) == [b"stalled"]


def test_sweeps_run_at_once(store):
    """[23] Four of them, with a writer that goes on."""
    for number in range(12):
        stall(store, f"step-{number}")
    kept = save(store, "step-100", [b"kept"])
    errors = []

    def run():
        try:
            sweep_now(retrying(store))  # their clock is far ahead: one may free what another is publishing
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    assert attempts(store) == {kept.txn}
    assert len(list(store.list(COMMITS_PREFIX))) == 13, "one abort an attempt"
    check_content(contents(store))


def test_a_sweep_that_dies_after_its_abort_is_finished_by_the_next(store):
    """[23] Dead after the abort and half of the deletes."""
    stall(store)
    for dies_at in (0, 1):
        with pytest.raises(Crashed):
            sweep_now(FaultyStore(store, dies_at, "crash-before", verb="delete"))
    assert len(list(store.list(COMMITS_PREFIX))) == 1
    sweep_now(store)
    assert attempts(store) == set()


def test_a_reader_during_retention_is_told_what_happened(store):
    """[24] Retired, not damaged; and during a save the previous checkpoint is read."""
    old = save(store, "step-1", [b"old"])
    save(store, "step-2", [b"new"])
    decision = find(store, "step-1")
    with pytest.raises(Crashed):
        retire(FaultyStore(store, 1, "crash-before", verb="delete"), old)  # half of its data is gone
    with pytest.raises(CheckpointRetired):
        load(store, decision)
    stall(store, "step-3")
    assert load(store, newest(store)) == [b"new"]


def test_a_coordinator_that_dies_is_succeeded(store):
    """[26] The next incarnation knows the txn (from begin.json, say) and settles it before it begins again."""
    attempt, shards = stall(store)
    ((checkpoint, txn),) = {parse_attempt(info.key) for info in store.list(DATA_PREFIX)}
    assert resolve(store, checkpoint, txn, force=True).kind == "abort"
    assert save(store, checkpoint, [b"successor"]).slot == 1
    with pytest.raises(Aborted):
        commit(attempt, shards)
    assert load(store, find(store, checkpoint)) == [b"successor"]


def test_the_stalled_writer_that_overwrites_does_not_hide_an_unseen_commit(store):
    save(store, "step-1", [b"seen"])
    stalled, shards = stall(store, overwrite=True)
    save(store, "step-1", [b"unseen"], overwrite=True)
    with pytest.raises(Conflict):
        commit(stalled, shards)
    assert load(store, find(store, "step-1")) == [b"unseen"]


# [28, 29] Damage behind a decision: the reader names the object.


@pytest.mark.parametrize("what", ["truncated", "flipped", "swapped", "empty", "missing", "longer", "other bytes"])
def test_a_damaged_shard_is_named(store, what):
    decision = save(store, "step-1", [b"a" * (BLOCK_BYTES + 5), b"b" * (BLOCK_BYTES + 5)])
    first, second = (key for key in sorted(contents(store)) if key.endswith(".safetensors"))
    data, other = store.read(first), store.read(second)
    if what == "missing":
        store.delete(first)
    else:
        damaged = {
            "truncated": data[:-1],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "swapped": other,
            "empty": b"",
            "longer": data + b"\0",
            "other bytes": bytes(len(data)),
        }
        store.put(first, BytesSource(damaged[what]))
    with pytest.raises(IntegrityError) as caught:
        load(store, decision)
    assert caught.value.key == first


@pytest.mark.parametrize("name", ["manifest.json", "index.msgpack"])
@pytest.mark.parametrize("what", ["missing", "truncated", "flipped", "empty", "of another attempt"])
def test_a_damaged_document_is_named(store, name, what):
    decision = save(store, "step-1", [b"one"])
    other = save(store, "step-2", [b"two"])
    key, foreign = (f"data/{d.checkpoint}/{d.txn}/{name}" for d in (decision, other))
    data = store.read(key)
    if what == "missing":
        store.delete(key)
    else:
        damaged = {
            "truncated": data[:-1],
            "flipped": bytes([data[0] ^ 1]) + data[1:],
            "empty": b"",
            "of another attempt": store.read(foreign),
        }
        store.put(key, BytesSource(damaged[what]))
    with pytest.raises(IntegrityError) as caught:
        load(store, decision)
    assert caught.value.key == key
    assert load(store, other) == [b"two"]


@pytest.mark.parametrize("data", [b"", b"{", b'{"version":2}', b"\x80\x04."])
def test_a_damaged_decision_holds_its_slot(store, data):
    """[29] Never free: no save, abort or reader that may be concerned walks past it. One that began later is not."""
    store.put("txstore.json", BytesSource(b'{"format":"txstore","version":1}'))
    attempt, shards = stall(store)
    store.put(decision_key("step-1", 0), BytesSource(data))
    for act in (
        lambda: commit(attempt, shards),
        attempt.abort,
        lambda: find(store, "step-1"),
        lambda: begin(store, "step-1", world_size=1),
        lambda: resolve(store, "step-1", "0" * 32, force=True),
    ):
        with pytest.raises(FormatError) as caught:
            act()
        assert caught.value.key == decision_key("step-1", 0)
    assert attempts(store) == {attempt.ticket.txn}, "nothing was deleted"
    before = [info.key for info in store.list("")]
    if b"version" in data:  # not damaged: of a release to come
        with pytest.raises(UnknownVersion):
            begin(store, "step-1", world_size=1, overwrite=True)
        with pytest.raises(UnknownVersion):
            sweep_now(store)
    else:
        assert sweep_now(store) == [], "the record may be the commit of the only attempt"
        assert [info.key for info in store.list("")] == before
        assert save(store, "step-1", [b"again"], overwrite=True).slot == 1


def test_a_record_that_is_ours_under_a_foreign_slot_is_refused(store):
    decision = save(store, "step-1", [b"one"])
    store.create(decision_key("step-1", 1), encode(decision))
    store.create(decision_key("step-9", 0), encode(decision))
    for name in ("step-1", "step-9"):
        with pytest.raises(FormatError, match="another key"):
            find(store, name)


def test_a_tombstone_alone_is_believed(store):
    """Set before the first delete: data that is still there is no longer a checkpoint."""
    decision = save(store, "step-1", [b"one"])
    tomb = Tombstone(checkpoint="step-1", slot=0, txn=decision.txn, reason="test")
    store.create(retired_key("step-1", 0), encode(tomb))
    with pytest.raises(CheckpointRetired):
        find(store, "step-1")


DAY = 24 * 3600.0


@pytest.mark.parametrize(("writer_s", "sweeper_s"), [(0, DAY), (0, -DAY), (DAY, -DAY), (-DAY, DAY), (DAY, DAY)])
def test_a_clock_that_is_a_day_off_neither_frees_nor_hides_an_attempt(store, writer_s, sweeper_s, monkeypatch):
    """[31] Each clock against the store's own: a young attempt stays and can commit, an old one goes."""
    now = time.time()
    monkeypatch.setattr("txstore.transaction.time", SimpleNamespace(time=lambda: now + writer_s))
    young, shards = stall(store)
    dead, _ = stall(store, "step-2")
    for age_s in (0.0, 0.9 * DAY):
        assert sweep(store, grace_s=2 * DAY, dry_run=False, clock=lambda age_s=age_s: now + age_s + sweeper_s) == []
    decision = commit(young, shards)
    swept = sweep(store, grace_s=2 * DAY, dry_run=False, clock=lambda: now + 4.1 * DAY + sweeper_s)
    assert [(orphan.txn, orphan.why) for orphan in swept] == [(dead.ticket.txn, "undecided")]
    assert load(store, newest(store)) == [b"stalled"]
    assert newest(store) == decision
