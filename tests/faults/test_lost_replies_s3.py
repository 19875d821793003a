"""Replies lost between the S3 backend and SeaweedFS."""

import logging

import pytest

from txstore.testing.lost_replies import LostReplies, Wire
from txstore.testing.proxy import Answer, Rule
from txstore_s3 import open_store


def error(status, code, **headers):
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>scripted</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml", **headers})


class S3Wire(Wire):
    throttled = error(503, "SlowDown")
    denied = error(403, "AccessDenied")
    undecided = error(409, "ConditionalRequestConflict")

    def create(self, key, **what):
        return Rule("PUT", key, header="If-None-Match", **what)

    def read(self, key, **what):
        return Rule("GET", key, **what)


class TestS3(LostReplies):
    wire = S3Wire()

    @pytest.fixture(autouse=True)
    def no_tracebacks_in_logs(self, caplog):
        # pytest keeps each log record: its traceback would hold a connection beyond the end of the test.
        caplog.set_level(logging.ERROR, "urllib3.connection")

    @pytest.fixture
    def upstream(self, s3_bucket):
        return s3_bucket.endpoint.url

    @pytest.fixture
    def opener(self, s3_bucket):
        url = f"s3://{s3_bucket.name}/{s3_bucket.new_prefix()}"

        def open_at(endpoint, read_timeout_s):
            options = {**s3_bucket.options, "endpoint_url": endpoint, "read_timeout_s": read_timeout_s}
            return open_store(url, **options)

        return open_at
