"""Fixtures of the S3 tests: one empty place, seen directly and through a proxy that loses replies."""

import pytest

from txstore.retry import Retrier, RetryPolicy
from txstore.testing.proxy import Answer, LostReplyProxy
from txstore_s3 import S3Config, S3Store

PART_BYTES = 5 << 20


@pytest.fixture
def proxy(s3_bucket):
    with LostReplyProxy(s3_bucket.endpoint.url) as proxy:
        yield proxy


@pytest.fixture
def place(s3_bucket):
    return f"s3://{s3_bucket.name}/{s3_bucket.new_prefix()}"


@pytest.fixture
def make(s3_bucket, place):
    """Function: a store of the place, with options; it repeats without waiting."""
    made = []

    def make(**options):
        config = S3Config.from_url(place, {**s3_bucket.options, "part_bytes": PART_BYTES, **options})
        policy = RetryPolicy(attempts=4, deadline_s=60, first_wait_s=0, longest_wait_s=0)
        made.append(S3Store(config, Retrier(policy, sleep=lambda _s: None)))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def direct(make):
    return make()


@pytest.fixture
def remote(make, proxy):
    return make(endpoint_url=proxy.url, read_timeout_s=20)


@pytest.fixture
def hasty(make, proxy):
    """For replies that never come: each costs its read timeout."""
    return make(endpoint_url=proxy.url, read_timeout_s=2.0)


@pytest.fixture
def through(remote, hasty):
    """Function: the store to use when a reply is lost in this way."""
    return lambda reply: hasty if "stall" in str(reply) else remote


@pytest.fixture
def answer():
    """Function: an answer as S3 gives it."""

    def answer(status, code, **headers):
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()
        return Answer(status, body, {"Content-Type": "application/xml", **headers})

    return answer
