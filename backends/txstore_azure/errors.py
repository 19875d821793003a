"""From the service's answers and the SDK's exceptions to the errors of the contract, by status, code and class."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from enum import Enum

from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ProxyError, SSLError

from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
    TxStoreError,
)


class Effect(Enum):
    """What a request may have done when its answer is unclear."""

    NONE = "nothing that is visible: a read, or the upload of a block"
    WRITE = "a write that may be repeated"
    CREATE = "a conditional write, which must be read back"


_SKEW_S = 300.0
"""Clocks that differ by more are mentioned: the service refuses requests that are 15 minutes off."""

_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"})
"""What OpenSSL says of the first bytes of a server that speaks plain HTTP."""

_TAKEN = frozenset(
    {
        (409, "BlobAlreadyExists"),
        (412, "BlobAlreadyExists"),
        (412, "ConditionNotMet"),
        (412, "TargetConditionNotMet"),
        (412, ""),
    }
)
"""What a conditional write is told when the blob is there. Any other 409 is a refusal."""

_NO_CONTAINER = "create it (txstore never does), or check the names of container and account in the URL"

_BY_CODE: dict[str, tuple[type[TxStoreError], str]] = {
    **dict.fromkeys(("BlobNotFound", "ResourceNotFound", "PathNotFound"), (NotFoundError, "")),
    # Never NotFoundError: a missing container must not pass for a missing object or an empty listing.
    **dict.fromkeys(("ContainerNotFound", "ContainerDisabled", "FilesystemNotFound"), (ConfigError, _NO_CONTAINER)),
    "ContainerBeingDeleted": (ConfigError, "the container is being deleted: use another one"),
    "AccountNotFound": (ConfigError, "check the name of the account"),
    "InvalidAuthenticationInfo": (AccessDeniedError, ""),
    "InvalidResourceName": (ConfigError, "check the names of container and prefix"),
    "InvalidUri": (ConfigError, "check the endpoint of the account"),
    "OutOfRangeInput": (ConfigError, "check the names of container and prefix"),
    "ResourceTypeMismatch": (ConfigError, "check the endpoint of the account"),
    # A definite refusal that a repetition cures: bytes damaged on their way, blocks dropped by another writer.
    **dict.fromkeys(
        ("Md5Mismatch", "Crc64Mismatch", "ContentLengthMismatch", "IncompleteBody", "InvalidBlockList"),
        (TransientError, ""),
    ),
    "AccountIsDisabled": (AccessDeniedError, "the account is disabled: ask its owner"),
    "AuthorizationFailure": (
        AccessDeniedError,
        "check the key or SAS, and whether the account's firewall lets this network in",
    ),
    "AuthorizationPermissionMismatch": (
        AccessDeniedError,
        "give this identity the role Storage Blob Data Contributor, or a SAS with the permissions rcwdl",
    ),
    "AuthorizationProtocolMismatch": (AccessDeniedError, "the SAS allows https only"),
    "AuthorizationResourceTypeMismatch": (AccessDeniedError, "the SAS needs the resource types container and object"),
    "AuthorizationServiceMismatch": (AccessDeniedError, "the SAS needs the service blob"),
    "AuthorizationSourceIPMismatch": (AccessDeniedError, "the SAS does not allow this IP address"),
    "BlobImmutableDueToPolicy": (AccessDeniedError, "an immutability policy or a legal hold protects the blob"),
    "InsufficientAccountPermissions": (AccessDeniedError, "the account does not allow this operation: ask its owner"),
    "KeyBasedAuthenticationNotPermitted": (AccessDeniedError, "the account allows no key: install azure-identity"),
    "LeaseAlreadyPresent": (AccessDeniedError, "somebody holds a lease on the blob: break it"),
    "LeaseIdMissing": (AccessDeniedError, "somebody holds a lease on the blob: break it"),
    "PublicAccessNotPermitted": (AccessDeniedError, "give credentials: the account allows no anonymous access"),
    "BlobArchived": (StoreError, "the blob is in the archive tier: rehydrate it first"),
    "BlobBeingRehydrated": (StoreError, "the blob is being rehydrated from the archive tier: wait"),
    "InvalidBlobType": (StoreError, "the blob is a page or append blob, which txstore never writes"),
    "PendingCopyOperation": (StoreError, "a copy to this blob is under way: wait, or abort it"),
    "RequestBodyTooLarge": (StoreError, "use a smaller part_bytes"),
    "SnapshotsPresent": (StoreError, "the blob has snapshots, which txstore never makes: delete them first"),
}

_BY_STATUS: dict[int, tuple[type[TxStoreError], str]] = {
    **dict.fromkeys(
        (401, 403, 407),
        (AccessDeniedError, "check the key, or whether the SAS or token has expired or allows too little"),
    ),
    412: (TransientError, "the object was replaced meanwhile"),
    **dict.fromkeys((501, 505), (CapabilityError, "this endpoint lacks what txstore needs: docs/compatibility.md")),
}


def translate_status(
    status: int, code: str, headers: Mapping[str, str], *, key: str, doing: str, effect: Effect
) -> TxStoreError:
    """The error for an answer that is not the one we hoped for.

    Args:
        status: HTTP status.
        code: The service's error code, or "" (a proxy has none).
        headers: Of the answer.
        key: The object concerned, or "".
        doing: What was asked, in a few words.
        effect: What the request may have done.
    """
    kind, next_step = _classify(status, code, effect)
    if issubclass(kind, NotFoundError):
        return kind("no such object", key=key)
    if issubclass(kind, AlreadyExistsError):
        return kind("object exists", key=key)
    if issubclass(kind, AccessDeniedError):
        next_step = _clock_hint(headers) or next_step or _BY_STATUS[403][1]
    what = f"{status} {code}".strip()
    error = kind(f"{doing} was answered with {what}", key=key, next_step=next_step)
    return error.because(what, _retry_after_s(headers)) if isinstance(error, StoreError) else error


def _classify(status: int, code: str, effect: Effect) -> tuple[type[TxStoreError], str]:
    if effect is Effect.CREATE and (status, code) in _TAKEN:
        return AlreadyExistsError, ""
    if found := _BY_CODE.get(code) or _BY_STATUS.get(status):
        return found
    # A success of another kind than expected comes from something else than the service.
    if status in {408, 429} or status >= 500 or 200 <= status < 300:
        return unclear(effect), ""
    if 300 <= status < 400 and status != 304:
        return ConfigError, "the endpoint redirects: give its final address in the account URL or connection string"
    return StoreError, ""


def translate_error(error: Exception, *, key: str, doing: str, effect: Effect) -> TxStoreError:
    """The error for a request without an answer: unless it surely was not sent, its effect is unclear.

    Only class names are kept of the exception: its text may hold a URL with a signature.
    """
    chain = list(_causes(error))
    names = " from ".join(dict.fromkeys(type(one).__name__ for one in chain[:4]))
    message = f"{doing} failed: {names}"
    if any(isinstance(one, ssl.SSLCertVerificationError) for one in chain):
        return ConfigError(
            message,
            key=key,
            next_step="the server's certificate is not trusted: check the endpoint, REQUESTS_CA_BUNDLE",
        )
    if any(isinstance(one, ssl.SSLError) and getattr(one, "reason", None) in _NO_TLS for one in chain):
        return ConfigError(message, key=key, next_step="the endpoint speaks no TLS: is it an http:// one?")
    if isinstance(error, ClientAuthenticationError):
        return AccessDeniedError(
            message, key=key, next_step="no credential could be obtained: check the login, or set AZURE_STORAGE_KEY"
        ).because(type(error).__name__)
    if _not_sent(error, chain):
        return TransientError(
            message, key=key, next_step="check the account's name or endpoint, and the network"
        ).because(type(chain[-1]).__name__)
    return unclear(effect)(message, key=key).because(type(error).__name__)


def unclear(effect: Effect) -> type[StoreError]:
    """The class of error for a request that may or may not have been carried out."""
    return TransientError if effect is Effect.NONE else OutcomeUnknownError


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, and what it was made from: the SDK keeps it in an attribute or an argument."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        inner = [getattr(one, "inner_exception", None), getattr(one, "reason", None), one.__cause__, one.__context__]
        todo += [other for other in [*inner, *one.args] if isinstance(other, BaseException)]


def _not_sent(error: Exception, chain: list[BaseException]) -> bool:
    if any(isinstance(one, NewConnectionError | ConnectTimeoutError | ProxyError) for one in chain):
        return True
    # The SDK calls every TLS failure a failed connection; one that comes while the answer is awaited is not.
    tls = any(isinstance(one, SSLError | ssl.SSLError) for one in chain)
    return isinstance(error, ServiceRequestError) and not tls


def _clock_hint(headers: Mapping[str, str]) -> str:
    skew_s = _clock_skew_s(headers)
    if abs(skew_s) <= _SKEW_S:
        return ""
    return f"the clock of this machine is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}: set it right"


def _clock_skew_s(headers: Mapping[str, str]) -> float:
    try:
        return time.time() - parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except (ValueError, TypeError):
        return 0.0


def _retry_after_s(headers: Mapping[str, str]) -> float:
    for name, unit_s in (("x-ms-retry-after-ms", 0.001), ("retry-after-ms", 0.001), ("Retry-After", 1.0)):
        try:
            return max(0.0, min(300.0, float(headers[name]) * unit_s))
        except (KeyError, ValueError):
            continue
    return 0.0
