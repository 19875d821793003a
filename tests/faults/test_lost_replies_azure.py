"""Replies lost, delayed and falsified between the Azure backend and Azurite."""

from __future__ import annotations

import random
from dataclasses import replace
from urllib.parse import quote

import pytest

from tests.servers.azurite import ACCOUNT, KEY
from txstore.checksum import BLOCK_BYTES
from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
    TxStoreError,
)
from txstore.retry import Retrier, RetryPolicy
from txstore.store import BytesSource, ChecksummedSource
from txstore.testing.lost_replies import LOSSES, LostReplies, Wire, patient
from txstore.testing.proxy import Answer, LostReplyProxy, Rule
from txstore_azure import AzureConfig, AzureStore

DECISION = "commits/step-1.0.json"


def error(status, code="", **headers):
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()
    return Answer(status, body if code else b"<html>a proxy</html>", {"x-ms-request-id": "1", **headers})


class AzureWire(Wire):
    throttled = error(503, "ServerBusy", **{"Retry-After": "1"})
    denied = error(403, "AuthenticationFailed")
    refused = frozenset({409, 412})

    def create(self, key, **what):
        return Rule("PUT", key, header="If-None-Match", **what)

    def read(self, key, **what):
        return Rule("GET", key, **what)


def open_at(endpoint, prefix, read_timeout_s=60.0, **options):
    """A store that waits between the parts of a verb no more than between verbs."""
    config = AzureConfig.from_url(
        f"az://checkpoints/{prefix}",
        {"account_url": f"{endpoint}/{ACCOUNT}", "account_key": KEY, "read_timeout_s": read_timeout_s, **options},
    )
    retrier = Retrier(RetryPolicy(attempts=3, deadline_s=1e9, first_wait_s=0, longest_wait_s=0), sleep=lambda _s: None)
    return AzureStore(config, retrier=retrier)


class TestAzure(LostReplies):
    wire = AzureWire()

    @pytest.fixture
    def upstream(self, azure_server):
        return f"http://{azure_server.host_port}"

    @pytest.fixture
    def opener(self, azure_prefix):
        return lambda endpoint, read_timeout_s: open_at(endpoint, azure_prefix, read_timeout_s)


@pytest.fixture
def proxy(azure_server):
    with LostReplyProxy(f"http://{azure_server.host_port}") as proxy:
        yield proxy


@pytest.fixture
def store(proxy, azure_prefix):
    # Long enough for a busy machine: these tests count requests.
    with open_at(proxy.url, azure_prefix, 1.5, part_bytes=BLOCK_BYTES, workers=2) as store:
        yield store


@pytest.fixture
def direct(azure_server, azure_prefix):
    with open_at(f"http://{azure_server.host_port}", azure_prefix) as store:
        yield store


UNCLEAR = [*LOSSES, *(error(status) for status in (408, 429, 500, 502, 503, 504)), error(500, "OperationTimedOut")]


def name_of(value):
    return str(value.status) if isinstance(value, Answer) else str(value)


@pytest.mark.parametrize("reply", UNCLEAR, ids=name_of)
def test_an_unclear_answer_to_one_create_is_unknown_and_one_request(reply, proxy, store, direct):
    proxy.add(Rule("PUT", "commits", reply=reply, times=None))
    with pytest.raises(OutcomeUnknownError) as caught:
        store.create(DECISION, b"mine")
    assert caught.value.cause
    assert proxy.count() == 1
    assert direct.read(DECISION) == b"mine"


# 15: what means "exists", and what does not

TAKEN = [(409, "BlobAlreadyExists"), (412, "ConditionNotMet"), (412, "TargetConditionNotMet"), (412, "")]
REFUSED = [
    (409, "ContainerBeingDeleted", ConfigError),
    (409, "BlobImmutableDueToPolicy", AccessDeniedError),
    (409, "LeaseAlreadyPresent", AccessDeniedError),
    (412, "LeaseIdMissing", AccessDeniedError),
    (409, "PendingCopyOperation", StoreError),
    (409, "InvalidBlobType", StoreError),
    (409, "AccountBeingCreated", StoreError),
    (409, "", StoreError),
    (403, "AuthorizationPermissionMismatch", AccessDeniedError),
    (404, "ContainerNotFound", ConfigError),
]


@pytest.mark.parametrize(("status", "code"), TAKEN)
@pytest.mark.parametrize("in_header", [True, False], ids=["code in header", "code in body"])
def test_exists_is_read_back(status, code, in_header, proxy, store, direct):
    answer = error(status, code, **({"x-ms-error-code": code} if in_header and code else {}))
    proxy.add(Rule("PUT", "commits", reply=answer, forward="never", times=None))
    with pytest.raises(AlreadyExistsError):
        store.create(DECISION, b"mine")
    direct.create(DECISION, b"other")
    with pytest.raises(AlreadyExistsError):
        patient(store).create(DECISION, b"mine")
    patient(store).create(DECISION, b"other")  # our own record, if the bytes are ours


