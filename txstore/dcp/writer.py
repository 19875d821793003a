"""`StorageWriter`: a DCP save as a transaction (commit protocol, "Who does what in a DCP save").

DCP runs all steps of one save in one thread, so the state of a save is kept per thread: concurrent saves
through one writer are simply two transactions. Nothing here deletes anything.

The writer is also DCP's `AsyncStager`: `dcp.async_save` copies the state into its buffers, and waits for them
while the save before is still writing from them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import txstore
from txstore.dcp.attempts import Attempts
from txstore.dcp.boundary import asked_name, at_boundary, connect
from txstore.dcp.carrier import Carrier, arrived, with_carrier
from txstore.dcp.items import lay_out, refuse_early, write_files
from txstore.dcp.metadata import build_index
from txstore.dcp.results import Items, items_of, match
from txstore.dcp.saved import Locations
from txstore.dcp.snapshot import SnapshotBuffers
from txstore.dcp.staged import Staged, refused, take_refusal
from txstore.dcp.world import World
from txstore.errors import ConfigError, PlanMismatch, SaveError, TransactionStateError, TxStoreError, describe
from txstore.manifest import Decision, Description, checked_description
from txstore.retry import RetryPolicy
from txstore.root import KnownStore
from txstore.shards.layout import SHARD_BYTES
from txstore.store import Store
from txstore.transaction import Transaction, Visibility


@dataclass(slots=True)
class _Save:
    """What one save knows on this rank, from `reset` to `finish`."""

    checkpoint: str | None = None
    refusal: TxStoreError | None = None
    rank: int | None = None
    transaction: Transaction | None = None
    decision: Decision | None = None
    planned: list[Items | None] = field(default_factory=list)


Phase = Literal["plan", "write", "written", "commit"]
"""Where a rank's save is: ``written`` when its shards are durable, ``commit`` on the coordinator alone."""

_NOT_CARRIED = frozenset({"_saves", "_attempts", "_world", "buffers", "on_phase"})
"""What belongs to saves in progress and stays in its process."""


