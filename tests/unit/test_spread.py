"""A store whose shards are spread over key prefixes: made on purpose, found out by readers, and whole in all its life."""

from __future__ import annotations

import pickle

import pytest

from tests.copying import assert_same_store, copy, fill
from txstore import catalog, manifest
from txstore.decisions import read_manifest, read_store_format
from txstore.errors import CheckpointRetired, ConfigError, FormatError, TxStoreError
from txstore.keys import STORE_KEY, begin_key, parse_attempt
from txstore.manifest import decode_store_format, encode, spread_of, store_format
from txstore.memory import MemoryStore
from txstore.ops.verify import verify_store
from txstore.root import ensure_store
from txstore.store import BytesSource, Store
from txstore.sweep import retire, sweep
from txstore.testing.samples import commit_sample
from txstore.transaction import begin, write_shard


@pytest.fixture
def store() -> Store:
    store = MemoryStore()
    assert spread_of(ensure_store(store, spread=4)) == 4
    return store


def parts_of(store: Store) -> set[str]:
    return {info.key.split("/")[1] for info in store.list("data/") if info.key.endswith(".safetensors")}


def test_a_store_is_not_spread_unless_asked() -> None:
    store = MemoryStore()
    commit_sample(store, "step-1", ranks=8)
    assert store.read(STORE_KEY) == b'{"format":"txstore","version":1}'
    assert parts_of(store) == {"step-1"}


def test_shards_lie_below_all_prefixes_and_documents_where_they_always_do(store: Store) -> None:
    assert store.read(STORE_KEY) == b'{"format":"txstore","spread":4,"version":2}'
    decision = commit_sample(store, "step-1", ranks=8)
    assert parts_of(store) == {"_00", "_01", "_02", "_03"}
    documents = {info.key for info in store.list(f"data/step-1/{decision.txn}/")}
    assert {key.rpartition("/")[2] for key in documents} == {"begin.json", "index.msgpack", "manifest.json"}
    assert catalog.newest(store) == catalog.find(store, "step-1") == decision
    assert verify_store(store, depth="full").state == "sound"


def test_a_ticket_brings_the_spread_to_the_ranks(store: Store) -> None:
    attempt = begin(store, "step-1", world_size=2)
    ticket = pickle.loads(pickle.dumps(attempt.ticket))
    assert write_shard(store, ticket, 1, 0, BytesSource(b"x")).key.startswith("data/_01/step-1/")


def test_a_copy_is_a_store_of_the_same_spread(store: Store) -> None:
    fill(store)
    target = MemoryStore()
    copy(store, target)
    assert_same_store(store, target)
    assert parts_of(target) == parts_of(store)


def test_a_retired_commit_leaves_nothing_behind(store: Store) -> None:
    old = commit_sample(store, "step-1", ranks=8)
    kept = commit_sample(store, "step-2", ranks=8)
    retire(store, old)
    assert {parse_attempt(info.key) for info in store.list("data/")} == {("step-2", kept.txn)}
    with pytest.raises(CheckpointRetired):
        catalog.find(store, "step-1")
    assert verify_store(store).state == "sound"


def test_a_sweep_takes_a_dead_attempt_whole_and_begin_last(store: Store) -> None:
    kept = commit_sample(store, "step-1", ranks=8)
    attempt = begin(store, "step-2", world_size=8)
    for rank in range(8):
        write_shard(store, attempt.ticket, rank, 0, BytesSource(bytes(rank)))
    attempt.abort()
    deleted: list[str] = []
    delete = store.delete
    store.delete = lambda key: (deleted.append(key), delete(key))[1]  # type: ignore[method-assign]
    (orphan,) = sweep(store, dry_run=False)
    assert (orphan.checkpoint, orphan.txn, orphan.keys) == ("step-2", attempt.ticket.txn, 9)
    assert deleted.index(begin_key("step-2", attempt.ticket.txn)) == len(deleted) - 1
    assert {parse_attempt(info.key) for info in store.list("data/")} == {("step-1", kept.txn)}


def test_the_layout_of_a_store_is_chosen_once(store: Store) -> None:
    assert spread_of(ensure_store(store)) == spread_of(ensure_store(store, spread=4)) == 4
    for other in (0, 8):
        with pytest.raises(ConfigError, match="over 4 prefixes, not"):
            ensure_store(store, spread=other)
    plain = MemoryStore()
    ensure_store(plain)
    ensure_store(plain, spread=0)
    with pytest.raises(ConfigError, match="over 0 prefixes, not 4"):
        ensure_store(plain, spread=4)


def test_of_two_layouts_made_at_once_one_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one looked before the winner wrote."""
    reads = iter([None, read_store_format(store)])
    monkeypatch.setattr("txstore.root.read_store_format", lambda _store: next(reads))
    with pytest.raises(ConfigError, match="over 4 prefixes, not 8"):
        ensure_store(store, spread=8)


@pytest.mark.parametrize("spread", [-1, 1, 257, 1 << 40])
def test_an_impossible_spread_is_refused(spread: int) -> None:
    store = MemoryStore()
    with pytest.raises(ConfigError, match="is neither 0 nor 2 to 256"):
        ensure_store(store, spread=spread)
    assert not list(store.list(""))


@pytest.mark.parametrize(
    "text",
    [
        '{"format":"txstore","version":2}',
        '{"format":"txstore","version":1,"spread":4}',
        '{"format":"txstore","version":3,"spread":4}',
        *(f'{{"format":"txstore","version":2,"spread":{value}}}' for value in ("0", "1", "257", "-4", '"4"', "null", "4.5", "[]")),
        '{"format":"txstore","version":2,"spread":4,"more":1}',
    ],
)  # fmt: skip
def test_an_impossible_format_document_is_refused(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        decode_store_format(text.encode(), STORE_KEY)
    assert caught.value.key == STORE_KEY


@pytest.mark.parametrize("spread", [0, 2, 16, 256])
def test_a_format_document_is_read_as_it_was_written(spread: int) -> None:
    document = decode_store_format(encode(store_format(spread)), STORE_KEY)
    assert spread_of(document) == spread
    assert document.version == (2 if spread else 1)


OPERATIONS = {
    "newest": catalog.newest,
    "find": lambda store: catalog.find(store, "step-1"),
    "entries": catalog.entries,
    "begin": lambda store: begin(store, "step-9", world_size=1),
    "sweep": lambda store: sweep(store, dry_run=False),
    "retire": lambda store: retire(store, catalog.find(store, "step-1")),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_release_that_does_not_know_the_layout_refuses_the_store(store, monkeypatch, operation: str) -> None:
    """As every release from before the spread does: it knows version 1 alone."""
    commit_sample(store, "step-1", ranks=8)
    commit_sample(store, "step-2")
    begin(store, "step-3", world_size=1).abort()
    before = [info.key for info in store.list("")]
    monkeypatch.setattr(manifest, "SPREAD_VERSION", 1)
    with pytest.raises(TxStoreError, match="format version 2, this release knows 1"):
        OPERATIONS[operation](store)
    assert [info.key for info in store.list("")] == before


def test_the_manifest_says_where_the_shards_are(store: Store) -> None:
    decision = commit_sample(store, "step-1", ranks=3)
    assert [shard.key.split("/")[1] for shard in read_manifest(store, decision).shards] == ["_00", "_01", "_02"]
