"""Reads whose body breaks: taken up after the last good byte, of the same version of the object."""

import random

import pytest

from txstore.errors import StoreError, TransientError
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import BytesSource
from txstore.testing.proxy import Answer, Rule

DATA = random.Random(3).randbytes(3 << 20)
KEY = "data/object"
GET = "data/object"


@pytest.fixture
def stored(direct):
    direct.put(KEY, BytesSource(DATA))


def ranges(proxy):
    gets = [request for request in proxy.requests if request.method == "GET"]
    return [{name.lower(): value for name, value in request.headers.items()} for request in gets]


@pytest.mark.parametrize("reply", ["truncate", "truncate-stall"])
@pytest.mark.parametrize(
    ("start", "size"), [(0, None), (1000, None), (0, len(DATA)), (1000, 1 << 20), (2 << 20, 5 << 20)]
)
def test_a_broken_body_is_taken_up_where_it_broke(stored, through, proxy, reply, start, size):
    remote = through(reply)
    proxy.add(Rule("GET", GET, reply=reply))
    wanted = DATA[start : None if size is None else start + size]
    assert remote.read(KEY, start, size) == wanted
    first, second = ranges(proxy)
    begin = int(second["range"].removeprefix("bytes=").partition("-")[0])
    assert start < begin <= start + len(wanted) // 2 + 1
    assert "if-match" not in first
    assert second["if-match"] == f'"{etag(remote)}"'
    assert sum(remote.retries.values()) == 1


def etag(store):
    import hashlib

    return hashlib.md5(DATA).hexdigest()


def test_a_body_that_breaks_again_and_again_arrives(stored, remote, proxy):
    proxy.add(Rule("GET", GET, reply="truncate", times=3))
    buffer = bytearray(len(DATA) + 10)
    with memoryview(buffer)[5:-5] as view:
        assert remote.read_into(KEY, 0, view) == len(DATA)
    assert bytes(buffer) == bytes(5) + DATA + bytes(5)
    assert proxy.count("GET", GET) == 4


def test_a_body_that_never_arrives_is_given_up(stored, remote, proxy):
    proxy.add(Rule("GET", GET, reply="truncate", times=None))
    with pytest.raises(TransientError):
        remote.read(KEY)
    assert proxy.count("GET", GET) == 4


def test_a_replaced_object_is_read_again_from_its_start(stored, direct, remote, proxy):
    new = DATA[::-1]
    proxy.add(Rule("GET", GET, reply="truncate", call=lambda: direct.put(KEY, BytesSource(new))))
    store = RetryingStore(remote, RetryPolicy(first_wait_s=0, longest_wait_s=0), sleep=lambda _s: None)
    assert store.read(KEY) == new


@pytest.mark.parametrize("length", [len(DATA), len(DATA) + 100, 100])
def test_a_replaced_object_is_never_mixed_with_the_new_one(stored, direct, remote, proxy, length):
    new = random.Random(length).randbytes(length)
    proxy.add(Rule("GET", GET, reply="truncate", call=lambda: direct.put(KEY, BytesSource(new))))
    buffer = bytearray(len(DATA))
    store = RetryingStore(remote, RetryPolicy(first_wait_s=0, longest_wait_s=0), sleep=lambda _s: None)
    count = store.read_into(KEY, 0, memoryview(buffer))
    assert bytes(buffer[:count]) == new[: len(DATA)]


def test_a_store_that_ignores_ranges_is_noticed(stored, remote, proxy):
    whole = Answer(200, DATA, {"ETag": '"x"'})
    proxy.add(Rule("GET", GET, reply=whole, times=None))
    assert remote.read(KEY, 0, 10) == DATA[:10]
    with pytest.raises(StoreError, match="ignores ranges"):
        remote.read(KEY, 5, 10)


def test_another_range_than_asked_for_is_not_taken(stored, remote, proxy):
    wrong = Answer(206, DATA[:10], {"ETag": '"x"', "Content-Range": f"bytes 0-9/{len(DATA)}"})
    proxy.add(Rule("GET", GET, reply=wrong))
    with pytest.raises(TransientError, match="another range"):
        remote.read(KEY, 5, 10)


@pytest.mark.parametrize("reply", ["reset", "garble", "stall", "close", Answer(500), Answer(503)], ids=str)
def test_a_read_that_never_began_is_transient(stored, through, proxy, reply):
    remote = through(reply)
    proxy.add(Rule("GET", GET, reply=reply), Rule("HEAD", GET, reply=reply))
    for call in (lambda: remote.read(KEY), lambda: remote.head(KEY)):
        with pytest.raises(TransientError):
            call()
    assert remote.read(KEY, 1, 3) == DATA[1:4]
    assert remote.head(KEY).size == len(DATA)


@pytest.mark.parametrize("reply", ["reset", "garble", "truncate", "garble-body", Answer(500)], ids=str)
def test_a_broken_listing_is_an_error_and_never_shorter(direct, remote, proxy, reply):
    keys = [f"data/{number:02}" for number in range(30)]
    for key in keys:
        direct.put(key, BytesSource(b"x"))
    proxy.add(Rule("GET", "list-type=2", reply=reply))
    with pytest.raises(TransientError):
        list(remote.list(""))
    proxy.add(Rule("GET", "list-type=2", reply=reply))
    store = RetryingStore(remote, RetryPolicy(first_wait_s=0, longest_wait_s=0), sleep=lambda _s: None)
    assert [info.key for info in store.list("")] == keys
