"""The two tables: by HTTP status, and by class of exception."""

from __future__ import annotations

import json
import pickle
import socket
import ssl
import time
from email.utils import formatdate

import pytest
import requests
import urllib3
from google.auth import exceptions as auth_errors

from txstore.errors import (
    AccessDeniedError,
    CapabilityError,
    ConfigError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
)
from txstore_gcs.errors import refused, retry_after_s, translate

SECRET = "ya29.a0AfH6SMBx-secret_secret"


def reply(reason: str, message: str = "what the service says") -> bytes:
    error = {"code": 1, "message": message, "errors": [{"domain": "global", "reason": reason, "message": message}]}
    return json.dumps({"error": error}).encode()


@pytest.mark.parametrize(
    ("status", "reason", "reading", "writing"),
    [
        (400, "invalid", StoreError, StoreError),
        (400, "required", ConfigError, ConfigError),
        (403, "retentionPolicyNotMet", AccessDeniedError, AccessDeniedError),
        (401, "authError", AccessDeniedError, AccessDeniedError),
        (403, "forbidden", AccessDeniedError, AccessDeniedError),
        (403, "rateLimitExceeded", TransientError, OutcomeUnknownError),
        (403, "userRateLimitExceeded", TransientError, OutcomeUnknownError),
        (405, "", ConfigError, ConfigError),
        (407, "", ConfigError, ConfigError),
        (408, "", TransientError, OutcomeUnknownError),
        (409, "conflict", TransientError, OutcomeUnknownError),
        (413, "uploadTooLarge", StoreError, StoreError),
        (412, "conditionNotMet", StoreError, StoreError),
        (429, "rateLimitExceeded", TransientError, OutcomeUnknownError),
        (500, "backendError", TransientError, OutcomeUnknownError),
        (501, "notImplemented", CapabilityError, CapabilityError),
        (502, "", TransientError, OutcomeUnknownError),
        (503, "backendError", TransientError, OutcomeUnknownError),
        (504, "", TransientError, OutcomeUnknownError),
        (599, "", TransientError, OutcomeUnknownError),
        (204, "", TransientError, OutcomeUnknownError),
        (302, "", ConfigError, ConfigError),
        (308, "", ConfigError, ConfigError),
    ],
)
def test_status(status: int, reason: str, reading: type, writing: type) -> None:
    for may_apply, kind in ((False, reading), (True, writing)):
        error = refused(status, {}, reply(reason), "commits/x", may_apply=may_apply)
        assert type(error) is kind
        assert error.key == "commits/x"
        assert str(status) in str(error)
        if isinstance(error, StoreError):
            assert error.cause == f"{status} {reason}".strip()
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "body", [b"", b"<html>503</html>", b"\xff\xfe", b"[1]", b'{"error": "text"}', b'{"error": {"errors": "x"}}']
)
def test_a_page_of_some_proxy_decides_nothing(body: bytes) -> None:
    error = refused(503, {}, body, "k", may_apply=True)
    assert isinstance(error, OutcomeUnknownError)
    assert error.message == "the service answered 503"


def test_hostile_text_from_the_service_is_made_printable_and_holds_no_token() -> None:
    error = refused(
        403, {}, reply("x\x1b[31m", f"\x1b[2J Bearer {SECRET} and {SECRET}, {'long ' * 500}"), "k", may_apply=False
    )
    assert str(error).isprintable()
    assert SECRET not in str(error)
    assert len(str(error)) < 600
    assert error.cause == "403"


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("7", 7, 7),
        ("", 0, 0),
        ("soon", 0, 0),
        ("-5", 0, 0),
        ("inf", 0, 0),
        ("99999999999", 3600, 3600),
    ],
)
def test_retry_after(text: str, least: float, most: float) -> None:
    assert least <= retry_after_s({"Retry-After": text} if text else {}) <= most
    assert least <= refused(429, {"Retry-After": text}, b"", "k", may_apply=True).retry_after_s <= most


