"""Every error that txstore raises, and what a caller does about it.

::

    TxStoreError
    ├── ConfigError (ValueError)            fix the URL, the option or the call
    ├── StoreError                          the store's answer to one request about one key
    │   ├── NotFoundError (FileNotFoundError)
    │   ├── AlreadyExistsError (FileExistsError)
    │   ├── AccessDeniedError (PermissionError)
    │   ├── StoreFullError                  free space or quota, then save again
    │   ├── UnusableStoreError (ConfigError) path, bucket, endpoint or credentials lead nowhere, or no longer do
    │   ├── CapabilityError                 this store cannot keep the contract: use another
    │   ├── TransientError                  had no effect; the retry layer repeats it
    │   └── OutcomeUnknownError             may have had effect; the retry layer settles it
    ├── TransactionError
    │   ├── AlreadyCommitted                the checkpoint exists, or is on its way; overwrite=True takes the next slot
    │   ├── Conflict                        another transaction committed this checkpoint first
    │   ├── Aborted                         an abort record names this transaction; begin a new one
    │   ├── CommitUnknown                   ask resolve(); nothing was deleted
    │   └── TransactionStateError           a bug in the caller: used after commit or abort
    ├── CheckpointNotFound (LookupError)    said only after a successful listing
    ├── CheckpointRetired                   removed by retention, on purpose
    ├── IntegrityError                      stored bytes disagree with what was committed
    │   └── StoreReplaced                   the store that this writer knew was deleted, emptied or replaced
    ├── FormatError                         a document is malformed or hostile
    │   └── UnknownVersion                  it is of another format version: use the release that wrote it
    ├── DeadlineExceeded (TimeoutError)     something did not end in time; the message says who waited for what
    ├── SaveError                           this state cannot be saved exactly, or a rank failed
    │   ├── NotNewest                       a newer checkpoint stands: the next resume would take that one
    │   ├── NotResumed                      the store holds checkpoints: call resume() first, or use a new root
    │   ├── PlanMismatch                    results, ranks or planners disagree
    │   ├── SaveBusy                        earlier saves are still on their way, and the policy is to raise
    │   ├── SnapshotInUse                   the previous snapshot's save has not ended: save less often
    │   ├── SnapshotTooLarge                the copy needs more memory than is allowed or there
    │   └── UnsupportedValue                a tensor or object that txstore cannot store exactly
    └── LoadError
        ├── StateMismatch                   keys, dtypes or shapes differ from the saved ones
        ├── Incompatible                    model, data, settings or parallelism differ: accept, verify or migrate
        ├── NotProved                       training did not go on where it stood: look before it trains on
        └── UnsafeObject                    a pickled object outside the weights_only allow-list

Every class survives pickling between ranks: only strings and numbers are kept, and the
text of a foreign exception instead of the exception (live SDK errors hold locks, sockets
and tracebacks, and an error that cannot be pickled leaves the other ranks waiting).
"""

from __future__ import annotations

import re
from typing import Self

_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # torch colours some of its messages


class TxStoreError(Exception):
    """Root of the tree.

    Args:
        message: What happened, lower case, values last.
        key: The object key, tensor name or checkpoint concerned, or "".
        rank: The rank on which it happened, or None outside a process group.
        next_step: What the reader of the message should do, or "".
    """

    def __init__(self, message: str, *, key: str = "", rank: int | None = None, next_step: str = "") -> None:
        # One positional argument: OSError subclasses would read a second one as strerror.
        super().__init__(message)
        self.message = message
        self.key = key
        self.rank = rank
        self.next_step = next_step

    def __str__(self) -> str:
        where = f" [rank {self.rank}]" if self.rank is not None else ""
        what = f": key={self.key!r}" if self.key and repr(self.key) not in self.message else ""
        hint = f" ({self.next_step})" if self.next_step else ""
        return f"{self.message}{what}{where}{hint}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))

    def at_rank(self, rank: int) -> Self:
        """Record the rank, if none is recorded yet; returns self."""
        if self.rank is None:
            self.rank = rank
        return self


def _rebuild(cls: type[TxStoreError], message: str, state: dict[str, object]) -> TxStoreError:
    # __new__ + explicit state: a subclass with other constructor arguments still unpickles.
    error = cls.__new__(cls, message)
    TxStoreError.__init__(error, message)
    error.__dict__.update(state)
    return error


