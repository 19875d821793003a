"""A store that says that it is asked for too much is asked for less, and for more again when it lets us."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.servers.fixtures import Place, empty_place
from txstore import open_store
from txstore.request_cap import requests_allowed
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import BytesSource
from txstore.testing.proxy import Answer
from txstore.testing.throttling import ThrottlingProxy

DATA = os.urandom(4096)
THREADS = 16
AT_ONCE = 4


@pytest.mark.parametrize("status", [503, 429])
def test_requests_in_flight_follow_what_the_store_takes(place: Place, status: int, set_max_requests) -> None:
    set_max_requests(THREADS)
    follow_what_it_takes(place, Answer(status))


@pytest.mark.parametrize("reason", ["rateLimitExceeded", "userRateLimitExceeded"])
def test_cloud_storage_says_it_with_403_as_well(request, reason: str, set_max_requests) -> None:
    set_max_requests(THREADS)
    body = json.dumps({"error": {"code": 403, "message": "slow down", "errors": [{"reason": reason}]}}).encode()
    follow_what_it_takes(empty_place(request, "gs"), Answer(403, body))


def follow_what_it_takes(place: Place, refusal: Answer) -> None:
    policy = RetryPolicy(attempts=50, first_wait_s=0.005, longest_wait_s=0.02)
    with (
        ThrottlingProxy(place.upstream, at_once=THREADS, hold_s=0.01, refusal=refusal) as proxy,
        open_store(place.url, **place.options_by(proxy.url)) as inner,
        ThreadPoolExecutor(THREADS) as pool,
    ):
        store = RetryingStore(inner, policy)
        store.put("x", BytesSource(DATA))

        def read_often(times: int) -> None:
            assert list(pool.map(store.read, ["x"] * times)) == [DATA] * times

        read_often(THREADS)
        assert (proxy.refused, requests_allowed()) == (0, THREADS)
        proxy.at_once = AT_ONCE
        read_often(200)
        assert requests_allowed() <= 2 * AT_ONCE, "it goes down to about what the store takes"
        # It tries one more now and then, and is refused; without a bound most requests would be.
        assert 0 < proxy.refused < 100
        proxy.at_once = THREADS
        read_often(400)
        assert requests_allowed() > 2 * AT_ONCE, "and up again"
        assert sum(store.retries.values()) == proxy.refused
