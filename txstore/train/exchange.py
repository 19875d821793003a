"""What the ranks agree on: small values over a process group of our own, each exchange with a name and a deadline.

Two rules keep ranks from waiting for one another for ever: every rank reaches the same exchanges in the same order,
an error is a value that is exchanged like any other (failure cases D2, D4, D5); and the group is ours alone, so
that no collective of training can meet one of a save (D1). Values are objects on the CPU (D10).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from txstore.errors import ConfigError, DeadlineExceeded, PlanMismatch, SaveError, TxStoreError, describe

T = TypeVar("T")


class Exchange:
    """Agreements among the ranks of one group. All methods are collective; one thread uses one `Exchange`.

    Args:
        name: What it serves, for error messages.
        deadline_s: The longest wait for the other ranks in one exchange, in seconds.
        process_group: Whose ranks take part; the default group if None. Without `torch.distributed` this process is
            the world. A new gloo group is made, so all ranks must construct their exchanges in the same order.
        own: A gloo group for this exchange and nothing else, instead of a new one.
    """

    def __init__(
        self,
        name: str,
        deadline_s: float,
        process_group: dist.ProcessGroup | None = None,
        *,
        own: dist.ProcessGroup | None = None,
    ) -> None:
        if not deadline_s > 0:
            raise ConfigError(f"deadline_s={deadline_s} must be positive")
        self.name = name
        self.deadline_s = deadline_s
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        self._broken: DeadlineExceeded | None = None
        if dist.is_available() and dist.is_initialized():
            self.group = own if own is not None else _new_group(process_group, deadline_s)
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides what is decided once."""
        return self.rank == 0

    @property
    def broken(self) -> DeadlineExceeded | None:
        """Why this exchange cannot be used any more, or None."""
        return self._broken

    def gather(self, phase: str, value: T) -> list[T]:
        """Every rank's `value`, in rank order, on every rank.

        Raises:
            DeadlineExceeded: Some rank did not come within the deadline. The group is unusable from then on.
            PlanMismatch: Some rank is at another exchange.
        """
        if self.group is None:
            return [value]
        if self._broken is not None:
            raise self._broken
        found: list[tuple[str, T]] = [(phase, value)] * self.world_size
        started = time.monotonic()
        try:
            dist.all_gather_object(found, (phase, value), group=self.group)
        except Exception as error:
            # A group whose collective failed is out of step for good: a later exchange could pair with an old one.
            waited_s = time.monotonic() - started
            what = f"another rank did not answer within {waited_s:.1f} s (deadline {self.deadline_s:g} s)"
            if waited_s < self.deadline_s / 2:  # this one came last, or another one died: nobody kept it waiting
                what = (
                    f"the other ranks are gone: one has ended, or they gave up after {self.deadline_s:g} s without this"
                )
            self._broken = DeadlineExceeded(
                f"{self.name}, {phase}: {what}: {describe(error)}",
                rank=self.rank,
                next_step="look at the other ranks' errors: the one without this error is the cause",
            )
            raise self._broken from error
        for rank, (theirs, _) in enumerate(found):
            if theirs != phase:
                raise PlanMismatch(
                    f"{self.name}: rank {rank} is at {theirs!r}, rank {self.rank} at {phase!r}",
                    rank=rank,
                    next_step="call the same methods in the same order on all ranks",
                )
        return [theirs for _, theirs in found]

    def settle(self, phase: str, error: TxStoreError | None = None) -> None:
        """Return on all ranks if no rank passed an error; else raise the same one on all ranks.

        Raises:
            TxStoreError: Some rank's error, as `raise_first` chooses.
        """
        raise_first(self.gather(phase, error))

    def attempt(self, phase: str, work: Callable[[], T], wrap: type[TxStoreError] = SaveError) -> T:
        """Do `work` on every rank; if it fails on any, raise the same error on all.

        Raises:
            TxStoreError: What some rank's `work` raised; foreign exceptions as `wrap`, as text.
        """
        result, error = typed(work, phase, self.rank, wrap)
        self.settle(phase, error)
        return result  # type: ignore[return-value]  # without an error the work has returned

    def decide(self, phase: str, work: Callable[[], T], wrap: type[TxStoreError] = SaveError) -> T:
        """Do `work` on the coordinator alone; its result, or its error, on all ranks.

        Raises:
            TxStoreError: What the coordinator's `work` raised.
        """
        answer: tuple[T | None, TxStoreError | None] = (None, None)
        if self.is_coordinator:
            answer = typed(work, phase, self.rank, wrap)
        result, error = self.gather(phase, answer)[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # as in `attempt`

    def equal(self, phase: str, value: object) -> int | None:
        """The lowest rank whose `value` differs from the coordinator's, or None."""
        values = self.gather(phase, value)
        return next((rank for rank, other in enumerate(values) if other != values[0]), None)

    def close(self, wait_s: float = 5.0) -> None:
        """Give the group back. Never waits longer than `wait_s`: another rank may have ended already."""
        group, self.group = self.group, None
        if group is None or not dist.is_initialized():
            return
        leave = threading.Thread(target=_destroy, args=(group,), daemon=True)
        leave.start()
        leave.join(wait_s)


def raise_first(errors: Iterable[TxStoreError | None]) -> None:
    """Raise the error that says most about the cause, if there is one: one with a key, then that of the lowest rank."""
    found = [error for error in errors if error is not None]
    if found:
        raise min(found, key=lambda error: (not error.key, error.rank or 0))


def typed(
    work: Callable[[], T], phase: str, rank: int, wrap: type[TxStoreError]
) -> tuple[T | None, TxStoreError | None]:
    """The result of `work`, or its error: a rank that raised instead would strand the others."""
    try:
        return work(), None
    except TxStoreError as error:
        return None, error.at_rank(rank)
    except Exception as error:  # noqa: BLE001 - as above
        typed_error = wrap(f"{phase} failed: {describe(error)}", rank=rank)
        typed_error.__cause__ = error
        return None, typed_error


def _new_group(process_group: dist.ProcessGroup | None, deadline_s: float) -> dist.ProcessGroup:
    timeout = timedelta(seconds=deadline_s)
    made: dist.ProcessGroup
    if process_group is None or dist.get_world_size(process_group) == dist.get_world_size():
        made = dist.new_group(timeout=timeout, backend="gloo")
        return made
    # torch names a group that only its members make by how many groups each of them has made, counted differently by
    # 2.13 and 2.14: with different counts they would wait for one another under different names.
    ranks = dist.get_process_group_ranks(process_group)
    names = [""] * len(ranks)
    dist.all_gather_object(names, dist.distributed_c10d._hash_ranks_to_str(ranks), group=process_group)  # noqa: SLF001
    if len(set(names)) > 1:
        raise ConfigError(
            "the members of this sub-group have made different numbers of process groups: torch cannot make a new one",
            next_step="make two gloo groups of these ranks, on all ranks, by dist.new_group; pass own_groups=(a, b)",
        )
    made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return made


def _destroy(group: dist.ProcessGroup) -> None:
    try:
        dist.destroy_process_group(group)
    except Exception:  # noqa: BLE001, S110 - a broken group has nothing left to give back
        pass
