"""The store contract as tests: subclass `StoreConformance` and give it a store.

::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self): ...

        @pytest.fixture
        def raw(self, store): ...

Call ``pytest.register_assert_rewrite("txstore.testing.conformance")`` in a ``conftest.py``.
"""

from __future__ import annotations

import multiprocessing
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from txstore.checksum import BLOCK_BYTES, Buffer, crc32c
from txstore.errors import AlreadyExistsError, FormatError, NotFoundError
from txstore.store import BytesSource, ChecksummedSource, ObjectInfo, Source, Store

_RACERS = 8
_ROUNDS = 20
_PROCESSES = 3


class RawAccess(Protocol):
    """The same objects, by another way than the code under test."""

    def write(self, key: str, data: bytes) -> None:
        """Place an object."""

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None if there is none."""


class BrokenSourceError(Exception):
    """Raised by `BrokenSource`."""


class BrokenSource(Source):
    """Gives `good_bytes` zeros, then raises; sizes larger than a window make it break half-way."""

    def __init__(self, size: int, good_bytes: int) -> None:
        self.size = size
        self._good_bytes = good_bytes

    def read(self, start: int, stop: int) -> Buffer:
        """Zeros, as long as they last."""
        if stop > self._good_bytes:
            raise BrokenSourceError(f"no bytes beyond {self._good_bytes}")
        return bytes(stop - start)

    def crc32c(self, start: int, stop: int) -> int:
        """CRC32C of zeros."""
        return crc32c(bytes(stop - start))


class StoreConformance:
    """What every store must do. Each test's name is a sentence of the contract."""

    picklable = True
    """Whether the store can be pickled into another process that sees the same objects."""

    list_count = 1100
    """Objects in the long listing: more than one page of every service."""

    @pytest.fixture
    def store(self) -> Store:
        """The store under test, empty."""
        raise NotImplementedError

    @pytest.fixture
    def raw(self, store: Store) -> RawAccess:
        """Access that bypasses the store under test."""
        raise NotImplementedError

    # put

    @pytest.mark.parametrize(
        "size",
        [
            0,
            1,
            4096,
            BLOCK_BYTES - 1,
            BLOCK_BYTES,
            BLOCK_BYTES + 1,
            8 * BLOCK_BYTES - 1,
            8 * BLOCK_BYTES,
            8 * BLOCK_BYTES + 1,
            17 * BLOCK_BYTES + 5,
        ],
    )
    def test_put_stores_every_byte(self, store: Store, raw: RawAccess, size: int) -> None:
        data = random.Random(size).randbytes(size)
        info = store.put("data/object", BytesSource(data))
        assert (info.key, info.size) == ("data/object", size)
        assert info.crc32c in {None, crc32c(data)}
        assert raw.read("data/object") == data

    def test_put_replaces(self, store: Store, raw: RawAccess) -> None:
        for data in (b"a longer first object", b"second", b""):
            store.put("latest.json", BytesSource(data))
            assert raw.read("latest.json") == data

    @pytest.mark.parametrize("good_bytes", [0, 8 * BLOCK_BYTES], ids=["at once", "half-way"])
    def test_put_of_a_source_that_raises_leaves_nothing(self, store: Store, raw: RawAccess, good_bytes: int) -> None:
        with pytest.raises(BrokenSourceError):
            store.put("data/broken", BrokenSource(17 * BLOCK_BYTES, good_bytes))
        assert raw.read("data/broken") is None
        assert [info.key for info in store.list("")] == []
        store.put("data/broken", BytesSource(b"next attempt"))
        assert raw.read("data/broken") == b"next attempt"

    def test_put_of_a_source_that_raises_keeps_the_old_object(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/kept", b"old")
        with pytest.raises(BrokenSourceError):
            store.put("data/kept", BrokenSource(17 * BLOCK_BYTES, 8 * BLOCK_BYTES))
        assert raw.read("data/kept") == b"old"

    def test_put_reads_the_source_in_whole_blocks(self, store: Store, raw: RawAccess) -> None:
        data = random.Random(1).randbytes(9 * BLOCK_BYTES + 7)
        source = ChecksummedSource(BytesSource(data))
        store.put("data/blocks", source)
        assert raw.read("data/blocks") == data
        assert source.blocks[-1] == crc32c(data[9 * BLOCK_BYTES :])

    def test_put_is_never_seen_in_part(self, store: Store) -> None:
        size = 2 * BLOCK_BYTES
        whole = {bytes([fill]) * size for fill in (1, 2)}
        store.put("data/swap", BytesSource(bytes([1]) * size))
        done = threading.Event()

        def write() -> None:
            try:
                for number in range(10):
                    store.put("data/swap", BytesSource(bytes([1 + number % 2]) * size))
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not done.is_set():
                assert store.read("data/swap") in whole
            writing.result()

    # create

    @pytest.mark.parametrize("size", [0, 1, 4096])
    def test_create_stores_every_byte(self, store: Store, raw: RawAccess, size: int) -> None:
        data = random.Random(size).randbytes(size)
        store.create("commits/step-1.0.json", data)
        assert raw.read("commits/step-1.0.json") == data

    def test_create_never_replaces(self, store: Store, raw: RawAccess) -> None:
        raw.write("commits/step-1.0.json", b"winner")
        for data in (b"other", b"winner", b""):
            with pytest.raises(AlreadyExistsError) as caught:
                store.create("commits/step-1.0.json", data)
            assert caught.value.key == "commits/step-1.0.json"
        assert raw.read("commits/step-1.0.json") == b"winner"
        assert [info.key for info in store.list("")] == ["commits/step-1.0.json"]

    def test_create_after_put_is_refused(self, store: Store, raw: RawAccess) -> None:
        store.put("txstore.json", BytesSource(b"put"))
        with pytest.raises(AlreadyExistsError):
            store.create("txstore.json", b"created")
        assert raw.read("txstore.json") == b"put"

    def test_create_after_delete_is_allowed(self, store: Store, raw: RawAccess) -> None:
        store.create("probe/x", b"one")
        store.delete("probe/x")
        store.create("probe/x", b"two")
        assert raw.read("probe/x") == b"two"

    def test_create_has_one_winner_among_threads(self, store: Store, raw: RawAccess) -> None:
        barrier = threading.Barrier(_RACERS)

        def race(racer: int) -> list[bool]:
            return _race(store, barrier.wait, racer)

        with ThreadPoolExecutor(_RACERS) as pool:
            won = list(pool.map(race, range(_RACERS)))
        _assert_one_winner(won, raw)

    def test_create_has_one_winner_among_processes(self, store: Store, raw: RawAccess) -> None:
        if not self.picklable:
            with pytest.raises(TypeError):
                pickle.dumps(store)
            return
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(_PROCESSES)
        replies = context.Queue()
        racers = [
            context.Process(target=_race_in_process, args=(pickle.dumps(store), barrier, racer, replies))
            for racer in range(_PROCESSES)
        ]
        for process in racers:
            process.start()
        won: dict[int, list[bool]] = dict(replies.get(timeout=120) for _ in racers)
        for process in racers:
            process.join(timeout=60)
        assert [process.exitcode for process in racers] == [0] * _PROCESSES
        _assert_one_winner([won[racer] for racer in range(_PROCESSES)], raw)

    # read, read_into, head

    @pytest.mark.parametrize(
        ("start", "size"), [(0, None), (0, 10), (3, 4), (9, 1), (3, None), (0, 0), (4, 0), (10, None), (10, 5), (99, 1)]
    )
    def test_read_returns_the_range(self, store: Store, raw: RawAccess, start: int, size: int | None) -> None:
        raw.write("data/ten", b"0123456789")
        assert store.read("data/ten", start, size) == b"0123456789"[start : None if size is None else start + size]

    def test_read_is_short_only_at_the_end(self, store: Store, raw: RawAccess) -> None:
        data = random.Random(2).randbytes(3 * BLOCK_BYTES)
        raw.write("data/three", data)
        assert store.read("data/three", BLOCK_BYTES, BLOCK_BYTES) == data[BLOCK_BYTES : 2 * BLOCK_BYTES]
        assert store.read("data/three", BLOCK_BYTES, 9 * BLOCK_BYTES) == data[BLOCK_BYTES:]

    def test_read_of_an_empty_object_is_empty(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/empty", b"")
        assert store.read("data/empty") == b""
        assert store.read_into("data/empty", 0, memoryview(bytearray(3))) == 0
        assert store.head("data/empty").size == 0

    @pytest.mark.parametrize(("start", "length", "count"), [(0, 10, 10), (2, 3, 3), (7, 8, 3), (10, 4, 0), (50, 4, 0)])
    def test_read_into_fills_the_buffer(
        self, store: Store, raw: RawAccess, start: int, length: int, count: int
    ) -> None:
        raw.write("data/ten", b"0123456789")
        buffer = bytearray(b"." * length)
        assert store.read_into("data/ten", start, memoryview(buffer)) == count
        assert bytes(buffer) == b"0123456789"[start : start + length].ljust(length, b".")

    def test_read_into_an_empty_buffer_reads_nothing(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/ten", b"0123456789")
        assert store.read_into("data/ten", 0, memoryview(bytearray())) == 0

    def test_read_into_fills_a_part_of_a_large_buffer(self, store: Store, raw: RawAccess) -> None:
        data = random.Random(3).randbytes(2 * BLOCK_BYTES + 3)
        raw.write("data/large", data)
        buffer = bytearray(len(data) + 20)
        assert store.read_into("data/large", 0, memoryview(buffer)[10 : 10 + len(data)]) == len(data)
        assert bytes(buffer) == bytes(10) + data + bytes(10)

    def test_head_knows_the_size(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/ten", b"0123456789")
        info = store.head("data/ten")
        assert (info.key, info.size) == ("data/ten", 10)
        assert info.crc32c in {None, crc32c(b"0123456789")}

    @pytest.mark.parametrize("key", ["absent", "data/absent", "data/present/absent", "data/presen", "data"])
    def test_an_absent_object_is_not_found(self, store: Store, raw: RawAccess, key: str) -> None:
        raw.write("data/present", b"x")
        for call in _readers(store, key):
            with pytest.raises(NotFoundError) as caught:
                call()
            assert caught.value.key == key

    def test_everything_is_absent_in_an_empty_store(self, store: Store) -> None:
        for call in _readers(store, "commits/step-1.0.json"):
            with pytest.raises(NotFoundError):
                call()

    # list

    def test_list_of_nothing_is_empty(self, store: Store, raw: RawAccess) -> None:
        assert list(store.list("")) == []
        raw.write("data/a", b"x")
        assert list(store.list("commits/")) == []
        assert list(store.list("data/a/")) == []
        assert list(store.list("data/b")) == []

    def test_list_finds_a_string_prefix_not_a_folder(self, store: Store, raw: RawAccess) -> None:
        for key in ("c/a", "c/ab", "c/abc/d", "c/b", "ca"):
            raw.write(key, b"x")
        assert _keys(store, "c/a") == ["c/a", "c/ab", "c/abc/d"]
        assert _keys(store, "c/ab") == ["c/ab", "c/abc/d"]
        assert _keys(store, "c/") == ["c/a", "c/ab", "c/abc/d", "c/b"]
        assert _keys(store, "c") == ["c/a", "c/ab", "c/abc/d", "c/b", "ca"]

    def test_list_is_in_order_of_the_whole_key(self, store: Store, raw: RawAccess) -> None:
        keys = ["a/b", "a-b", "a.b", "a/b-c", "a0", "a/-/z", "a/b.c/d", "A", "a=", "a+", "a_", "a/b+/c", "Z/z", "a-/b"]
        for key in keys:
            raw.write(key, b"x")
        assert _keys(store, "") == sorted(keys)

    def test_list_starts_after_a_key(self, store: Store, raw: RawAccess) -> None:
        keys = sorted(["a-b", "a.b", "a/b/1", "a/b/2", "a/c", "a0", "b"])
        for key in keys:
            raw.write(key, b"x")
        for after in [
            "",
            "0",
            "a",
            "a-",
            "a/",
            "a/b",
            "a/b/",
            "a/b/1",
            "a/b/15",
            "a/b/zz",
            "a/bb",
            "a0",
            "b",
            "c",
            *keys,
        ]:
            assert _keys(store, "", after) == [key for key in keys if key > after], after
            assert _keys(store, "a/", after) == [key for key in keys if key > after and key.startswith("a/")], after

    def test_list_reports_sizes(self, store: Store, raw: RawAccess) -> None:
        for size in (0, 1, 5000):
            raw.write(f"data/{size:04d}", bytes(size))
        infos: list[ObjectInfo] = list(store.list("data/"))
        assert [info.size for info in infos] == [0, 1, 5000]
        assert all(info.crc32c in {None, crc32c(bytes(info.size))} for info in infos)

    def test_list_sees_completed_writes_and_deletes(self, store: Store) -> None:
        for number in range(5):
            store.put(f"data/p{number}", BytesSource(b"x"))
            store.create(f"data/c{number}", b"x")
            assert {f"data/p{number}", f"data/c{number}"} <= set(_keys(store, "data/"))
        store.delete("data/p0")
        assert "data/p0" not in _keys(store, "data/")

    def test_list_goes_on_beyond_one_page(self, store: Store, raw: RawAccess) -> None:
        keys = [f"commits/step-{number}.0.json" for number in range(self.list_count)]
        for key in keys:
            raw.write(key, b"x")
        assert _keys(store, "commits/") == sorted(keys)
        middle = sorted(keys)[len(keys) // 2]
        assert _keys(store, "commits/", middle) == sorted(keys)[len(keys) // 2 + 1 :]

    def test_list_of_an_impossible_prefix_is_empty(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/a", b"x")
        for prefix in ("../", "/", "data//", "./data", "data/../data/", ".hidden"):
            assert list(store.list(prefix)) == [], prefix

    # delete

    def test_delete_removes_one_object(self, store: Store, raw: RawAccess) -> None:
        for key in ("data/a", "data/ab", "data/b"):
            raw.write(key, b"x")
        store.delete("data/a")
        assert raw.read("data/a") is None
        assert _keys(store, "") == ["data/ab", "data/b"]

    def test_delete_of_an_absent_object_succeeds(self, store: Store, raw: RawAccess) -> None:
        store.delete("data/never/was")
        raw.write("data/a", b"x")
        store.delete("data/a")
        store.delete("data/a")
        store.delete("data/a/below")
        assert list(store.list("")) == []

    def test_delete_of_a_prefix_removes_nothing(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/a/b", b"x")
        store.delete("data/a")
        store.delete("data")
        assert raw.read("data/a/b") == b"x"

    # keys

    @pytest.mark.parametrize(
        "key",
        [
            "x",
            "a=b",
            "a+b",
            "-",
            "_",
            "=",
            "+x",
            "UPPER/lower",
            "trailing.",
            "a..b",
            "a.tmp",
            "data/step-1/" + "0" * 32 + "/rank-00000-00000.safetensors",
            "con",
            "/".join(["s" * 128] * 6 + ["e" * 126]),
            "n" * 255,
        ],
    )
    def test_a_valid_key_works_with_every_verb(self, store: Store, raw: RawAccess, key: str) -> None:
        store.create(key, b"created")
        assert raw.read(key) == b"created"
        store.put(key, BytesSource(b"replaced"))
        assert store.read(key) == b"replaced"
        assert store.head(key).size == 8
        assert _keys(store, "") == [key] == _keys(store, key)
        store.delete(key)
        assert raw.read(key) is None

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "/x",
            "x/",
            "a//b",
            "../x",
            "a/../b",
            ".",
            "./x",
            ".hid",
            "a/.hid",
            "a b",
            "a\nb",
            "a\0b",
            "é",
            "a" * 901,
        ],
    )
    def test_an_invalid_key_is_refused(self, store: Store, key: str) -> None:
        calls: list[Callable[[], Any]] = [
            *_readers(store, key),
            lambda: store.put(key, BytesSource(b"x")),
            lambda: store.create(key, b"x"),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(FormatError):
                call()
        assert list(store.list("")) == []

    # life

    def test_a_closed_store_can_be_used_again(self, store: Store) -> None:
        with store as entered:
            assert entered is store
            store.create("x", b"1")
        store.close()
        store.close()
        assert store.read("x") == b"1"
        store.put("y", BytesSource(b"2"))
        assert _keys(store, "") == ["x", "y"]

    def test_a_pickled_store_is_the_same_store(self, store: Store) -> None:
        if not self.picklable:
            with pytest.raises(TypeError):
                pickle.dumps(store)
            return
        store.create("x", b"1")
        copy: Store = pickle.loads(pickle.dumps(store))  # noqa: S301 - made on the same line
        assert copy.url == store.url
        assert copy.read("x") == b"1"
        with pytest.raises(AlreadyExistsError):
            copy.create("x", b"2")
        copy.put("y", BytesSource(b"2"))
        assert store.read("y") == b"2"

    def test_many_threads_share_one_store(self, store: Store) -> None:
        def work(worker: int) -> None:
            chosen = random.Random(worker)
            for number in range(15):
                key = f"data/w{worker}/n{number}"
                data = chosen.randbytes(chosen.randrange(1, 3000))
                store.put(key, BytesSource(data))
                assert store.read(key) == data
                assert store.head(key).size == len(data)
                assert key in _keys(store, f"data/w{worker}/")
                if number % 3 == 0:
                    store.delete(key)

        with ThreadPoolExecutor(_RACERS) as pool:
            list(pool.map(work, range(_RACERS)))
        assert len(_keys(store, "data/")) == _RACERS * 10


def _keys(store: Store, prefix: str, start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after)]


def _readers(store: Store, key: str) -> list[Callable[[], Any]]:
    return [
        lambda: store.read(key),
        lambda: store.read(key, 0, 1),
        lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        lambda: store.head(key),
    ]


def _body(round_: int, racer: int) -> bytes:
    return f"round {round_} racer {racer} ".encode() * 100


def _race(store: Store, wait: Callable[[], Any], racer: int) -> list[bool]:
    """One racer's rounds: which of them it won."""
    won = []
    for round_ in range(_ROUNDS):
        wait()
        try:
            store.create(f"commits/race-{round_}.0.json", _body(round_, racer))
            won.append(True)
        except AlreadyExistsError:
            won.append(False)
        # Whoever has lost must be able to read the whole winner at once.
        seen = store.read(f"commits/race-{round_}.0.json")
        assert seen in {_body(round_, other) for other in range(_RACERS)}, seen[:80]
    return won


def _race_in_process(pickled: bytes, barrier: Any, racer: int, replies: Any) -> None:
    store: Store = pickle.loads(pickled)  # noqa: S301 - from the parent test
    replies.put((racer, _race(store, barrier.wait, racer)))


def _assert_one_winner(won: list[list[bool]], raw: RawAccess) -> None:
    for round_ in range(_ROUNDS):
        winners = [racer for racer, rounds in enumerate(won) if rounds[round_]]
        assert len(winners) == 1, f"round {round_} has winners {winners}"
        assert raw.read(f"commits/race-{round_}.0.json") == _body(round_, winners[0])
