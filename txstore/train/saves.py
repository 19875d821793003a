"""The background half of a save: one thread that writes snapshots one after another, and tells every rank the same.

Staged and committed are two moments with two futures (mission, "Save: two completions, never confused").
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from txstore.dcp.snapshot import Snapshot
from txstore.dcp.writer import Phase, StorageWriter
from txstore.errors import AlreadyCommitted, DeadlineExceeded, LoadError, SaveError, TxStoreError, describe
from txstore.events import SavePhase
from txstore.manifest import Decision, Description
from txstore.retry import RetryingStore
from txstore.train.exchange import Exchange, typed


class SaveHandle:
    """One save that was asked for.

    Attributes:
        checkpoint: Its name.
        step: The global step it was taken at.
        staged: Done when the snapshot was independent of training, on all ranks.
        committed: Done when the checkpoint exists, with its decision; or failed, with the same error on all ranks.
            Cancelling it is not possible: a save that is on its way cannot be called back.
        skipped: Why there is no save, or "". The futures of a skipped save are cancelled.
    """

    def __init__(self, checkpoint: str, step: int, *, skipped: str = "") -> None:
        self.checkpoint = checkpoint
        self.step = step
        self.skipped = skipped
        self.staged: Future[None] = Future()
        self.committed: Future[Decision] = Future()
        for future in (self.staged, self.committed):
            # Running futures cannot be cancelled: `cancel()` answers False instead of a promise it cannot keep.
            future.cancel() if skipped else future.set_running_or_notify_cancel()

    def __repr__(self) -> str:
        state = self.skipped or "on its way"
        if self.committed.done() and not self.skipped:
            state = "failed" if self.committed.exception() else "committed"
        return f"SaveHandle({self.checkpoint}, {state})"


@dataclass(slots=True)
class Request:
    """A staged save on its way to the store. Times are of the monotonic clock, in seconds."""

    handle: SaveHandle
    snapshot: Snapshot
    description: Description
    overwrite: bool
    requested_s: float
    waited_s: float
    staged_s: float
    begun_s: float | None = None
    reached_s: dict[Phase, float] = field(default_factory=dict)
    written_bytes: int = 0
    ended_s: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    error: TxStoreError | None = None

    def reach(self, phase: Phase, nbytes: int) -> None:
        """Note that a phase has begun on this rank."""
        self.reached_s[phase] = time.monotonic()
        if phase == "written":
            self.written_bytes = nbytes

    @property
    def phase(self) -> SavePhase:
        """Where the save is, or was when it ended."""
        last = next(reversed(self.reached_s), None)
        return "wait" if last is None else "commit" if last == "written" else last


Ended = Callable[[Request, Decision | None], None]
ReadBack = Callable[[Decision], object]


class BackgroundSaves:
    """Runs saves in order, in one daemon thread that is started with the first.

    Args:
        writer: Writes them; nobody else uses it.
        exchange: The ranks' exchange on this thread; its group also carries DCP's collectives.
        ended: Called on this thread after each save, before its futures are done.
        read_back: Verifies a commit, on the coordinator; None for no verification.
    """

    def __init__(
        self, writer: StorageWriter, exchange: Exchange, ended: Ended, read_back: ReadBack | None = None
    ) -> None:
        self._writer = writer
        self._exchange = exchange
        self._ended = ended
        self._read_back = read_back
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, request: Request) -> None:
        """Queue a staged save."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="txstore-saves", daemon=True)
            self._thread.start()
        self._queue.put(request)

    def close(self, wait_s: float) -> bool:
        """End the thread after what is queued; whether it has ended within `wait_s`."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            request.begun_s = time.monotonic()
            decision = self._save(request)
            request.snapshot.release()
            request.ended_s = time.monotonic()
            self._ended(request, decision)
            if request.error is None and decision is not None:
                request.handle.committed.set_result(decision)
                request.error = self._verified(decision)
            else:
                request.handle.committed.set_exception(request.error or SaveError("no commit was reported"))
            request.ended.set()

    def _verified(self, decision: Decision) -> TxStoreError | None:
        """Read the checkpoint back, if that is wanted; damage is an error on all ranks."""
        read_back = self._read_back
        if read_back is None:
            return None
        error: TxStoreError | None = None
        if self._exchange.is_coordinator:
            error = typed(lambda: read_back(decision), "verification", self._exchange.rank, LoadError)[1]
        try:
            self._exchange.settle(f"verification of {decision.checkpoint}", error)
        except TxStoreError as agreed:
            return agreed
        return None

    def _save(self, request: Request) -> Decision | None:
        """Write, commit, and agree on the outcome; an error is left in the request."""
        error: TxStoreError | None = None
        name = request.handle.checkpoint
        self._writer.description = request.description
        self._writer.overwrite = request.overwrite
        self._writer.on_phase = request.reach
        self._writer.world_size = self._exchange.world_size
        try:
            state_dict_saver.save(
                request.snapshot.state_dict,
                checkpoint_id=name,
                storage_writer=self._writer,
                process_group=self._exchange.group,
                no_dist=self._exchange.group is None,
            )
        except BaseException as raised:  # noqa: BLE001 - nothing may leave this thread unseen
            error = cause_of(raised, self._exchange.rank, name)
        try:
            self._exchange.settle(f"outcome of {name}", error)
            return self._exchange.gather(f"decision on {name}", self._writer.decision)[0]
        except TxStoreError as agreed:
            # A broken group has no agreement; what happened here says more than that it broke.
            request.error = error if error is not None and isinstance(agreed, DeadlineExceeded) else agreed
            if isinstance(agreed, AlreadyCommitted):
                agreed.next_step = "this step was saved before: by this run, or by another that shares its root"
            return None


def cause_of(error: BaseException, rank: int, checkpoint: str, wrap: type[TxStoreError] = SaveError) -> TxStoreError:
    """The typed error inside what DCP raised: that of the lowest rank; foreign ones as text."""
    if isinstance(error, TxStoreError):
        return error.at_rank(rank)
    if isinstance(error, CheckpointException):
        failed = sorted((at, wrapped[0]) for at, wrapped in error.failures.items())
        for at, inner in failed:
            if isinstance(inner, TxStoreError):
                return inner.at_rank(at)
        if failed:
            at, inner = failed[0]
            return wrap(f"rank {at} failed: {describe(inner)}", key=checkpoint, rank=at)
    return wrap(f"rank {rank} failed: {describe(error)}", key=checkpoint, rank=rank)


def stuck(store: object, request: Request, deadline_s: float, rank: int) -> DeadlineExceeded:
    """The error for a save that is still on its way after its deadline: says where it is."""
    running = store.in_flight() if isinstance(store, RetryingStore) else []
    if request.begun_s is None:
        where, key = "waiting for an earlier save", request.handle.checkpoint
    elif running:
        where, key = f"in {running[0]}", running[0].key
    else:
        where, key = "waiting for the other ranks", ""  # the rank that is stuck names an object: its error is preferred
    return DeadlineExceeded(
        f"the save of {request.handle.checkpoint} did not end within {deadline_s:g} s: rank {rank} is {where}",
        key=key,
        rank=rank,
        next_step="it was given up: `txstore ls` says whether it was committed before that; resume from the newest",
    )
