"""From HTTP status and exception class to the errors of the contract: two tables, never by message text."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec
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
    TxStoreError,
    describe,
)
from txstore.redact import printable, redact_text
from txstore.request_cap import THROTTLED

TRANSPORT = (requests.RequestException, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)
"""What a broken connection may raise, by the layer that noticed it."""

CAUGHT = (*TRANSPORT, auth_errors.GoogleAuthError)

_CREDENTIALS_HINT = "check the credentials, and that the clock of this machine is right"
_PASSING = (auth_errors.TransportError, auth_errors.TimeoutError, auth_errors.ResponseError)
_THROTTLED_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded", "quotaExceeded"})
_LONGEST_RETRY_AFTER_S = 3600.0
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9 _-]{0,59}")
_TOKEN = re.compile(r"(?i)bearer\s+\S+|ya29\.\S+|eyJ[\w-]+\.[\w-]+\.\S+")

_STATUS: dict[int, tuple[type[TxStoreError], str]] = {
    401: (AccessDeniedError, _CREDENTIALS_HINT),
    403: (AccessDeniedError, "grant roles/storage.objectUser on the bucket to these credentials"),
    405: (ConfigError, "is the endpoint a Cloud Storage JSON API?"),
    407: (ConfigError, "the HTTP proxy wants credentials: check HTTPS_PROXY"),
    501: (CapabilityError, "this endpoint does not implement the request: use Cloud Storage itself"),
}
_REASONS: dict[str, tuple[type[TxStoreError], str]] = {
    "required": (ConfigError, "if the bucket makes the requester pay, give user_project"),
    "retentionPolicyNotMet": (AccessDeniedError, "the bucket's retention policy protects the object for a while"),
    "objectUnderActiveHold": (AccessDeniedError, "somebody holds the object: release the hold first"),
}


class _Detail(msgspec.Struct):
    reason: str = ""


class _Error(msgspec.Struct):
    message: str = ""
    errors: list[_Detail] = []


class _ErrorReply(msgspec.Struct):
    error: _Error


def _details(body: bytes) -> tuple[str, str]:
    """Reason code and message of the service, both "" if the body is something else, such as a proxy's page."""
    try:
        error = msgspec.json.decode(body, type=_ErrorReply).error
    except (msgspec.DecodeError, UnicodeError):
        return "", ""
    reason = error.errors[0].reason if error.errors else ""
    text = _TOKEN.sub("***", redact_text(printable(" ".join(error.message.split())[:300])))
    return (reason if _REASON.fullmatch(reason) else ""), text


