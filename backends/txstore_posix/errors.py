"""From errno to the errors of the contract: one table."""

from __future__ import annotations

import errno
import os

from txstore.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    TransientError,
    TxStoreError,
)

ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
"""The name, a directory on its way, or anything but a directory of other keys is not there."""

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""The file system does not know this call."""

_FULL_HINT = "free space or raise the quota, then save again"

_TABLE: dict[int, tuple[type[TxStoreError], str]] = {
    errno.ENOENT: (NotFoundError, ""),
    errno.ENOTDIR: (NotFoundError, ""),
    errno.EISDIR: (NotFoundError, ""),
    errno.EACCES: (AccessDeniedError, "check owner and mode of the directory"),
    errno.EPERM: (AccessDeniedError, "check owner, mode and attributes of the directory"),
    errno.EROFS: (AccessDeniedError, "the file system is mounted read-only"),
    errno.ENOSPC: (StoreFullError, _FULL_HINT),
    errno.EDQUOT: (StoreFullError, _FULL_HINT),
    errno.EFBIG: (StoreFullError, "raise the file size limit (ulimit -f), or write smaller shards"),
    errno.ENAMETOOLONG: (ConfigError, "use a shorter checkpoint name or root"),
    errno.ELOOP: (ConfigError, "remove the loop of symbolic links"),
    errno.ENOTEMPTY: (ConfigError, "the key is a directory of other keys"),
    **dict.fromkeys(
        (
            errno.EINTR,
            errno.EEXIST,  # a temporary name met itself
            errno.EAGAIN,
            errno.EBUSY,
            errno.ETXTBSY,
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOMEM,
            errno.ENOBUFS,
            errno.ENOLCK,
            errno.EIO,
            errno.EREMOTEIO,
            errno.ESTALE,
            errno.ETIMEDOUT,
            errno.ENOTCONN,
            errno.ECONNABORTED,
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.EHOSTDOWN,
            errno.EHOSTUNREACH,
            errno.ENETDOWN,
            errno.ENETUNREACH,
            errno.ESHUTDOWN,
        ),
        (TransientError, ""),
    ),
}

# Answers with which link and rename say that they did nothing. ENOENT is missing on purpose: over NFS it
# is also the answer to a repeated rename whose first reply was lost.
_REFUSED = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENOTEMPTY,
    }
)


def errno_name(error: OSError) -> str:
    """``ENOSPC``, or the number if it has no name."""
    return errno.errorcode.get(error.errno or 0, f"errno {error.errno}")


def _message(error: OSError, doing: str, root: str) -> str:
    where = f" in {root}" if root else ""
    return f"{doing} failed: {errno_name(error)} ({os.strerror(error.errno or 0)}){where}"


def translate(error: OSError, key: str, doing: str, root: str = "") -> TxStoreError:
    """The error of the contract for a call that was not a publication, and so had no visible effect.

    An errno outside the table is a plain `StoreError`: it surfaces at once and is never retried.
    The message names `root`, the store's directory: a key alone does not say which disk is meant.
    """
    kind, next_step = _TABLE.get(error.errno or 0, (StoreError, ""))
    return kind(_message(error, doing, root), key=key, next_step=next_step)


def translate_write(error: OSError, key: str, doing: str, root: str = "") -> TxStoreError:
    """As `translate`, for the preparation of a write: there is no object that could be missing."""
    if error.errno == errno.ENOENT:
        next_step = "a directory vanished while it was used, or this file system makes none there"
        return TransientError(_message(error, doing, root), key=key, next_step=next_step)
    if error.errno in {errno.ENOTDIR, errno.EISDIR}:
        return ConfigError(_message(error, doing, root), key=key, next_step="a part of the key is already an object")
    return translate(error, key, doing, root)


def translate_mkdir(error: OSError, key: str, directory: str) -> TxStoreError:
    """As `translate_write`, for a directory that could not be made: it is not there, and the one above it says why."""
    found = translate_write(error, key, f"creation of the directory {directory}")
    if isinstance(found, AccessDeniedError) and error.errno != errno.EROFS:
        found.next_step = f"check owner and mode of {os.path.dirname(directory)}"
    return found


def translate_publish(error: OSError, key: str, doing: str, root: str = "") -> TxStoreError:
    """As `translate`, for link and rename: unless the kernel clearly refused, the effect is unknown."""
    if error.errno in _REFUSED:
        return translate_write(error, key, doing, root)
    return unknown(error, key, doing, root)


def unknown(error: OSError, key: str, doing: str, root: str = "") -> OutcomeUnknownError:
    """The object is visible, or may be, and its durability is in doubt."""
    return OutcomeUnknownError(_message(error, doing, root), key=key)
