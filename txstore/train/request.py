"""One save: what the caller holds of it, and what its ranks know of it on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from txstore.dcp.snapshot import Snapshot
from txstore.dcp.writer import Phase
from txstore.errors import SaveError, TxStoreError
from txstore.events import SavePhase
from txstore.manifest import Decision, Description

Told = Callable[["Request", Decision | None, TxStoreError | None], None]


class SaveHandle:
    """One save that was asked for.

    Attributes:
        checkpoint: Its name.
        step: The global step it was taken at.
        staged: Done when the snapshot was independent of training, on all ranks.
        committed: Done when the checkpoint exists, with its decision; or failed, with the same error on all ranks:
            `CommitUnknown` if the checkpoint may exist, any other error if it does not and will not.
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
    """A staged save on its way to the store. Times are of the monotonic clock, in seconds.

    Attributes:
        tell: Tells the observers how it ended, once, on the thread that settles it and before its future is done.
        given_up: The training thread does not wait any longer: it will settle the handle, with what all ranks know.
    """

    handle: SaveHandle
    snapshot: Snapshot
    description: Description
    overwrite: bool
    tell: Told
    requested_s: float
    waited_s: float
    staged_s: float
    begun_s: float | None = None
    reached_s: dict[Phase, float] = field(default_factory=dict)
    written_bytes: int = 0
    committed_s: float | None = None
    ended_s: float | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    error: TxStoreError | None = None
    given_up: bool = False
    _settled: threading.Lock = field(default_factory=threading.Lock)

    def reach(self, phase: Phase, nbytes: int) -> None:
        """Note that a phase has begun on this rank."""
        self.reached_s[phase] = time.monotonic()
        if phase == "written":
            self.written_bytes = nbytes

    def settle(self, decision: Decision | None, error: TxStoreError | None) -> None:
        """Tell how the save ended, unless that has been told: a save that was given up may end later."""
        if not self._settled.acquire(blocking=False):
            return
        if decision is None and error is None:
            error = SaveError("no commit was reported", key=self.handle.checkpoint)
        self.tell(self, decision, error)
        if decision is not None:
            self.handle.committed.set_result(decision)
        else:
            self.handle.committed.set_exception(error)

    @property
    def phase(self) -> SavePhase:
        """Where the save is, or was when it ended."""
        last = next(reversed(self.reached_s), None)
        return "wait" if last is None else "commit" if last == "written" else last
