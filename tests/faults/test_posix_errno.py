"""Errno injection at every call of put, create and delete."""

import errno

import pytest

from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    OutcomeUnknownError,
    StoreFullError,
    TransientError,
    TxStoreError,
)
from txstore.store import BytesSource
from txstore_posix import durability

KEY = "data/step-1/txn/object"
OLD, NEW = b"the old object", b"the new object, which is longer"

SCENARIOS = {
    "put new": (None, lambda store: store.put(KEY, BytesSource(NEW)), NEW),
    "put over old": (OLD, lambda store: store.put(KEY, BytesSource(NEW)), NEW),
    "create new": (None, lambda store: store.create(KEY, NEW), NEW),
    "create over old": (OLD, lambda store: store.create(KEY, NEW), OLD),
    "delete": (OLD, lambda store: store.delete(KEY), None),
}
NO_EFFECT = (TransientError, StoreFullError, AccessDeniedError, ConfigError, CapabilityError)
DEFINITE = ("ENOSPC", "EDQUOT", "EACCES", "EPERM", "EROFS")
AMBIGUOUS = ("EIO", "EINTR", "ESTALE", "ETIMEDOUT", "ENOENT")
PUBLISHES = {"link", "rename", "rename_noreplace"}
WRITES = {"pwrite", "start_writeback"}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(durability, "WINDOW_BYTES", 16)
    monkeypatch.setattr(durability, "BLOCK_BYTES", 1)


def content(root):
    path = root / KEY
    return path.read_bytes() if path.exists() else None


def prepare(root, old):
    if old is not None:
        (root / KEY).parent.mkdir(parents=True)
        (root / KEY).write_bytes(old)


def attempt(act, store):
    try:
        act(store)
    except (TxStoreError, OSError) as error:
        return error
    return None


def nth(operation, number, code, when="before"):
    """A fault at call `number` of one operation, counted from 0."""
    seen = []

    def fault(index, done):
        if done == operation:
            seen.append(index)
            if len(seen) == number + 1:
                return when, code
        return None

    return fault


def second_fsyncs(calls):
    failed = {inode for operation, _, inode in calls.failed if operation == "fsync"}
    return [one for one in calls.trace if one[0] == "fsync" and one[2] in failed]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    ("when", "name"), [("before", name) for name in DEFINITE + AMBIGUOUS] + [("after", name) for name in AMBIGUOUS]
)
def test_every_errno_at_every_call_leaves_old_or_new(scenario, when, name, traced, tmp_path, leftovers):
    old, act, new = SCENARIOS[scenario]
    code = getattr(errno, name)
    prepare(tmp_path / "clean", old)
    store, calls = traced(root=tmp_path / "clean")
    attempt(act, store)
    assert content(tmp_path / "clean") == new
    total = calls.count
    assert total > 4
    for at in range(total):
        root = tmp_path / f"at-{at}"
        prepare(root, old)
        store, calls = traced(lambda index, _, at=at: (when, code) if index == at else None, root)
        error = attempt(act, store)
        if not calls.failed:
            continue  # the real call failed by itself: there was nothing to apply and then deny
        operation = calls.failed[0][0]
        where = f"{when} call {at} ({operation}): {error!r}"

        assert content(root) in {old, new}, where
        if scenario == "delete" and name == "ENOENT" and operation in {"open_directory", "unlink"}:
            continue  # that is what an absent object looks like
        if error is None:
            assert content(root) == new, where
        else:
            assert isinstance(error, TxStoreError), where
        if isinstance(error, NO_EFFECT):
            assert content(root) == old, f"claims to have had no effect: {where}"
        if operation != "unlink" and (operation, when) != ("create_file", "after"):
            assert leftovers(root) == [], where
        if when == "before":
            assert second_fsyncs(calls) == [], f"fsync again after it failed: {where}"
        visible = [info.key for info in traced(root=root)[0].list("")]
        assert visible == ([KEY] if content(root) is not None else []), where

        # What comes next, without the fault, must work: the retry layer does this.
        again = attempt(act, traced(root=root)[0])
        assert again is None or isinstance(again, AlreadyExistsError), where
        assert content(root) == new, where


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("scenario", ["put new", "create new"])
def test_a_full_disk_is_store_full_at_every_step(name, scenario, traced, tmp_path, leftovers):
    _, act, _ = SCENARIOS[scenario]
    seen = []
    act(traced(lambda index, operation: seen.append(operation))[0])
    published = next(at for at, operation in enumerate(seen) if operation in PUBLISHES)
    places = [
        at
        for at, operation in enumerate(seen[: published + 1])
        if operation in {"mkdir", "create_file", "allocate", "pwrite", "fsync", "close", *PUBLISHES}
    ]
    assert {seen[at] for at in places} >= {"mkdir", "create_file", "allocate", "pwrite", "fsync", "close"}
    for at in places:
        root = tmp_path / f"at-{at}"
        store, _ = traced(lambda index, _, at=at: ("before", getattr(errno, name)) if index == at else None, root)
        with pytest.raises(StoreFullError, match=name) as caught:
            act(store)
        assert caught.value.key == KEY
        assert caught.value.next_step
        assert content(root) is None
        assert leftovers(root) == []


