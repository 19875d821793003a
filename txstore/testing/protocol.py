"""The actors of the commit protocol, for the explorer in `txstore.testing.explorer`.

Actors call `txstore.transaction`, `txstore.catalog` and `txstore.sweep` as an application does, through a
`RetryingStore` of two attempts that never waits. Two checkpoints are in play: `CHECKPOINT`, which everybody fights
over, and `NEWER`, which stands from the start in some worlds so that `CHECKPOINT` may be retired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import SimpleNamespace
from unittest import mock

from txstore import root, slot_walk, transaction
from txstore.catalog import find, newest
from txstore.checksum import crc32c
from txstore.decisions import gone, read_index, read_manifest
from txstore.errors import (
    Aborted,
    AlreadyCommitted,
    CheckpointNotFound,
    CheckpointRetired,
    CommitUnknown,
    ConfigError,
    Conflict,
    NotFoundError,
    StoreError,
    TxStoreError,
)
from txstore.manifest import Decision
from txstore.memory import MemoryStore
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import BytesSource, Store
from txstore.sweep import retire, sweep
from txstore.testing.model import Actor, Outcome
from txstore.testing.saves import AT_ONCE, index_of

CHECKPOINT = "step-1"
NEWER = "step-2"


def txn_of(name: str) -> str:
    """The transaction id of the writer called `name`."""
    return name.encode().hex().rjust(32, "0")


def retrying(store: Store) -> RetryingStore:
    """Two attempts, no waiting."""
    policy = RetryPolicy(attempts=2, deadline_s=1e9, first_wait_s=0, longest_wait_s=0)
    return RetryingStore(store, policy, sleep=lambda _s: None, clock=lambda: 0.0)


@contextmanager
def deterministic(name: str) -> Iterator[None]:
    """Make the transaction code a function of its replies: ids, names and times are the actor's own."""
    ticks = count()

    def tick() -> str:
        return f"2026-01-01T00:00:{next(ticks):02}.000+00:00"

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(transaction, "new_txn", return_value=txn_of(name)))
        stack.enter_context(mock.patch.object(transaction, "time", SimpleNamespace(time=lambda: 0.0)))
        for module in (transaction, slot_walk):
            stack.enter_context(mock.patch.object(module, "default_writer", return_value=name))
            stack.enter_context(mock.patch.object(module, "now", side_effect=tick))
        yield


def _actor(name: str, body: Callable[[Store], Outcome]) -> Actor:
    def run(store: Store) -> Outcome:
        with deterministic(name):
            return body(retrying(store))

    return Actor(name, run)


def payload(name: str) -> bytes:
    """What the writer called `name` saves."""
    return f"the values of {name}".encode()


def save(store: Store, name: str, *, overwrite: bool = False, again: bool = False, give_up: bool = False) -> Outcome:
    """One save, and what its caller is told.

    Args:
        store: The store.
        name: The writer.
        overwrite: As in `transaction.begin`.
        again: Call `commit` once more after a failure that is not a decision.
        give_up: After `CommitUnknown`, abort and say how that ended.
    """
    try:
        attempt = transaction.begin(store, CHECKPOINT, world_size=1, overwrite=overwrite, writer=name)
        shard = transaction.write_shard(store, attempt.ticket, 0, 0, BytesSource(payload(name)))
    except AlreadyCommitted:
        return ("already committed",)
    except StoreError as error:
        return ("failed", type(error).__name__)
    outcome = _commit(attempt, shard)
    if outcome[0] == "failed" and again:
        outcome = _commit(attempt, shard)
    return _give_up(attempt) if outcome == ("unknown",) and give_up else outcome


def _commit(attempt: transaction.Transaction, shard: transaction.Shard) -> Outcome:
    try:
        return "committed", attempt.commit([shard], index_of([shard]), visibility=AT_ONCE).slot
    except Conflict as error:
        return "conflict", error.winner
    except Aborted:
        return ("aborted",)
    except CommitUnknown:
        return ("unknown",)
    except TxStoreError as error:
        return "failed", type(error).__name__


def _give_up(attempt: transaction.Transaction) -> Outcome:
    try:
        return "settled", attempt.ticket.txn, attempt.abort().kind
    except CommitUnknown:
        return ("unknown",)


def writer(name: str, *, overwrite: bool = False, again: bool = False, give_up: bool = False) -> Actor:
    """Saves `CHECKPOINT`; see `save`."""
    return _actor(name, lambda store: save(store, name, overwrite=overwrite, again=again, give_up=give_up))


def resolver(name: str, of: str) -> Actor:
    """Settles the transaction of writer `of` from another process, by an abort if need be."""

    def body(store: Store) -> Outcome:
        try:
            decision = slot_walk.resolve(store, CHECKPOINT, txn_of(of), force=True)
        except (CommitUnknown, StoreError):
            return ("unknown",)
        assert decision is not None
        return "settled", txn_of(of), decision.kind

    return _actor(name, body)


def sweeper(name: str) -> Actor:
    """Sweeps with no age limit."""

    def body(store: Store) -> Outcome:
        try:
            sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 0.0)
        except (CommitUnknown, StoreError) as error:
            return "stopped", type(error).__name__
        return ("swept",)

    return _actor(name, body)


def retention(name: str, *, of: str | None = CHECKPOINT) -> Actor:
    """Retires the standing commit of a checkpoint, or (None) tries to retire the newest of all."""

    def body(store: Store) -> Outcome:
        try:
            retire(store, find(store, of) if of else newest(store))
        except (CheckpointNotFound, CheckpointRetired):
            return ("nothing to retire",)
        except ConfigError:
            return ("refused",)
        except StoreError as error:
            return "stopped", type(error).__name__
        return ("retired",)

    return _actor(name, body)


READER, READER_OF_NEWEST = "reader", "reader of newest"


def reader(name: str = READER) -> Actor:
    """Loads `CHECKPOINT` by name, or (`READER_OF_NEWEST`) whatever is newest."""
    of = CHECKPOINT if name == READER else None

    def body(store: Store) -> Outcome:
        try:
            decision = find(store, of) if of else newest(store)
            manifest = read_manifest(store, decision)
            file = read_index(store, decision, manifest).files[0]
            data = _read_shard(store, decision, file.key)
        except CheckpointNotFound:
            return ("nothing",)
        except CheckpointRetired:
            return ("retired",)
        except TxStoreError as error:
            return "failed", type(error).__name__
        if len(data) != file.size or crc32c(data).to_bytes(4, "little") != file.blocks:
            return "torn", file.key
        return "loaded", decision.checkpoint, decision.slot

    return _actor(name, body)


def _read_shard(store: Store, decision: Decision, key: str) -> bytes:
    try:
        return store.read(key)
    except NotFoundError as error:
        raise gone(store, decision, key) from error


def standing(*names: str, newer: bool = False) -> dict[str, bytes]:
    """What a store holds in which these writers saved `CHECKPOINT` in turn; `newer` adds a `NEWER` one."""
    store = MemoryStore()
    checkpoints = [(name, CHECKPOINT) for name in names] + ([("n", NEWER)] if newer else [])
    root.ensure_store(store)
    for name, checkpoint in checkpoints:
        with deterministic(name), mock.patch(f"{__name__}.CHECKPOINT", checkpoint):
            assert save(store, name, overwrite=True)[0] == "committed"
    return {info.key: store.read(info.key) for info in store.list("")}
