"""Retention and orphans: what may go, when, and what never does."""

import time
from types import SimpleNamespace

import pytest

from txstore.catalog import entries, find, newest
from txstore.errors import Aborted, CheckpointRetired, ConfigError, FormatError, IntegrityError, UnknownVersion
from txstore.keys import DATA_PREFIX, SlotName, begin_key, decision_key, parse_attempt, retired_key
from txstore.memory import MemoryStore
from txstore.slot_walk import claim_abort
from txstore.store import BytesSource, ObjectInfo
from txstore.sweep import GRACE_FLOOR_S, expired, retire, sweep
from txstore.testing.faults import FaultyStore
from txstore.testing.saves import AT_ONCE, index_of, load, save
from txstore.transaction import begin, write_shard

HOUR, DAY = 3600.0, 24 * 3600.0
NOW = 1_800_000_000.0


class ClockedStore(MemoryStore):
    """Stamps objects by a clock of its own."""

    def __init__(self):
        super().__init__()
        self.now_s = NOW

    def put(self, key, source):
        info = super().put(key, source)
        self._objects[key] = (self._objects[key][0], self.now_s)
        return info


class Undated(MemoryStore):
    """Keeps no times, as some stores do."""

    def list(self, prefix, start_after=""):
        for info in super().list(prefix, start_after):
            yield ObjectInfo(info.key, info.size, info.crc32c, None)


def attempts(store):
    return {parse_attempt(info.key)[1] for info in store.list(DATA_PREFIX) if parse_attempt(info.key)}


def stall(store, checkpoint="step-5"):
    """An attempt with one shard and no decision."""
    attempt = begin(store, checkpoint, world_size=1)
    return attempt, write_shard(store, attempt.ticket, 0, 0, BytesSource(b"stalled"))


@pytest.fixture
def writer_clock(monkeypatch):
    """The clock of the writer's host, as `begin` reads it."""
    clock = [NOW]
    monkeypatch.setattr("txstore.transaction.time.time", lambda: clock[0])
    return clock


def test_a_dry_run_reports_and_removes_nothing():
    store = MemoryStore()
    attempt, shard = stall(store)
    before = {info.key: store.read(info.key) for info in store.list("")}
    (orphan,) = sweep(store, grace_s=0, force=True)
    assert (orphan.checkpoint, orphan.txn, orphan.keys, orphan.why) == ("step-5", attempt.ticket.txn, 2, "undecided")
    assert orphan.bytes == shard.size + len(store.read(begin_key("step-5", attempt.ticket.txn)))
    assert {info.key: store.read(info.key) for info in store.list("")} == before


def test_a_grace_below_the_floor_needs_force():
    with pytest.raises(ConfigError):
        sweep(MemoryStore(), grace_s=GRACE_FLOOR_S - 1)
    for odd in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ConfigError):
            sweep(MemoryStore(), grace_s=odd, force=True)
    sweep(MemoryStore(), grace_s=GRACE_FLOOR_S)


@pytest.mark.parametrize(
    ("writer_s", "store_s", "old"),
    [
        (0, 0, True),
        (-DAY, 0, True),  # the writer's clock is a day behind
        (+DAY, 0, False),  # ... or ahead: we wait longer
        (0, -DAY, True),
        (0, +DAY, False),  # the last object was stored a day later
        (+HOUR, +HOUR, False),
    ],
)
def test_the_youngest_of_all_ages_counts(writer_clock, writer_s, store_s, old):
    store = ClockedStore()
    writer_clock[0] += writer_s
    store.now_s += store_s
    attempt, _ = stall(store)
    found = sweep(store, grace_s=2 * DAY, dry_run=False, clock=lambda: NOW + 2 * DAY + 1)
    assert bool(found) is old
    assert (attempt.ticket.txn in attempts(store)) is not old


def test_without_any_time_an_attempt_is_not_old():
    store = Undated()
    attempt, _ = stall(store)
    store.put(begin_key("step-5", attempt.ticket.txn), BytesSource(b"damaged"))
    assert sweep(store, dry_run=False, clock=lambda: NOW * 10) == []
    assert [orphan.why for orphan in sweep(store, grace_s=0, force=True)] == ["undecided"]


