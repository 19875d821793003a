"""What interrupted writes leave: invisible, reclaimed, and never taken from a live writer."""

import os
import signal
import subprocess
import sys
import time

import pytest

from txstore import open_store
from txstore.errors import FormatError
from txstore.slot_walk import claim_abort
from txstore.store import BytesSource, Unfinished
from txstore.sweep import sweep
from txstore.transaction import begin

KILLED_WRITER = """
import os, signal, sys
from txstore import open_store
from txstore.store import BytesSource
class Killed(BytesSource):
    def read(self, start, stop):
        if start: os.kill(os.getpid(), signal.SIGKILL)
        return super().read(start, stop)
open_store(sys.argv[1]).put(sys.argv[2], Killed(bytes(20 << 20)))
"""


@pytest.fixture
def attempt(tmp_path):
    """A store with one attempt whose rank was killed in the middle of a shard."""
    store = open_store(tmp_path)
    ticket = begin(store, "step-1", world_size=1).ticket
    key = f"data/step-1/{ticket.txn}/rank-00000-00000.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path), key], check=False)
    assert done.returncode == -signal.SIGKILL
    return store, ticket, tmp_path


def files(root):
    return [name for _, _, names in os.walk(root / "data") for name in names]


def test_a_killed_write_is_invisible_and_kept_within_the_grace(attempt):
    store, ticket, root = attempt
    assert [info.key for info in store.list("data/")] == [f"data/step-1/{ticket.txn}/begin.json"]
    assert len(files(root)) == 2
    assert sweep(store, dry_run=False) == []
    assert len(files(root)) == 2


def test_it_is_freed_at_once_when_its_attempt_is_dead(attempt):
    store, ticket, root = attempt
    claim_abort(store, "step-1", ticket.txn)
    found = sweep(store, dry_run=True)
    assert [orphan.why for orphan in found] == ["aborted", "unfinished"]
    assert found[1].bytes >= 8 << 20, "what was freed is what the killed write held"
    assert len(files(root)) == 2, "a dry run removes nothing"
    sweep(store, dry_run=False)
    assert files(root) == []
    assert not (root / "data" / "step-1").exists()


def test_it_is_freed_past_the_grace(attempt):
    store, _, root = attempt
    sweep(store, dry_run=False, clock=lambda: time.time() + 30 * 86400)
    assert files(root) == []


def test_a_late_leftover_of_a_swept_attempt_is_found_again(attempt):
    store, ticket, root = attempt
    claim_abort(store, "step-1", ticket.txn)
    sweep(store, dry_run=False)
    folder = root / "data" / "step-1" / ticket.txn
    folder.mkdir(parents=True)
    (folder / ".txstore-0123456789abcdef").write_bytes(b"late")
    assert [orphan.why for orphan in sweep(store, dry_run=False)] == ["unfinished"]
    assert not folder.exists()


def test_discard_takes_nothing_but_temporary_files(tmp_path):
    store = open_store(tmp_path)
    store.put("latest.json", BytesSource(b"x"))
    for key in ("latest.json", "../.txstore-1", "/etc/.txstore-1"):
        with pytest.raises(FormatError):
            store.discard(Unfinished(key, 1, 0.0))
    assert store.read("latest.json") == b"x"


def test_a_record_that_is_being_published_is_left_alone_even_by_force(tmp_path):
    store = open_store(tmp_path)
    begin(store, "step-1", world_size=1)
    (tmp_path / "commits").mkdir(exist_ok=True)
    flying = tmp_path / "commits" / ".txstore-0123456789abcdef"
    flying.write_bytes(b"{")
    sweep(store, dry_run=False, grace_s=0, force=True)
    assert flying.exists()
    sweep(store, dry_run=False, grace_s=0, force=True, clock=lambda: time.time() + 2 * 3600)
    assert not flying.exists()