@pytest.mark.parametrize("scenario", ["put new", "create new"])
def test_a_failed_file_fsync_is_never_repeated_and_the_next_attempt_is_a_new_file(
    scenario, traced, tmp_path, leftovers
):
    _, act, _ = SCENARIOS[scenario]
    root = tmp_path / "root"

    def fault(index, operation):
        if operation == "fsync" and calls.trace[-1][0] in WRITES and not calls.failed:
            return "before", errno.EIO
        return None

    store, calls = traced(fault)
    with pytest.raises(TransientError, match=r"fsync failed: EIO .* in /.*/root"):
        act(store)
    assert [operation for operation, _, _ in calls.failed] == ["fsync"]
    assert second_fsyncs(calls) == []
    assert content(root) is None
    assert leftovers(root) == []
    act(store)
    names = [arguments[1] for operation, arguments, _ in calls.trace if operation == "create_file"]
    assert len(names) == len(set(names)) == 2
    assert content(root) == NEW


@pytest.mark.parametrize(("name", "kind"), [("EIO", TransientError), ("EDQUOT", StoreFullError)])
def test_an_error_of_close_fails_the_write(name, kind, traced, tmp_path, leftovers):
    store, _ = traced(nth("close", 0, getattr(errno, name)))
    with pytest.raises(kind, match=f"close failed: {name}"):
        store.put(KEY, BytesSource(NEW))
    assert content(tmp_path / "root") is None
    assert leftovers(tmp_path / "root") == []


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "ESTALE", "EACCES"])
@pytest.mark.parametrize("scenario", ["put new", "create new", "put over old"])
def test_a_failed_directory_fsync_after_publishing_is_unknown(name, scenario, traced, tmp_path):
    old, act, _ = SCENARIOS[scenario]
    prepare(tmp_path / "clean", old)
    store, calls = traced(root=tmp_path / "clean")
    act(store)
    last = calls.operations().count("fsync") - 1
    path = tmp_path / "root" / KEY
    prepare(tmp_path / "root", old)
    store, calls = traced(nth("fsync", last, getattr(errno, name)))
    with pytest.raises(OutcomeUnknownError, match=f"after publishing failed: {name}"):
        act(store)
    assert path.read_bytes() == NEW
    if scenario == "create new":
        # Asked again, create settles it: object and directory are synced before it says "exists".
        before = len(calls.trace)
        with pytest.raises(AlreadyExistsError):
            act(store)
        synced = {inode for operation, _, inode in calls.trace[before:] if operation == "fsync"}
        assert {path.stat().st_ino, path.parent.stat().st_ino} <= synced


def test_exists_is_said_only_of_a_durable_object(traced, tmp_path):
    prepare(tmp_path / "root", OLD)
    path = tmp_path / "root" / KEY
    clean, calls = traced()
    with pytest.raises(AlreadyExistsError):
        clean.create(KEY, NEW)
    order = [inode for operation, _, inode in calls.trace if operation == "fsync"]
    assert order[-2:] == [path.stat().st_ino, path.parent.stat().st_ino]
    for number in (len(order) - 2, len(order) - 1):
        store, _ = traced(nth("fsync", number, errno.EIO))
        with pytest.raises(OutcomeUnknownError, match="EIO"):
            store.create(KEY, NEW)
    assert path.read_bytes() == OLD


def test_a_rename_whose_reply_was_lost_is_unknown(traced):
    # Over NFS the repeated rename finds its source gone.
    store, _ = traced(nth("rename", 0, errno.ENOENT, when="after"))
    with pytest.raises(OutcomeUnknownError, match="ENOENT"):
        store.put(KEY, BytesSource(NEW))


@pytest.mark.parametrize("name", ["EOPNOTSUPP", "EINVAL", "ENOSYS", "EINTR"])
def test_a_file_system_without_preallocation_is_fine(name, traced, tmp_path):
    store, _ = traced(nth("allocate", 0, getattr(errno, name)))
    store.put(KEY, BytesSource(NEW))
    assert content(tmp_path / "root") == NEW


@pytest.mark.parametrize("name", ["EIO", "ENOSYS", "EINVAL", "ENOSPC"])
def test_early_write_back_is_only_a_hint(name, traced, tmp_path):
    """A disk that refuses to begin early is asked again by fsync, which alone tells what became of the bytes."""
    _, act, new = SCENARIOS["put new"]
    store, calls = traced(
        lambda _, operation: ("before", getattr(errno, name)) if operation == "start_writeback" else None
    )
    act(store)
    assert {operation for operation, _, _ in calls.failed} == {"start_writeback"}
    assert "fsync" in calls.operations()
    assert content(tmp_path / "root") == new
