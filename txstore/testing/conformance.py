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
from typing import Any

import pytest

from txstore.checksum import BLOCK_BYTES, Buffer, crc32c
from txstore.errors import AlreadyExistsError, FormatError
from txstore.store import BytesSource, ChecksummedSource, Source, Store
from txstore.testing.reading import RawAccess, ReadConformance, keys_of, readers_of

_RACERS = 8
_ROUNDS = 20
_PROCESSES = 3


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


class StoreConformance(ReadConformance):
    """What every store must do. Each test's name is a sentence of the contract."""

    picklable = True
    """Whether the store can be pickled into another process that sees the same objects."""

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

    # delete

    def test_delete_removes_one_object(self, store: Store, raw: RawAccess) -> None:
        for key in ("data/a", "data/ab", "data/b"):
            raw.write(key, b"x")
        store.delete("data/a")
        assert raw.read("data/a") is None
        assert keys_of(store, "") == ["data/ab", "data/b"]

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
        assert keys_of(store, "") == [key] == keys_of(store, key)
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
            *readers_of(store, key),
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
        assert keys_of(store, "") == ["x", "y"]

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
                assert key in keys_of(store, f"data/w{worker}/")
                if number % 3 == 0:
                    store.delete(key)

        with ThreadPoolExecutor(_RACERS) as pool:
            list(pool.map(work, range(_RACERS)))
        assert len(keys_of(store, "data/")) == _RACERS * 10


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
