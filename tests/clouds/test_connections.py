"""Connections are used again: opening one costs more than most requests."""

from __future__ import annotations

import os

import pytest

from tests.servers.fixtures import Place
from txstore import open_store
from txstore.errors import AlreadyExistsError, NotFoundError
from txstore.store import BytesSource
from txstore.testing.proxy import LostReplyProxy

SHARD = os.urandom((2 << 20) + 1)


def test_one_connection_serves_all_that_one_thread_does(place: Place) -> None:
    buffer = bytearray(len(SHARD))
    with LostReplyProxy(place.upstream) as proxy, open_store(place.url, **place.options_by(proxy.url)) as store:
        store.put("shard", BytesSource(SHARD))
        store.close()
        before = proxy.connections
        for _ in range(3):
            assert store.read("shard") == SHARD
            assert store.read_into("shard", 0, memoryview(buffer)) == len(SHARD)
            assert buffer == SHARD
            assert store.read_into("shard", 5, memoryview(buffer)[:7]) == 7
            assert buffer[:7] == SHARD[5:12]
            assert store.read("shard", len(SHARD) + 5, 1) == b""
            assert store.head("shard").size == len(SHARD)
            store.put("document", BytesSource(b"x"))
            store.delete("absent")
            with pytest.raises(NotFoundError):
                store.read("absent")
            with pytest.raises(AlreadyExistsError):
                store.create("document", b"y")
            assert [info.key for info in store.list("")] == ["document", "shard"]
        # fake-gcs-server ends a connection after the answer to a range beyond the end.
        ended = 3 if place.url.startswith("gs:") else 0
        assert proxy.connections == before + 1 + ended
