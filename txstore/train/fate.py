"""What became of saves that did not end in time: committed, never to be, or not known. Nothing unproved is said.

A save that is stuck may have committed already, and its thread may wake up and commit later. So it is given up first: a
rank that has not handed its shards over will not, and a coordinator that has not sent the decision will not. Only a
decision that was sent has to be looked for in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from txstore.dcp.writer import StorageWriter
from txstore.errors import CommitUnknown, DeadlineExceeded, TxStoreError, describe
from txstore.manifest import Decision
from txstore.retry import RetryingStore
from txstore.train.deadline import within
from txstore.train.exchange import Exchange
from txstore.train.request import Request

GIVE_UP_S = 60.0
"""The longest that the coordinator asks the store about a decision that was sent."""

TIDY_S = 5.0
"""The longest that it tries to leave an abort record for what never commits, so that a sweep need not wait."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What is known of one save.

    Attributes:
        checkpoint: Its name.
        decision: Its commit, if that stands.
        unknown: Why nobody can say, or "". With neither it has not committed and never will.
    """

    checkpoint: str
    decision: Decision | None = None
    unknown: str = ""


def give_up(writer: StorageWriter, requests: Sequence[Request], exchange: Exchange) -> list[Fate]:
    """Stop all saves of a writer on this rank; what this rank knows of each. Not collective."""
    sent = writer.give_up()
    if not exchange.is_coordinator:
        return [_on_a_peer(request, exchange.rank) for request in requests]
    settled = _settle(writer, sent, exchange.deadline_s / 2)  # the other ranks wait for the answer
    return [_on_the_coordinator(request, settled) for request in requests]


def agreed(told: Sequence[Sequence[Fate]]) -> list[Fate]:
    """What all ranks together know of each save: one that can prove something is believed."""
    return [min(of_all, key=_doubt) for of_all in zip(*told, strict=True)]


def with_fates(error: TxStoreError, fates: Sequence[Fate], root: str) -> TxStoreError:
    """The error for saves that did not end in time.

    Returns:
        `CommitUnknown` if some may have been committed, or may yet be; else `DeadlineExceeded`, which says which stand.
    """
    told = [error.message]
    for fate in fates:
        if fate.unknown:
            told.append(f"whether {fate.checkpoint} is committed is not known: {fate.unknown}")
        elif fate.decision is not None:
            told.append(f"{fate.checkpoint} is committed")
        else:
            told.append(f"{fate.checkpoint} is not committed and will not be")
    kind: type[TxStoreError] = DeadlineExceeded
    next_step = "look at the log of that rank and at its storage; start again, and resume"
    if any(fate.unknown for fate in fates):
        kind = CommitUnknown
        next_step = f"nothing was deleted; `txstore ls {root} --all` tells; start again, and resume"
    return kind("; ".join(told), key=error.key, rank=error.rank, next_step=next_step)


def stuck(store: object, request: Request, limit_s: float, rank: int) -> DeadlineExceeded:
    """The error for a save that is still on its way after its deadline: says where it is."""
    running = store.in_flight() if isinstance(store, RetryingStore) else []
    if request.begun_s is None:
        where, key = "waiting for an earlier save", request.handle.checkpoint
    elif running:
        where, key = f"in {running[0]}", running[0].key
    else:
        where, key = "waiting for the other ranks", ""  # the rank that is stuck names an object: its error is preferred
    what = "save" if request.committed_s is None else "verification"
    return DeadlineExceeded(
        f"the {what} of {request.handle.checkpoint} did not end within {limit_s:g} s: rank {rank} is {where}",
        key=key,
        rank=rank,
    )


def _doubt(fate: Fate) -> int:
    return 2 if fate.unknown else 1 if fate.decision is None else 0


def _ended(request: Request) -> Fate | None:
    committed, name = request.handle.committed, request.handle.checkpoint
    if not committed.done():
        return None
    error = committed.exception()
    if error is None:
        return Fate(name, committed.result())
    return Fate(name, unknown=str(error) if isinstance(error, CommitUnknown) else "")


def _on_a_peer(request: Request, rank: int) -> Fate:
    ended = _ended(request)
    if ended is not None:
        return ended
    handed_over = "written" in request.reached_s
    why = f"rank {rank} has written its part, and rank 0 does not answer" if handed_over else ""
    return Fate(request.handle.checkpoint, unknown=why)


def _on_the_coordinator(request: Request, settled: dict[str, Fate]) -> Fate:
    name = request.handle.checkpoint
    ended = _ended(request)
    if ended is not None:
        return ended
    # An attempt of the same name may be that of an earlier save, until this one has begun to plan.
    return settled.get(name, Fate(name)) if "plan" in request.reached_s else Fate(name)


def _settle(writer: StorageWriter, sent: dict[str, Decision | None], limit_s: float) -> dict[str, Fate]:
    """What became of the attempts whose decision was sent; all others get an abort record, if the store answers."""
    open_ = [name for name, decision in sent.items() if decision is None]
    fates = {name: Fate(name, decision) for name, decision in sent.items() if decision is not None}
    limit_s = min(limit_s, GIVE_UP_S if open_ else TIDY_S)
    try:
        found = within(limit_s, writer.store, "the abort of a save that is stuck", writer.abandon)
    except Exception as error:  # noqa: BLE001 - also a foreign backend's
        return fates | {name: Fate(name, unknown=describe(error)) for name in open_}
    return fates | {one.checkpoint: Fate(one.checkpoint, one) for one in found if one.kind == "commit"}
