"""Checkpoints on each cloud backend: saved, swept, proved, raced for by 32 writers, and copied from and to a directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tests.copying import assert_same_store, copy, fill
from tests.servers.fixtures import Place
from txstore import catalog, open_store, transaction
from txstore.errors import Aborted, CheckpointNotFound, Conflict, IntegrityError
from txstore.manifest import Decision
from txstore.probe import probe, prove
from txstore.retry import RetryingStore
from txstore.store import BytesSource, Store
from txstore.sweep import sweep
from txstore.testing import saves
from txstore_posix import open_store as open_posix


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with open_store(place.url, **place.options) as store:
        yield RetryingStore(store)


def test_an_empty_prefix_holds_no_checkpoint(store):
    with pytest.raises(CheckpointNotFound):
        catalog.newest(store)


def test_the_probe_accepts_it(store):
    assert store.needs_probe
    assert [check.problem for check in probe(store) if check.problem] == []
    prove(store)
    assert list(store.list("")) == []


def test_a_checkpoint_is_saved_found_and_read(store):
    values = [b"rank 0" * 1000, bytes(10_000_000), b""]
    decision = saves.save(store, "step-7", values)
    assert catalog.newest(store) == decision
    assert saves.load(store, decision) == values


def test_a_record_that_was_lost_is_noticed(store):
    saves.save(store, "step-1", [b"one"])
    saves.save(store, "step-2", [b"two"])
    store.delete("commits/step-2.0.json")
    with pytest.raises(IntegrityError, match=r"the record of step-2\.0 was lost"):
        catalog.newest(store)


def test_a_sweep_takes_what_is_dead_and_nothing_else(store):
    kept = saves.save(store, "step-1", [b"kept"])
    dead = transaction.begin(store, "step-2", world_size=1)
    transaction.write_shard(store, dead.ticket, 0, 0, BytesSource(b"dead"))
    assert sweep(store, dry_run=False) == []  # too young
    swept = sweep(store, grace_s=60, force=True, dry_run=False, clock=lambda: time.time() + 3600)
    assert [orphan.txn for orphan in swept] == [dead.ticket.txn]
    assert list(store.list(f"data/step-2/{dead.ticket.txn}")) == []
    with pytest.raises(Aborted):
        dead.commit([], saves.index_of([]))
    assert saves.load(store, kept) == [b"kept"]


def test_of_32_writers_of_one_checkpoint_one_commits(store):
    barrier = Barrier(32)

    def write(number):
        attempt = transaction.begin(store, "step-1", world_size=1)
        shard = transaction.write_shard(store, attempt.ticket, 0, 0, BytesSource(b"%d" % number))
        barrier.wait()
        try:
            return attempt.commit([shard], saves.index_of([shard]), visibility=saves.AT_ONCE)
        except Conflict as error:
            return error

    with ThreadPoolExecutor(32) as pool:
        ends = list(pool.map(write, range(32)))
    (won,) = (end for end in ends if isinstance(end, Decision))
    assert {end.winner for end in ends if isinstance(end, Conflict)} == {won.txn}
    assert len(ends) == 32
    assert [info.key for info in store.list("commits/")] == ["commits/step-1.0.json"]
    assert catalog.newest(store) == won


def test_a_copy_of_a_posix_store_is_a_store(store, tmp_path):
    source = open_posix(str(tmp_path / "store"))
    fill(source)
    assert copy(source, store) > 15
    assert_same_store(source, store)


def test_a_copy_to_a_posix_store_is_a_store(store, tmp_path):
    fill(store)
    target = open_posix(str(tmp_path / "store"))
    copy(store, target)
    assert_same_store(store, target)
