"""Verification: what it finds, that it finds all of it, and what it costs."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from txstore.checksum import BLOCK_BYTES, sha256_hex
from txstore.decisions import read_index, read_manifest
from txstore.errors import AccessDeniedError, NotFoundError, TransientError
from txstore.keys import STORE_KEY, decision_key, retired_key
from txstore.manifest import Decision, Tombstone, encode, seal
from txstore.memory import MemoryStore
from txstore.ops import shard_check
from txstore.ops.report import Depth, Step
from txstore.ops.verify import verify, verify_store
from txstore.store import BytesSource
from txstore.sweep import retire
from txstore.testing.samples import commit_sample

ROWS = 5 * 1024 + 3
"""A bit more than five blocks in each of two shards."""

DEPTHS: tuple[Depth, ...] = ("documents", "sample", "full")


class WatchedStore(MemoryStore):
    """Records reads of shards, and can be told to misbehave."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.before_read: Callable[[str, int], None] = lambda key, start: None
        self.silent = False

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self.before_read(key, start)
        self.reads.append((key, start, buffer.nbytes))
        data, _ = self._get(key)
        part = memoryview(data)[start : start + buffer.nbytes]
        buffer[: part.nbytes] = part
        return part.nbytes

    def edit(self, key: str, change: Callable[[bytes], bytes]) -> None:
        data, modified_s = self._objects[key]
        self._objects[key] = (change(data), modified_s)

    def head(self, key: str):
        if self.silent:
            raise TransientError("connection reset", key=key)
        # As POSIX and plain S3 do: no checksum of its own, so that damage must be found in the bytes.
        return dataclasses.replace(super().head(key), crc32c=None)


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def decision(store: WatchedStore) -> Decision:
    return commit_sample(store, "step-10", rows=ROWS)


def flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        at_ = at % len(data)
        return data[:at_] + bytes([data[at_] ^ 1]) + data[at_ + 1 :]

    return change


def shard_keys(store: WatchedStore, decision: Decision) -> list[str]:
    return [shard.key for shard in read_manifest(store, decision).shards]


def kinds(report) -> list[tuple[str, str]]:
    return [(problem.kind, problem.key) for problem in report.problems]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_sound_checkpoint_is_sound(store: WatchedStore, decision: Decision, depth: Depth) -> None:
    report = verify(store, decision, depth=depth)
    assert (report.state, report.problems, report.shards) == ("sound", (), 2)
    size = sum(shard.size for shard in read_manifest(store, decision).shards)
    if depth == "full":
        assert (report.bytes_read, report.blocks) == (size, 12)
    elif depth == "documents":
        assert (report.bytes_read, report.blocks) == (0, 0)


@pytest.mark.parametrize("block", range(6))
def test_a_flipped_bit_in_any_block_is_found_in_full(store: WatchedStore, decision: Decision, block: int) -> None:
    key = shard_keys(store, decision)[1]
    store.edit(key, flip(block * BLOCK_BYTES + 5000))
    report = verify(store, decision, depth="full")
    assert report.state == "damaged"
    assert kinds(report) == [("checksum", key)]
    assert report.problems[0].what.startswith(f"block {block} ")
    assert verify(store, decision, depth="documents").state == "sound"


@pytest.mark.parametrize("at", [0, -1])
def test_a_sample_always_has_the_first_and_the_last_block(store: WatchedStore, decision: Decision, at: int) -> None:
    store.edit(shard_keys(store, decision)[0], flip(at))
    assert verify(store, decision, depth="sample", sample_blocks=0).state == "damaged"


def test_a_sample_follows_from_its_seed(store: WatchedStore) -> None:
    decision = commit_sample(store, "step-20", rows=30 * 1024)

    def blocks_read(seed: int | None) -> tuple[int, list[tuple[str, int, int]]]:
        store.reads.clear()
        report = verify(store, decision, depth="sample", seed=seed, sample_blocks=4)
        return report.seed, sorted(store.reads)

    seed, chosen = blocks_read(None)
    assert blocks_read(seed) == (seed, chosen)
    assert blocks_read(1) != blocks_read(2)
    per_shard = [[read for read in chosen if read[0] == key] for key in shard_keys(store, decision)]
    assert all(4 <= len(reads) <= 6 for reads in per_shard)
    assert [start for _, start, _ in per_shard[0]] != [start for _, start, _ in per_shard[1]]