class StorageWriter(DcpStorageWriter):
    """Pass as ``storage_writer=`` to ``dcp.save`` or ``dcp.async_save``, with ``checkpoint_id="step-1000"``.

    The checkpoint exists when the save returns (or its future resolves), whole and durable; before that,
    and after any failure, no reader sees any of it and the previous checkpoint is the newest.

    A writer belongs to the default process group that exists when it is made, or else at its first `dcp.async_save`.
    When that group is gone, it saves no more.

    Args:
        store: URL of the store's root, such as ``file:///checkpoints/run-1``, or an open store.
        overwrite: Let a checkpoint that is already committed be committed again, in its next slot. The
            old one stays readable until the new decision stands.
        description: What to record about the trainer's state.
        shard_bytes: Target size of a shard file.
        threads: Shard files that one rank writes at once.
        retry: Attempts and deadlines of store operations.
        visibility: How long the coordinator waits for other ranks' files to become visible.
        buffers: Where `dcp.async_save` copies the state; by default buffers of this writer's own. Pass one
            object to all writers of a run, if it makes a writer for each save: then only the first allocates.
        options: Passed to the backend.

    Raises (from the save, inside DCP's `CheckpointException`, the same on all ranks):
        AlreadyCommitted, Conflict, CommitUnknown, StoreReplaced, PlanMismatch, UnsupportedValue, IntegrityError,
        StoreError;
        from `dcp.async_save` also SnapshotInUse and SnapshotTooLarge.
    """

    on_phase: Callable[[Phase, int], None] | None = None
    """Called on the save's thread at the beginning of each phase, with the bytes written so far by this rank."""

    world_size: int | None = None
    """How many ranks must take part, if it is known: DCP takes a process whose group is gone for the whole world."""

    # The state is copied when `stage` returns; DCP need not ask.
    _synchronize_after_execute = False

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        *,
        overwrite: bool = False,
        description: Description | None = None,
        shard_bytes: int = SHARD_BYTES,
        threads: int = 2,
        retry: RetryPolicy | None = None,
        visibility: Visibility | None = None,
        buffers: SnapshotBuffers | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        if shard_bytes < 1 or threads < 1:
            raise ConfigError(f"shard_bytes={shard_bytes} and threads={threads} must be positive")
        self.store = connect(store, retry, options)
        self.overwrite = overwrite
        self.description = checked_description(description)
        self._shard_bytes = shard_bytes
        self._threads = threads
        self._visibility = visibility
        self._options = options
        self._known = KnownStore()
        self._start_fresh()
        if buffers is not None:
            self.buffers = buffers

    def _start_fresh(self) -> None:
        self.buffers = SnapshotBuffers()
        self._saves = threading.local()
        self._attempts = Attempts(self.store, self._known)
        self._world = World()

    def __getstate__(self) -> dict[str, Any]:
        # async_save in PROCESS mode sends the writer to another process: no save in progress travels, and no buffer.
        return {key: value for key, value in self.__dict__.items() if key not in _NOT_CARRIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start_fresh()

    @property
    def _save(self) -> _Save:
        save = getattr(self._saves, "save", None)
        if save is None:
            save = self._saves.save = _Save()
        return save

    @property
    def rank(self) -> int | None:
        """The rank of this thread's save in its process group."""
        return self._save.rank

    @property
    def decision(self) -> Decision | None:
        """The commit of this thread's last save: on the coordinator, once it stands; None elsewhere."""
        return self._save.decision

    @property
    def checkpoint_id(self) -> str | None:
        """URL of the checkpoint being saved."""
        name = self._save.checkpoint
        return f"{self.store.url}/{name}" if name else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could name a checkpoint."""
        return bool(os.fspath(checkpoint_id))

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Part of DCP's `AsyncStager`: whether `async_save` should call `synchronize_staging`."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> Staged:
        """Part of DCP's `AsyncStager`: copy the state; on return training may change it.

        Waits while the save before through the same buffers is in progress. Raises nothing: what goes wrong on
        one rank is raised from the save, on all ranks, as every error of a save is.
        """
        if not self._world.existed:
            self._world = World()
        try:
            return self.buffers.stage(state_dict, save_ends_with_thread=True).state_dict
        except TxStoreError as error:
            return refused(error)
        except Exception as error:  # noqa: BLE001 - whatever a tensor's class does when it is copied
            return refused(SaveError(f"stage failed: {describe(error)}"))

    def synchronize_staging(self) -> None:
        """Part of DCP's `AsyncStager`: nothing to wait for."""

    def close(self) -> None:
        """Let go of the buffers' memory. The writer, and `buffers` that were passed, stay usable."""
        self.buffers.close()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save of another checkpoint: a name in the store, or a full URL below its root.

        A wrong one is refused by `set_up_storage_writer`, on all ranks.
        """
        save = self._saves.save = _Save()
        take_refusal()  # of an earlier save in this thread, which did not get as far as to raise it
        if checkpoint_id is not None:
            asked = asked_name(self.store, checkpoint_id, self._options, SaveError)
            if isinstance(asked, TxStoreError):
                save.refusal = asked
            else:
                save.checkpoint = asked

    @at_boundary(SaveError)
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - DCP's signature
        """Learn the rank. A save without collectives has no coordinator and cannot commit."""
        self._attempts.forget_decided()
        self._tell("plan", 0)
        save = self._save
        save.rank = kwargs.get("rank", 0)
        save.transaction = None
        save.planned = []
        arrived.ticket = None
        refusal = take_refusal() or save.refusal
        if refusal is not None:
            raise refusal
        if self._world.is_gone:
            # Each rank would find itself alone, take itself for the world, and commit its own part as the whole.
            raise PlanMismatch(
                "the process group that this writer belongs to is gone: the other ranks would be missing",
                key=save.checkpoint or "",
                next_step="wait for all saves before torch.distributed is destroyed; after that, make a new writer",
            )
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False has no coordinator, so nobody could commit",
                next_step="leave use_collectives=True; for one process per checkpoint pass no_dist=True",
            )
        if save.checkpoint is None:
            raise ConfigError("no checkpoint is named", next_step="pass checkpoint_id='step-<n>' to the save")

    @at_boundary(SaveError)
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what the plan alone shows to be impossible, before anything is written."""
        refuse_early(plan.items)
        arrived.ticket = None
        return plan

    @at_boundary(SaveError)
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: begin the transaction and hand every rank its ticket."""
        save = self._save
        if save.checkpoint is None:
            raise TransactionStateError("prepare_global_plan before set_up_storage_writer")
        if self.world_size not in {None, len(plans)}:
            raise PlanMismatch(
                f"{len(plans)} of {self.world_size} ranks take part in the save",
                key=save.checkpoint,
                next_step="end all saves before torch.distributed is destroyed",
            )
        save.transaction = self._attempts.begin(save.checkpoint, len(plans), overwrite=self.overwrite)
        # A caching planner sends an empty, unusable plan when nothing changed: its items are not known here.
        save.planned = [items_of(item.index for item in plan.items) if plan.usable else None for plan in plans]
        carrier = Carrier(save.transaction.ticket)
        arrived.ticket = carrier.ticket  # without a process group nothing is pickled
        return [with_carrier(plan, carrier) for plan in plans]

    def know(self, decision: Decision) -> None:
        """The store holds this commit: a save that does not find it there fails with `StoreReplaced`."""
        self._known.see(decision=decision)

    def give_up(self) -> dict[str, Decision | None]:
        """Stop, from any thread and on any rank, all that is not decided, without a request to the store.

        For saves that are stuck: the thread that runs one may wake up long after everybody has given it up. A rank
        whose shards are not written yet reports none from now on, so nobody can commit them.

        Returns:
            On the coordinator, by checkpoint, the attempts whose decision was sent already: the decision, or None if
            its fate is not known. Nothing else commits any more, and nothing more begins.
        """
        return self._attempts.give_up()

    def abandon(self) -> list[Decision]:
        """As `give_up`, and settle in the store all that this writer has begun, so that its space can be swept.

        Returns:
            What settled each: normally an abort; the commit, if that turns out to stand.

        Raises:
            CommitUnknown: No answer could be had from the store.
        """
        return self._attempts.abandon()

    def _tell(self, phase: Phase, nbytes: int) -> None:
        if self.on_phase is not None:
            self.on_phase(phase, nbytes)

    @at_boundary(SaveError)
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank: write the shards; on return they are durable. An error on any thread is raised here."""
        save = self._save
        ticket = arrived.ticket
        if ticket is None or save.rank is None:
            raise PlanMismatch(
                "no ticket arrived from the coordinator",
                next_step="a custom planner must return the plans that the storage writer gave it",
            )
        if (ticket.url, ticket.checkpoint) != (self.store.url, save.checkpoint):
            raise PlanMismatch(
                f"the coordinator saves {ticket.checkpoint} to {ticket.url}, "
                f"this rank {save.checkpoint} to {self.store.url}",
                key=ticket.checkpoint,
                next_step="pass the same URL and checkpoint_id on all ranks",
            )
        self._tell("write", 0)
        laid = lay_out(plan.items, planner, self._shard_bytes, self._threads)
        results = write_files(self.store, ticket, save.rank, laid, threads=self._threads)
        self._tell("written", sum(result.size_in_bytes for result in results))
        self._attempts.hand_over()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    @at_boundary(SaveError)
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: check the results against the plan, then commit."""
        save = self._save
        transaction = save.transaction
        if transaction is None:
            raise TransactionStateError("finish without a transaction")
        placed = match(transaction.ticket, save.planned, results)
        index, shards = build_index(metadata, placed)
        self._tell("commit", sum(shard.size for shard in shards))
        # Once more: a store that was deleted meanwhile would get a commit that nobody can read.
        self._known.check(self.store)
        save.decision = transaction.commit(
            shards,
            index,
            software={"txstore": txstore.__version__, "torch": str(torch.__version__)},
            description=self.description,
            visibility=self._visibility,
        )
        self._known.see(decision=save.decision)
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = Locations(index, list(metadata.state_dict_metadata))

    def storage_meta(self) -> StorageMeta | None:
        """What DCP tells planners and loggers about this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, modules=["txstore"])
