"""Replies that are lost, late or false, between the GCS backend and a real server.

Every create is one POST: the proxy counts them, so an SDK that repeats requests by itself would be seen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from tests.servers.fake_gcs import FakeGcs
from txstore import catalog, root
from txstore.checksum import BLOCK_BYTES
from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CommitUnknown,
    ConfigError,
    Conflict,
    NotFoundError,
    OutcomeUnknownError,
    TransactionError,
    TransientError,
)
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import BytesSource, ChecksummedSource
from txstore.testing import saves
from txstore.testing.lost_replies import LostReplies, Wire
from txstore.testing.proxy import Answer, LostReplyProxy, Rule
from txstore_gcs import GcsStore, open_store

ATTEMPTS = 4
POLICY = RetryPolicy(attempts=ATTEMPTS, deadline_s=60)
KEY = "commits/step-1.0.json"
AT_KEY = "commits%2Fstep-1.0.json"
OURS, OTHERS = b'{"txn":"ours"}', b'{"txn":"other"}'
LOSSES = ["reset", "close", "stall", "truncate", "truncate-stall", "garble", "garble-body"]
SOME = ["reset", "stall", "garble-body", Answer(503)]
UNCLEAR = [*LOSSES, *(Answer(status, b"<html>") for status in (408, 429, 500, 502, 503, 504))]


def name_of(reply: object) -> str:
    return str(reply.status) if isinstance(reply, Answer) else str(reply)


@pytest.fixture
def proxy(gcs_server: FakeGcs) -> Iterator[LostReplyProxy]:
    with LostReplyProxy(gcs_server.url) as proxy:
        yield proxy


@pytest.fixture
def bare(proxy: LostReplyProxy, gcs_prefix: str) -> Iterator[GcsStore]:
    options = {"endpoint_url": proxy.url, "token": "anon", "read_timeout_s": 0.5, "window_bytes": BLOCK_BYTES}
    with open_store(f"gs://bucket/{gcs_prefix}", **options) as store:
        yield store


@pytest.fixture
def waits() -> list[float]:
    return []


@pytest.fixture
def store(bare: GcsStore, waits: list[float]) -> RetryingStore:
    return RetryingStore(bare, POLICY, sleep=waits.append)


@pytest.fixture
def direct(gcs_server: FakeGcs, gcs_prefix: str) -> Iterator[GcsStore]:
    """The same store, past the proxy."""
    with open_store(f"gs://bucket/{gcs_prefix}", endpoint_url=gcs_server.url, token="anon") as store:
        yield store


class GcsWire(Wire):
    throttled = Answer(429, b'{"error": {"errors": [{"reason": "rateLimitExceeded"}]}}')
    undecided = Answer(409)

    def create(self, key, **what):
        return Rule("POST", f"{quote(key, safe='')}.*ifGenerationMatch=0", **what)

    def read(self, key, **what):
        return Rule("GET", quote(key, safe=""), **what)


class TestGcs(LostReplies):
    wire = GcsWire()

    @pytest.fixture
    def upstream(self, gcs_server):
        return gcs_server.url

    @pytest.fixture
    def opener(self, gcs_prefix):
        def open_at(endpoint, read_timeout_s):
            return open_store(
                f"gs://bucket/{gcs_prefix}", endpoint_url=endpoint, token="anon", read_timeout_s=read_timeout_s
            )

        return open_at


# create


@pytest.mark.parametrize("reply", UNCLEAR, ids=name_of)
def test_one_attempt_is_one_request_and_an_unclear_answer_is_unknown(reply, proxy, bare, direct):
    proxy.add(Rule("POST", AT_KEY, reply=reply))
    with pytest.raises(OutcomeUnknownError):
        bare.create(KEY, OURS)
    assert proxy.count("POST") == proxy.count() == 1
    assert direct.read(KEY) == OURS


@pytest.mark.parametrize("reply", UNCLEAR, ids=name_of)
def test_a_create_whose_reply_is_lost_has_won(reply, proxy, store, direct):
    proxy.add(Rule("POST", AT_KEY, reply=reply))
    store.create(KEY, OURS)
    assert proxy.count("POST") == 2
    assert direct.read(KEY) == OURS
    assert sum(store.retries.values()) == 1


@pytest.mark.parametrize("reply", SOME, ids=name_of)
def test_a_create_that_was_never_applied_is_repeated(reply, proxy, store, direct):
    proxy.add(Rule("POST", AT_KEY, forward="never", reply=reply, times=2))
    store.create(KEY, OURS)
    assert proxy.count("POST") == 3
    assert direct.read(KEY) == OURS


@pytest.mark.parametrize("reply", SOME, ids=name_of)
def test_losing_with_a_lost_reply_is_losing(reply, proxy, store, direct):
    direct.create(KEY, OTHERS)
    proxy.add(Rule("POST", AT_KEY, reply=reply))
    with pytest.raises(AlreadyExistsError):
        store.create(KEY, OURS)
    assert direct.read(KEY) == OTHERS


def test_when_every_reply_is_lost_the_last_look_decides(proxy, store):
    proxy.add(Rule("POST", AT_KEY, reply="reset", times=None))
    store.create(KEY, OURS)
    assert proxy.count("POST") == ATTEMPTS


def test_when_the_reads_fail_too_it_is_unknown(proxy, store, direct):
    proxy.add(Rule("POST", AT_KEY, reply="reset", times=None), Rule("GET", AT_KEY, reply=Answer(503), times=None))
    with pytest.raises(OutcomeUnknownError):
        store.create(KEY, OURS)
    assert proxy.count("POST") == ATTEMPTS
    assert direct.read(KEY) == OURS


@pytest.mark.parametrize("status", [401, 403])
def test_a_clear_refusal_does_not_undo_an_unclear_answer(status, proxy, store, direct):
    proxy.add(
        Rule("POST", AT_KEY, reply="reset"),
        Rule("", AT_KEY, forward="never", reply=Answer(status), times=None),
    )
    with pytest.raises(OutcomeUnknownError):
        store.create(KEY, OURS)
    assert direct.read(KEY) == OURS
    assert proxy.count("DELETE") == 0


def test_a_clear_refusal_alone_is_not_repeated(proxy, store):
    proxy.add(Rule("POST", AT_KEY, forward="never", reply=Answer(403), times=None))
    with pytest.raises(AccessDeniedError):
        store.create(KEY, OURS)
    assert proxy.count("POST") == 1


@pytest.mark.parametrize("winner", [OTHERS, OURS], ids=["another", "our retry"])
def test_a_request_that_lands_late_changes_nothing(winner, proxy, store, bare, direct):
    proxy.add(Rule("POST", AT_KEY, forward="later", reply="stall"))
    with pytest.raises(OutcomeUnknownError):
        bare.create(KEY, OURS)
    direct.create(KEY, winner)
    assert proxy.release() == [412]
    assert direct.read(KEY) == winner
    if winner == OURS:
        store.create(KEY, OURS)
    else:
        with pytest.raises(AlreadyExistsError):
            store.create(KEY, OURS)


def test_a_request_that_lands_before_our_retry_is_ours(proxy, store, direct):
    proxy.add(Rule("POST", AT_KEY, forward="later", reply="stall"))
    original = store.inner.create

    def create(key, data):
        proxy.release()
        original(key, data)

    store.inner.create = create
    store.create(KEY, OURS)
    assert direct.read(KEY) == OURS


def test_a_reply_about_other_bytes_is_no_success(proxy, bare):
    wrong = {"name": "x", "size": str(len(OURS)), "crc32c": "AAAAAA=="}
    proxy.add(Rule("POST", AT_KEY, reply=Answer(200, json.dumps(wrong).encode())))
    with pytest.raises(OutcomeUnknownError, match="other bytes"):
        bare.create(KEY, OURS)


# throttling


def test_a_storm_of_429_is_never_a_conflict(proxy, store, direct):
    proxy.add(Rule("POST", AT_KEY, forward="never", reply=Answer(429, headers={"Retry-After": "3"}), times=None))
    with pytest.raises(TransactionError) as caught:
        saves.save(store, "step-1", [b"shard"])
    assert type(caught.value) is CommitUnknown
    assert not isinstance(caught.value, Conflict)
    with pytest.raises(NotFoundError):
        direct.read(KEY)
    assert any(info.key.endswith(".safetensors") for info in direct.list("data/"))
    proxy.clear()
    decision = saves.save(store, "step-1", [b"again"])
    assert saves.load(direct, decision) == [b"again"]


def test_the_store_is_given_the_time_it_asks_for(proxy, store, waits):
    reply = Answer(429, b'{"error": {"errors": [{"reason": "rateLimitExceeded"}]}}', headers={"Retry-After": "30"})
    proxy.add(Rule("POST", AT_KEY, forward="never", reply=reply, times=1))
    store.create(KEY, OURS)
    assert waits == [30.0]
    assert store.retries == {"429 rateLimitExceeded": 1}


# put


@pytest.mark.parametrize("forward", ["now", "never"])
@pytest.mark.parametrize("reply", SOME, ids=name_of)
def test_a_put_whose_reply_is_lost_is_repeated_whole(reply, forward, proxy, store, direct):
    data = random.Random(1).randbytes(2 * BLOCK_BYTES + 5)
    proxy.add(Rule("POST", "shard", forward=forward, reply=reply))
    info = store.put("data/shard", ChecksummedSource(BytesSource(data)))
    assert (info.size, direct.read("data/shard")) == (len(data), data)
    assert proxy.count("POST") == 2


@pytest.mark.parametrize("wrong", [{}, {"crc32c": "AAAAAA=="}, {"size": "1"}, {"size": "x"}, {"crc32c": "??"}])
def test_a_put_is_done_only_when_the_service_confirms_the_bytes(wrong, proxy, store):
    data = bytes(2 * BLOCK_BYTES)
    reply = {"name": "x", "size": str(len(data)), **wrong}
    proxy.add(Rule("POST", "shard", reply=Answer(200, json.dumps(reply).encode())))
    store.put("data/shard", BytesSource(data))
    assert proxy.count("POST") == 2


# read


@pytest.mark.parametrize("loss", ["truncate", "truncate-stall"])
def test_a_broken_body_is_taken_up_at_the_last_good_byte(loss, proxy, bare, direct):
    data = random.Random(2).randbytes(6 * BLOCK_BYTES + 9)
    direct.put("data/shard", BytesSource(data))
    proxy.add(Rule("GET", "shard", reply=loss, times=2))
    buffer = bytearray(len(data) - 7)
    assert bare.read_into("data/shard", 7, memoryview(buffer)) == len(buffer)
    assert bytes(buffer) == data[7:]
    ranges = [request.headers["Range"] for request in proxy.requests]
    starts = [int(text.removeprefix("bytes=").partition("-")[0]) for text in ranges]
    assert len(starts) == 3
    assert starts[0] == 7
    assert 7 + 2 * BLOCK_BYTES < starts[1] < starts[2]


def test_a_service_that_stumbles_on_the_way_is_asked_again(proxy, bare, direct):
    data = random.Random(2).randbytes(6 * BLOCK_BYTES)
    direct.put("data/shard", BytesSource(data))
    proxy.add(
        Rule("GET", "shard", reply="truncate"),
        Rule("GET", "shard", forward="never", reply=Answer(503), times=2),
    )
    buffer = bytearray(len(data))
    assert bare.read_into("data/shard", 0, memoryview(buffer)) == len(data)
    assert bytes(buffer) == data
    assert proxy.count("GET") == 4


def test_the_outer_layer_repeats_a_read_that_never_began(proxy, bare, direct):
    direct.put("data/shard", BytesSource(b"x"))
    proxy.add(Rule("GET", "shard", forward="never", reply=Answer(503), times=None))
    with pytest.raises(TransientError):
        bare.read("data/shard")
    assert proxy.count("GET") == 1


@pytest.mark.parametrize("new", [b"n" * 6 * BLOCK_BYTES, None], ids=["replaced", "deleted"])
def test_an_object_that_changes_on_the_way_is_never_mixed(new, proxy, bare, direct):
    direct.put("data/shard", BytesSource(b"o" * 6 * BLOCK_BYTES))
    proxy.add(Rule("GET", "shard", reply="truncate"))
    pieces = bare._pieces("data/shard", 0, None, BLOCK_BYTES)
    assert next(pieces) == b"o" * BLOCK_BYTES
    if new is None:
        direct.delete("data/shard")
    else:
        direct.put("data/shard", BytesSource(new))
    with pytest.raises(TransientError, match="replaced or removed"):
        list(pieces)


def test_a_server_that_names_no_version_is_not_gone_on_with(proxy, bare, direct):
    whole = bytes(6 * BLOCK_BYTES)
    direct.put("data/shard", BytesSource(whole))
    rest = Answer(206, b"x", {"Content-Range": f"bytes {4 * BLOCK_BYTES}-{len(whole) - 1}/{len(whole)}"})
    proxy.add(Rule("GET", "shard", reply="truncate"), Rule("GET", "shard", forward="never", reply=rest, times=None))
    with pytest.raises(TransientError, match="names no version"):
        bare.read_into("data/shard", 0, memoryview(bytearray(len(whole))))


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {}),
        (206, {}),
        (206, {"Content-Range": "bytes 0-9/20"}),
        (206, {"Content-Range": "bytes 5-9/*"}),
        (206, {"Content-Range": "bytes 5-7/20"}),
        (206, {"Content-Range": "items 5-9/20"}),
    ],
)
def test_an_answer_that_is_another_range_is_not_taken(status, headers, proxy, bare):
    headers = {"x-goog-generation": "1", **headers}
    proxy.add(Rule("GET", "shard", forward="never", reply=Answer(status, b"x" * 10, headers), times=None))
    with pytest.raises(TransientError, match="not the range"):
        bare.read("data/shard", 5, 10)


@pytest.mark.parametrize("loss", LOSSES)
def test_looking_and_listing_are_repeated(loss, proxy, store, direct, monkeypatch):
    monkeypatch.setattr("txstore_gcs.store._PAGE", 2)
    for number in range(5):
        direct.put(f"data/{number}", BytesSource(b"x"))
    for skip in (0, 1):
        proxy.clear()
        proxy.add(Rule("GET", "prefix=", reply=loss, skip=skip))
        assert [info.key for info in store.list("data/")] == [f"data/{number}" for number in range(5)]
        assert proxy.count("GET") == 4
    proxy.clear()
    proxy.add(Rule("GET", "data%2F0", reply=loss))
    assert store.head("data/0").size == 1
    assert proxy.count("GET") == 2


@pytest.mark.parametrize("body", [b"{}", b'{"message": "hello"}', b'{"kind": "storage#object"}', b"[]", b"", b"<html>"])
def test_what_is_no_listing_is_not_an_empty_one(body, proxy, bare):
    proxy.add(Rule("GET", "prefix=", forward="never", reply=Answer(200, body), times=None))
    with pytest.raises(TransientError, match="garbled"):
        list(bare.list(""))
    with pytest.raises(TransientError, match="garbled"):
        bare.head("absent")


@pytest.mark.parametrize("loss", [*LOSSES, Answer(503)], ids=name_of)
def test_a_delete_whose_reply_is_lost_is_repeated(loss, proxy, store, direct):
    direct.put("data/x", BytesSource(b"x"))
    proxy.add(Rule("DELETE", "data", reply=loss))
    store.delete("data/x")
    assert list(direct.list("")) == []


# transactions


def test_thirty_two_writers_of_one_checkpoint_commit_once(gcs_server, gcs_prefix, direct):
    direct.put("txstore.json", BytesSource(direct_format(direct)))

    def write(number: int) -> str:
        url = f"gs://bucket/{gcs_prefix}"
        with open_store(url, endpoint_url=gcs_server.url, token="anon") as mine:
            try:
                return saves.save(RetryingStore(mine), "step-1", [f"writer {number}".encode()]).txn
            except TransactionError as error:
                return type(error).__name__

    with ThreadPoolExecutor(32) as pool:
        outcomes = list(pool.map(write, range(32)))
    won = [text for text in outcomes if len(text) == 32]
    assert len(won) == 1, outcomes
    assert set(outcomes) - set(won) <= {"Conflict", "AlreadyCommitted"}
    assert "Conflict" in outcomes
    assert catalog.newest(direct).txn == won[0]
    assert [info.key for info in direct.list("commits/")] == [KEY]


def direct_format(store: GcsStore) -> bytes:
    """What the first writer would write."""
    root.ensure_store(store)
    return store.read("txstore.json")


def test_a_missing_bucket_is_not_a_missing_object(gcs_server):
    with open_store("gs://no-such-bucket/x", endpoint_url=gcs_server.url, token="anon") as store:
        calls = [
            lambda: store.read("k"),
            lambda: store.read_into("k", 0, memoryview(bytearray(3))),
            lambda: store.head("k"),
            lambda: list(store.list("")),
            lambda: store.delete("k"),
            lambda: store.create("k", b"x"),
            lambda: store.put("k", BytesSource(b"x")),
            lambda: store.put("k", BytesSource(bytes(2 * BLOCK_BYTES))),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="no such bucket: no-such-bucket") as caught:
                call()
            assert "never creates buckets" in caught.value.next_step
        with pytest.raises(ConfigError, match="no such bucket"):
            catalog.entries(RetryingStore(store, POLICY))
