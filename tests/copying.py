"""A store copied object by object to another backend, as `rclone`, `gsutil` or `aws s3 cp` would do it."""

from __future__ import annotations

import pytest

from txstore import catalog, transaction
from txstore.errors import AlreadyCommitted
from txstore.ops.verify import verify_store
from txstore.store import BytesSource, Store
from txstore.sweep import retire
from txstore.testing import saves
from txstore.testing.samples import commit_sample


def copy(source: Store, target: Store) -> int:
    """Copy every object; returns how many there were. Knows nothing of checkpoints."""
    infos = list(source.list(""))
    for info in infos:
        target.put(info.key, BytesSource(source.read(info.key)))
    return len(infos)


def fill(store: Store) -> None:
    """Two checkpoints, one of them committed twice, an aborted attempt and a retired commit."""
    commit_sample(store, "step-1")
    commit_sample(store, "step-2", rows=1000, payload=b"")
    commit_sample(store, "step-2", rows=3, overwrite=True)
    transaction.begin(store, "step-4", world_size=1).abort()
    retire(store, commit_sample(store, "step-0"))


def assert_same_store(source: Store, target: Store) -> None:
    """What stands in `source` stands in `target`, verifies there, and can be gone on with."""
    assert saves.contents(target) == saves.contents(source)
    assert catalog.entries(target) == catalog.entries(source)
    assert catalog.newest(target) == catalog.newest(source)
    report = verify_store(target)
    assert report.state == "sound", report
    assert [one.decision.checkpoint for one in report.reports] == ["step-1", "step-2", "step-2"]
    commit_sample(target, "step-3")
    assert catalog.newest(target).checkpoint == "step-3"
    with pytest.raises(AlreadyCommitted):
        commit_sample(target, "step-1")