@pytest.mark.parametrize(("status", "code"), TAKEN)
def test_exists_though_nothing_is_there_is_asked_again(status, code, proxy, store, direct):
    proxy.add(Rule("PUT", "commits", reply=error(status, code), forward="never"))
    patient(store).create(DECISION, b"mine")
    assert direct.read(DECISION) == b"mine"
    assert proxy.count("PUT") == 2


@pytest.mark.parametrize(("status", "code", "kind"), REFUSED)
def test_any_other_conflict_is_a_refusal_and_never_exists(status, code, kind, proxy, store, direct):
    proxy.add(Rule("PUT", "commits", reply=error(status, code), forward="never", times=None))
    for attempt in (store, patient(store)):
        with pytest.raises(TxStoreError) as caught:
            attempt.create(DECISION, b"mine")
        assert isinstance(caught.value, kind)
        assert not isinstance(caught.value, AlreadyExistsError | OutcomeUnknownError | TransientError)
        assert code in str(caught.value)
    assert proxy.count("PUT") == 2
    with pytest.raises(NotFoundError):
        direct.read(DECISION)


def test_a_success_of_somebody_else_is_no_success(proxy, store, direct):
    for answer in (Answer(201), Answer(200, b"<html>welcome</html>"), Answer(204)):
        proxy.clear()
        proxy.add(Rule("PUT", "commits", reply=answer, forward="never"))
        with pytest.raises(OutcomeUnknownError):
            store.create(DECISION, b"mine")
    assert list(direct.list("")) == []


def test_blocks_are_never_staged_at_a_decision_key(proxy, store):
    # Azurite, and perhaps others, then say "exists" of a blob that is not there.
    store.create(DECISION, b"x" * 4096)
    (request,) = proxy.requests
    assert "comp=" not in request.target
    assert {name.lower(): value for name, value in request.headers.items()}["if-none-match"] == "*"


# Large objects

DATA = random.Random(7).randbytes(3 * BLOCK_BYTES + 5)


@pytest.mark.parametrize("reply", [*LOSSES, error(500, "InternalError"), error(503, "ServerBusy")], ids=name_of)
@pytest.mark.parametrize("request_", ["comp=block&", "comp=blocklist"])
def test_a_lost_reply_to_a_part_of_a_put_is_survived(request_, reply, proxy, store, direct):
    proxy.add(Rule("PUT", request_, reply=reply))
    source = ChecksummedSource(BytesSource(DATA))
    assert store.put("data/x", source).size == len(DATA)
    assert direct.read("data/x") == DATA
    # The part was repeated, not the whole. The emulator may end an idle connection, which repeats one more.
    assert 4 + (request_ == "comp=block&") <= proxy.count("PUT", "comp=block&") < 2 * 4
    assert sum(store._retrier.counts.by_cause().values()) == 1


def test_blocks_that_another_writer_dropped_are_uploaded_again(proxy, store, direct):
    # The service drops uncommitted blocks when somebody else writes the blob; Azurite keeps them.
    gone = Rule("PUT", "comp=blocklist", reply=error(400, "InvalidBlockList"), forward="never", times=None)
    proxy.add(gone)
    with pytest.raises(TransientError, match="InvalidBlockList"):
        store.put("data/x", BytesSource(DATA))
    assert list(direct.list("")) == []
    proxy.clear()
    proxy.add(replace(gone, times=3))
    assert patient(store).put("data/x", BytesSource(DATA)).size == len(DATA)
    assert direct.read("data/x") == DATA
    ids = [request.target.partition("blockid=")[2] for request in proxy.requests if "comp=block&" in request.target]
    assert len(set(ids)) == 8, "a block id was used twice"


def test_a_put_that_fails_for_good_leaves_nothing_and_stops(proxy, store, direct):
    proxy.add(Rule("PUT", "comp=block&", reply=error(403, "AuthorizationFailure"), forward="never", skip=1, times=None))
    big = bytes(40 * BLOCK_BYTES)
    with pytest.raises(AccessDeniedError):
        store.put("data/x", BytesSource(big))
    assert proxy.count("PUT", "comp=block&") < 10
    assert proxy.count("PUT", "comp=blocklist") == 0
    assert list(direct.list("")) == []


def test_a_blob_that_came_out_short_is_noticed(proxy, store, direct):
    short = Answer(200, b"", {"Content-Length": "5", "x-ms-request-id": "1"})
    proxy.add(Rule("HEAD", reply=short, times=None))
    with pytest.raises(OutcomeUnknownError, match="5 bytes instead of"):
        store.put("data/x", BytesSource(DATA))


# Reads