def retry_after_s(headers: Mapping[str, str]) -> float:
    """The service's own wish in seconds, 0.0 if it has none or it makes no sense."""
    text = headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        wish = float(text)
    else:
        try:
            when = parsedate_to_datetime(text)
        except (ValueError, TypeError):
            return 0.0
        wish = (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return min(max(wish, 0.0), _LONGEST_RETRY_AFTER_S)


def throttles(response: requests.Response) -> bool:
    """Whether the service asks for fewer requests; reads the body of a 403, which may be that or a refusal."""
    if response.status_code == 403:
        return _details(response.content)[0] in _THROTTLED_REASONS
    return response.status_code in THROTTLED


def refused(status: int, headers: Mapping[str, str], body: bytes, key: str, *, may_apply: bool) -> TxStoreError:
    """The error for an answer that is no success.

    Args:
        status: HTTP status; those with a meaning for one verb alone (404, 412, 416) are that verb's business.
        headers: Of the answer.
        body: Of the answer.
        key: The key concerned.
        may_apply: Whether the request changes something: then an unclear answer may hide a success.
    """
    reason, text = _details(body)
    message = f"the service answered {status}" + (f" {reason}" if reason else "") + (f": {text}" if text else "")
    cause = f"{status} {reason}".strip()
    if status in {408, 409, 429} or (status >= 500 and status != 501) or reason in _THROTTLED_REASONS:
        return unclear(message, key, cause, may_apply=may_apply, retry_after=retry_after_s(headers))
    if 200 <= status < 300:
        return unclear(message, key, cause, may_apply=may_apply)
    if 300 <= status < 400:
        return ConfigError(message, key=key, next_step="the endpoint redirects: give its final address as endpoint_url")
    kind, next_step = _REASONS.get(reason) or _STATUS.get(status, (StoreError, ""))
    error = kind(message, key=key, next_step=next_step)
    return error.because(cause) if isinstance(error, StoreError) else error


def unclear(message: str, key: str, cause: str, *, may_apply: bool, retry_after: float = 0.0) -> StoreError:
    """`OutcomeUnknownError` if the request may have been applied, else `TransientError`."""
    kind = OutcomeUnknownError if may_apply else TransientError
    return kind(message, key=key).because(cause, retry_after)


def translate(error: Exception, key: str, *, may_apply: bool) -> TxStoreError:
    """The error for an exception in `CAUGHT`.

    Args:
        error: What the SDK or the HTTP layers raised.
        key: The key concerned.
        may_apply: Whether a part of a request that changes something may have reached the service.
    """
    if isinstance(error, auth_errors.GoogleAuthError):
        return _of_auth(error, key)
    text = redact_text(describe(error))
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.InvalidSchema):
        return ConfigError(f"not a usable endpoint: {text}", key=key, next_step="check endpoint_url and the proxies")
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in _chain(error)):
        return ConfigError(
            "the certificate of the endpoint was not accepted",
            key=key,
            next_step="check endpoint_url, REQUESTS_CA_BUNDLE, and that the clock of this machine is right",
        )
    failed = unclear(f"the request failed: {text}", key, _kind(error), may_apply=may_apply)
    if not may_apply:
        failed.next_step = "check the endpoint and the network"
    return failed


def _of_auth(error: auth_errors.GoogleAuthError, key: str) -> TxStoreError:
    """Signing failed, so nothing was sent, or all that was sent was answered by 401."""
    if isinstance(error, auth_errors.MalformedError):
        return ConfigError("the credentials are malformed", key=key, next_step="check GOOGLE_APPLICATION_CREDENTIALS")
    if type(error) is auth_errors.DefaultCredentialsError:  # its subclasses mean other things
        return ConfigError(
            "no credentials for Google Cloud were found",
            key=key,
            next_step="set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
        )
    if isinstance(error, auth_errors.MutualTLSChannelError):
        return ConfigError(
            "the client certificate could not be used", key=key, next_step="see GOOGLE_API_CERTIFICATE_CONFIG"
        )
    # The text of these errors may hold a part of the request for a token.
    kind = type(error).__name__
    if isinstance(error, _PASSING) or error.retryable:
        return TransientError(f"no access token could be had: {kind}", key=key).because(f"credentials {_kind(error)}")
    return AccessDeniedError(
        f"the credentials were not accepted: {kind}", key=key, next_step=_CREDENTIALS_HINT
    ).because(kind)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and whatever lies behind it: as cause, as context, or as an argument (urllib3, requests)."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        behind = (one.__cause__, one.__context__, getattr(one, "reason", None), *one.args)
        waiting += [other for other in behind if isinstance(other, BaseException)]


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "dns"),
    (ConnectionRefusedError, "refused"),
    (TimeoutError, "timeout"),
    (urllib3.exceptions.TimeoutError, "timeout"),
    (requests.Timeout, "timeout"),
    (http.client.IncompleteRead, "truncated"),
    (urllib3.exceptions.IncompleteRead, "truncated"),
    (ConnectionError, "reset"),
    (ssl.SSLError, "tls"),
    (http.client.HTTPException, "garbled"),
)


def _kind(error: BaseException) -> str:
    """What broke, in one word: what repetitions are counted by."""
    chain = list(_chain(error))
    for kind, word in _KINDS:
        if any(isinstance(one, kind) for one in chain):
            return word
    return type(error).__name__
