"""Odd answers of real file systems: links, renames, directory fsync, short writes, vanishing directories."""

import errno
import logging
import os

import pytest

from txstore.errors import (
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    TransientError,
    TxStoreError,
)
from txstore.store import BytesSource
from txstore_posix import durability

KEY = "data/step-1/txn/object"
OLD, NEW = b"the old object", b"the new object, which is longer"
WITHOUT_LINKS = ["EPERM", "ENOTSUP", "EMLINK", "EXDEV", "ENOSYS"]
WRITES = {"pwrite", "start_writeback"}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(durability, "WINDOW_BYTES", 16)
    monkeypatch.setattr(durability, "BLOCK_BYTES", 1)


@pytest.fixture
def object_path(tmp_path):
    return tmp_path / "root" / KEY


def answers(**by_operation):
    """Faults by name of the operation: ``link=("before", errno.EPERM)``."""
    return lambda index, operation: by_operation.get(operation)


def write_old(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(OLD)


def test_our_own_link_over_nfs_is_a_success(traced, object_path, leftovers):
    # The server made the link, the reply was lost, the client's repetition met it.
    store, calls = traced(answers(link=("after", errno.EEXIST)))
    store.create(KEY, NEW)
    assert object_path.read_bytes() == NEW
    assert leftovers(object_path.parent) == []
    assert calls.operations()[-2:] == ["unlink", "fsync"]


def test_another_link_to_our_temporary_file_is_no_win(traced, object_path, tmp_path):
    # st_nlink == 2 would call this a win: a backup that snapshots by hard links took our file in flight.
    write_old(object_path)

    def fault(index, operation):
        if operation == "link":
            temporary = next(path for path in object_path.parent.iterdir() if path.name.startswith("."))
            os.link(temporary, tmp_path / "backup")

    store, _ = traced(fault)
    with pytest.raises(AlreadyExistsError):
        store.create(KEY, NEW)
    assert object_path.read_bytes() == OLD


@pytest.mark.parametrize("name", WITHOUT_LINKS)
def test_without_links_an_exclusive_rename_is_used(name, traced, object_path, leftovers):
    store, calls = traced(answers(link=("before", getattr(errno, name))))
    store.create(KEY, NEW)
    assert "rename_noreplace" in calls.operations()
    assert object_path.read_bytes() == NEW
    with pytest.raises(AlreadyExistsError):
        store.create(KEY, OLD)
    assert object_path.read_bytes() == NEW
    assert leftovers(object_path.parent) == []
    assert calls.operations().count("open_file") == 1, "the existing object was not made durable"


@pytest.mark.parametrize("name", ["EINVAL", "ENOSYS"])
def test_without_links_and_exclusive_rename_the_store_is_refused(name, traced, object_path, leftovers):
    store, _ = traced(answers(link=("before", errno.EPERM), rename_noreplace=("before", getattr(errno, name))))
    with pytest.raises(CapabilityError, match=f"link EPERM, renameat2 {name}") as caught:
        store.create(KEY, NEW)
    assert "object store" in caught.value.next_step
    assert not object_path.exists()
    assert leftovers(object_path.parent) == []


@pytest.mark.parametrize("name", ["EIO", "ENOENT", "ETIMEDOUT"])
def test_an_unclear_exclusive_rename_is_unknown(name, traced):
    store, _ = traced(answers(link=("before", errno.EPERM), rename_noreplace=("after", getattr(errno, name))))
    with pytest.raises(OutcomeUnknownError, match=name):
        store.create(KEY, NEW)


def test_a_c_library_without_renameat2_counts_as_unsupported(traced, monkeypatch):
    from txstore_posix import syscalls

    monkeypatch.setattr(syscalls, "_libc", object)
    store, _ = traced(answers(link=("before", errno.EPERM)))
    with pytest.raises(CapabilityError, match="ENOSYS"):
        store.create(KEY, b"")


def test_an_object_that_vanishes_while_it_is_in_the_way_is_transient(traced, object_path):
    write_old(object_path)
    store, _ = traced(lambda index, operation: object_path.unlink() if operation == "open_file" else None)
    with pytest.raises(TransientError, match="gone"):
        store.create(KEY, NEW)


@pytest.mark.parametrize("name", ["EINVAL", "ENOTSUP"])
def test_a_file_system_without_directory_fsync_is_tolerated_with_one_warning(name, traced, caplog):
    durability._warn_unsynced.cache_clear()

    def fault(index, operation):
        if operation == "fsync" and calls.trace[-1][0] not in WRITES:
            return "before", getattr(errno, name)
        return None

    store, calls = traced(fault)
    with caplog.at_level(logging.WARNING, "txstore_posix"):
        store.put(KEY, BytesSource(NEW))
        store.create("commits/a.0.json", NEW)
        store.delete(KEY)
    durability._warn_unsynced.cache_clear()
    assert len([record for record in caplog.records if name in record.getMessage()]) == 1


@pytest.mark.parametrize("name", ["EINVAL", "ENOTSUP"])
def test_a_file_that_cannot_be_synced_is_not_tolerated(name, traced, object_path):
    def fault(index, operation):
        return ("before", getattr(errno, name)) if operation == "fsync" and calls.trace[-1][0] in WRITES else None

    store, calls = traced(fault)
    with pytest.raises(TxStoreError, match=name):
        store.put(KEY, BytesSource(NEW))
    assert not object_path.exists()


def test_an_unreadable_directory_above_the_store_is_tolerated(traced, tmp_path, object_path):
    # Homes below a directory that may be passed through but not read are common.
    (tmp_path / "root").mkdir()

    def fault(index, operation):
        # After the temporary file: data/step-1, data, root, and then the directories above the root.
        opened = [one for one in calls.trace if one[0] == "open_directory"]
        return ("before", errno.EACCES) if operation == "open_directory" and len(opened) > 3 else None

    store, calls = traced(fault)
    store.put(KEY, BytesSource(NEW))
    assert {operation for operation, _, _ in calls.failed} == {"open_directory"}
    assert object_path.read_bytes() == NEW


def test_short_writes_are_continued(traced, object_path):
    store, calls = traced()
    calls.pwrite = lambda fd, data, offset: os.pwrite(fd, data[: 1 + offset % 3], offset)
    store.put(KEY, BytesSource(NEW))
    store.create("commits/a.0.json", NEW)
    assert object_path.read_bytes() == NEW == store.read("commits/a.0.json")


def test_a_write_of_nothing_does_not_loop(traced, object_path):
    store, calls = traced()
    calls.pwrite = lambda fd, data, offset: 0
    with pytest.raises(TransientError, match="EIO"):
        store.put(KEY, BytesSource(NEW))
    assert not object_path.exists()


def test_a_source_that_returns_too_little_is_caught(traced, object_path, leftovers):
    class Short(BytesSource):
        def read(self, start, stop):
            return super().read(start, stop - 1)

    store, _ = traced()
    with pytest.raises(ValueError, match="returned 15 bytes for 0:16"):
        store.put(KEY, Short(NEW))
    assert not object_path.exists()
    assert leftovers(object_path.parent) == []


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "of the source"), KeyboardInterrupt(), TransientError("its own")], ids=repr
)
def test_an_error_of_the_source_is_not_translated(error, traced, object_path, leftovers):
    class Raising(BytesSource):
        def read(self, start, stop):
            raise error

    store, _ = traced()
    with pytest.raises(type(error)) as caught:
        store.put(KEY, Raising(NEW))
    assert caught.value is error
    assert leftovers(object_path.parent) == []


