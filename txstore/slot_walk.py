"""The slot walk (commit protocol): how a commit or an abort claims the one key that decides.

A transaction walks the slots of its checkpoint from 0 and claims the first free one. A commit and an abort
compete for it through the same `create`, so exactly one of them stands. Nothing here deletes anything.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from txstore.decisions import is_retired, lost_record, missing_record, read_decision, walk_slots
from txstore.errors import (
    AlreadyCommitted,
    AlreadyExistsError,
    CommitUnknown,
    FormatError,
    OutcomeUnknownError,
    StoreError,
)
from txstore.keys import check_checkpoint, check_txn, decision_key, step_of
from txstore.manifest import Decision, encode, seal
from txstore.redact import printable
from txstore.store import Store

TWO_JOBS = "if that process (host:pid) still runs and is another job's, two jobs share this store: end one of them"
"""What comes before any other advice about a checkpoint that stands: `overwrite` would let two runs mix."""


def default_writer() -> str:
    """Host and process, for the people who read the records."""
    return f"{platform.node()}:{os.getpid()}"


def stood_before(store: Store, checkpoint: str, *, overwrite: bool) -> tuple[frozenset[str], frozenset[int]]:
    """Transactions whose commit stands now, and slots whose record is damaged: what `overwrite` lets a commit pass.

    A damaged record may be a commit: without `overwrite` it is refused like one. With it the slot is passed: whatever
    it was, it was written before this transaction had an id, so it is no abort of it.

    Raises:
        AlreadyCommitted: One stands, and `overwrite` is False. Names who wrote it: it may be another job.
        FormatError: A record is damaged, and `overwrite` is False.
    """
    damaged: dict[int, FormatError] = {}
    try:
        stood = [
            decision
            for decision in walk_slots(store, checkpoint, damaged=damaged if overwrite else None)
            if decision.kind == "commit" and not is_retired(store, decision)
        ]
    except FormatError as error:
        error.next_step = error.next_step or (
            "restore the record from a copy of the store, save under another name, or pass overwrite=True: "
            "the damaged slot stays as it is, and the next one is taken"
        )
        raise
    if stood and not overwrite:
        raise AlreadyCommitted(
            f"checkpoint {checkpoint} is already committed, by {printable(stood[-1].writer)}",
            key=checkpoint,
            next_step=f"{TWO_JOBS}; else choose another name, or pass overwrite=True, which takes the next slot",
        )
    return frozenset(decision.txn for decision in stood), frozenset(damaged)


def claim(
    store: Store,
    build: Callable[[int], Decision],
    must_stop: Callable[[Decision], None],
    damaged: Collection[int] = (),
) -> Decision:
    """The slot walk: claim the first free slot with the decision built for it.

    Args:
        store: The store.
        build: The decision for a slot.
        must_stop: Raises if what another transaction decided ends the walk.
        damaged: Slots whose record was damaged before this transaction began: whatever it was, it was about another.

    Returns:
        The decision of this transaction that stands: the one just made, or one made earlier.

    Raises:
        FormatError: A damaged record in another slot: it may be about this transaction.
    """
    slot = 0
    while True:
        if slot in damaged:
            slot += 1
            continue
        wanted = build(slot)
        found = read_decision(store, wanted.checkpoint, slot)
        if found is None:
            key = decision_key(wanted.checkpoint, slot)
            try:
                store.create(key, encode(wanted))
            except AlreadyExistsError:
                try:
                    found = read_decision(store, wanted.checkpoint, slot)
                except StoreError as error:  # NFS: it may be our own
                    raise _unknown(wanted, key, error.message) from error
                if found is None:
                    raise _unknown(wanted, key, "the record appeared and vanished") from None
            except OutcomeUnknownError as error:
                raise _unknown(wanted, key, error.message) from error
            else:
                return wanted
        if _is_settled(found, wanted):
            return _confirm(store, found)
        must_stop(found)
        slot += 1


def _is_settled(found: Decision, wanted: Decision) -> bool:
    """Whether `found` is the end of the transaction that `wanted` is about."""
    if found.txn != wanted.txn:
        return False
    if found.kind == wanted.kind == "commit" and found.manifest != wanted.manifest:
        raise FormatError("one transaction committed two different manifests", key=found.txn)
    return found.kind == "commit" or wanted.kind == "abort"


def _confirm(store: Store, found: Decision) -> Decision:
    """Make a decision that we merely saw durable before anybody relies on it.

    A record can be visible and not yet durable (POSIX: linked, directory not synced). `create` with the
    same bytes syncs it again before it says "exists".
    """
    key = decision_key(found.checkpoint, found.slot)
    try:
        store.create(key, encode(found))
    except AlreadyExistsError:
        return found
    except StoreError as error:
        # A refusal too: the record is there, so "it failed" would be wrong, and "it stands" is not sure.
        raise _unknown(found, key, error.message) from error
    return found


def _unknown(wanted: Decision, key: str, cause: str) -> CommitUnknown:
    error = CommitUnknown(
        f"whether {wanted.checkpoint} was decided is not known: {cause}",
        key=key,
        next_step=f"nothing was deleted; slot_walk.resolve(store, {wanted.checkpoint!r}, {wanted.txn!r}) settles it",
    )
    error.txn = wanted.txn
    return error


def claim_abort(
    store: Store, checkpoint: str, txn: str, *, writer: str | None = None, damaged: Collection[int] = ()
) -> Decision:
    """Settle a transaction from any process: claim the first free slot with an abort that names it.

    A stalled writer must pass through that slot, so it can never commit afterwards.

    Args:
        store: The store.
        checkpoint: The transaction's checkpoint.
        txn: The transaction.
        writer: Who aborts, for people.
        damaged: As for `claim`: only whoever began the transaction knows.

    Returns:
        The decision that settles `txn`: an abort, or the commit that already stands.

    Raises:
        CommitUnknown: No answer could be had.
    """
    check_checkpoint(checkpoint)
    check_txn(txn)
    who = writer if writer is not None else default_writer()
    decided_at = now()

    def build(slot: int) -> Decision:
        return seal(
            Decision(
                kind="abort",
                checkpoint=checkpoint,
                slot=slot,
                step=step_of(checkpoint),
                txn=txn,
                writer=who,
                decided_at=decided_at,
            )
        )

    try:
        return claim(store, build, lambda _found: None, damaged)
    except StoreError as error:
        raise _unknown(build(0), decision_key(checkpoint, 0), error.message) from error


def resolve(store: Store, checkpoint: str, txn: str, *, force: bool = False) -> Decision | None:
    """What became of a transaction whose commit was unknown; the answer never changes once given.

    Args:
        store: The store.
        checkpoint: Its checkpoint.
        txn: Its id, from `CommitUnknown.txn`.
        force: If it is still undecided, abort it, so that there is an answer.

    Returns:
        The commit or the abort that settles it; None if undecided and not `force`.

    Raises:
        CommitUnknown: No answer could be had.
        FormatError: A record is damaged, and no other one answers.
        IntegrityError: A record is missing, or was lost: it may be the answer.
        StoreError: The decisions could not be read.
    """
    damaged: dict[int, FormatError] = {}
    for decision in walk_slots(store, checkpoint, damaged=damaged):
        if decision.txn == txn:
            return _confirm(store, decision)
    if damaged:
        raise damaged[min(damaged)]
    lost = lost_record(store)
    if lost is not None and lost.checkpoint == checkpoint:
        raise missing_record(lost, lost=lost)  # an abort would take its slot, and perhaps be a second answer
    return claim_abort(store, checkpoint, txn) if force else None


def now() -> str:
    """The time in UTC, for people; nothing is ordered by it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
