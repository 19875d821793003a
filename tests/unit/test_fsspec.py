"""memory:// and fsspec+scheme://: which filesystems are accepted, and what a store in one process's memory refuses."""

from __future__ import annotations

import os
import pickle
import traceback

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from tests.copying import assert_same_store, copy, fill
from txstore.errors import AccessDeniedError, CapabilityError, ConfigError, OutcomeUnknownError, TransientError
from txstore.registry import open_store as open_any
from txstore.retry import RetryingStore
from txstore.store import BytesSource
from txstore_fsspec import open_store
from txstore_fsspec.verdicts import judge
from txstore_posix import open_store as open_posix


@pytest.fixture
def store(memory_root):
    with open_store(f"memory://{memory_root}") as store:
        yield store


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("memory://a", "memory://a"),
        ("memory://", "memory://"),
        ("memory:////a//b/", "memory://a/b"),
        ("fsspec+memory://a/b", "memory://a/b"),
        ("MEMORY://A", "memory://A"),
        ("memory://a b/%C3%A9+", "memory://a%20b/%C3%A9+"),
    ],
)
def test_one_place_has_one_canonical_url(url, canonical):
    assert open_any(url).url == canonical == open_any(canonical).url


@pytest.mark.parametrize(
    "url",
    [
        "memory://a?b",
        "memory://a#b",
        "memory://a::file://b",
        "fsspec+simplecache::memory://a",
        "memory://../a",
        "memory://a/%2E%2E/b",
        "memory://a%",
        "memory://%ff",
        "memory://a%3A%3Ab",
        "fsspec+nonsense://a",
    ],
)
def test_a_malformed_url_is_refused(url):
    with pytest.raises(ConfigError):
        open_store(url)


@pytest.mark.parametrize("option", ["use_listings_cache", "skip_instance_cache", "global_store"])
def test_an_option_that_the_store_rests_on_is_refused(option):
    with pytest.raises(ConfigError, match=option):
        open_store("memory://a", **{option: True})


def test_only_what_was_shown_to_keep_the_contract_is_accepted():
    accepted = set()
    for scheme in known_implementations:
        try:
            kind = fsspec.get_filesystem_class(scheme)
        except ImportError:
            continue
        verdict = judge(kind)
        assert bool(verdict.refusal) == bool(verdict.instead)
        if not verdict.refusal:
            accepted.add(scheme)
    assert accepted == {"memory"}


@pytest.mark.parametrize(
    ("url", "why", "instead"),
    [
        ("fsspec+file:///tmp/x", "visible", "file://"),
        ("fsspec+local:///tmp/x", "visible", "file://"),
        ("fsspec+zip://x", "nobody has shown", "s3://"),
        ("fsspec+dir://x", "another filesystem", "below it"),
    ],
)
def test_a_refusal_says_why_and_what_to_use(url, why, instead):
    with pytest.raises(CapabilityError, match=why) as caught:
        open_any(url)
    assert instead in caught.value.next_step


def test_a_subclass_is_another_class():
    class Lookalike(MemoryFileSystem):
        protocol = "lookalike"

    assert not judge(MemoryFileSystem).refusal
    assert judge(Lookalike).refusal


def test_options_are_in_no_text():
    store = open_store("memory://a", token="s3cr3t")
    assert "s3cr3t" not in f"{store!r} {store.url} {store.config!r} {vars(store)!r}"


def test_a_store_in_memory_cannot_be_pickled_or_used_after_a_fork(store):
    store.put("x", BytesSource(b"1"))
    with pytest.raises(TypeError, match="one process"):
        pickle.dumps(store)
    child = os.fork()
    if child == 0:
        try:
            for call in (lambda: store.create("y", b""), lambda: store.read("x"), lambda: list(store.list(""))):
                with pytest.raises(CapabilityError, match="one process"):
                    call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.read("x") == b"1"


def test_a_key_below_an_object_is_refused_and_is_no_conflict(store):
    store.create("a", b"1")
    for call in (lambda: store.create("a/b", b"2"), lambda: store.put("a/b", BytesSource(b"2"))):
        with pytest.raises(ConfigError, match="already an object"):
            call()


def test_a_transaction_of_somebody_else_does_not_hold_back_our_writes(store, memory_root):
    shared = fsspec.filesystem("memory")
    with shared.transaction:
        store.create("x", b"1")
        assert shared.cat_file(f"/{memory_root}/x") == b"1"
        assert store.read("x") == b"1"


@pytest.mark.parametrize(
    ("error", "read", "write"),
    [
        (PermissionError("no"), AccessDeniedError, AccessDeniedError),
        (TimeoutError("late"), TransientError, OutcomeUnknownError),
        (OSError(5, "broken"), TransientError, OutcomeUnknownError),
    ],
)
def test_errors_of_the_filesystem_are_typed(error, read, write, store, monkeypatch):
    def fail(*_arguments, **_options):
        raise error

    for name in ("pipe_file", "cat_file", "info", "find", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, name, fail)
    reads = [lambda: store.read("x"), lambda: store.head("x"), lambda: list(store.list(""))]
    writes = [lambda: store.create("x", b""), lambda: store.put("x", BytesSource(b"")), lambda: store.delete("x")]
    for calls, kind in ((reads, read), (writes, write)):
        for call in calls:
            with pytest.raises(kind) as caught:
                call()
            pickle.loads(pickle.dumps(caught.value))


def test_a_copy_between_files_and_memory_is_a_store(store, tmp_path):
    source = open_posix(str(tmp_path / "store"))
    fill(source)
    copy(source, store)
    assert_same_store(source, RetryingStore(store))
