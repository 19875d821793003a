"""Every state that a power loss may leave, from the recorded calls of put and create.

The model of the disk is the weakest one that POSIX allows: what was not synced is there or not, in any
combination; an fsync of a file keeps its bytes and not its name; an fsync of a directory keeps its
entries. Directories that stood before are not taken for durable: their maker may have died before its
own fsync. Each fsync is then dropped in turn, and the check must notice.
"""

import errno
import itertools
import os

import pytest

from txstore.errors import AlreadyExistsError
from txstore.store import BytesSource
from txstore_posix import durability

KEY = "data/step-1/txn/object"
OLD, NEW = b"old", b"new bytes, in three windows of 10"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(durability, "WINDOW_BYTES", 12)
    monkeypatch.setattr(durability, "BLOCK_BYTES", 1)


def put(store):
    store.put(KEY, BytesSource(NEW))


def create(store):
    store.create(KEY, NEW)


class Disk:
    """What is durable and what is in flight, replayed from a trace."""

    def __init__(self, leaf, old):
        self.leaf = leaf
        self.names = {}  # durable entries of the leaf directory: name -> inode
        self.bytes = {}  # durable content: inode -> bytes
        self.pending_names = []  # changes of the leaf directory, each a dict name -> inode or None
        self.pending_bytes = []  # (inode, kind, offset, bytes)
        self.temporary = {}
        self.opened = {}  # descriptor -> path
        self.synced = {}  # path -> how many calls had been made
        self.made = {}
        self.step = 0
        if old is not None:
            self.names = {"object": "old"}
            self.bytes = {"old": old}

    def apply(self, operation, arguments, inode):
        self.step += 1
        if operation == "open_directory":
            self.opened[arguments[-1]] = arguments[0]
        elif operation == "mkdir":
            self.made[arguments[0]] = self.step
        elif operation == "create_file":
            self.opened[arguments[-1]] = None
            self.temporary[arguments[1]] = inode
            self.pending_names.append({arguments[1]: inode})
        elif operation in {"pwrite", "allocate"}:
            offset, data = (arguments[2], arguments[1]) if operation == "pwrite" else (0, None)
            self.pending_bytes.append((inode, offset, data, arguments[1]))
        elif operation == "fsync":
            self._sync(arguments[0], inode)
        elif operation in {"link", "rename", "rename_noreplace"}:
            assert self.opened.get(arguments[0]) == self.leaf, "the directory was not open before the publication"
            change = {arguments[2]: self.temporary[arguments[1]]}
            self.pending_names.append(change if operation == "link" else {**change, arguments[1]: None})
        elif operation == "unlink":
            self.pending_names.append({arguments[1]: None})

    def _sync(self, fd, inode):
        path = self.opened[fd]
        if path is None:
            self.bytes[inode] = self._content(inode, [one for one in self.pending_bytes if one[0] == inode])
            self.pending_bytes = [one for one in self.pending_bytes if one[0] != inode]
            return
        self.synced[path] = self.step
        if path == self.leaf:
            for change in self.pending_names:
                self._change(self.names, change)
            self.pending_names = []

    @staticmethod
    def _change(names, change):
        for name, inode in change.items():
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode

    def _content(self, inode, writes):
        content = bytearray(self.bytes.get(inode, b""))
        for _, offset, data, size in writes:
            if data is None:
                content.extend(bytes(max(0, size - len(content))))
            else:
                content.extend(bytes(max(0, offset - len(content))))
                content[offset : offset + len(data)] = data
        return bytes(content)

    def states(self):
        """All contents that the key may have after a crash at this moment; None for absent."""
        found = set()
        for kept_names in _subsets(self.pending_names):
            names = dict(self.names)
            for change in kept_names:
                self._change(names, change)
            inode = names.get("object")
            if inode is None:
                found.add(None)
                continue
            pending = [one for one in self.pending_bytes if one[0] == inode]
            for kept_bytes in _subsets(pending):
                found.add(self._content(inode, kept_bytes))
                torn = [(i, o, d and d[: len(d) // 2], s) for i, o, d, s in kept_bytes]
                found.add(self._content(inode, torn))
        return found

    def unsynced_parents(self, top):
        """Directories on the way from the mount point whose entries may still be lost."""
        missing, path = [], self.leaf
        while path not in {top, "/"}:
            parent = os.path.dirname(path)
            if self.synced.get(parent, 0) <= self.made.get(path, 0):
                missing.append(parent)
            path = parent
        return missing


def _subsets(items):
    for count in range(len(items) + 1):
        yield from itertools.combinations(items, count)


def check(trace, root, old, top="/"):
    """Violations of "whole or nothing" at every moment and of "durable on return" at the end."""
    disk = Disk(os.path.dirname(os.path.join(root, KEY)), old)
    found = []
    for operation, arguments, inode in trace:
        disk.apply(operation, arguments, inode)
        bad = disk.states() - {old, NEW}
        if bad:
            found.append(f"after {operation}: {bad}")
    if disk.states() != {NEW}:
        found.append(f"not durable on return: {disk.states()}")
    found += [f"entry of a directory not synced in {path}" for path in disk.unsynced_parents(top)]
    return found


def run(traced, tmp_path, name, act, old, fault=lambda index, operation: None):
    root = tmp_path / name / "made" / "root"
    if old is not None:
        (root / KEY).parent.mkdir(parents=True)
        (root / KEY).write_bytes(old)
    store, calls = traced(fault, root)
    act(store)
    return calls, str(root)


CASES = [(put, None), (put, OLD), (create, None)]
IDS = ["put new", "put over old", "create"]


def mount_point(path):
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return str(path)


@pytest.mark.parametrize(("act", "old"), CASES, ids=IDS)
def test_a_crash_at_any_moment_leaves_old_or_new_and_on_return_new(act, old, traced, tmp_path):
    calls, root = run(traced, tmp_path, "clean", act, old)
    assert {"allocate", "pwrite", "fsync", "close"} <= set(calls.operations())
    assert calls.operations().count("pwrite") == 3
    assert check(calls.trace, root, old, mount_point(root)) == []


@pytest.mark.parametrize(("act", "old"), CASES, ids=IDS)
def test_dropping_any_one_fsync_is_noticed(act, old, traced, tmp_path):
    calls, root = run(traced, tmp_path, "clean", act, old)
    total = calls.operations().count("fsync")
    # The file, its directory, txn's, step's and data's parents, and those above the root.
    assert total >= 6
    for dropped in range(total):
        seen = []

        def fault(index, operation, dropped=dropped, seen=seen):
            if operation == "fsync":
                seen.append(index)
                return "drop" if len(seen) == dropped + 1 else None
            return None

        calls, root = run(traced, tmp_path, f"without-{dropped}", act, old, fault)
        assert check(calls.trace, root, old, mount_point(root)) != [], f"nobody misses fsync {dropped}"


@pytest.mark.parametrize(("act", "old"), CASES, ids=IDS)
def test_a_rename_without_links_is_as_safe(act, old, traced, tmp_path):
    def fault(index, operation):
        return ("before", errno.EPERM) if operation == "link" else None

    calls, root = run(traced, tmp_path, "clean", act, old, fault)
    assert check(calls.trace, root, old, mount_point(root)) == []


def test_later_writes_sync_every_directory_up_to_the_root(traced, tmp_path):
    # One that this store made and synced may have been pruned, and made again by a rank that has not synced it.
    root = tmp_path / "root"
    store, calls = traced(root=root)
    store.put("data/step-1/txn/first", BytesSource(NEW))
    before = len(calls.trace)
    create(store)
    assert check(calls.trace[before:], str(root), None, str(root)) == []


def test_a_root_that_was_removed_is_made_durable_again(traced, tmp_path):
    root = tmp_path / "made" / "root"
    store, calls = traced(root=root)
    store.put("data/step-1/txn/first", BytesSource(NEW))
    os.rename(tmp_path / "made", tmp_path / "moved")
    before = len(calls.trace)
    create(store)
    assert check(calls.trace[before:], str(root), None, mount_point(root)) == []


def test_the_directory_is_open_before_the_publication(traced, tmp_path, monkeypatch):
    def sync_by_path(self):
        # The planted fault: a directory opened afterwards may be another one, and the open may fail.
        fd = self._calls.open_directory(self._path)
        self._calls.fsync(fd)
        os.close(fd)

    calls, _ = run(traced, tmp_path, "clean", create, None)
    assert _directory_was_open(calls.trace)
    monkeypatch.setattr(durability.StagedFile, "_sync_published", sync_by_path)
    calls, _ = run(traced, tmp_path, "late", create, None)
    assert not _directory_was_open(calls.trace)


def _directory_was_open(trace):
    """Whether the last fsync is of a descriptor that was not opened after the publication."""
    published = next(at for at, one in enumerate(trace) if one[0] in {"link", "rename"})
    opened_late = {one[1][-1] for one in trace[published:] if one[0] == "open_directory"}
    return trace[-1][0] == "fsync" and trace[-1][1][0] not in opened_late


@pytest.mark.parametrize(("act", "old"), CASES, ids=IDS)
def test_the_check_notices_a_file_written_in_place(act, old, traced, tmp_path, monkeypatch):
    """Planted: publish first, write afterwards."""

    def write(self, source):
        fd, self._file = self._file, None
        (self.replace if act is put else self.publish)()
        self._calls.pwrite(fd, memoryview(source.read(0, source.size)), 0)
        self._calls.fsync(fd)
        os.close(fd)
        self.replace = self.publish = lambda: None

    monkeypatch.setattr(durability.StagedFile, "write", write)
    calls, root = run(traced, tmp_path, "planted", act, old)
    assert any(found.startswith("after") for found in check(calls.trace, root, old, mount_point(root)))


def test_exists_leaves_the_object_durable(traced, tmp_path):
    root = tmp_path / "root"
    (root / KEY).parent.mkdir(parents=True)
    (root / KEY).write_bytes(OLD)
    store, calls = traced(root=root)
    with pytest.raises(AlreadyExistsError):
        create(store)
    synced = [inode for operation, _, inode in calls.trace if operation == "fsync"]
    at_object = synced.index((root / KEY).stat().st_ino)
    at_directory = len(synced) - 1 - synced[::-1].index((root / KEY).parent.stat().st_ino)
    assert at_object < at_directory
