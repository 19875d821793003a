"""The saves that are on their way: how many there may be, how they ended, and what is raised of it, on all ranks alike.

A save ends with the same outcome on all ranks, but not at one moment: what counts is what all ranks know, and that
is agreed on by number, oldest first, before anybody acts on it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import NoReturn

from txstore.dcp.writer import StorageWriter
from txstore.errors import DeadlineExceeded, PlanMismatch, SaveBusy, TxStoreError
from txstore.events import SkipReason
from txstore.manifest import Decision
from txstore.train.exchange import Exchange
from txstore.train.fate import agreed, give_up, stuck, with_fates
from txstore.train.policy import SavePolicy
from txstore.train.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Bid:
    """What a rank brings to a save: it must fit the other ranks' before anything is copied."""

    checkpoint: str
    ended: int
    late: bool


class Ledger:
    """All saves of one checkpointer that are not accounted for on all ranks.

    Args:
        policy: Limits.
        front: The ranks' exchange on the training thread.
        writer: Writes them; it is given up with a save that is stuck.
    """

    def __init__(self, policy: SavePolicy, front: Exchange, writer: StorageWriter) -> None:
        self._policy = policy
        self._front = front
        self._writer = writer
        self._requests: list[Request] = []
        self._failed_in_a_row = 0
        self._tolerated: list[
            Request
        ] = []  # failed since the newest commit, and nobody was told: a warning is no error
        self._asked_step = -1
        self._committed_step = -1
        self._stuck: TxStoreError | None = None

    @property
    def stuck(self) -> TxStoreError | None:
        """The error of a save that was given up: there will be no other."""
        return self._stuck

    @property
    def all_ended(self) -> bool:
        """Whether nothing is on its way on this rank."""
        return all(request.ended.is_set() for request in self._requests)

    @property
    def asked_step(self) -> int:
        """The step of the newest save, whatever became of it; -1 if there is none."""
        return self._asked_step

    @property
    def standing_step(self) -> int:
        """The highest step of a save that is on its way or committed, as all ranks know it; -1 if there is none."""
        return max([self._committed_step, *(request.handle.step for request in self._requests)])

    def goes_on_from(self, step: int) -> None:
        """What was committed before a resume no longer counts: the step that was resumed does, -1 for none."""
        self._committed_step = step

    def holds(self, request: Request) -> bool:
        """Whether a save is not accounted for, the same on all ranks."""
        return any(one is request for one in self._requests)

    def add(self, request: Request) -> None:
        """Take note of a save that is on its way."""
        self._requests.append(request)
        self._asked_step = request.handle.step

    def meet(self, checkpoint: str) -> None:
        """Agree on a save, and account for the earlier ones that have ended on all ranks. Nothing is waited for.

        Raises:
            PlanMismatch: The ranks save different checkpoints.
            TxStoreError: An earlier save failed.
        """
        ended, _ = self._agree(checkpoint)
        self._account_for(ended)

    def make_room(self, checkpoint: str) -> SkipReason | None:
        """Agree on the next save, account for earlier ones and apply the policy.

        Returns:
            Why the next save is to be skipped, or None.

        Raises:
            SaveBusy: The limit is reached, and the policy is to raise.
            PlanMismatch: The ranks save different checkpoints.
            DeadlineExceeded: An earlier save is stuck.
            TxStoreError: An earlier save failed.
        """
        ended, late = self._agree(checkpoint)
        surplus = max(len(self._requests) - ended - self._policy.max_in_flight + 1, int(late))
        if surplus > 0 and self._policy.when_busy == "wait":
            self.wait_for(ended + surplus)
            return None
        self._account_for(ended)
        if surplus <= 0:
            return None
        if self._policy.when_busy == "raise":
            raise SaveBusy(
                f"{len(self._requests)} saves are on their way" + (", one of them late" if late else ""),
                key=checkpoint,
                next_step="save less often, or use when_busy='wait' or 'skip'",
            )
        return "commit_lag" if late else "in_flight"

    def _agree(self, checkpoint: str) -> tuple[int, bool]:
        """How many saves have ended on all ranks, and whether one that has not is late."""
        bids = self._front.gather("save", self._bid(checkpoint))
        for rank, bid in enumerate(bids):
            if bid.checkpoint != bids[0].checkpoint:
                raise PlanMismatch(f"rank {rank} saves {bid.checkpoint}, rank 0 {bids[0].checkpoint}", rank=rank)
        ended = min(bid.ended for bid in bids)
        return ended, any(bid.late for bid in bids) and ended < len(self._requests)

    def _bid(self, checkpoint: str) -> _Bid:
        ended = sum(request.ended.is_set() for request in self._requests)
        limit_s = self._policy.max_commit_lag_s
        late = (
            limit_s is not None
            and ended < len(self._requests)
            and time.monotonic() - self._requests[ended].requested_s > limit_s
        )
        return _Bid(checkpoint, ended, late)

    def wait_for_all(self) -> list[Decision]:
        """Wait until all saves have ended on all ranks; their decisions. Raises as `wait_for`."""
        return self.wait_for(len(self._requests))

    def end(self) -> None:
        """Wait for all saves, the last ones: no later save can make good what the policy has tolerated until now.

        Raises:
            TxStoreError: As `wait_for`; or the newest save has failed, and no call has raised it.
        """
        self.wait_for_all()
        if self._tolerated:
            self._raise([request.error for request in self._tolerated if request.error is not None])

    def wait_for(self, count: int) -> list[Decision]:
        """Wait for the oldest `count` saves on all ranks, then account for them.

        Raises:
            DeadlineExceeded: One is stuck, and was given up; the message says of each save whether it stands. What does
                not stand never will.
            CommitUnknown: One is stuck, and may have been committed.
            TxStoreError: One failed, and the policy does not tolerate it.
        """
        error: TxStoreError | None = None
        for request in self._requests[:count]:
            if not self._ends(request):
                error = self._stuck_at(request)
                break
        try:
            self._front.settle("end of earlier saves", error)
        except DeadlineExceeded as late:
            self._stuck = self._give_up(late)
            raise self._stuck from None
        return self._account_for(count)

    def _ends(self, request: Request) -> bool:
        """Whether it ends in time: the save in `deadline_s` from its request, its verification in as much again."""
        while not request.ended.wait(self._left_s(request)):
            if self._left_s(request) <= 0:
                return False
        return True

    def _left_s(self, request: Request) -> float:
        since_s = request.requested_s if request.committed_s is None else request.committed_s
        return max(0.0, since_s + self._policy.deadline_s - time.monotonic())

    def _stuck_at(self, request: Request) -> DeadlineExceeded:
        return stuck(self._writer.store, request, self._policy.deadline_s, self._front.rank)

    def _account_for(self, count: int) -> list[Decision]:
        """Take note of the oldest `count` outcomes, which all ranks know; raise what the policy does not tolerate."""
        ended, self._requests = self._requests[:count], self._requests[count:]
        decisions, errors = [], []
        for request in ended:
            if request.error is None:
                self._failed_in_a_row, self._tolerated = 0, []
                self._committed_step = max(self._committed_step, request.handle.step)
                decisions.append(request.handle.committed.result())
                continue
            self._failed_in_a_row += 1
            self._tolerated.append(request)
            errors.append(request.error)
            log.warning("the save of %s failed: %s", request.handle.checkpoint, request.error)
        if errors and self._failed_in_a_row > self._policy.max_failed_in_a_row:
            self._raise(errors)
        return decisions

    def _raise(self, errors: list[TxStoreError]) -> NoReturn:
        self._tolerated = []
        for other in errors[:-1]:
            errors[-1].add_note(f"an earlier save failed as well: {other}")
        raise errors[-1]

    def _give_up(self, late: DeadlineExceeded) -> TxStoreError:
        """After a save that is stuck, on any rank: stop what can be stopped, and find out what became of each save."""
        for request in self._requests:
            request.given_up = True
        fates = give_up(self._writer, self._requests, self._front)
        try:
            fates = agreed(self._front.gather("what became of the saves", fates))
        except TxStoreError as silent:
            log.warning("the ranks could not agree on what became of the saves: %s", silent)
        error = with_fates(late, fates, self._writer.store.url)
        for request, fate in zip(self._requests, fates, strict=True):
            request.settle(fate.decision, error)
        return error

    def overlooked(self) -> str:
        """Wait for what is on its way, on this rank alone; what nobody has been told, or ""."""
        told: list[str] = []
        failed = [] if self._stuck else list(self._tolerated)
        waiting = [] if self._stuck else list(self._requests)
        for number, request in enumerate(waiting):
            if not self._ends(request):
                left = waiting[number:]
                fates = give_up(self._writer, left, self._front)
                error = with_fates(self._stuck_at(request), fates, self._writer.store.url)
                for one, fate in zip(left, fates, strict=True):
                    one.settle(fate.decision, error)
                told.append(str(error))
                break
            if request.error is not None:
                failed.append(request)
            elif len(failed) <= self._policy.max_failed_in_a_row:
                failed = []  # made good
        told[:0] = [f"the save of {request.handle.checkpoint} failed: {request.error}" for request in failed]
        return "; ".join(told)