def test_an_undecided_attempt_is_aborted_before_its_data_goes():
    store = MemoryStore()
    attempt, shard = stall(store)
    assert [orphan.why for orphan in sweep(store, grace_s=0, force=True, dry_run=False)] == ["undecided"]
    assert attempts(store) == set()
    with pytest.raises(Aborted):  # not "missing": the writer learns why its shard is gone
        attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
    assert save(store, "step-5", [b"again"]).slot == 1


def test_shards_that_a_stalled_rank_writes_later_are_reclaimed_later():
    store = MemoryStore()
    attempt, _ = stall(store)
    sweep(store, grace_s=0, force=True, dry_run=False)
    write_shard(store, attempt.ticket, 1, 0, BytesSource(b"late"))
    # Dead for certain, so no age is needed.
    assert [orphan.why for orphan in sweep(store, dry_run=False)] == ["aborted"]
    assert attempts(store) == set()


def test_committed_and_superseded_commits_stay():
    store = MemoryStore()
    first = save(store, "step-1", [b"one"])
    second = save(store, "step-1", [b"two"], overwrite=True)
    assert sweep(store, grace_s=0, force=True, dry_run=False) == []
    assert load(store, first) == [b"one"]
    assert load(store, second) == [b"two"]


def test_stray_objects_are_left_alone():
    store = MemoryStore()
    save(store, "step-1", [b"one"])
    strays = ["data/notes", "data/step-1/notes", "data/step-1/not-a-txn/x", "other-run/data", "pinned"]
    for key in strays:
        store.put(key, BytesSource(b"mine"))
    sweep(store, grace_s=0, force=True, dry_run=False)
    assert all(store.read(key) == b"mine" for key in strays)


# Retirement


def test_retired_data_is_gone_and_says_so():
    store = MemoryStore()
    old, new = save(store, "step-1", [b"one"]), save(store, "step-2", [b"two"])
    retire(store, old, reason="too old")
    assert attempts(store) == {new.txn}
    assert b"too old" in store.read(retired_key("step-1", 0))
    assert store.read(decision_key("step-1", 0)), "the decision stays"
    with pytest.raises(CheckpointRetired):
        load(store, old)
    retire(store, old)  # again


def test_what_a_dead_retirement_left_is_swept():
    store = MemoryStore()
    old, _ = save(store, "step-1", [b"one"]), save(store, "step-2", [b"two"])
    store.create(retired_key("step-1", 0), b"tombstone")
    assert [orphan.why for orphan in sweep(store, dry_run=False)] == ["retired"]
    assert old.txn not in attempts(store)


def test_an_object_that_is_missing_without_a_tombstone_is_damage():
    store = MemoryStore()
    decision = save(store, "step-1", [b"one"])
    assert decision.manifest is not None
    store.delete(decision.manifest.key)
    with pytest.raises(IntegrityError) as caught:
        load(store, decision)
    assert caught.value.key == decision.manifest.key


def test_what_must_never_be_retired():
    store = MemoryStore()
    old, new = save(store, "step-1", [b"one"]), save(store, "step-2", [b"two"])
    with pytest.raises(ConfigError, match="newest"):
        retire(store, new)
    with pytest.raises(ConfigError, match="protected"):
        retire(store, old, protect=[old.txn])
    attempt, _ = stall(store)
    with pytest.raises(ConfigError, match="only a commit"):
        retire(store, attempt.abort())
    assert load(store, old) == [b"one"]
    assert load(store, new) == [b"two"]
    assert not list(store.list("retired/"))


def test_a_decision_of_another_store_retires_nothing_here():
    here, there = MemoryStore(), MemoryStore()
    mine, _ = save(here, "step-1", [b"mine"]), save(here, "step-2", [b"two"])
    theirs, _ = save(there, "step-1", [b"theirs"]), save(there, "step-3", [b"three"])
    with pytest.raises(ConfigError, match="another decision"):
        retire(here, theirs)
    assert load(here, mine) == [b"mine"]