def describe(error: BaseException) -> str:
    """A foreign exception as one line of text, safe to keep in an error that travels between ranks."""
    text = " ".join(_TERMINAL.sub("", str(error)).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


class ConfigError(TxStoreError, ValueError):
    """The URL, an option or the call is wrong."""


class StoreError(TxStoreError):
    """The store's answer to one request about one key.

    Attributes:
        cause: Status and code, or kind of fault, in a few words (``503 SlowDown``, ``timeout``): what
            retries are counted by. Never a secret.
        retry_after_s: How long the store asked us to wait; 0.0 if it did not say.
    """

    cause: str = ""
    retry_after_s: float = 0.0

    def because(self, cause: str, retry_after_s: float = 0.0) -> Self:
        """Record the cause and the store's own wish; returns self."""
        self.cause = cause
        self.retry_after_s = retry_after_s
        return self


class NotFoundError(StoreError, FileNotFoundError):
    """No object has this key."""


class AlreadyExistsError(StoreError, FileExistsError):
    """`create` found an object under this key."""


class AccessDeniedError(StoreError, PermissionError):
    """The store refuses this caller, or is read-only."""


class StoreFullError(StoreError):
    """No space or quota is left (ENOSPC, EDQUOT)."""


class UnusableStoreError(StoreError, ConfigError):
    """A request was refused for what the store's URL, path, bucket, endpoint or credentials are.

    When a store is opened that is a `ConfigError`. In the middle of a run it is also the store's answer: a disk was
    unmounted, a bucket removed, a directory replaced by a file. Whoever goes on without storage by ``except
    StoreError`` goes on here, too.
    """


class CapabilityError(StoreError):
    """The store cannot keep the contract, so nothing was written."""


class TransientError(StoreError):
    """The request had no effect and may be repeated."""


class OutcomeUnknownError(StoreError):
    """The request may have had effect: put and delete are repeated, create is read back."""


class TransactionError(TxStoreError):
    """The transaction did not commit, or nobody knows yet."""


class AlreadyCommitted(TransactionError):
    """The checkpoint stood before, or this run is saving it in another state; and `overwrite` was not given."""


class Conflict(TransactionError):
    """Another transaction committed this checkpoint after this one began.

    Attributes:
        winner: The transaction id that holds the slot.
    """

    winner: str = ""


class Aborted(TransactionError):
    """An abort record names this transaction; its shards may be gone."""


class CommitUnknown(TransactionError):
    """The decision was sent and no answer could be had; `resolve` settles it. Nothing was deleted.

    Attributes:
        txn: The transaction id to resolve.
    """

    txn: str = ""


class TransactionStateError(TransactionError):
    """A transaction was used after its end."""


class CheckpointNotFound(TxStoreError, LookupError):
    """A successful listing holds no such committed checkpoint."""


class CheckpointRetired(TxStoreError):
    """The checkpoint was committed and has been removed by retention."""


class IntegrityError(TxStoreError):
    """Stored bytes disagree with the committed digests, sizes or checksums."""


class StoreReplaced(IntegrityError):
    """The store that this writer has seen was deleted, emptied or replaced by another: nothing is written to it."""


class FormatError(TxStoreError):
    """A document is malformed or hostile."""


class UnknownVersion(FormatError):
    """A document of a format version that this release does not know: not damaged, and never passed over as damaged."""


class DeadlineExceeded(TxStoreError, TimeoutError):
    """A collective, a store operation or a whole save did not end within its deadline."""


class SaveError(TxStoreError):
    """A save was refused; nothing was committed."""


class PlanMismatch(SaveError):
    """Plans, results or ranks disagree with each other."""


class NotResumed(SaveError):
    """The store holds checkpoints, and the run that wants to save has not resumed."""


class NotNewest(SaveError):
    """What was to be saved is older than a checkpoint that stands: no resume would take it unasked."""


class SaveBusy(SaveError):
    """As many saves as the policy allows are still on their way."""


class SnapshotInUse(SaveError):
    """The buffers still hold a snapshot whose save has not ended."""


class SnapshotTooLarge(SaveError):
    """A snapshot needs more memory than is allowed, or than the machine has."""


class UnsupportedValue(SaveError):
    """A value cannot be stored exactly."""


class LoadError(TxStoreError):
    """A load was refused."""


class StateMismatch(LoadError):
    """The target state differs from the saved one in keys, dtypes or shapes."""


class Incompatible(LoadError):
    """The checkpoint was saved under conditions that differ from today's, and nobody allowed the differences.

    Attributes:
        judgement: All differences in JSON form, as `txstore.compat.Judgement.to_dict` gives them.
    """

    judgement: dict[str, object] | None = None


class NotProved(LoadError):
    """A check after the resume failed: the state, or the first steps, are not what was saved leads to."""


class UnsafeObject(LoadError):
    """An object payload needs code outside the `weights_only` allow-list."""