def test_a_directory_pruned_under_a_writer_is_made_again(traced, object_path):
    pruned = []

    def fault(index, operation):
        if operation == "create_file" and len(pruned) < 3:
            object_path.parent.rmdir()
            pruned.append(index)

    store, _ = traced(fault)
    store.put(KEY, BytesSource(NEW))
    assert len(pruned) == 3
    assert object_path.read_bytes() == NEW


def test_a_directory_that_is_pruned_for_ever_is_transient(traced, object_path):
    def fault(index, operation):
        if operation == "create_file":
            object_path.parent.rmdir()

    store, calls = traced(fault)
    with pytest.raises(TransientError, match="again and again"):
        store.put(KEY, BytesSource(NEW))
    assert calls.count < 200


def test_a_dangling_link_in_the_way_does_not_loop(traced, tmp_path):
    (tmp_path / "root").symlink_to(tmp_path / "nowhere")
    store, calls = traced()
    with pytest.raises(ConfigError, match="is the disk mounted"):
        store.put(KEY, BytesSource(NEW))
    assert calls.count == 1


def test_a_key_below_an_object_or_above_objects_is_refused(traced):
    store, _ = traced()
    store.create("a/object", b"x")
    for call in (lambda key: store.create(key, b"y"), lambda key: store.put(key, BytesSource(b"y"))):
        for key in ("a/object/below", "a"):
            with pytest.raises(ConfigError):
                call(key)
    with pytest.raises(NotFoundError):
        store.read("a")
    assert store.read("a/object") == b"x"


def test_names_longer_than_the_file_system_allows_are_a_config_error(traced):
    store, _ = traced()
    for call in (lambda: store.create("n" * 256, b"x"), lambda: store.read("n" * 256), lambda: store.head("n" * 256)):
        with pytest.raises(ConfigError, match="ENAMETOOLONG"):
            call()


def test_a_fifo_under_a_key_is_no_object_and_does_not_hang(traced, tmp_path):
    (tmp_path / "root").mkdir()
    os.mkfifo(tmp_path / "root" / "fifo")
    store, _ = traced()
    for call in (lambda: store.read("fifo"), lambda: store.head("fifo")):
        with pytest.raises(NotFoundError):
            call()
    with pytest.raises(TxStoreError):
        store.create("fifo", b"x")
    assert [(info.key, info.size) for info in store.list("")] == [("fifo", 0)]


def test_short_reads_are_continued(traced, monkeypatch):
    # Linux gives at most 2 GiB less a page at once, and a network file system may give less.
    store, _ = traced()
    store.put(KEY, BytesSource(NEW))
    real_pread, real_preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real_pread(fd, min(size, 3), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_preadv(fd, [buffers[0][:3]], offset))
    buffer = bytearray(len(NEW))
    assert store.read_into(KEY, 0, memoryview(buffer)) == len(NEW)
    assert bytes(buffer) == store.read(KEY) == NEW
    assert store.read(KEY, 1, 8) == NEW[1:9]


@pytest.mark.parametrize("in_memory", [True, False])
def test_space_is_reserved_only_where_it_costs_no_write(in_memory, traced, tmp_path, monkeypatch):
    """tmpfs fills reserved pages with zeros, for the write to fill them again."""
    monkeypatch.setattr(durability, "BLOCK_BYTES", 4)
    store, calls = traced()
    kind = store._check_mount(str(tmp_path), KEY)
    monkeypatch.setattr("txstore_posix.store.IN_MEMORY", frozenset({kind}) if in_memory else frozenset())
    store.put(KEY, BytesSource(NEW))
    assert ("allocate" in calls.operations()) is not in_memory