def test_a_name_can_be_saved_again_once_it_is_retired():
    store = MemoryStore()
    old, _ = save(store, "step-1", [b"one"]), save(store, "step-2", [b"two"])
    retire(store, old)
    again = save(store, "step-1", [b"again"])
    assert again.slot == 1
    assert load(store, find(store, "step-1")) == [b"again"]


# Which commits a retention takes back


def retained(store, **options):
    gone = {(decision.checkpoint, decision.slot) for decision in expired(entries(store), **options)}
    return [
        (e.decision.checkpoint, e.decision.slot)
        for e in entries(store)
        if (e.decision.checkpoint, e.decision.slot) not in gone
    ]


@pytest.fixture
def run():
    store = MemoryStore()
    for step in (9, 10, 100):
        save(store, f"step-{step}", [b"x"])
    save(store, "step-10", [b"y"], overwrite=True)
    save(store, "best", [b"z"])
    return store


def test_the_newest_stay_by_number_and_superseded_commits_go(run):
    assert retained(run, keep_last=1) == [("best", 0), ("step-100", 0)]
    assert retained(run, keep_last=2) == [("best", 0), ("step-10", 1), ("step-100", 0)]
    assert retained(run, keep_last=9) == [("best", 0), ("step-9", 0), ("step-10", 1), ("step-100", 0)]


def test_protected_commits_stay(run):
    pinned = next(entry.decision for entry in entries(run) if entry.state == "superseded")
    assert ("step-10", 0) in retained(run, keep_last=1, protect=[pinned.txn])


def test_a_name_without_a_step_is_retired_by_name_only(run):
    assert ("best", 0) in retained(run, keep_last=1)
    retire(run, find(run, "best"))


@pytest.mark.parametrize("keep_last", [0, -1])
def test_something_must_be_kept(run, keep_last):
    with pytest.raises(ConfigError):
        expired(entries(run), keep_last=keep_last)


def test_aborted_and_retired_decisions_are_not_retired_again(run):
    attempt, _ = stall(run, "step-200")
    attempt.abort()
    for decision in expired(entries(run), keep_last=1):
        retire(run, decision)
    assert expired(entries(run), keep_last=1) == []
    assert newest(run).checkpoint == "step-100"


def test_the_begin_of_an_attempt_goes_last():
    """Until then a sweep that died half-way can be told from a stray rank's late write, and its age is known."""
    store = MemoryStore()
    attempt, _ = stall(store)
    deletes = FaultyStore(store, verb="delete")
    sweep(deletes, grace_s=0, force=True, dry_run=False)
    assert [key for _, key in deletes.log][-1] == begin_key("step-5", attempt.ticket.txn)
    assert len(deletes.log) == 2


def test_a_writer_whose_clock_was_ahead_does_not_keep_its_attempt(monkeypatch):
    """Its begin record lies in the future; the store's own times say how old the attempt is."""
    store, now_s = MemoryStore(), time.time()
    with monkeypatch.context() as patch:
        patch.setattr("txstore.transaction.time", SimpleNamespace(time=lambda: 4e9))
        begin(store, "step-1", world_size=1)
    assert sweep(store, clock=lambda: now_s + GRACE_FLOOR_S) == []
    assert [orphan.why for orphan in sweep(store, clock=lambda: now_s + 8 * GRACE_FLOOR_S)] == ["undecided"]


# damaged records


def damage(store, checkpoint, slot=0):
    key = decision_key(checkpoint, slot)
    intact = store.read(key)
    store.put(key, BytesSource(b"{"))
    return lambda: store.put(key, BytesSource(intact))


def sweep_all(store):
    return {
        (orphan.checkpoint, orphan.txn, orphan.why) for orphan in sweep(store, grace_s=0, force=True, dry_run=False)
    }


