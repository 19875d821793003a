"""What happens to saves and resumes, as typed events, and who listens.

An observer is any ``Callable[[Event], None]``. It is called on the thread on which the thing happened, the training
thread included: it must return soon. Durations are seconds of the monotonic clock, `at_s` is the wall clock.

Events carry no name of a run: a store's root, and so a log beside it, belongs to one run. Each rank tells what it saw
itself; readers of several logs order them by `at_s`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Literal, TypedDict

from msgspec import Struct

from txstore.errors import (
    CheckpointNotFound,
    CheckpointRetired,
    DeadlineExceeded,
    FormatError,
    Incompatible,
    IntegrityError,
    NotProved,
    StateMismatch,
    StoreError,
    TxStoreError,
    UnsafeObject,
    describe,
)
from txstore.redact import redact_text

log = logging.getLogger(__name__)

_LONGEST_TEXT = 2000
"""Characters of an error that an event carries: a mismatch may name every key of a model."""

WhenBusy = Literal["wait", "skip", "raise"]
"""What a save does while an earlier one is still on its way: wait for it, leave itself out, or raise `SaveBusy`."""

SkipReason = Literal["in_flight", "commit_lag"]
"""Which limit was reached: saves on their way, age of the oldest save on its way."""

SavePhase = Literal["wait", "capture", "copy", "plan", "write", "commit", "unknown"]
"""Where a save was when it failed; ``wait`` is waiting for, or refused because of, an earlier save."""

RestoreReason = Literal[
    "not_found", "incompatible", "mismatch", "integrity", "format", "unsafe", "store", "deadline", "validation", "other"
]
"""Why a restore failed: a closed set, because it becomes a label.

``incompatible`` is the judgement before the load, ``mismatch`` are keys, dtypes or shapes that differ in the load, and
``validation`` is a proof after it that failed.
"""

Depth = Literal["documents", "sample", "full", "drill"]
"""How a checkpoint was verified: as in `txstore verify`, or by a drill, which loads it and goes on from it."""


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class _Event(Struct, frozen=True, kw_only=True, tag_field="event", tag=_tag):
    """Common to all events.

    Attributes:
        at_s: When it happened, seconds since the epoch.
        rank: Who says so.
        world_size: Ranks of the process that says so.
        checkpoint: The checkpoint concerned; "" if there is none.
        step: Its step; None if it has none.
    """

    at_s: float
    rank: int
    world_size: int
    checkpoint: str
    step: int | None


class SaveRequested(_Event, frozen=True, kw_only=True):
    """Training stands at `step` and asks for a save; told before any waiting.

    Each ends in one of `SaveSkipped`, `Committed` and `SaveFailed`, unless the process dies first.

    Attributes:
        when_busy: What the policy does if an earlier save is still on its way.
    """

    when_busy: WhenBusy


class SaveSkipped(_Event, frozen=True, kw_only=True):
    """The policy left this save out."""

    reason: SkipReason


class Staged(_Event, frozen=True, kw_only=True):
    """The snapshot is independent of training, which goes on. Nothing is committed.

    Attributes:
        bytes: Bytes of this rank's snapshot.
        waited_s: How long training stood still for an earlier save.
        capture_s: How long the state was collected; training stood still.
        copy_s: How long it was copied, until the copy's own completion; training stood still.
    """

    bytes: int
    waited_s: float
    capture_s: float
    copy_s: float


class Written(_Event, frozen=True, kw_only=True):
    """This rank's shards are in the store, durable. Nothing is committed.

    Attributes:
        bytes: Bytes that this rank wrote.
        plan_s: From the start of the background save until the plan was agreed.
        write_s: Writing the shards.
    """

    bytes: int
    plan_s: float
    write_s: float


class Committed(_Event, frozen=True, kw_only=True):
    """The recovery point exists.

    Attributes:
        bytes: Bytes of the whole checkpoint, over all ranks.
        save_s: From the end of the waiting for earlier saves until the commit.
        commit_s: From the last rank's result until the decision was published.
        lag_s: From the request until the commit, waiting included: how much older than the commit its state is.
        slot: Slot of the decision.
        txn: The transaction.
    """

    bytes: int
    save_s: float
    commit_s: float
    lag_s: float
    slot: int
    txn: str


class SaveFailed(_Event, frozen=True, kw_only=True):
    """Nothing was committed, or nobody knows (``CommitUnknown``).

    Attributes:
        phase: Where the save was.
        error_type: Class of the error.
        message: Its text, without secrets.
        key: Object, tensor or checkpoint concerned, or "".
        failed_rank: Where it happened, if that is known.
        consecutive: Failed saves since the last commit, this one included.
    """

    phase: SavePhase
    error_type: str
    message: str
    key: str
    failed_rank: int | None
    consecutive: int


class Verified(_Event, frozen=True, kw_only=True):
    """Stored bytes were compared with what was committed, or a drill has ended.

    Attributes:
        depth: What was done.
        ok: Whether nothing was wrong.
        bytes: Bytes of shards that were read.
        verify_s: How long it took.
        problems: How many things were wrong.
        stood_at_s: When training stood at this step, seconds since the epoch; None if that is not known.
    """

    depth: Depth
    ok: bool
    bytes: int
    verify_s: float
    problems: int = 0
    stood_at_s: float | None = None


class Restored(_Event, frozen=True, kw_only=True):
    """State was loaded and put in place; training may go on unless the proof says no.

    Attributes:
        bytes: Bytes that this rank loaded.
        restore_s: All of it; the sum of the phases, and what lies between.
        choose_s: Finding the recovery point.
        judge_s: Comparing it with today's run.
        load_s: Reading and resharding.
        apply_s: Putting schedulers, generators and cursors in place.
        validate_s: The checks before the first step.
        saved_world_size: Ranks of the run that saved.
    """

    bytes: int
    restore_s: float
    choose_s: float
    judge_s: float
    load_s: float
    apply_s: float
    validate_s: float
    saved_world_size: int


class RestoreFailed(_Event, frozen=True, kw_only=True):
    """This recovery point was not restored. Fields are those of `SaveFailed`."""

    reason: RestoreReason
    error_type: str
    message: str
    key: str
    failed_rank: int | None


class ChecksumFailed(_Event, frozen=True, kw_only=True):
    """An object's bytes are not those that were committed; told once an object, besides what it made fail."""

    key: str


