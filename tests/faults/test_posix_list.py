"""What list and delete do in a directory that is not tidy."""

import errno
import os
import re
import socket
import stat
import subprocess

import pytest

from txstore.catalog import entries, find, newest
from txstore.errors import AccessDeniedError, ConfigError, IntegrityError, NotFoundError, TransientError
from txstore.store import BytesSource
from txstore.testing.samples import commit_sample
from txstore_posix import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "root"))


def keys(store, prefix=""):
    return [info.key for info in store.list(prefix)]


def test_names_that_are_no_keys_are_passed_over(store, tmp_path):
    store.create("data/a", b"x")
    for name in (".txstore-0123", ".nfs0001", ".snapshot", "a b", "é", "a~", "#x#"):
        (tmp_path / "root/data" / name).write_bytes(b"x")
    (tmp_path / "root/.hidden").mkdir()
    (tmp_path / "root/.hidden/x").write_bytes(b"x")
    assert keys(store) == ["data/a"]


def test_links_to_directories_are_not_followed(store, tmp_path, caplog):
    store.create("data/a/x", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"x")
    (tmp_path / "root/data/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/data/latest").symlink_to("a")
    (tmp_path / "root/data/out").symlink_to(tmp_path / "outside")
    assert keys(store) == ["data/a/x"]
    assert "links to directories inside a store are not followed" in caplog.text


def replace(path, how):
    """Put something else in the place of a file."""
    moved = path.with_name(".moved")
    path.rename(moved)
    if how == "link":
        path.symlink_to(moved)
    elif how == "dangling":
        path.symlink_to("nowhere")
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))


def test_a_link_to_a_file_is_that_file(store, tmp_path):
    store.create("data/a", b"12345")
    replace(tmp_path / "root/data/a", "link")
    listed = list(store.list(""))
    assert listed == [store.head("data/a")]
    assert (listed[0].size, store.read("data/a")) == (5, b"12345")


@pytest.mark.parametrize("how", ["dangling", "fifo", "socket"])
def test_what_is_no_file_is_listed_and_cannot_be_read(how, store, tmp_path):
    store.create("data/a", b"x")
    replace(tmp_path / "root/data/a", how)
    assert [(info.key, info.size) for info in store.list("data/")] == [("data/a", 0)]
    for call in (store.head, store.read, lambda key: store.read_into(key, 0, memoryview(bytearray(1)))):
        with pytest.raises(NotFoundError):
            call("data/a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a device")
def test_a_device_is_listed_and_cannot_be_read(store, tmp_path):
    store.create("data/a", b"x")
    try:
        replace(tmp_path / "root/data/a", "device")
    except PermissionError:
        pytest.skip("devices are not allowed here")
    assert [(info.key, info.size) for info in store.list("data/")] == [("data/a", 0)]
    with pytest.raises((NotFoundError, AccessDeniedError)):  # a mount with nodev denies the open
        store.head("data/a")


def test_a_copy_of_links_is_a_store(store, tmp_path):
    commit_sample(store, "step-1")
    subprocess.run(["cp", "-rs", tmp_path / "root", tmp_path / "copy"], check=True)
    copy = open_store(str(tmp_path / "copy"))
    assert [entry.decision.checkpoint for entry in entries(copy)] == ["step-1"]
    assert newest(copy) == newest(store) == find(copy, "step-1")


def test_a_newest_decision_behind_a_link_is_taken(store, tmp_path):
    commit_sample(store, "step-1")
    decision = commit_sample(store, "step-2")
    replace(tmp_path / "root/commits/step-2.0.json", "link")
    assert [entry.decision.checkpoint for entry in entries(store)] == ["step-1", "step-2"]
    assert newest(store) == find(store, "step-2") == decision


@pytest.mark.parametrize("how", ["dangling", "fifo", "socket"])
def test_a_newest_decision_that_is_no_file_is_damage_and_not_passed_over(how, store, tmp_path):
    commit_sample(store, "step-1")
    commit_sample(store, "step-2")
    replace(tmp_path / "root/commits/step-2.0.json", how)
    for question in (entries, newest, lambda store: find(store, "step-2")):
        with pytest.raises(IntegrityError, match=r"step-2\.0"):
            question(store)