@pytest.mark.parametrize(("ahead_s", "least", "most"), [(1000, 900, 1001), (-100, 0, 0), (99_999, 3600, 3600)])
def test_retry_after_a_date(ahead_s: float, least: float, most: float) -> None:
    # The date is made here, not when the tests are collected: that may be many minutes ago.
    text = formatdate(time.time() + ahead_s, usegmt=True)
    assert least <= retry_after_s({"Retry-After": text}) <= most
    assert least <= refused(429, {"Retry-After": text}, b"", "k", may_apply=True).retry_after_s <= most


def behind(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


LOST = [
    (requests.ConnectTimeout(), "timeout"),
    (requests.ReadTimeout(), "timeout"),
    (
        requests.ConnectionError(urllib3.exceptions.ProtocolError("aborted", ConnectionResetError(104, "reset"))),
        "reset",
    ),
    (requests.ConnectionError(behind(urllib3.exceptions.HTTPError(), ConnectionRefusedError())), "refused"),
    (requests.ConnectionError(behind(urllib3.exceptions.HTTPError(), socket.gaierror(-2, "unknown"))), "dns"),
    (requests.exceptions.SSLError(ssl.SSLError("bad record")), "tls"),
    (requests.exceptions.ChunkedEncodingError(urllib3.exceptions.IncompleteRead(1, 2)), "truncated"),
    (urllib3.exceptions.ReadTimeoutError(None, "u", "m"), "timeout"),
    (urllib3.exceptions.IncompleteRead(5, 5), "truncated"),
    (requests.exceptions.ProxyError("no"), "ProxyError"),
    (OSError(5, "io"), "OSError"),
]


@pytest.mark.parametrize(("error", "cause"), LOST, ids=[f"{type(error).__name__}-{cause}" for error, cause in LOST])
def test_a_broken_connection(error: Exception, cause: str) -> None:
    for may_apply, kind in ((False, TransientError), (True, OutcomeUnknownError)):
        found = translate(error, "k", may_apply=may_apply)
        assert type(found) is kind
        assert found.cause == cause


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (auth_errors.DefaultCredentialsError("none"), ConfigError, "application-default login"),
        (auth_errors.RefreshError(f"invalid_grant {SECRET}", {"x": SECRET}), AccessDeniedError, "clock"),
        (auth_errors.RefreshError("later", retryable=True), TransientError, "no access token"),
        (auth_errors.TransportError(f"metadata {SECRET}"), TransientError, "no access token"),
        (auth_errors.TimeoutError("slow"), TransientError, "no access token"),
        (auth_errors.MalformedError("json"), ConfigError, "malformed"),
        (auth_errors.InvalidOperation("anonymous"), AccessDeniedError, "not accepted"),
        (auth_errors.MutualTLSChannelError("cert"), ConfigError, "client certificate"),
        (requests.exceptions.InvalidURL("http://["), ConfigError, "endpoint"),
        (requests.exceptions.InvalidSchema("gopher"), ConfigError, "endpoint"),
        (
            requests.exceptions.SSLError(urllib3.exceptions.SSLError(ssl.SSLCertVerificationError())),
            ConfigError,
            "clock",
        ),
    ],
)
def test_what_was_never_sent(error: Exception, kind: type, says: str) -> None:
    found = translate(error, "k", may_apply=True)
    assert type(found) is kind
    assert says in str(found)
    assert SECRET not in str(found)
    assert str(pickle.loads(pickle.dumps(found))) == str(found)


def test_a_live_error_of_the_sdk_travels_between_ranks() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(requests.ConnectionError) as caught:
            requests.get(f"http://127.0.0.1:{unused.getsockname()[1]}/", timeout=5)
    found = translate(caught.value, "k", may_apply=False)
    assert found.cause == "refused"
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.key, copy.cause, str(copy)) == ("k", "refused", str(found))