class FellBack(_Event, frozen=True, kw_only=True):
    """An older recovery point, `checkpoint`, was taken; a `RestoreFailed` says what was wrong with the other.

    Attributes:
        from_checkpoint: The newer one that could not be taken.
        reason: Why.
    """

    from_checkpoint: str
    reason: RestoreReason


class Proved(_Event, frozen=True, kw_only=True):
    """The proof after a resume has ended: did training really go on from `checkpoint`?

    Attributes:
        ok: Whether every check held.
        loss_delta: Loss of the first step after the resume, minus the last one before the save; None if it was not
            compared. In a log also null if it is not finite; `ok` is false then.
        reprocessed_samples: Samples that were trained on before the crash and are again; None if not known.
    """

    ok: bool
    loss_delta: float | None = None
    reprocessed_samples: int | None = None


class StepRecorded(_Event, frozen=True, kw_only=True):
    """Training has finished `step`.

    Attributes:
        loss: What the loop recorded; in a log null if it is not finite.
        consumed_samples: Samples of all ranks since the beginning of the run, this step's included.
    """

    loss: float | None
    consumed_samples: int


Event = (
    StepRecorded
    | SaveRequested
    | SaveSkipped
    | Staged
    | Written
    | Committed
    | SaveFailed
    | Verified
    | Restored
    | RestoreFailed
    | ChecksumFailed
    | FellBack
    | Proved
)

Observer = Callable[[Event], None]


EVENT_NAMES = frozenset(_tag(kind.__name__) for kind in _Event.__subclasses__())
"""The value of `event` in each line of a log."""


class ErrorFields(TypedDict):
    """What `SaveFailed` and `RestoreFailed` say of an error."""

    error_type: str
    message: str
    key: str
    failed_rank: int | None


def error_fields(error: BaseException) -> ErrorFields:
    """The fields of an event about `error`: ``SaveFailed(..., **error_fields(error))``."""
    message, key, failed_rank = describe(error), "", None
    if isinstance(error, TxStoreError):
        message, key, failed_rank = error.message, error.key, error.rank
    return {
        "error_type": type(error).__name__,
        "message": _plain(message),
        "key": _plain(key),
        "failed_rank": failed_rank,
    }


def _plain(text: str) -> str:
    """Short, without secrets, and encodable: a file name that is no UTF-8 must not lose the event."""
    if len(text) > _LONGEST_TEXT:
        # Cut at a blank: half a URL would not be recognised, and its password would stay.
        text = text[:_LONGEST_TEXT].rpartition(" ")[0] + " ..."
    return redact_text(text).encode("utf-8", "backslashreplace").decode("utf-8")


_REASONS: tuple[tuple[type[TxStoreError], RestoreReason], ...] = (
    (CheckpointNotFound, "not_found"),
    (CheckpointRetired, "not_found"),
    (Incompatible, "incompatible"),
    (NotProved, "validation"),
    (DeadlineExceeded, "deadline"),
    (StateMismatch, "mismatch"),
    (IntegrityError, "integrity"),
    (FormatError, "format"),
    (Incompatible, "incompatible"),
    (NotProved, "validation"),
    (UnsafeObject, "unsafe"),
    (DeadlineExceeded, "deadline"),
    (StoreError, "store"),
)


def restore_reason(error: BaseException) -> RestoreReason:
    """The reason that an error of a resume amounts to."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "other")


class Observers:
    """Calls each observer, and lets none of them break a save: itself an observer.

    What an observer raises becomes one warning in the log with its traceback, the first time; later times are told
    at level debug, because a full disk under an event log would otherwise warn at every event of every save.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._told: set[int] = set()

    def __call__(self, event: Event) -> None:
        """Tell all observers."""
        for number, observer in enumerate(self._observers):
            try:
                observer(event)
            except Exception:  # whatever an observer raises, the save goes on
                level = logging.DEBUG if number in self._told else logging.WARNING
                self._told.add(number)
                name = _tag(type(event).__name__)
                log.log(level, "an observer failed at %s and may miss more: %r", name, observer, exc_info=True)
