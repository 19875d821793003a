"""The transaction: begin, write, commit, abort. How a decision is claimed is in `txstore.slot_walk`.

Begin, commit and abort run on the coordinator; `write_shard` runs on every rank and holds no state.
A commit and an abort compete for one key through the same `create`, so exactly one of them stands.
Nothing in this module deletes anything: a commit whose reply was lost may have happened.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from txstore.checksum import combine_blocks, sha256_hex
from txstore.decisions import is_retired, walk_slots
from txstore.errors import (
    Aborted,
    Conflict,
    IntegrityError,
    NotFoundError,
    PlanMismatch,
    StoreError,
    TransactionStateError,
)
from txstore.index import Index, ObjectRecord, encode_index, parse_index
from txstore.keys import (
    LATEST_KEY,
    begin_key,
    check_checkpoint,
    decision_key,
    index_key,
    manifest_key,
    new_txn,
    parse_attempt,
    shard_key,
    step_of,
    warn_of_no_step,
)
from txstore.manifest import (
    Begin,
    Decision,
    Description,
    FileRef,
    Manifest,
    Pointer,
    ShardRef,
    Totals,
    decode_decision,
    decode_manifest,
    encode,
    seal,
    spread_of,
)
from txstore.root import KnownStore, ensure_store
from txstore.side_by_side import side_by_side
from txstore.slot_walk import claim, claim_abort, default_writer, now, stood_before
from txstore.store import BytesSource, ChecksummedSource, Source, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Plain data that makes a rank part of a transaction; it travels in each plan's ``storage_data``."""

    url: str
    checkpoint: str
    txn: str
    spread: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard file as its rank wrote it: key, size in bytes, CRC32C of the file and of each block."""

    key: str
    rank: int
    size: int
    crc32c: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visibility:
    """How long the coordinator waits for a peer's object to become visible (attribute caches on NFS, Lustre).

    Attributes:
        wait_s: Total wait before a missing or shorter object counts as missing.
        poll_s: Time between two looks.
    """

    wait_s: float = 3.0
    poll_s: float = 0.1
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)


def write_shard(store: Store, ticket: Ticket, rank: int, number: int, source: Source) -> Shard:
    """Write one immutable shard file of one rank; on return it is durable. Runs on every rank.

    Raises:
        IntegrityError: The store reports another size or checksum than was sent.
    """
    key = shard_key(ticket.checkpoint, ticket.txn, rank, number, ticket.spread)
    checked = ChecksummedSource(source, key)
    info = store.put(key, checked)
    crc = combine_blocks(checked.blocks, checked.size)
    if info.size != checked.size or info.crc32c not in {None, crc}:
        raise IntegrityError(f"sent {checked.size} bytes, the store reports {info.size}", key=key, rank=rank)
    return Shard(key, rank, checked.size, crc, checked.blocks)


def begin(
    store: Store,
    checkpoint: str,
    *,
    world_size: int,
    overwrite: bool = False,
    writer: str | None = None,
    known: KnownStore | None = None,
) -> Transaction:
    """Start an attempt to save `checkpoint`. Coordinator only.

    Args:
        store: The store.
        checkpoint: Its name.
        world_size: How many ranks write.
        overwrite: Let a checkpoint that stands be committed again, in its next slot.
        writer: Who writes, for people.
        known: What the caller has seen of the store: it is not made anew then, but must be the same.

    Raises:
        StoreReplaced: As `ensure_store`.
        AlreadyCommitted: It stands already, and `overwrite` is False.
        FormatError: A decision of it is damaged, and `overwrite` is False.
        ConfigError: Not a checkpoint name.
    """
    warn_of_no_step(check_checkpoint(checkpoint))
    layout = ensure_store(store, known)
    stood, damaged = stood_before(store, checkpoint, overwrite=overwrite)
    ticket = Ticket(store.url, checkpoint, new_txn(), spread_of(layout))
    who = writer if writer is not None else default_writer()
    record = Begin(
        checkpoint=checkpoint,
        step=step_of(checkpoint),
        txn=ticket.txn,
        world_size=world_size,
        overwrite=overwrite,
        writer=who,
        started_at_s=time.time(),
    )
    store.put(begin_key(checkpoint, ticket.txn), BytesSource(encode(record)))
    return Transaction(store, ticket, stood=stood, damaged=damaged, world_size=world_size, writer=who)


class Transaction:
    """One attempt, on the coordinator. Made by `begin`; not picklable, not reusable.

    Attributes:
        ticket: What the other ranks need.
        decision: The commit, once `commit` knows that it stands.
    """

    def __init__(
        self,
        store: Store,
        ticket: Ticket,
        *,
        stood: frozenset[str],
        world_size: int,
        writer: str,
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        self.ticket = ticket
        self._store = store
        self._stood = stood
        self._damaged = damaged
        self._world_size = world_size
        self._writer = writer
        self._open = True
        self._lock = threading.Lock()
        self._given_up = False
        self._sent = False
        self.decision: Decision | None = None

    def __getstate__(self) -> object:
        raise TypeError("a transaction stays with its coordinator; send its ticket instead")

    def commit(
        self,
        shards: Sequence[Shard],
        index: Index,
        *,
        software: dict[str, str] | None = None,
        description: Description | None = None,
        visibility: Visibility | None = None,
    ) -> Decision:
        """Publish the decision that makes the shards a recovery point.

        Args:
            shards: Every shard of every rank, in the order of `index.files`.
            index: Where each item lies.
            software: Versions to record.
            description: What the trainer says about its state.
            visibility: How long to wait for a peer's object to become visible.

        Returns:
            The decision; the checkpoint is durable and readable.

        Raises:
            IntegrityError: A shard is missing or has the wrong size or checksum. Nothing was committed.
            PlanMismatch, FormatError: The shards or the index are impossible. Nothing was committed.
            Conflict: Another transaction committed this checkpoint meanwhile.
            Aborted: Somebody aborted this transaction.
            CommitUnknown: It may have been committed; ask `resolve`. Nothing was deleted.
        """
        if not self._open:
            raise TransactionStateError("this transaction has ended", key=self.ticket.txn)
        self._check_plan(shards, index)
        self._look_at_all(shards, visibility or Visibility())
        index_data = encode_index(index)
        manifest = self._manifest(shards, index, index_data, software or {}, description or Description())
        manifest_data = encode(manifest)
        build = self._decision(manifest, manifest_data)
        # Read as a reader will, before anything is published: an acknowledged commit must be readable.
        decision = build(0)
        ticket = self.ticket
        key = decision_key(ticket.checkpoint, 0)
        decode_decision(encode(decision), key, checkpoint=ticket.checkpoint, slot=0)
        parse_index(index_data, decode_manifest(manifest_data, decision))
        # One try: a second call would put another manifest, and a delayed request of the first could replace it later.
        self._open = False
        self._store.put(manifest.index.key, BytesSource(index_data))
        self._store.put(manifest_key(ticket.checkpoint, ticket.txn), BytesSource(manifest_data))
        with self._lock:
            if self._given_up:
                raise TransactionStateError("this transaction was given up", key=self.ticket.txn)
            self._sent = True
        try:
            decision = self.decision = claim(self._store, build, self._must_stop, self._damaged)
        except (StoreError, Aborted, Conflict):
            with self._lock:
                self._sent = False  # refused, with an answer: it does not stand, and is not sent again
            raise
        _point_at(self._store, decision)
        return decision

    def _check_plan(self, shards: Sequence[Shard], index: Index) -> None:
        own = (self.ticket.checkpoint, self.ticket.txn)
        if [(file.key, file.size) for file in index.files] != [(shard.key, shard.size) for shard in shards]:
            raise PlanMismatch("the index names other files than were written", key=self.ticket.checkpoint)
        for shard in shards:
            if parse_attempt(shard.key) != own:  # it would be swept away together with the attempt that wrote it
                raise PlanMismatch("a shard belongs to another transaction", key=shard.key, rank=shard.rank)

    def _look_at_all(self, shards: Sequence[Shard], visibility: Visibility) -> None:
        try:
            side_by_side(lambda shard: _look_at(self._store, shard, visibility), shards)
        except IntegrityError:
            for found in walk_slots(self._store, self.ticket.checkpoint, damaged={}):
                if found.kind == "abort":  # if of this transaction, a sweep took the shard: say so, not "missing"
                    self._must_stop(found)
            raise

    def _manifest(
        self,
        shards: Sequence[Shard],
        index: Index,
        index_data: bytes,
        software: dict[str, str],
        description: Description,
    ) -> Manifest:
        tensors = sum(not isinstance(item, ObjectRecord) for item in index.items)
        totals = Totals(
            sum(shard.size for shard in shards),
            len(shards),
            tensors,
            len(index.items) - tensors,
            self._world_size,
        )
        ticket = self.ticket
        return Manifest(
            checkpoint=ticket.checkpoint,
            step=step_of(ticket.checkpoint),
            txn=ticket.txn,
            writer=self._writer,
            created_at=now(),
            software=software,
            totals=totals,
            index=FileRef(index_key(ticket.checkpoint, ticket.txn), len(index_data), sha256_hex(index_data)),
            shards=tuple(ShardRef(shard.key, shard.rank, shard.size, shard.crc32c) for shard in shards),
            description=description,
        )

    def give_up(self) -> bool:
        """Send no decision from now on, from any thread and without a request to the store.

        Returns:
            Whether none was sent, or what was sent was refused: then this transaction has not committed and never
            will. Else ask `abort`.
        """
        with self._lock:
            self._open, self._given_up = False, True
            return not self._sent

    def abort(self) -> Decision:
        """Make sure that this transaction never commits, unless it already has.

        Returns:
            The decision that settled it: normally an abort; the commit, if that turns out to stand.

        Raises:
            CommitUnknown: No answer could be had from the store.
        """
        self.give_up()
        ticket, damaged = self.ticket, self._damaged
        return claim_abort(self._store, ticket.checkpoint, ticket.txn, writer=self._writer, damaged=damaged)

    def _decision(self, manifest: Manifest, manifest_data: bytes) -> Callable[[int], Decision]:
        key = manifest_key(self.ticket.checkpoint, self.ticket.txn)
        ref = FileRef(key, len(manifest_data), sha256_hex(manifest_data))
        decided_at = now()  # taken once: every retry sends the same bytes
        return lambda slot: seal(
            Decision(
                kind="commit",
                checkpoint=self.ticket.checkpoint,
                slot=slot,
                step=step_of(self.ticket.checkpoint),
                txn=self.ticket.txn,
                writer=self._writer,
                decided_at=decided_at,
                manifest=ref,
                totals=manifest.totals,
            )
        )

    def _must_stop(self, found: Decision) -> None:
        """The rule for each occupied slot on the way; returns to go on to the next one."""
        if found.kind == "abort":
            if found.txn == self.ticket.txn:
                raise Aborted(
                    f"transaction {found.txn} was aborted by {found.writer}",
                    key=self.ticket.checkpoint,
                    next_step="save again: a new transaction takes the next slot",
                )
            return
        if found.txn in self._stood or is_retired(self._store, found):
            return
        error = Conflict(
            f"checkpoint {found.checkpoint} was committed by another transaction, {found.txn} of {found.writer}",
            key=self.ticket.checkpoint,
            next_step="one writer per checkpoint; the winner's checkpoint is whole",
        )
        error.winner = found.txn
        raise error


def _look_at(store: Store, shard: Shard, visibility: Visibility) -> None:
    """Check that a shard is there with the right size and checksum.

    Raises:
        IntegrityError: It is not, even after the wait.
    """
    give_up = visibility.clock() + visibility.wait_s
    while True:
        try:
            info = store.head(shard.key)
            if info.size == shard.size and info.crc32c in {None, shard.crc32c}:
                return
            problem = f"the object has {info.size} bytes, {shard.size} were written"
            if info.size == shard.size:
                problem = "the object has another checksum than was written"
        except NotFoundError:
            problem = "the object is missing"
        if visibility.clock() >= give_up:
            raise IntegrityError(
                f"not committed: {problem}",
                key=shard.key,
                rank=shard.rank,
                next_step="do all ranks see the same storage?",
            )
        visibility.sleep(visibility.poll_s)


def _point_at(store: Store, decision: Decision) -> None:
    """Move the hint. The commit stands whatever happens here, so a failure is only a warning."""
    pointer = Pointer(checkpoint=decision.checkpoint, slot=decision.slot, txn=decision.txn)
    try:
        store.put(LATEST_KEY, BytesSource(encode(pointer)))
    except Exception as error:  # noqa: BLE001 - not even a backend's bug may report a standing commit as failed
        log.warning("committed %s, but the hint %s was not updated: %s", decision.checkpoint, LATEST_KEY, error)
