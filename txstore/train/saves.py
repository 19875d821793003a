"""The background half of a save: one thread that writes snapshots one after another, and tells every rank the same.

Staged and committed are two moments with two futures (mission, "Save: two completions, never confused").
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from txstore.dcp.writer import StorageWriter
from txstore.errors import AlreadyCommitted, CommitUnknown, LoadError, SaveError, TxStoreError, describe
from txstore.manifest import Decision
from txstore.slot_walk import TWO_JOBS
from txstore.train import exit_guard
from txstore.train.exchange import Exchange, typed
from txstore.train.fate import give_up, with_fates
from txstore.train.request import Request

UNMOVED = (
    "if something was trained since, count it in state.progress.global_step, which has not moved; "
    "if nothing was, leave this save out: `if saves.saved_step != state.progress.global_step: saves.save()`"
)
"""What to do about a save of a step that stands already."""

ReadBack = Callable[[Decision], object]


class BackgroundSaves:
    """Runs saves in order, in one daemon thread that is started with the first.

    Args:
        writer: Writes them; nobody else uses it.
        exchange: The ranks' exchange on this thread; its group also carries DCP's collectives.
        read_back: Verifies a commit, on the coordinator; None for no verification.
    """

    def __init__(self, writer: StorageWriter, exchange: Exchange, read_back: ReadBack | None = None) -> None:
        self._writer = writer
        self._exchange = exchange
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
            if not request.given_up:
                request.settle(decision, request.error)
            if decision is not None:
                exit_guard.overtaken(self._writer.store.url, request.handle.step)
            if decision is not None and request.error is None:
                request.committed_s = request.ended_s
                request.error = self._verified(decision)
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
            if self._exchange.broken is not None:
                return self._alone(request, error, self._exchange.broken)
            request.error = agreed
            if isinstance(agreed, AlreadyCommitted):
                agreed.message += ": this run saved or resumed this step before, or another run shares its root"
                agreed.next_step = f"{TWO_JOBS}; else, {UNMOVED}"
            return None

    def _alone(self, request: Request, error: TxStoreError | None, broken: TxStoreError) -> Decision | None:
        """The ranks cannot agree any more: what this one can prove is all that it says."""
        (fate,) = give_up(self._writer, [request], self._exchange)
        if fate.decision is None and error is not None and (isinstance(error, CommitUnknown) or not fate.unknown):
            request.error = error  # what happened here says more than that the group broke
        else:
            request.error = with_fates(broken, [fate], self._writer.store.url)
        return fate.decision


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
