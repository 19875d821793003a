"""The saves that are on their way: how many there may be, how they ended, and what is raised of it, on all ranks alike.

A save ends with the same outcome on all ranks, but not at one moment: what counts is what all ranks know, and that
is agreed on by number, oldest first, before anybody acts on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from txstore.errors import CommitUnknown, DeadlineExceeded, PlanMismatch, SaveBusy, TxStoreError, describe
from txstore.manifest import Decision
from txstore.store import Store
from txstore.train.deadline import within
from txstore.train.exchange import Exchange
from txstore.train.policy import SavePolicy
from txstore.train.saves import Request, stuck

log = logging.getLogger(__name__)

GIVE_UP_S = 60.0
"""How long the coordinator tries to abort a save that is stuck."""

Skipped = Literal["in_flight", "commit_lag"]


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
        store: For what it is doing, when it is stuck.
        abandon: Makes sure that nothing of what is on its way commits any more; for the coordinator.
    """

    def __init__(self, policy: SavePolicy, front: Exchange, store: Store, abandon: Callable[[], object]) -> None:
        self._policy = policy
        self._front = front
        self._store = store
        self._abandon = abandon
        self._requests: list[Request] = []
        self._failed_in_a_row = 0
        self._stuck: TxStoreError | None = None

    @property
    def stuck(self) -> TxStoreError | None:
        """The error of a save that was given up: there will be no other."""
        return self._stuck

    @property
    def all_ended(self) -> bool:
        """Whether nothing is on its way on this rank."""
        return all(request.ended.is_set() for request in self._requests)

    def add(self, request: Request) -> None:
        """Take note of a save that is on its way."""
        self._requests.append(request)

    def make_room(self, checkpoint: str) -> Skipped | None:
        """Agree on the next save, account for earlier ones and apply the policy.

        Returns:
            Why the next save is to be skipped, or None.

        Raises:
            SaveBusy: The limit is reached, and the policy is to raise.
            PlanMismatch: The ranks save different checkpoints.
            DeadlineExceeded: An earlier save is stuck.
            TxStoreError: An earlier save failed.
        """
        bids = self._front.gather("save", self._bid(checkpoint))
        for rank, bid in enumerate(bids):
            if bid.checkpoint != bids[0].checkpoint:
                raise PlanMismatch(f"rank {rank} saves {bid.checkpoint}, rank 0 {bids[0].checkpoint}", rank=rank)
        agreed = min(bid.ended for bid in bids)
        late = any(bid.late for bid in bids) and agreed < len(self._requests)
        surplus = max(len(self._requests) - agreed - self._policy.max_in_flight + 1, int(late))
        if surplus > 0 and self._policy.when_busy == "wait":
            self.wait_for(agreed + surplus)
            return None
        self._account_for(agreed)
        if surplus <= 0:
            return None
        if self._policy.when_busy == "raise":
            raise SaveBusy(
                f"{len(self._requests)} saves are on their way" + (", one of them late" if late else ""),
                key=checkpoint,
                next_step="save less often, or use when_busy='wait' or 'skip'",
            )
        return "commit_lag" if late else "in_flight"

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

    def wait_for(self, count: int) -> list[Decision]:
        """Wait for the oldest `count` saves on all ranks, then account for them.

        Raises:
            DeadlineExceeded: One is stuck, and was given up: unless it was committed before that, it never will be.
            CommitUnknown: One is stuck, and it could not be aborted.
            TxStoreError: One failed, and the policy does not tolerate it.
        """
        error: TxStoreError | None = None
        for request in self._requests[:count]:
            if not request.ended.wait(self._left_s(request)):
                error = self._stuck_at(request)
                break
        try:
            self._front.settle("end of earlier saves", error)
        except DeadlineExceeded as agreed:
            self._stuck = self._give_up(agreed)
            raise self._stuck from None
        return self._account_for(count)

    def _left_s(self, request: Request) -> float:
        return max(0.0, request.requested_s + self._policy.deadline_s - time.monotonic())

    def _stuck_at(self, request: Request) -> DeadlineExceeded:
        return stuck(self._store, request, self._policy.deadline_s, self._front.rank)

    def _account_for(self, count: int) -> list[Decision]:
        """Take note of the oldest `count` outcomes, which all ranks know; raise what the policy does not tolerate."""
        ended, self._requests = self._requests[:count], self._requests[count:]
        decisions, errors = [], []
        for request in ended:
            if request.error is None:
                self._failed_in_a_row = 0
                decisions.append(request.handle.committed.result())
                continue
            self._failed_in_a_row += 1
            errors.append(request.error)
            log.warning("the save of %s failed: %s", request.handle.checkpoint, request.error)
        if errors and self._failed_in_a_row > self._policy.max_failed_in_a_row:
            for other in errors[:-1]:
                errors[-1].add_note(f"an earlier save failed as well: {other}")
            raise errors[-1]
        return decisions

    def _give_up(self, error: DeadlineExceeded) -> TxStoreError:
        """After a save that is stuck, on any rank: make sure that it never commits."""
        if not self._front.is_coordinator:
            return error
        try:
            within(GIVE_UP_S, self._store, "the abort of a save that is stuck", self._abandon)
        except Exception as unsettled:  # noqa: BLE001 - also a foreign backend's
            return CommitUnknown(
                f"{error.message}; and it could not be aborted: {describe(unsettled)}",
                key=error.key,
                rank=error.rank,
                next_step="look with `txstore ls`: the checkpoint may exist or come to exist",
            )
        return error

    def overlooked(self) -> str:
        """Wait for what is on its way, on this rank alone; what nobody has been told, or ""."""
        told = []
        for request in [] if self._stuck else self._requests:
            if not request.ended.wait(self._left_s(request)):
                told.append(str(self._stuck_at(request)))
            elif request.error is not None:
                told.append(f"the save of {request.handle.checkpoint} failed: {request.error}")
        return "; ".join(told)
