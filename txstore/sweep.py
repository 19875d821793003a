"""Removal: retention of committed checkpoints, and orphans of attempts that never committed.

The order is the safety (commit protocol, "Removal"): a tombstone before the data of a commit goes, an
abort record before the data of an attempt goes. Decision records stay for ever: a deleted one could be
created again by a stalled writer. Everything can be stopped anywhere and run again.

One rule is stricter than "dead once its slot names another transaction": an undecided attempt is always
aborted first, even when another commit holds the slot it would meet. That commit may be retired later,
and a stalled writer walks past retired commits (ADR 0003).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from txstore.catalog import Entry, newest
from txstore.decisions import (
    is_retired,
    lost_record,
    missing_record,
    read_decision,
    read_store_format,
    walk_slots,
)
from txstore.errors import (
    AlreadyExistsError,
    CheckpointNotFound,
    ConfigError,
    FormatError,
    IntegrityError,
    NotFoundError,
)
from txstore.keys import (
    DATA_PREFIX,
    STORE_KEY,
    attempt_prefixes,
    begin_key,
    decision_key,
    parse_attempt,
    retired_key,
)
from txstore.manifest import DECISION_MAX_BYTES, Decision, Tombstone, decode_begin, encode, spread_of
from txstore.retry import RetryingStore
from txstore.slot_walk import claim_abort
from txstore.store import KeepsUnfinished, ObjectInfo, Store

log = logging.getLogger(__name__)

GRACE_FLOOR_S = 24 * 3600.0
"""An undecided attempt younger than this is never touched, unless forced: its writer may only be slow."""

RECORD_FLOOR_S = 3600.0
"""What was left outside an attempt, by the write of a small record, must be this old even if a sweep is forced."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """An attempt whose data no decision needs.

    Attributes:
        why: ``retired`` (its commit has a tombstone), ``aborted``, ``undecided`` and past the grace, or
            ``unfinished``: what interrupted writes left, past the grace or of a dead attempt.
    """

    checkpoint: str
    txn: str
    keys: int
    bytes: int
    why: Literal["retired", "aborted", "undecided", "unfinished"]


def sweep(
    store: Store,
    *,
    grace_s: float = 7 * GRACE_FLOOR_S,
    force: bool = False,
    dry_run: bool = True,
    clock: Callable[[], float] = time.time,
) -> list[Orphan]:
    """Reclaim the data of attempts that can never commit.

    Args:
        store: The store.
        grace_s: Age that an undecided attempt must have.
        force: Allow a grace below `GRACE_FLOOR_S`: no save may be running.
        dry_run: Only report.
        clock: Seconds since the epoch.

    Returns:
        What was (or would be) removed. A checkpoint with a damaged decision record keeps every attempt that no readable
        record names, since that record may be its commit, and a warning says so.

    Raises:
        ConfigError: A grace below the floor.
        IntegrityError: A decision record is missing, or `txstore.json`: a copy of a store that has not ended.
        UnknownVersion: A record is of a format version that this release does not know.
        StoreError: The store refused.
    """
    if not (math.isfinite(grace_s) and (force or grace_s >= GRACE_FLOOR_S)):
        raise ConfigError(
            f"a grace of {grace_s:.0f} s is below the floor of {GRACE_FLOOR_S:.0f} s",
            next_step="pass force=True if no save is running",
        )
    layout = read_store_format(store)
    spread = spread_of(layout)  # of a layout that this release does not know nothing is deleted
    # Candidates first, decisions second: a commit that lands in between is seen (restic, lakeFS).
    found: dict[tuple[str, str], list[ObjectInfo]] = {}
    for info in store.list(DATA_PREFIX):
        if attempt := parse_attempt(info.key):
            found.setdefault(attempt, []).append(info)
    if found and layout is None:
        # Data whose decisions are still on their way here looks dead, and may be old: a copy can keep the times.
        raise IntegrityError(
            "there is data here, and no txstore.json",
            key=STORE_KEY,
            next_step="copy all of the store, txstore.json last, and sweep then",
        )
    if (lost := lost_record(store)) is not None:
        raise missing_record(lost, lost=lost)  # its data would be aborted as undecided, and go
    removed: list[Orphan] = []
    for (checkpoint, txn), objects in found.items():
        why = _why_orphan(store, checkpoint, txn)
        if why is None or (why == "undecided" and _age_s(store, checkpoint, txn, objects, clock()) < grace_s):
            continue
        if not dry_run:
            if why == "undecided" and claim_abort(store, checkpoint, txn).kind == "commit":
                continue  # it committed while we looked
            _delete_attempt(store, checkpoint, txn, spread)
        removed.append(Orphan(checkpoint, txn, len(objects), sum(info.size for info in objects), why))
    return removed + _sweep_unfinished(store, grace_s=grace_s, dry_run=dry_run, now_s=clock())


def _sweep_unfinished(store: Store, *, grace_s: float, dry_run: bool, now_s: float) -> list[Orphan]:
    """Free what interrupted writes left: of a dead attempt at once, else past the grace.

    A rank that was killed in the middle of a shard leaves gigabytes that no listing shows.
    """
    backend = store.inner if isinstance(store, RetryingStore) else store
    if not isinstance(backend, KeepsUnfinished):
        return []
    dead: dict[tuple[str, str], bool] = {}
    sizes: dict[tuple[str, str], list[int]] = {}
    for left in list(backend.unfinished("")):
        attempt = parse_attempt(left.key) or ("", "")
        if attempt[0] and attempt not in dead:
            dead[attempt] = _why_orphan(store, *attempt) in {"retired", "aborted"}
        # Outside an attempt it may be the record that another sweep, or a commit, is publishing at this moment.
        patience_s = grace_s if attempt[0] else max(grace_s, RECORD_FLOOR_S)
        if not dead.get(attempt) and now_s - left.modified_s < patience_s:
            continue
        if not dry_run:
            backend.discard(left)
        sizes.setdefault(attempt, []).append(left.size)
    return [Orphan(*attempt, len(each), sum(each), "unfinished") for attempt, each in sizes.items()]


def retire(store: Store, decision: Decision, *, reason: str = "retention", protect: Iterable[str] = ()) -> None:
    """Take back a commit: tombstone first, then its data; the decision record stays.

    Args:
        store: The store.
        decision: The commit.
        reason: For the people who read the tombstone.
        protect: Transaction ids that must stay: pinned, or resumed from.

    Raises:
        ConfigError: It is the newest commit, or protected, or not the decision that this store holds in its slot.
    """
    if decision.kind != "commit":
        raise ConfigError("only a commit can be retired", key=decision.txn)
    # A tombstone names a slot: one made from another store's decision would take back the commit that lies here.
    if read_decision(store, decision.checkpoint, decision.slot) != decision:
        raise ConfigError(f"{decision.checkpoint}.{decision.slot} is another decision here", key=decision.checkpoint)
    if decision.txn in set(protect) or _is_newest(store, decision):
        raise ConfigError(
            f"{decision.checkpoint}.{decision.slot} is the newest checkpoint, or protected", key=decision.checkpoint
        )
    record = Tombstone(checkpoint=decision.checkpoint, slot=decision.slot, txn=decision.txn, reason=reason)
    try:
        store.create(retired_key(decision.checkpoint, decision.slot), encode(record))
    except AlreadyExistsError:
        pass  # an earlier run set it and may have died before the last delete
    _delete_attempt(store, decision.checkpoint, decision.txn, spread_of(read_store_format(store)))


def expired(entries: Sequence[Entry], *, keep_last: int, protect: Iterable[str] = ()) -> list[Decision]:
    """Which commits a retention of the newest `keep_last` checkpoints takes back; pure.

    Superseded commits go too. A checkpoint whose name carries no step has no place in the order, so it stays until it
    is retired by name. `entries` are those of `catalog.entries`, by ascending step.
    """
    if keep_last < 1:
        raise ConfigError(f"keep_last={keep_last} would remove the newest checkpoint")
    kept = set(protect)
    standing = [entry.decision for entry in entries if entry.state == "committed"]
    kept.update(decision.txn for decision in standing[-keep_last:])
    kept.update(decision.txn for decision in standing if decision.step is None)
    live = [entry.decision for entry in entries if entry.state in {"committed", "superseded"}]
    return [decision for decision in live if decision.txn not in kept]


def _is_newest(store: Store, decision: Decision) -> bool:
    try:
        return newest(store).txn == decision.txn
    except CheckpointNotFound:
        return False


def _why_orphan(store: Store, checkpoint: str, txn: str) -> Literal["retired", "aborted", "undecided"] | None:
    """Why nothing needs an attempt; None if something does, or may: a damaged record can be about any attempt.

    A readable record that names it is believed all the same, as `resolve` does: a transaction has one answer.
    """
    damaged: dict[int, FormatError] = {}
    for decision in walk_slots(store, checkpoint, damaged=damaged):
        if decision.txn == txn:
            if decision.kind == "abort":
                return "aborted"
            return "retired" if is_retired(store, decision) else None
    if not damaged:
        return "undecided"
    log.warning(
        "%s stays: no readable decision names it, and %s is damaged and may be its commit. Restore that record from a "
        "copy of the store and sweep again; without a copy the attempt can only be kept",
        begin_key(checkpoint, txn).rpartition("/")[0],
        ", ".join(decision_key(checkpoint, slot) for slot in damaged),
    )
    return None


def _age_s(store: Store, checkpoint: str, txn: str, objects: Sequence[ObjectInfo], now_s: float) -> float:
    """The youngest of all ages that writer and store give: no single clock can make an attempt look old."""
    times = [info.modified_s for info in objects if info.modified_s is not None]
    key = begin_key(checkpoint, txn)
    try:
        times.append(decode_begin(store.read(key, 0, DECISION_MAX_BYTES + 1), key).started_at_s)
    except (NotFoundError, FormatError):
        pass  # a stray rank wrote after an earlier sweep, or begin never landed: the store's times remain
    # A time to come is a wrong clock's: it must not keep garbage until then. What other clocks say counts.
    past = [time_s for time_s in times if time_s <= now_s]
    return now_s - max(past) if past else 0.0


def _delete_attempt(store: Store, checkpoint: str, txn: str, spread: int) -> None:
    """Delete an attempt's objects, ``begin.json`` last: until then a later sweep can tell its age."""
    last = begin_key(checkpoint, txn)
    for prefix in attempt_prefixes(checkpoint, txn, spread):
        for key in [info.key for info in store.list(prefix) if info.key != last]:
            store.delete(key)
    store.delete(last)
