"""The one retry layer: repeats what may be repeated, and reads back what `create` left unclear.

A conditional write is not idempotent under retry: the first attempt lands, its reply is lost, and the
second is told "exists". So `RetryingStore.create` decides by the bytes it reads back, never by the code
(commit protocol, "One conditional primitive"). SDK retries are off below this layer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, stop_any
from tenacity.stop import stop_base
from tenacity.wait import wait_base, wait_random_exponential

from txstore.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
    UnusableStoreError,
)
from txstore.field_types import check_fields
from txstore.in_flight import InFlight, Operation
from txstore.store import ObjectInfo, Source, Store

log = logging.getLogger(__name__)
_T = TypeVar("_T")

RETRIED = (TransientError, OutcomeUnknownError)
"""The allow-list. Anything else surfaces at once: a retried bug is a slow bug."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long one operation is repeated.

    Attributes:
        attempts: Most attempts of one operation.
        deadline_s: No attempt begins later than this after the first.
        first_wait_s: Upper end of the first random wait; doubled each time (full jitter).
        longest_wait_s: Upper end of any wait.
    """

    attempts: int = 8
    deadline_s: float = 120.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 20.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.attempts < 1 or min(self.deadline_s, self.first_wait_s, self.longest_wait_s) < 0:
            raise ConfigError(f"not a retry policy: {self}")


class _StopAtDeadline(stop_base):
    """Stop when the next attempt would begin after the deadline, by the injected clock."""

    def __init__(self, deadline: float, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._clock = clock

    def __call__(self, retry_state: RetryCallState) -> bool:
        return self._clock() + retry_state.upcoming_sleep >= self._deadline


class _Wait(wait_base):
    """Full jitter, and never less than the store asked for."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._jitter = wait_random_exponential(multiplier=policy.first_wait_s, max=policy.longest_wait_s)

    def __call__(self, retry_state: RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        return max(self._jitter(retry_state), error.retry_after_s if isinstance(error, StoreError) else 0.0)


class RetryCounts:
    """How many attempts were repeated, by cause. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, error: BaseException) -> None:
        """Count one repetition, by the error's cause or its class."""
        cause = error.cause if isinstance(error, StoreError) else ""
        with self._lock:
            self._counts[cause or type(error).__name__] += 1

    def by_cause(self) -> dict[str, int]:
        """A copy of the counts."""
        with self._lock:
            return dict(self._counts)

    def __reduce__(self) -> tuple[object, ...]:
        return RetryCounts, ()  # another process counts its own


@runtime_checkable
class CountsRetries(Protocol):
    """A backend that repeats parts of its verbs and counts them."""

    @property
    def retries(self) -> dict[str, int]:
        """Repeated parts so far, by cause."""


class Retrier:
    """Repeats a call whose errors are on the allow-list, within a policy.

    `RetryingStore` repeats whole verbs with it; a backend repeats the parts of one verb, such as the
    upload of one part, so that a fault does not start a large object again.

    Args:
        policy: Attempts, deadline and waits.
        counts: Where repetitions are counted.
        sleep: Collaborator that waits (seconds).
        clock: Monotonic clock (seconds).
    """

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        counts: RetryCounts | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or RetryPolicy()
        self.counts = counts or RetryCounts()
        self._sleep = sleep
        self._clock = clock

    def call(self, function: Callable[..., _T], *args: object) -> _T:
        """`function(*args)`, repeated while it raises `TransientError` or `OutcomeUnknownError`."""
        policy = self.policy
        deadline = self._clock() + policy.deadline_s
        retrying = Retrying(
            retry=retry_if_exception_type(RETRIED),
            wait=_Wait(policy),
            stop=stop_any(stop_after_attempt(policy.attempts), _StopAtDeadline(deadline, self._clock)),
            sleep=self._sleep,
            before_sleep=self._note,
            reraise=True,
        )
        return retrying(function, *args)

    def _note(self, state: RetryCallState) -> None:
        if state.outcome is not None and (error := state.outcome.exception()) is not None:
            self.counts.add(error)
            log.debug("attempt %d failed, waiting %.2f s: %s", state.attempt_number, state.upcoming_sleep, error)


class RetryingStore(Store):
    """Any store, with retries. Passes the conformance suite itself.

    Args:
        inner: The backend.
        policy: Attempts, deadline and waits.
        sleep: Collaborator that waits (seconds).
        clock: Monotonic clock (seconds).
    """

    def __init__(
        self,
        inner: Store,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.url = inner.url
        self.needs_probe = inner.needs_probe
        self.distant = inner.distant
        self.streams = inner.streams
        self.read_bytes = inner.read_bytes
        self._retrier = Retrier(policy, sleep=sleep, clock=clock)
        self._in_flight = InFlight()

    def in_flight(self) -> list[Operation]:
        """The operations that have begun and not ended, the longest first."""
        return self._in_flight.operations()

    @property
    def policy(self) -> RetryPolicy:
        """Attempts, deadline and waits."""
        return self._retrier.policy

    @property
    def retries(self) -> dict[str, int]:
        """What was repeated so far, by cause: whole verbs, and parts of them inside the backend."""
        counts = Counter(self._retrier.counts.by_cause())
        if isinstance(self.inner, CountsRetries):
            counts.update(self.inner.retries)
        return dict(counts)

    def _call(self, verb: Callable[..., _T], key: str, *args: object) -> _T:
        with self._in_flight.running(verb.__name__, key):
            return self._retried(verb, key, *args)

    def _retried(self, function: Callable[..., _T], *args: object) -> _T:
        try:
            return self._retrier.call(function, *args)
        except UnusableStoreError:
            raise
        except ConfigError as error:
            raise _answered(error) from error

    def put(self, key: str, source: Source) -> ObjectInfo:
        """`put` again from the start: the source is replayable, the object whole or nothing."""
        return self._call(self.inner.put, key, source)

    def create(self, key: str, data: bytes) -> None:
        """`create` with read-back.

        Raises:
            AlreadyExistsError: The key surely holds other bytes.
            OutcomeUnknownError: An attempt may have landed and no read could tell.
            StoreError: A definite refusal, and no attempt can have landed.
        """
        # A later clear error does not undo an unclear one: 500 after applying, then 403 from an expired token.
        unclear = False

        def attempt() -> None:
            nonlocal unclear
            try:
                self.inner.create(key, data)
            except AlreadyExistsError:
                # Until it is read back this may be our own record, and the read-back may fail.
                unclear = True
                found = self._read_back(key, data)
                if found is None:
                    # "Exists", but nothing is there: S3's 409, a lagging replica. Ask again.
                    raise OutcomeUnknownError(
                        "create was told that the object exists, but it does not", key=key
                    ) from None
                if not found:
                    raise
            except OutcomeUnknownError:
                unclear = True
                raise

        with self._in_flight.running("create", key):
            try:
                self._retried(attempt)
            except AlreadyExistsError:
                raise
            except StoreError as error:
                if not unclear:
                    raise
                self._settle(key, data, error)

    def _settle(self, key: str, data: bytes, error: StoreError) -> None:
        """The budget is spent after an unclear attempt: read once more, else say that it is unknown."""
        found = self._read_back(key, data)
        if found:
            return
        if found is not None:
            raise AlreadyExistsError("object exists", key=key) from error
        # Absent now proves nothing: the first request may still be on its way.
        raise OutcomeUnknownError(f"create may or may not have landed: {error.message}", key=key) from error

    def _read_back(self, key: str, data: bytes) -> bool | None:
        """Whether the key holds exactly `data`; None if nothing is there.

        Raises:
            OutcomeUnknownError: The read failed for good.
        """
        try:
            return self.read(key, 0, len(data) + 1) == data
        except NotFoundError:
            return None
        except StoreError as error:
            raise OutcomeUnknownError(f"create could not be read back: {error.message}", key=key) from error

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """`read`, repeated."""
        return self._call(self.inner.read, key, start, size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """`read_into`, repeated from its start."""
        return self._call(self.inner.read_into, key, start, buffer)

    def head(self, key: str) -> ObjectInfo:
        """`head`, repeated."""
        return self._call(self.inner.head, key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """`list`, taken up again after the last key seen, so that no key is shown twice."""
        last = start_after
        inner: Iterator[ObjectInfo] | None = None

        def advance() -> ObjectInfo | None:
            nonlocal inner
            try:
                if inner is None:
                    inner = self.inner.list(prefix, last)
                return next(inner, None)
            except RETRIED:
                inner = None  # a generator that raised is finished
                raise

        # A budget for each step, begun when it fails: one for the whole listing would be spent by its sheer length.
        while (info := self._advance(prefix, advance)) is not None:
            last = info.key
            yield info

    def _advance(self, prefix: str, advance: Callable[[], ObjectInfo | None]) -> ObjectInfo | None:
        try:
            with self._in_flight.running("list", prefix):
                return advance()
        except RETRIED as error:
            first: list[StoreError] = [error]
        except UnusableStoreError:
            raise
        except ConfigError as error:
            raise _answered(error) from error

        def again() -> ObjectInfo | None:
            if first:  # the attempt that has failed already counts as the first one
                raise first.pop()
            return advance()

        with self._in_flight.running("list", prefix):
            return self._retried(again)

    def delete(self, key: str) -> None:
        """`delete`, repeated: an absent object is success."""
        self._call(self.inner.delete, key)

    def close(self) -> None:
        """Close the backend."""
        self.inner.close()


def _answered(error: ConfigError) -> UnusableStoreError:
    """What a backend refuses for the URL's sake, as an answer of the store.

    Else it would pass by all that treats answers: an unclear `create` that is followed by it would be called refused.
    """
    next_step = (
        error.next_step or "check path, bucket, endpoint and credentials of the store; was it moved, or unmounted?"
    )
    return UnusableStoreError(error.message, key=error.key, rank=error.rank, next_step=next_step)
