"""The reading half of the store contract as tests; `txstore.testing.conformance` adds the writing half."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.errors import NotFoundError
from txstore.store import BytesSource, ObjectInfo, Store


class RawAccess(Protocol):
    """The same objects, by another way than the code under test."""

    def write(self, key: str, data: bytes) -> None:
        """Place an object."""

    def read(self, key: str) -> bytes | None:
        """The object's bytes, or None if there is none."""


class ReadConformance:
    """What `read`, `read_into`, `head` and `list` of every store must do."""

    list_count = 1100
    """Objects in the long listing: more than one page of every service."""

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
        for call in readers_of(store, key):
            with pytest.raises(NotFoundError) as caught:
                call()
            assert caught.value.key == key

    def test_everything_is_absent_in_an_empty_store(self, store: Store) -> None:
        for call in readers_of(store, "commits/step-1.0.json"):
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
        assert keys_of(store, "c/a") == ["c/a", "c/ab", "c/abc/d"]
        assert keys_of(store, "c/ab") == ["c/ab", "c/abc/d"]
        assert keys_of(store, "c/") == ["c/a", "c/ab", "c/abc/d", "c/b"]
        assert keys_of(store, "c") == ["c/a", "c/ab", "c/abc/d", "c/b", "ca"]

    def test_list_is_in_order_of_the_whole_key(self, store: Store, raw: RawAccess) -> None:
        keys = ["a/b", "a-b", "a.b", "a/b-c", "a0", "a/-/z", "a/b.c/d", "A", "a=", "a+", "a_", "a/b+/c", "Z/z", "a-/b"]
        for key in keys:
            raw.write(key, b"x")
        assert keys_of(store, "") == sorted(keys)

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
            assert keys_of(store, "", after) == [key for key in keys if key > after], after
            assert keys_of(store, "a/", after) == [key for key in keys if key > after and key.startswith("a/")], after

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
            assert {f"data/p{number}", f"data/c{number}"} <= set(keys_of(store, "data/"))
        store.delete("data/p0")
        assert "data/p0" not in keys_of(store, "data/")

    def test_list_goes_on_beyond_one_page(self, store: Store, raw: RawAccess) -> None:
        keys = [f"commits/step-{number}.0.json" for number in range(self.list_count)]
        for key in keys:
            raw.write(key, b"x")
        assert keys_of(store, "commits/") == sorted(keys)
        middle = sorted(keys)[len(keys) // 2]
        assert keys_of(store, "commits/", middle) == sorted(keys)[len(keys) // 2 + 1 :]

    def test_list_of_an_impossible_prefix_is_empty(self, store: Store, raw: RawAccess) -> None:
        raw.write("data/a", b"x")
        for prefix in ("../", "/", "data//", "./data", "data/../data/", ".hidden"):
            assert list(store.list(prefix)) == [], prefix


def keys_of(store: Store, prefix: str, start_after: str = "") -> list[str]:
    """The keys of a listing."""
    return [info.key for info in store.list(prefix, start_after)]


def readers_of(store: Store, key: str) -> list[Callable[[], Any]]:
    """Every way to ask for one object."""
    return [
        lambda: store.read(key),
        lambda: store.read(key, 0, 1),
        lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        lambda: store.head(key),
    ]
