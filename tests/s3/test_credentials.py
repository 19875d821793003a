"""Credentials that run out in the middle: loaded again once, if there are others; limits on requests and on time."""

import random
import threading
import time

import pytest

from tests.servers.seaweed import ACCESS_KEY, OTHER_KEY, OTHER_SECRET, SECRET_KEY
from txstore.errors import AccessDeniedError, StoreError
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import BytesSource
from txstore.testing.proxy import Rule
from txstore.testing.saves import load, save

DATA = random.Random(7).randbytes(16 << 20)


@pytest.fixture
def credentials(tmp_path, monkeypatch):
    """Function: write the profile's credentials."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(key, secret):
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write(ACCESS_KEY, SECRET_KEY)
    return write


@pytest.fixture
def rotating(make, proxy, credentials):
    """A store that takes its credentials from the profile."""
    return make(endpoint_url=proxy.url, key=None, secret=None)


def signers(proxy):
    names = [
        request.headers["Authorization"].partition("Credential=")[2].partition("/")[0] for request in proxy.requests
    ]
    return [name for number, name in enumerate(names) if not number or names[number - 1] != name]


def patient(store):
    return RetryingStore(store, RetryPolicy(first_wait_s=0, longest_wait_s=0), sleep=lambda _s: None)


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_credentials_that_expire_at_the_decision_are_loaded_again(rotating, direct, proxy, credentials, answer, code):
    expired = Rule(
        "PUT",
        "commits/",
        forward="never",
        reply=answer(400, code),
        call=lambda: credentials(OTHER_KEY, OTHER_SECRET),
    )
    proxy.add(expired)
    store = patient(rotating)
    decision = save(store, "step-1", [b"x"])
    assert load(direct, decision) == [b"x"]
    assert signers(proxy) == [ACCESS_KEY, OTHER_KEY]
    assert store.retries == {f"400 {code}": 1}


def test_credentials_that_expire_in_the_middle_of_an_upload_are_loaded_again(
    rotating, direct, proxy, credentials, answer
):
    proxy.add(
        Rule(
            "PUT",
            "partNumber=3",
            forward="never",
            reply=answer(400, "ExpiredToken"),
            call=lambda: credentials(OTHER_KEY, OTHER_SECRET),
        )
    )
    rotating.put("data/x", BytesSource(DATA))
    assert direct.read("data/x") == DATA
    assert proxy.count("PUT", "partNumber=3") == 2
    assert proxy.count("PUT", "partNumber=1") == 1
    assert rotating.retries == {"400 ExpiredToken": 1}


def test_expired_credentials_without_others_are_access_denied(rotating, proxy, answer):
    proxy.add(Rule(forward="never", reply=answer(400, "ExpiredToken"), times=None))
    with pytest.raises(AccessDeniedError, match="expired"):
        patient(rotating).create("commits/x", b"x")
    assert proxy.count() == 1


def test_many_threads_that_meet_expired_credentials_load_them_once(
    rotating, proxy, credentials, answer, caplog, direct
):
    for number in range(8):
        direct.put(f"data/{number}", BytesSource(b"x"))
    credentials_changed = threading.Barrier(8, action=lambda: credentials(OTHER_KEY, OTHER_SECRET))
    proxy.add(Rule("GET", forward="never", reply=answer(400, "ExpiredToken"), times=8, call=credentials_changed.wait))
    threads = [threading.Thread(target=patient(rotating).read, args=(f"data/{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert signers(proxy) == [ACCESS_KEY, OTHER_KEY]
    assert proxy.count("GET") == 16
    assert sum("had expired" in record.message for record in caplog.records) == 1


def test_a_throttled_store_is_given_up_at_the_deadline(remote, proxy, answer):
    proxy.add(Rule(forward="never", reply=answer(503, "SlowDown", **{"Retry-After": "0.3"}), times=None))
    began = time.monotonic()
    with pytest.raises(StoreError, match="SlowDown"):
        RetryingStore(remote, RetryPolicy(attempts=99, deadline_s=1.0, first_wait_s=0.01)).put("x", BytesSource(b"x"))
    assert time.monotonic() - began < 5.0, "the deadline, and one answer on a busy machine"
    assert proxy.count() <= 4, "each wait is at least what the store asked for"