@pytest.mark.parametrize("below", ["", "/run/1"])
@pytest.mark.parametrize("what", ["dangling", "file"])
def test_a_root_that_leads_nowhere_is_no_empty_store(what, below, tmp_path):
    if what == "dangling":
        (tmp_path / "ckpt").symlink_to(tmp_path / "not-mounted/disk")
    else:
        (tmp_path / "ckpt").write_bytes(b"x")
    root = f"{tmp_path}/ckpt{below}"
    store = open_store(root)
    for call in (
        lambda: keys(store),
        lambda: keys(store, "commits/"),
        lambda: list(store.unfinished("")),
        lambda: store.read("a/b"),
        lambda: store.head("a"),
        lambda: store.delete("a/b"),
        lambda: store.create("a/b", b"x"),
        lambda: store.put("a", BytesSource(b"x")),
        lambda: entries(store),
        lambda: newest(store),
        lambda: find(store, "step-1"),
    ):
        with pytest.raises(ConfigError, match=f"root {re.escape(root)} cannot be used.*is the disk mounted"):
            call()


def test_a_dangling_link_in_place_of_a_directory_is_no_empty_listing(store, tmp_path):
    commit_sample(store, "step-1")
    (tmp_path / "root/commits").rename(tmp_path / "moved")
    (tmp_path / "root/commits").symlink_to("nowhere")
    for question in (entries, newest, lambda store: find(store, "step-1")):
        with pytest.raises(ConfigError, match="symbolic link"):
            question(store)


def test_a_root_that_is_not_there_yet_is_empty(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to("disk")
    store = open_store(f"{tmp_path}/ckpt/run/1")
    assert keys(store) == keys(store, "commits/") == list(store.unfinished("")) == []
    store.delete("a/b")
    with pytest.raises(NotFoundError):
        store.read("a")
    store.create("a/b", b"x")
    assert keys(store) == ["a/b"]
    assert keys(store, "a/b/") == [], "no key can be under an object: an answer, not an error"


def test_a_root_or_prefix_behind_a_link_is_listed(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "root").symlink_to("scratch")
    store = open_store(str(tmp_path / "root"))
    store.create("data/a", b"x")
    assert keys(store) == ["data/a"]
    (tmp_path / "big").mkdir()
    (tmp_path / "scratch/moved").symlink_to(tmp_path / "big")
    store.put("moved/b", BytesSource(b"y"))
    assert keys(store, "moved/") == ["moved/b"]


@pytest.mark.parametrize(("code", "kind"), [(errno.EACCES, AccessDeniedError), (errno.EIO, TransientError)])
def test_a_listing_that_fails_is_an_error_and_not_empty(code, kind, store, tmp_path, monkeypatch):
    store.create("data/a/x", b"x")
    store.create("commits/a", b"x")
    real = os.scandir

    def scandir(path):
        if str(path).endswith("/data/a"):
            raise OSError(code, os.strerror(code))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for prefix in ("", "data/", "data/a/"):
        with pytest.raises(kind, match=f"{errno.errorcode[code]}.* in {re.escape(str(tmp_path))}/root"):
            keys(store, prefix)
    assert keys(store, "commits/") == ["commits/a"], "a directory that cannot match was read"


def test_what_vanishes_during_a_listing_is_left_out(store, tmp_path):
    for key in ("data/a/x", "data/b/x", "data/c"):
        store.create(key, b"x")
    listing = store.list("data/")
    assert next(listing).key == "data/a/x"
    store.delete("data/b/x")
    (tmp_path / "root/data/c").unlink()
    assert list(listing) == []


def test_delete_removes_empty_directories_of_data_only(store, tmp_path):
    for key in ("data/a/t/x", "data/a/t/y", "data/b/t/x", "commits/a"):
        store.create(key, b"x")
    root = tmp_path / "root"
    store.delete("data/a/t/x")
    assert (root / "data/a/t").is_dir()
    store.delete("data/a/t/y")
    assert not (root / "data/a").exists()
    store.delete("data/b/t/x")
    store.delete("commits/a")
    assert sorted(path.name for path in root.iterdir()) == ["commits", "data"]


def test_delete_leaves_a_directory_with_a_file_in_flight(store, tmp_path):
    store.create("data/a/t/x", b"x")
    (tmp_path / "root/data/a/t/.txstore-0123").write_bytes(b"half")
    store.delete("data/a/t/x")
    assert (tmp_path / "root/data/a/t/.txstore-0123").exists()
    assert keys(store) == []


def test_delete_again_syncs_the_directory(traced):
    # The delete before may have failed between unlink and fsync.
    store, calls = traced()
    store.create("commits/a", b"x")
    store.delete("commits/a")
    before = len(calls.trace)
    store.delete("commits/a")
    assert "fsync" in calls.operations()[before:]
