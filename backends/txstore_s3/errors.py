"""From the SDK's exceptions to the errors of the contract: one table, by class, status and API code."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Literal

import urllib3.exceptions
from botocore import exceptions as sdk
from botocore.parsers import ResponseParserError

from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    TransientError,
    TxStoreError,
)

SDK_ERRORS = (
    sdk.BotoCoreError,
    sdk.ClientError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    OSError,
)
"""What a call into the SDK may raise; OSError: the socket, while a body is read."""

MAX_SKEW_S = 600.0
"""Below this the clock is right and a signature was merely old when it arrived (S3 allows 15 minutes)."""

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
"""Codes that say that the credentials have run out."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, for the interpretation of what comes of it.

    Attributes:
        operation: The API's name of it.
        key: The object's key, relative to the root, or "".
        effect: ``read`` changes nothing; ``write`` may be repeated; ``create`` must be read back.
    """

    operation: str
    key: str
    effect: Literal["read", "write", "create"] = "read"


class UploadGoneError(StoreError):
    """The multipart upload does not exist (any more): completed by a request whose reply was lost, or aborted."""


_CREDENTIALS_HINT = "check the access key, the secret, and the profile"
_REGION_HINT = "set option region (or AWS_REGION) to the bucket's region, or endpoint_url to the final address"
_BUCKET_HINT = "create the bucket first, or correct its name: txstore never creates one"
_DENIED_HINT = (
    "grant s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload and ListBucket;"
    " without ListBucket S3 answers 403 for absent objects too"
)
_FULL_HINT = "free space or raise the quota, then save again"


class _Verdict(Enum):
    TRANSIENT = "the request surely had no effect"
    UNCLEAR = "a write may have had effect"


_TRANSIENT, _UNCLEAR = _Verdict.TRANSIENT, _Verdict.UNCLEAR
_Kind = type[TxStoreError] | _Verdict

_BY_CODE: dict[str, tuple[_Kind, str]] = {
    "NoSuchBucket": (ConfigError, _BUCKET_HINT),
    "InvalidBucketName": (ConfigError, _BUCKET_HINT),
    "NoSuchUpload": (UploadGoneError, ""),
    "AuthorizationHeaderMalformed": (ConfigError, _REGION_HINT),
    "IllegalLocationConstraintException": (ConfigError, _REGION_HINT),
    "PermanentRedirect": (ConfigError, _REGION_HINT),
    "InvalidAccessKeyId": (AccessDeniedError, _CREDENTIALS_HINT),
    "SignatureDoesNotMatch": (AccessDeniedError, _CREDENTIALS_HINT),
    "InvalidToken": (AccessDeniedError, _CREDENTIALS_HINT),
    "KeyTooLongError": (ConfigError, "use a shorter checkpoint name or prefix"),
    "EntityTooLarge": (ConfigError, "write smaller shards"),
    "RequestTimeout": (_UNCLEAR, ""),
    "SlowDown": (_UNCLEAR, ""),
    "BadDigest": (_TRANSIENT, "the bytes changed on their way: check memory and network if this repeats"),
    "InvalidDigest": (_TRANSIENT, ""),
    "IncompleteBody": (_TRANSIENT, ""),
    "XAmzContentSHA256Mismatch": (_TRANSIENT, ""),
    "XAmzContentChecksumMismatch": (_TRANSIENT, ""),
    "QuotaExceeded": (StoreFullError, _FULL_HINT),
    "XMinioStorageFull": (StoreFullError, _FULL_HINT),
    "XMinioAdminBucketQuotaExceeded": (StoreFullError, _FULL_HINT),
    "ConditionalRequestConflict": (_UNCLEAR, ""),
    "OperationAborted": (_UNCLEAR, ""),
}

_BY_STATUS: dict[int, tuple[_Kind, str]] = {
    301: (ConfigError, _REGION_HINT),
    302: (ConfigError, _REGION_HINT),
    307: (ConfigError, _REGION_HINT),
    308: (ConfigError, _REGION_HINT),
    400: (StoreError, ""),
    401: (AccessDeniedError, _CREDENTIALS_HINT),
    403: (AccessDeniedError, _DENIED_HINT),
    404: (NotFoundError, ""),
    408: (_UNCLEAR, ""),
    409: (_UNCLEAR, ""),
    412: (AlreadyExistsError, ""),
    429: (_UNCLEAR, ""),
    501: (StoreError, ""),
    507: (StoreFullError, _FULL_HINT),
}

_CREATE_HINT = "this endpoint does not take If-None-Match: use a store with conditional writes (docs/compatibility.md)"
_UNKNOWN_HEADER = frozenset({"InvalidRequest", "InvalidArgument", "NotImplemented", "UnsupportedOperation", "400", ""})
# What a store answers to a condition that it does not know (400: with one of the codes above); 304 is what some
# answer instead of 412.
_CREATE: dict[int, tuple[_Kind, str]] = {
    304: (AlreadyExistsError, ""),
    400: (CapabilityError, _CREATE_HINT),
    405: (CapabilityError, _CREATE_HINT),
    501: (CapabilityError, _CREATE_HINT),
}

_CERTIFICATE_HINT = "set option verify (or AWS_CA_BUNDLE) to the path of the CA certificate"
_REACH_HINT = "check endpoint_url, the network and the proxy settings"
_FIND_HINT = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or options key and secret"

# The first line that fits counts: a connection that was never made is a connection error too.
_BY_CLASS: list[tuple[tuple[type[Exception], ...], _Kind, str, str]] = [
    (
        (sdk.EndpointConnectionError, sdk.ConnectTimeoutError, sdk.ProxyConnectionError),
        TransientError,
        "the endpoint could not be reached",
        _REACH_HINT,
    ),
    (
        (sdk.NoCredentialsError, sdk.PartialCredentialsError),
        AccessDeniedError,
        "no (complete) credentials were found",
        _FIND_HINT,
    ),
    (
        (sdk.TokenRetrievalError, sdk.SSOError, sdk.NoAuthTokenError, getattr(sdk, "LoginError", sdk.SSOError)),
        AccessDeniedError,
        "the login has ended",
        "log in again: aws sso login",
    ),
    (
        (sdk.CredentialRetrievalError, sdk.MetadataRetrievalError),
        TransientError,
        "credentials could not be loaded",
        _FIND_HINT,
    ),
    (
        (
            sdk.HTTPClientError,
            sdk.ConnectionError,
            sdk.ChecksumError,
            sdk.IncompleteReadError,
            ResponseParserError,
            urllib3.exceptions.HTTPError,
            OSError,
        ),
        _UNCLEAR,
        "the reply was lost",
        "",
    ),
]


def translate(error: Exception, call: Call, *, refreshed: bool = False) -> TxStoreError:
    """The error of the contract for what the SDK raised.

    Args:
        error: One of `SDK_ERRORS`.
        call: What was asked.
        refreshed: Whether the caller has got other credentials since: an expired token may then be tried again.
    """
    if isinstance(error, sdk.ClientError):
        return _translate_answer(error, call, refreshed=refreshed)
    name = type(error).__name__
    if _certificate_refused(error):
        return ConfigError("the server's TLS certificate is not trusted", key=call.key, next_step=_CERTIFICATE_HINT)
    for classes, kind, message, next_step in _BY_CLASS:
        if isinstance(error, classes):
            text = f"{call.operation}: {message}: {name}"
            if kind is _UNCLEAR:
                return _lost(text, call, next_step).because(name)
            assert isinstance(kind, type)
            found = kind(text, key=call.key, next_step=next_step)
            return found.because(name) if isinstance(found, StoreError) else found
    # What is left (ParamValidationError, ProfileNotFound, InvalidRegionError, ...) failed before anything was sent.
    return ConfigError(f"{call.operation}: {name}: {_first_line(error)}", key=call.key)


def code_of(error: BaseException | None) -> tuple[int, str]:
    """HTTP status and API code of an answer; (0, "") for anything else."""
    if not isinstance(error, sdk.ClientError):
        return 0, ""
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status, str(error.response.get("Error", {}).get("Code", ""))


def _translate_answer(error: sdk.ClientError, call: Call, *, refreshed: bool) -> TxStoreError:
    status, code = code_of(error)
    label = str(status) if code in {"", str(status)} else f"{status} {code}"
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    foreign = error.operation_name != call.operation  # the SDK asked STS, or for the bucket's region, on the way
    kind, next_step = _kind(status, code, call)
    if code in EXPIRED:
        kind = _TRANSIENT if refreshed else AccessDeniedError
        next_step = "the credentials have expired: renew them"
    elif code == "RequestTimeTooSkewed":
        kind = AccessDeniedError if abs(skew_s(headers)) > MAX_SKEW_S else _TRANSIENT
        next_step = "this machine's clock is wrong: synchronise it"
    message = f"{error.operation_name}: {label}"
    if kind is _UNCLEAR and not foreign:
        return _lost(message, call, next_step).because(label, _retry_after_s(headers))
    if kind is _UNCLEAR or kind is _TRANSIENT:
        return TransientError(message, key=call.key, next_step=next_step).because(label, _retry_after_s(headers))
    if foreign and kind is not ConfigError:
        kind = AccessDeniedError
    assert isinstance(kind, type)
    found = kind(message, key=call.key, next_step=next_step)
    return found.because(label) if isinstance(found, StoreError) else found


def _kind(status: int, code: str, call: Call) -> tuple[_Kind, str]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if call.effect == "create" and status in _CREATE and (status != 400 or code in _UNKNOWN_HEADER):
        return _CREATE[status]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    # 200 with an error body reaches us as 500.
    return (_UNCLEAR, "") if status >= 500 or status < 300 else (StoreError, "")


def _lost(message: str, call: Call, next_step: str = "") -> StoreError:
    kind = TransientError if call.effect == "read" else OutcomeUnknownError
    return kind(message, key=call.key, next_step=next_step)


def skew_s(headers: dict[str, str]) -> float:
    """How many seconds this machine's clock is ahead of the server's; 0.0 if the server does not say."""
    try:
        return time.time() - parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError):
        return 0.0


def _retry_after_s(headers: dict[str, str]) -> float:
    try:
        return min(max(0.0, float(headers.get("retry-after", 0))), 300.0)
    except ValueError:
        return 0.0


def _certificate_refused(error: BaseException) -> bool:
    seen: set[int] = set()
    todo: list[Any] = [error]
    while todo:
        one = todo.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        if isinstance(one, ssl.SSLCertVerificationError):
            return True
        seen.add(id(one))
        todo += [
            one.__cause__,
            one.__context__,
            getattr(one, "kwargs", {}).get("error"),
            getattr(one, "reason", None),
            *one.args,
        ]
    return False


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