@pytest.mark.parametrize("again", [True, False])
def test_a_damaged_record_keeps_what_it_may_name_and_nothing_else(again, caplog):
    """One record that was damaged once must not stop every sweep of the store for ever."""
    store = MemoryStore()
    first = save(store, "step-1", [b"the first"])
    dead, _ = stall(store, "step-1.old")
    other = save(store, "step-2", [b"another"])
    gone, _ = stall(store, "step-3")
    mend = damage(store, "step-1")
    kept = {first.txn, other.txn}
    if again:
        kept.add(save(store, "step-1", [b"the second"], overwrite=True).txn)
    found = sweep_all(store)
    assert found == {("step-3", gone.ticket.txn, "undecided"), ("step-1.old", dead.ticket.txn, "undecided")}
    assert attempts(store) == kept
    (told,) = [one.getMessage() for one in caplog.records if one.name == "txstore.sweep"]
    assert f"data/step-1/{first.txn} stays" in told
    assert "commits/step-1.0.json is damaged" in told
    assert "Restore that record" in told
    mend()
    assert sweep_all(store) == set()
    assert attempts(store) == kept
    if not again:
        assert load(store, find(store, "step-1")) == [b"the first"]


def test_an_attempt_that_a_readable_record_names_is_swept_beside_a_damaged_one():
    store = MemoryStore()
    attempt, _ = stall(store)
    first = save(store, "step-5", [b"the first"])
    claim_abort(store, "step-5", attempt.ticket.txn)
    damage(store, "step-5")
    assert sweep_all(store) == {("step-5", attempt.ticket.txn, "aborted")}
    assert attempts(store) == {first.txn}


def test_an_attempt_beside_a_damaged_record_is_never_aborted():
    """The record may be its commit, whatever its age: an abort would be a second answer."""
    store = MemoryStore()
    attempt, _ = stall(store)
    claim_abort(store, "step-5", "f" * 32)
    damage(store, "step-5")
    before = [info.key for info in store.list("commits/")]
    assert sweep_all(store) == set()
    assert attempts(store) == {attempt.ticket.txn}
    assert [info.key for info in store.list("commits/")] == before


def test_a_record_of_a_version_to_come_or_a_missing_one_still_stops_the_sweep():
    store = MemoryStore()
    save(store, "step-1", [b"x"])
    save(store, "step-1", [b"y"], overwrite=True)
    key = decision_key("step-1", 0)
    intact = store.read(key)
    store.put(key, BytesSource(intact.replace(b'"version":1', b'"version":9')))
    with pytest.raises(UnknownVersion):
        sweep_all(store)
    store.delete(key)
    with pytest.raises(IntegrityError):
        sweep_all(store)


def test_retention_takes_nothing_that_a_damaged_record_may_concern():
    store = MemoryStore()
    for step in (1, 2, 3):
        save(store, f"step-{step}", [b"x"])
    first = find(store, "step-1")
    second = save(store, "step-1", [b"y"], overwrite=True)
    save(store, "step-1", [b"z"], overwrite=True)
    damage(store, "step-1", 2)
    with pytest.raises(FormatError):
        entries(store)
    found = {}
    listed = entries(store, damaged=found)
    assert list(found) == [SlotName("step-1", 2)]
    assert [(entry.decision.txn, entry.state) for entry in listed[:2]] == [
        (first.txn, "unknown"),
        (second.txn, "unknown"),
    ]
    assert [entry.decision.checkpoint for entry in listed if entry.state == "committed"] == ["step-2", "step-3"]
    assert [decision.checkpoint for decision in expired(listed, keep_last=1)] == ["step-2"]


def copied(store, *prefixes):
    """What of a store has arrived at another place, with its times."""
    there = MemoryStore()
    there._objects = {key: value for key, value in store._objects.items() if key.startswith(prefixes)}
    return there


@pytest.mark.parametrize("arrived", [(DATA_PREFIX,), (DATA_PREFIX, "retired/", "commits/", "latest.json")])
def test_a_copy_that_has_not_ended_is_not_swept(arrived):
    store = ClockedStore()
    save(store, "step-1", [b"old"])
    save(store, "step-2", [b"new"])
    there = copied(store, *arrived)
    before = dict(there._objects)
    with pytest.raises(IntegrityError, match=r"no txstore\.json") as raised:
        sweep(there, clock=lambda: NOW + 365 * DAY, dry_run=False)
    assert "txstore.json last" in raised.value.next_step
    assert there._objects == before, "no data deleted, and no abort record made"
    there._objects |= store._objects
    assert sweep(there, clock=lambda: NOW + 365 * DAY, dry_run=False) == []
    assert load(there, newest(there)) == [b"new"]
