"""What a run goes on from, and what it may add: a save that the next resume would not take is refused, not made.

A resume takes the newest commit. A checkpoint of a lower step would be committed and never taken: a run that forgot to
resume, or went back to an older checkpoint, would lose at its next start all that it did, without a word.
"""

from __future__ import annotations

from dataclasses import dataclass

from txstore.errors import Conflict, NotNewest, NotResumed, StoreReplaced
from txstore.manifest import Decision, Progress
from txstore.store import Store
from txstore.train.choice import newest_readable
from txstore.train.deadline import within
from txstore.train.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a resume began.

    Attributes:
        decision: The commit; None if there was none.
        pinned: Whether the caller named it, so that it may be older than the newest.
        passed_over: Newer checkpoints that are damaged.
        counts_anew: Whether the counters were not restored.
    """

    decision: Decision | None
    pinned: bool = False
    passed_over: tuple[str, ...] = ()
    counts_anew: bool = False


class Lineage:
    """The checkpoints that one checkpointer resumed from and saved.

    Args:
        store: The store.
        exchange: The ranks' exchange on the training thread.
        limit_s: How long the coordinator may look at the store, in seconds.
    """

    def __init__(self, store: Store, exchange: Exchange, limit_s: float) -> None:
        self._store = store
        self._exchange = exchange
        self._limit_s = limit_s
        self._origin: Origin | None = None
        self._looked = False
        self._newest: tuple[int, str] | None = None
        self._mine: dict[str, Progress | None] = {}

    def resumed(self, origin: Origin, progress: Progress) -> None:
        """Go on from a resume; what was saved before it no longer counts."""
        self._origin, self._looked, self._newest = origin, False, None
        self._mine = dict.fromkeys(origin.passed_over)
        if origin.decision is not None:
            self._mine[origin.decision.checkpoint] = progress

    def admit(self, checkpoint: str, step: int) -> None:
        """Refuse a save that the next resume would not take. Collective; only the first save reads the store.

        Raises:
            NotResumed: The store holds checkpoints, and this run has not resumed.
            NotNewest: A newer checkpoint stands, or was saved by this run.
            Conflict: Somebody else has committed since the resume.
            StoreReplaced: What was resumed is gone.
            TxStoreError: The store could not be read.
        """
        if not self._looked:
            self._newest = self._exchange.decide("newest checkpoint", self._look)
            self._looked = True
        if self._origin and self._origin.decision and self._origin.counts_anew:
            raise NotNewest(
                f"the counters began anew, and {self._store.url} counts on from {self._origin.decision.checkpoint}",
                key=self._origin.decision.checkpoint,
                next_step="save to a root of its own: resume there first, and from this one if that is empty",
            )
        if self._newest is not None and step < self._newest[0]:
            raise NotNewest(
                f"{checkpoint} is older than {self._newest[1]}: the next resume would not take it",
                key=self._newest[1],
                next_step="to go on from an older checkpoint, resume it, and save to a root of its own",
            )
        self._newest = (step, checkpoint)

    def overwrites(self, checkpoint: str, progress: Progress) -> bool:
        """Whether this run may commit a checkpoint again, unasked; takes note of the one that is being saved.

        It may if its resume passed the checkpoint over as damaged: else it would fail there after every resume, for
        ever. And if its own one of the same step is of another micro step: else a preempted job that saves inside an
        accumulation window would lose what it did since the step.
        """
        may = checkpoint in self._mine and self._mine[checkpoint] != progress
        self._mine[checkpoint] = progress
        return may

    def _look(self) -> tuple[int, str] | None:
        """Step and name of the newest commit, if it fits what this run goes on from. On the coordinator."""
        passed_over = self._origin.passed_over if self._origin else ()
        found, damaged = within(
            self._limit_s,
            self._store,
            "the look for the newest checkpoint",
            lambda: newest_readable(self._store, passed_over),
        )
        if self._origin is None:
            self._must_be_empty(found, damaged)
        else:
            self._must_fit(self._origin, found, damaged)
        return None if found is None or found.step is None else (found.step, found.checkpoint)

    def _must_be_empty(self, found: Decision | None, damaged: tuple[str, ...]) -> None:
        if found is not None or damaged:
            name = found.checkpoint if found else damaged[0]
            raise NotResumed(
                f"{self._store.url} holds checkpoints, such as {name}, and this run has not resumed",
                key=name,
                next_step="call resume() before the first save; a run that begins anew has a root of its own",
            )

    def _must_fit(self, origin: Origin, found: Decision | None, damaged: tuple[str, ...]) -> None:
        mine = origin.decision
        if mine is not None and (found is None or _is_newer(mine, found)) and mine.checkpoint not in damaged:
            raise StoreReplaced(
                f"{mine.checkpoint}, from which this run goes on, is gone: the store was deleted, emptied or replaced",
                key=mine.checkpoint,
                next_step="find out what happened to the store; training has not lost anything yet",
            )
        if found is not None and not origin.pinned and (mine is None or found.txn != mine.txn):
            since = f"this run resumed {mine.checkpoint}" if mine else "this run found no checkpoint"
            if mine is None or not _is_newer(mine, found):
                raise Conflict(
                    f"{found.checkpoint} was committed by {found.writer} since {since}",
                    key=found.checkpoint,
                    next_step="another run saves to this root: one root for one run; find it before anything else",
                )


def _is_newer(one: Decision, other: Decision) -> bool:
    return (-1 if one.step is None else one.step) > (-1 if other.step is None else other.step)
