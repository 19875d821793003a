"""From the service's answers and the SDK's exceptions to the errors of the contract: by status and code, never by text."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from enum import Enum

from azure.core.exceptions import AzureError, ClientAuthenticationError, ServiceRequestError
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

_ABSENT = frozenset({"BlobNotFound", "ResourceNotFound", "PathNotFound"})
_NO_CONTAINER = frozenset({"ContainerNotFound", "ContainerDisabled", "ContainerBeingDeleted", "FilesystemNotFound"})
_EXISTS = frozenset({"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet", "UnmodifiedSinceConditionNotMet"})

_TRANSIENT = frozenset(
    {
        "Md5Mismatch",  # the bytes were damaged on their way
        "Crc64Mismatch",
        "ContentLengthMismatch",
        "IncompleteBody",
        "InvalidBlockList",  # another writer of this key has dropped our blocks
        "InvalidBlobOrBlock",
    }
)
"""Codes of a definite refusal that a repetition cures."""

_DENIED = {
    "AccountIsDisabled": "the account is disabled: ask its owner",
    "AuthorizationFailure": "check the key or SAS, and whether the account's firewall lets this network in",
    "AuthorizationPermissionMismatch": "give this identity the role Storage Blob Data Contributor, or a SAS with rcwdl",
    "AuthorizationProtocolMismatch": "the SAS allows https only",
    "AuthorizationResourceTypeMismatch": "the SAS needs the resource types container and object",
    "AuthorizationServiceMismatch": "the SAS needs the service blob",
    "AuthorizationSourceIPMismatch": "the SAS does not allow this IP address",
    "BlobImmutableDueToPolicy": "an immutability policy or a legal hold protects the blob",
    "InsufficientAccountPermissions": "the account does not allow this operation: ask its owner",
    "KeyBasedAuthenticationNotPermitted": "the account allows no key: use an identity (azure-identity)",
    "LeaseIdMissing": "somebody holds a lease on the blob: break it",
    "LeaseAlreadyPresent": "somebody holds a lease on the blob: break it",
    "PublicAccessNotPermitted": "give credentials: the account allows no anonymous access",
}

_CONFIG = {
    "AccountNotFound": "check the name of the account",
    "InvalidAuthenticationInfo": "check the credentials",
    "InvalidResourceName": "check the names of container and prefix",
    "InvalidUri": "check the endpoint of the account",
    "OutOfRangeInput": "check the names of container and prefix",
    "ResourceTypeMismatch": "check the endpoint of the account",
}

_KEPT = {
    "BlobArchived": "the blob is in the archive tier: rehydrate it first",
    "BlobBeingRehydrated": "the blob is being rehydrated from the archive tier: wait",
    "InvalidBlobType": "the blob is a page or append blob, which txstore never writes",
    "PendingCopyOperation": "a copy to this blob is under way: wait, or abort it",
    "RequestBodyTooLarge": "use a smaller part_bytes",
    "SnapshotsPresent": "the blob has snapshots, which txstore never makes: delete them first",
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
    what = f"{status} {code}".strip()
    message = f"{doing} was answered with {what}"
    if code in _NO_CONTAINER:
        # Never NotFoundError: a missing container must not pass for a missing object or an empty listing.
        return ConfigError(
            f"{message}: the container is not usable",
            key=key,
            next_step="create it (txstore never does), or check the names of container and account in the URL",
        )
    if status == 404 and code in _ABSENT:
        return NotFoundError("no such object", key=key)
    if effect is Effect.CREATE and status in {409, 412} and (code in _EXISTS or (status == 412 and not code)):
        return AlreadyExistsError("object exists", key=key)
    if status == 412 and code not in _DENIED:
        return TransientError(f"{message}: the object was replaced meanwhile", key=key).because(what)
    if code in _DENIED or status in {401, 403, 407}:
        return AccessDeniedError(message, key=key, next_step=_denied_hint(code, headers)).because(what)
    if code in _TRANSIENT:
        return TransientError(message, key=key).because(what)
    if code in _CONFIG:
        return ConfigError(message, key=key, next_step=_CONFIG[code])
    if status in {408, 429} or (status >= 500 and status not in {501, 505}):
        return _unclear(effect)(message, key=key).because(what, _retry_after_s(headers))
    if status in {501, 505}:
        return CapabilityError(message, key=key, next_step="this endpoint lacks what txstore needs").because(what)
    if 200 <= status < 300:
        return _unclear(effect)(f"{message}, which is not an answer of the service", key=key).because(what)
    return StoreError(message, key=key, next_step=_KEPT.get(code, "")).because(what)


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
    if isinstance(error, ClientAuthenticationError):
        return AccessDeniedError(
            message, key=key, next_step="no credential could be obtained: check the login, or set AZURE_STORAGE_KEY"
        ).because(type(error).__name__)
    if _not_sent(error, chain):
        return TransientError(
            message, key=key, next_step="check the account's name or endpoint, and the network"
        ).because(type(chain[-1]).__name__)
    return _unclear(effect)(message, key=key).because(type(error).__name__)


def _unclear(effect: Effect) -> type[StoreError]:
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


def _denied_hint(code: str, headers: Mapping[str, str]) -> str:
    skew_s = _clock_skew_s(headers)
    if abs(skew_s) > _SKEW_S:
        return f"the clock of this machine is {abs(skew_s):.0f} s {'ahead' if skew_s > 0 else 'behind'}: set it right"
    return _DENIED.get(code, "check the key, or whether the SAS or token has expired or allows too little")


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


__all__ = ["AzureError", "Effect", "translate_error", "translate_status"]