@pytest.mark.parametrize("reply", [*LOSSES, error(500, "InternalError"), error(503, "ServerBusy")], ids=name_of)
def test_a_read_goes_on_at_the_last_good_byte(reply, proxy, store, direct):
    direct.put("data/x", BytesSource(DATA))
    proxy.add(Rule("GET", reply=reply))
    buffer = bytearray(len(DATA) - 7)
    assert store.read_into("data/x", 7, memoryview(buffer)) == len(buffer)
    assert bytes(buffer) == DATA[7:]
    first, second = proxy.requests
    starts = [int(one.headers["x-ms-range"].removeprefix("bytes=").partition("-")[0]) for one in (first, second)]
    assert starts[0] == 7
    if reply in ("truncate", "truncate-stall"):
        assert starts[1] > BLOCK_BYTES
        assert second.headers["If-Match"] == direct_etag(first, direct)
    else:
        assert starts[1] == 7


def direct_etag(request, direct):
    from txstore_azure.client import Request

    with direct._client.stream(
        Request(method="HEAD", url=direct._blob("data/x").url, key="", doing="head", expect=200)
    ) as response:
        return response.headers["ETag"]


def test_a_read_never_mixes_two_versions(proxy, store, direct):
    old, new = b"o" * len(DATA), b"n" * (len(DATA) - BLOCK_BYTES)
    direct.put("latest.json", BytesSource(old))
    proxy.add(Rule("GET", reply="truncate", call=lambda: direct.put("latest.json", BytesSource(new))))
    assert store.read("latest.json") == new
    buffer = bytearray(len(old))
    direct.put("latest.json", BytesSource(old))
    proxy.clear()
    proxy.add(Rule("GET", reply="truncate", call=lambda: direct.put("latest.json", BytesSource(new))))
    count = store.read_into("latest.json", 0, memoryview(buffer))
    assert bytes(buffer[:count]) == new


def test_a_range_that_is_ignored_is_never_taken_for_the_range(proxy, store, direct):
    direct.put("data/x", BytesSource(b"0123456789"))
    whole = {"ETag": '"1"', "x-ms-request-id": "1"}
    wrong = [
        Answer(200, b"0123456789", whole),
        Answer(206, b"0123", whole | {"Content-Range": "bytes 0-3/10"}),
        Answer(206, b"456", whole),
        Answer(206, b"45", whole | {"Content-Range": "bytes 4-5/10"}),
        Answer(206, b"4567", whole | {"Content-Range": "bytes 4-6/10"}),
        Answer(206, b"012", whole | {"Content-Range": "bytes 0-6/10"}),
        Answer(206, b"45", whole | {"Content-Range": "bytes 4-6/10"}),
        Answer(206, b"456", whole | {"Content-Range": "bytes 4-9/10"}),
    ]
    for answer in wrong:
        proxy.clear()
        proxy.add(Rule("GET", reply=answer, times=None))
        with pytest.raises(TransientError):
            store.read("data/x", 4, 3)


@pytest.mark.parametrize("verb", ["read", "read_into", "head", "list"])
def test_reads_fail_as_transient(verb, proxy, store):
    calls = {
        "read": lambda: store.read("x"),
        "read_into": lambda: store.read_into("x", 0, memoryview(bytearray(3))),
        "head": lambda: store.head("x"),
        "list": lambda: list(store.list("")),
    }
    for reply in ("reset", error(500), error(503, "ServerBusy"), error(429)):
        proxy.clear()
        proxy.add(Rule(reply=reply, times=None))
        with pytest.raises(TransientError):
            calls[verb]()


@pytest.mark.parametrize(
    "reply", ["garble-body", "truncate", Answer(200, b"<html>welcome</html>"), Answer(200)], ids=repr
)
def test_a_listing_that_cannot_be_read_is_never_empty(reply, proxy, store, direct):
    direct.put("commits/a", BytesSource(b"x"))
    proxy.add(Rule("GET", reply=reply, times=None))
    with pytest.raises(TransientError):
        list(store.list("commits/"))


@pytest.mark.parametrize("verb", ["read", "head", "list", "delete"])
def test_a_404_that_is_not_the_services_is_no_absence(verb, proxy, store):
    proxy.add(Rule(reply=Answer(404, b"<html>no such host here</html>"), times=None))
    calls = {
        "read": lambda: store.read("x"),
        "head": lambda: store.head("x"),
        "list": lambda: list(store.list("")),
        "delete": lambda: store.delete("x"),
    }
    with pytest.raises(StoreError) as caught:
        calls[verb]()
    assert not isinstance(caught.value, NotFoundError)


def test_the_services_wish_to_wait_is_passed_on(proxy, store):
    proxy.add(Rule("PUT", reply=error(503, "ServerBusy", **{"Retry-After": "7"}), forward="never"))
    with pytest.raises(OutcomeUnknownError) as caught:
        store.create("x", b"1")
    assert caught.value.retry_after_s == 7.0
    assert caught.value.cause == "503 ServerBusy"


def test_requests_are_signed_anew_when_they_are_repeated(proxy, store):
    proxy.add(Rule("PUT", reply=error(500, "InternalError"), forward="never", times=1))
    patient(store).create("x", b"1")
    first, second = proxy.requests
    for header in ("Authorization", "x-ms-client-request-id"):
        assert first.headers[header] != second.headers[header] or header == "Authorization"
    assert quote("x") in second.target