def test_a_sampled_block_that_is_damaged_is_found(store: WatchedStore, decision: Decision) -> None:
    key = shard_keys(store, decision)[0]
    seed = next(
        seed
        for seed in range(100)
        if 3 in random.Random(f"{seed}:{key}").sample(range(6), 1)  # the documented choice, from outside
    )
    store.edit(key, flip(3 * BLOCK_BYTES))
    assert verify(store, decision, depth="sample", seed=seed, sample_blocks=1).problems[0].what.startswith("block 3 ")


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("change", "kind"), [(lambda d: d[:-1], "size"), (lambda d: d + b"x", "size")])
def test_another_size_is_found_at_every_depth(store, decision, depth, change, kind) -> None:
    key = shard_keys(store, decision)[0]
    store.edit(key, change)
    assert kinds(verify(store, decision, depth=depth)) == [(kind, key)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_missing_shard_is_found_at_every_depth(store: WatchedStore, decision: Decision, depth: Depth) -> None:
    key = shard_keys(store, decision)[1]
    store.delete(key)
    assert kinds(verify(store, decision, depth=depth)) == [("missing", key)]


@pytest.mark.parametrize("depth", ["sample", "full"])
def test_swapped_shards_are_found(store: WatchedStore, depth: Depth) -> None:
    decision = commit_sample(store, "step-30", ranks=3, rows=8)
    first, second = shard_keys(store, decision)[1:]
    a, b = store.read(first), store.read(second)
    assert len(a) == len(b)
    store.edit(first, lambda _: b)
    store.edit(second, lambda _: a)
    assert kinds(verify(store, decision, depth=depth)) == [("checksum", first), ("checksum", second)]


@pytest.mark.parametrize("change", [flip(20), flip(-3), lambda d: d[:-1], lambda d: d + b" ", lambda d: b""])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_damaged_manifest_is_found_at_every_depth(store, decision, depth, change) -> None:
    store.edit(decision.manifest.key, change)
    report = verify(store, decision, depth=depth)
    assert [key for _, key in kinds(report)] == [decision.manifest.key]
    assert kinds(report)[0][0] in {"digest", "size"}


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_damaged_index_does_not_hide_damaged_shards(store, decision, depth) -> None:
    manifest = read_manifest(store, decision)
    store.edit(manifest.index.key, flip(100))
    store.delete(manifest.shards[0].key)
    store.edit(manifest.shards[1].key, flip(70_000))
    found = [("digest", manifest.index.key), ("missing", manifest.shards[0].key)]
    if depth == "full":
        found.append(("checksum", manifest.shards[1].key))
    assert kinds(verify(store, decision, depth=depth)) == found


def test_all_damage_is_named_not_the_first_only(store: WatchedStore, decision: Decision) -> None:
    first, second = shard_keys(store, decision)
    for block in (1, 2, 4):
        store.edit(first, flip(block * BLOCK_BYTES))
    store.edit(second, flip(0))
    report = verify(store, decision)
    assert [problem.what.split(" (")[0] for problem in report.problems] == [
        "blocks 1 to 2",
        "block 4",
        "block 0",
    ]
    assert [problem.key for problem in report.problems] == [first, first, second]
    assert all(problem.next_step for problem in report.problems)


def test_a_file_of_noise_is_summed_up(store: WatchedStore) -> None:
    decision = commit_sample(store, "step-40", ranks=1, rows=50 * 1024)
    key = shard_keys(store, decision)[0]
    data = bytearray(store.read(key))
    for block in range(0, 50, 2):
        data[block * BLOCK_BYTES + 9000] ^= 1
    store.edit(key, lambda _: bytes(data))
    report = verify(store, decision)
    assert len(report.problems) == shard_check.MOST_FINDINGS + 1
    assert report.problems[-1].what.startswith("5 more blocks")


def test_header_that_contradicts_the_index_is_found_in_full_only(store: WatchedStore) -> None:
    """Bytes and checksums are as committed; the writer laid out another tensor than it told the index."""

    def transposed(extent):
        return dataclasses.replace(extent, shape=extent.shape[::-1]) if len(extent.shape) == 2 else extent

    decision = commit_sample(store, "step-50", tamper=transposed)
    assert verify(store, decision, depth="sample").state == "sound"
    report = verify(store, decision, depth="full")
    assert [problem.kind for problem in report.problems] == ["header", "header"]
    assert "'model.weight' has another dtype, shape" in report.problems[0].what


def test_saved_offsets_that_stock_readers_would_believe_are_checked(store: WatchedStore) -> None:
    def moved(extent):
        return dataclasses.replace(extent, offsets=(1, 1)) if len(extent.shape) == 2 else extent

    report = verify(store, commit_sample(store, "step-60", tamper=moved))
    assert "'model.weight' has other saved_offsets" in report.problems[0].what


def test_array_that_only_the_header_names_is_found(store: WatchedStore) -> None:
    def renamed(extent):
        return dataclasses.replace(extent, name="other") if extent.name == "model.weight" else extent

    decision = commit_sample(store, "step-70", tamper=renamed)
    what = [problem.what for problem in verify(store, decision).problems]
    assert what[:2] == ["'model.weight' is in the index only", "'other' is in the header only"]


def test_removal_while_reading_is_no_damage(store: WatchedStore, decision: Decision) -> None:
    commit_sample(store, "step-11")

    def remove_at_the_second_window(key: str, start: int) -> None:
        store.before_read = lambda key, start: None
        retire(store, decision)

    store.before_read = remove_at_the_second_window
    report = verify(store, decision)
    assert (report.state, report.problems) == ("retired", ())


def test_damage_behind_a_tombstone_is_retired_too(store: WatchedStore, decision: Decision) -> None:
    store.edit(shard_keys(store, decision)[0], flip(0))
    mark = Tombstone(checkpoint="step-10", slot=0, txn=decision.txn, reason="test")
    store.create(retired_key("step-10", 0), encode(mark))
    assert verify(store, decision).state == "retired"


def test_a_refused_shard_is_unreadable_not_damaged(store: WatchedStore, decision: Decision) -> None:
    first, second = shard_keys(store, decision)

    def refuse(key: str, start: int) -> None:
        if key == first:
            raise AccessDeniedError("permission denied", key=key)

    store.before_read = refuse
    report = verify(store, decision)
    assert (report.state, kinds(report)) == ("unreadable", [("unreadable", first)])
    store.edit(second, flip(BLOCK_BYTES))
    assert verify(store, decision).state == "damaged"


def test_a_store_that_stops_answering_is_an_error(store: WatchedStore, decision: Decision) -> None:
    asked: list[str] = []

    def hang_up(key: str, start: int) -> None:
        asked.append(key)
        store.silent = True
        raise TransientError("connection reset", key=key)

    store.before_read = hang_up
    with pytest.raises(TransientError):
        verify(store, decision)
    assert len(asked) == 1, "each further object would take a retry budget of its own"


def test_a_bad_sector_is_not_a_store_that_stopped_answering(store: WatchedStore, decision: Decision) -> None:
    first, second = shard_keys(store, decision)
    store.edit(second, flip(BLOCK_BYTES))

    def bad_sector(key: str, start: int) -> None:
        if key == first:
            raise TransientError("read failed: EIO", key=key)

    store.before_read = bad_sector
    assert kinds(verify(store, decision)) == [("unreadable", first), ("checksum", second)]


@pytest.mark.parametrize("name", ["__metadata__", "a.b/c ü", "quote'\"\\n\n"])
def test_any_name_is_sound(store: WatchedStore, name: str) -> None:
    assert verify(store, commit_sample(store, "step-90", names=(name, "extra"))).problems == ()


def test_memory_is_bounded_by_the_windows(store: WatchedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txstore.ops.verify.READERS", 2)
    decision = commit_sample(store, "step-80", rows=40 * 1024, ranks=3)
    tracemalloc.start()
    try:
        report = verify(store, decision)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.bytes_read > 120 * BLOCK_BYTES
    assert peak < 2 * shard_check.WINDOW_BYTES + BLOCK_BYTES
    assert max(size for _, _, size in store.reads) == shard_check.WINDOW_BYTES


def test_progress_ends_at_its_total(store: WatchedStore, decision: Decision) -> None:
    steps: list[Step] = []
    verify(store, decision, progress=steps.append)
    assert steps[-1].done_bytes == steps[-1].total_bytes > 10 * BLOCK_BYTES
    assert [step.done_bytes for step in steps] == sorted(step.done_bytes for step in steps)


def test_verify_changes_nothing(store: WatchedStore, decision: Decision) -> None:
    store.edit(shard_keys(store, decision)[0], flip(9))
    before = dict(store._objects)
    verify_store(store)
    assert store._objects == before


def test_store_superseded_commits_are_verified_and_retired_ones_are_not(store: WatchedStore) -> None:
    first = commit_sample(store, "step-1")
    second = commit_sample(store, "step-1", overwrite=True)
    gone = commit_sample(store, "step-2")
    last = commit_sample(store, "step-3")
    retire(store, gone)
    report = verify_store(store)
    assert [one.decision for one in report.reports] == [first, second, last]
    assert report.state == "sound"
    assert [one.decision for one in verify_store(store, checkpoint="step-1").reports] == [first, second]


@pytest.mark.parametrize("depth", DEPTHS)
def test_store_damaged_decision_does_not_hide_the_others(store: WatchedStore, depth: Depth) -> None:
    for step in (1, 2, 3):
        commit_sample(store, f"step-{step}")
    key = decision_key("step-2", 0)
    for change in (flip(2), lambda d: d[:-1], lambda d: d + b"x", lambda d: b"", lambda d: b"[" * 4096):
        intact = store.read(key)
        store.edit(key, change)
        report = verify_store(store, depth=depth)
        assert [(problem.kind, problem.key) for problem in report.problems] == [("format", key)]
        assert [one.decision.checkpoint for one in report.reports] == ["step-1", "step-3"]
        assert report.state == "damaged"
        store.edit(key, lambda _, intact=intact: intact)


def test_store_no_flipped_bit_in_a_decision_goes_unseen(store: WatchedStore) -> None:
    commit_sample(store, "step-7")
    key = decision_key("step-7", 0)
    intact = store.read(key)
    unseen = []
    for at in range(len(intact)):
        for bit in (0, 1, 5):
            store.edit(key, lambda _, at=at, bit=bit: intact[:at] + bytes([intact[at] ^ 1 << bit]) + intact[at + 1 :])
            if verify_store(store, depth="documents").state != "damaged":
                unseen.append((at, bit, store.read(key)))
    assert unseen == []


def test_store_swapped_decisions_are_found(store: WatchedStore) -> None:
    commit_sample(store, "step-1")
    commit_sample(store, "step-2")
    one, two = store.read(decision_key("step-1", 0)), store.read(decision_key("step-2", 0))
    store.edit(decision_key("step-1", 0), lambda _: two)
    store.edit(decision_key("step-2", 0), lambda _: one)
    assert [problem.kind for problem in verify_store(store).problems] == ["format", "format"]


def test_store_deleted_decision_leaves_a_gap(store: WatchedStore) -> None:
    commit_sample(store, "step-1")
    commit_sample(store, "step-1", overwrite=True)
    store.delete(decision_key("step-1", 0))
    report = verify_store(store)
    assert [(problem.kind, problem.key) for problem in report.problems] == [("missing", decision_key("step-1", 0))]
    assert [one.decision.slot for one in report.reports] == [1]


def test_store_without_its_format_document_is_damaged(store: WatchedStore) -> None:
    commit_sample(store, "step-1")
    intact = store.read(STORE_KEY)
    store.delete(STORE_KEY)
    assert [(problem.kind, problem.key) for problem in verify_store(store).problems] == [("missing", STORE_KEY)]
    store.put(STORE_KEY, BytesSource(intact.replace(b"1", b"9")))
    assert [(problem.kind, problem.key) for problem in verify_store(store).problems] == [("format", STORE_KEY)]


def test_store_decision_that_changed_since_it_was_listed(store: WatchedStore, decision: Decision) -> None:
    store.edit(decision_key("step-10", 0), lambda data: data.replace(b"sample:1", b"sample:2"))
    assert kinds(verify(store, decision, depth="documents")) == [("format", decision_key("step-10", 0))]


def test_empty_store_gives_an_empty_report(store: WatchedStore) -> None:
    assert verify_store(store) == type(verify_store(store))(problems=(), reports=())


def test_index_that_contradicts_the_manifest_is_named(store: WatchedStore, decision: Decision) -> None:
    """Digests agree all the way down: the writer itself committed an index of other files."""
    manifest = read_manifest(store, decision)
    index = read_index(store, decision, manifest)
    data = msgspec.msgpack.encode(msgspec.structs.replace(index, files=index.files[::-1]))
    ref = msgspec.structs.replace(manifest.index, size=len(data), sha256=sha256_hex(data))
    forged = encode(msgspec.structs.replace(manifest, index=ref))
    store.edit(ref.key, lambda _: data)
    store.edit(decision.manifest.key, lambda _: forged)
    manifest_ref = msgspec.structs.replace(decision.manifest, size=len(forged), sha256=sha256_hex(forged))
    decision = seal(msgspec.structs.replace(decision, manifest=manifest_ref))
    store.edit(decision_key("step-10", 0), lambda _: encode(decision))
    assert kinds(verify(store, decision, depth="documents")) == [("format", ref.key)]


def test_not_found_is_not_swallowed_as_unreadable(store: WatchedStore, decision: Decision) -> None:
    key = shard_keys(store, decision)[0]

    def vanish(wanted: str, start: int) -> None:
        if wanted == key:
            raise NotFoundError("no such object", key=wanted)

    store.before_read = vanish
    assert kinds(verify(store, decision)) == [("missing", key)]
