"""What list and delete do in a directory that is not tidy."""

import errno
import os

import pytest

from txstore.errors import AccessDeniedError, TransientError
from txstore.store import BytesSource
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


def test_links_are_not_followed(store, tmp_path, caplog):
    store.create("data/a/x", b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"x")
    (tmp_path / "root/data/loop").symlink_to(tmp_path / "root")
    (tmp_path / "root/data/latest").symlink_to("a")
    (tmp_path / "root/data/out").symlink_to(tmp_path / "outside")
    (tmp_path / "root/data/file").symlink_to(tmp_path / "outside/secret")
    assert keys(store) == ["data/a/x"]
    assert "links inside a store are not followed" in caplog.text


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
        with pytest.raises(kind, match=errno.errorcode[code]):
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
