"""`StorageReader`: decision -> manifest -> index -> blocks, each verified before it is believed.

Every rank finds the checkpoint for itself (DCP gives a reader no collective before planning), and the
coordinator's choice then binds all: ranks that found different ones are refused, never mixed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import ProcessGroup, get_process_group_ranks, get_rank
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.futures import Future

from txstore.catalog import find, newest
from txstore.dcp.boundary import asked_name, at_boundary, connect
from txstore.dcp.metadata import build_metadata
from txstore.dcp.passing import Offer, Passing, check_group, directions
from txstore.dcp.scatter import Scatter, ranges
from txstore.decisions import read_index, read_manifest
from txstore.errors import ConfigError, LoadError, PlanMismatch, StateMismatch, TxStoreError
from txstore.index import Index
from txstore.manifest import Decision, Manifest
from txstore.retry import RetryPolicy
from txstore.shards.reading import BlockReader, Wanted
from txstore.shards.sharing import Piece, Segment, divide, pieces_of, runs_of
from txstore.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The commit that a load reads."""

    url: str
    checkpoint: str
    slot: int
    txn: str

    def __str__(self) -> str:
        return f"{self.checkpoint} (slot {self.slot}, transaction {self.txn}) in {self.url}"


@dataclass(frozen=True, slots=True)
class Directions:
    """What the coordinator tells a rank in `LoadPlan.storage_data`: its own choice, and what to share."""

    choice: Choice
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A load whose targets and objects have been accepted, and what is still to be read into the targets."""

    scatter: Scatter
    blocks: BlockReader
    served: Sequence[Sequence[Wanted]]
    alone: Sequence[Wanted]


@dataclass(slots=True)
class _Load:
    """What one load knows on this rank, from `reset` to `read_data`."""

    name: str | None = None
    refusal: TxStoreError | None = None
    rank: int | None = None
    decision: Decision | None = None
    index: Index | None = None
    metadata: Metadata | None = None


class _Unreadable(Metadata):
    """Stands for metadata that could not be read, and raises the reason when it is used.

    DCP replaces an exception from `read_metadata` by an AssertionError. The reason must reach the caller
    with its type, so it is raised by `set_up_storage_reader`, the next call, or by a planner that looks first.
    """

    def __init__(self, reason: TxStoreError) -> None:
        self.reason = reason

    def __getattribute__(self, name: str) -> Any:
        if name in {"state_dict_metadata", "planner_data", "storage_data"}:
            raise object.__getattribute__(self, "reason")
        return object.__getattribute__(self, name)


class _SavedState(dict[str, Any]):
    """The saved state of a strict load: to ask for a key that was not saved is refused, typed, where it is asked.

    DCP's default planner says it with a bare RuntimeError, and no method of a reader runs between that planner
    seeing the target and raising. `get`, iteration and `keys` are a dict's: a planner that looks before it
    asks (`StrictLoadPlanner`) decides for itself.
    """

    def __init__(self, saved: Mapping[str, Any], rank: int | None) -> None:
        super().__init__(saved)
        self._rank = rank

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        raise StateMismatch(
            f"{key!r} is in the state to load and was not saved",
            key=str(key),
            rank=self._rank,
            next_step="leave it out, or pass strict=False to StorageReader and let the planner decide",
        )


class StorageReader(DcpStorageReader):
    """Pass as ``storage_reader=`` to ``dcp.load``.

    Without a ``checkpoint_id`` it reads the newest committed checkpoint.

    Args:
        store: URL of the store's root, or an open store.
        strict: Refuse a load that leaves saved state unread or asks for a key that was not saved. Pass False to
            load a part, such as the model without the optimizer; missing keys are then the planner's affair.
        trust_objects: Let the planner unpickle objects outside torch's ``weights_only`` allow-list. The
            checkpoint can then run any code: only for checkpoints that you wrote.
        threads: Concurrent reads of one rank; by default as many as the store works best with (`Store.streams`).
        share: A gloo group of the ranks that load, of which each reads a part of what several need and passes it on,
            so that the store is asked once for each byte. Worth it where reads are slow or cost money: not for files
            that the page cache holds. A rank that is gone, or waits for the store longer than the group's timeout,
            fails the load. Nothing else may use the group meanwhile: pass one that is not the load's own if you can.
        retry: Attempts and deadlines of store operations.
        options: Passed to the backend.

    Raises (from the load, inside DCP's `CheckpointException`, the same on all ranks):
        CheckpointNotFound, CheckpointRetired, IntegrityError, FormatError, StateMismatch, UnsafeObject,
        PlanMismatch, StoreError.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        *,
        strict: bool = True,
        trust_objects: bool = False,
        threads: int | None = None,
        share: ProcessGroup | None = None,
        retry: RetryPolicy | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        if threads is not None and threads < 1:
            raise ConfigError(f"threads={threads} must be positive")
        if share is not None:
            check_group(share)
        self._share = share
        self.store = connect(store, retry, options)
        self._strict = strict
        self._trust_objects = trust_objects
        self._threads = threads or self.store.streams
        self._options = options
        self._loads = threading.local()
        self._pinned: tuple[Decision, Manifest, Index] | None = None

    def pin(self, decision: Decision, manifest: Manifest, index: Index) -> None:
        """Read this commit in every load from now on, from documents that are at hand: none is fetched again.

        Another commit of the same name, made meanwhile, is not looked at; a ``checkpoint_id`` must be of this one.
        """
        self._pinned = (decision, manifest, index)

    def __getstate__(self) -> dict[str, Any]:
        # A process group does not travel: a copy in another process reads by itself.
        return {key: value for key, value in self.__dict__.items() if key != "_loads"} | {"_share": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._loads = threading.local()

    @property
    def _load(self) -> _Load:
        # DCP runs all steps of one load in one thread: two threads that share a reader load two checkpoints.
        load: _Load | None = getattr(self._loads, "load", None)
        if load is None:
            load = self._loads.load = _Load()
        return load

    @property
    def decision(self) -> Decision | None:
        """The commit that this thread's last load read, or None."""
        return self._load.decision

    @property
    def rank(self) -> int | None:
        """The rank of this load in its process group."""
        return self._load.rank

    @property
    def checkpoint_id(self) -> str | None:
        """URL of the checkpoint that was asked for or found."""
        load = self._load
        name = load.decision.checkpoint if load.decision else load.name
        return f"{self.store.url}/{name}" if name else None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could name a checkpoint."""
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Name the checkpoint of the next load: a name in the store, or a full URL below its root.

        A wrong one is refused by `set_up_storage_reader`, on all ranks.
        """
        load = self._loads.load = _Load()
        if checkpoint_id is not None:
            asked = asked_name(self.store, checkpoint_id, self._options, LoadError)
            if isinstance(asked, TxStoreError):
                load.refusal = asked
            else:
                load.name = asked

    # Not named kwargs: DCP would take that name as an offer to read metadata rank by rank, without collectives.
    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """Find the commit and read its manifest and index. Each call looks again: nothing is cached."""
        load = self._load
        load.rank = load.decision = None
        if load.refusal is not None:
            return _Unreadable(load.refusal)
        try:
            return self._read_metadata()
        except TxStoreError as error:
            return _Unreadable(error)

    @at_boundary(LoadError)
    def _read_metadata(self) -> Metadata:
        load = self._load
        decision, manifest, index = self._pinned or self._find(load.name)
        if load.name not in {None, decision.checkpoint}:
            raise ConfigError(f"this reader is pinned to {decision.checkpoint}", key=load.name or "")
        metadata = build_metadata(index, manifest.index.key)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=f"{self.store.url}/{decision.checkpoint}", modules=["txstore"]
        )
        load.decision, load.index, load.metadata = decision, index, metadata
        return metadata

    def _find(self, name: str | None) -> tuple[Decision, Manifest, Index]:
        decision = newest(self.store) if name is None else find(self.store, name)
        manifest = read_manifest(self.store, decision)
        return decision, manifest, read_index(self.store, decision, manifest)

    @at_boundary(LoadError)
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002, FBT001 - DCP's signature
        """Learn the rank; raise what `read_metadata` found wrong."""
        load = self._load
        load.rank = kwargs.get("rank", 0)
        # A name holds for one load: the next one, if it names none, means the newest and not this one again.
        load.name = load.refusal = None
        if isinstance(metadata, _Unreadable):
            raise metadata.reason
        if self._strict:
            metadata.state_dict_metadata = _SavedState(metadata.state_dict_metadata, load.rank)
        load.metadata = metadata

    @at_boundary(LoadError)
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Say what this rank needs, if reads are shared."""
        load = self._load
        if self._share is None or load.index is None or load.metadata is None:
            return plan
        needed = runs_of(ranges(plan.items, load.metadata.storage_data), [file.size for file in load.index.files])
        members = tuple(get_process_group_ranks(self._share))
        return replace(plan, storage_data=Offer(members, get_rank(self._share), self._choice(), tuple(needed)))

    @at_boundary(LoadError)
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: check that all saved state is asked for, bind all ranks to one commit, share out the reads."""
        if self._strict:
            self._refuse_unread(plans)
        choice = self._choice()
        shared, why_not = directions([plan.storage_data for plan in plans])
        if why_not:
            log.warning("every rank reads by itself what it needs: %s", why_not)
        return [
            LoadPlan(plan.items, storage_data=Directions(choice, segments), planner_data=plan.planner_data)
            for plan, segments in zip(plans, shared, strict=True)
        ]

    def _refuse_unread(self, plans: Sequence[LoadPlan]) -> None:
        saved = self._load.metadata.state_dict_metadata if self._load.metadata else {}
        asked = {item.storage_index.fqn for plan in plans for item in plan.items}
        unread = sorted(
            fqn
            for fqn, value in saved.items()
            # A tensor without elements is never read, whether it is asked for or not.
            if fqn not in asked and not (isinstance(value, TensorStorageMetadata) and 0 in value.size)
        )
        if unread:
            raise StateMismatch(
                f"{len(unread)} saved keys are not in the state to load: {', '.join(map(repr, unread[:10]))}",
                key=unread[0],
                next_step="add them, or pass strict=False to StorageReader to load a part on purpose",
            )

    def _choice(self) -> Choice:
        decision = self._load.decision
        if decision is None:
            raise LoadError("no checkpoint was read")
        return Choice(self.store.url, decision.checkpoint, decision.slot, decision.txn)

    @at_boundary(LoadError)
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every rank: read what the plan asks for into the target state.

        All targets are compared with the saved dtypes, and all objects have passed the gate, before the
        first byte is written to any target.
        """
        told = plan.storage_data
        pieces = list(pieces_of(told.segments)) if isinstance(told, Directions) else []
        if pieces and self._share is not None:
            # Whatever goes wrong in `_begin` is told to the ranks that wait for this one.
            passing = Passing(self._share, pieces, threads=self._threads)
            begun = passing.run(lambda: self._begin(plan, planner, pieces))
        else:
            begun = self._begin(plan, planner, [])
        begun.blocks.read_all(begun.alone)
        begun.scatter.finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _begin(self, plan: LoadPlan, planner: LoadPlanner, pieces: Sequence[Piece]) -> _Begun:
        """Look at all targets, and judge all objects; nothing is changed yet."""
        load = self._load
        choice = plan.storage_data.choice if isinstance(plan.storage_data, Directions) else None
        mine = self._choice()
        if choice != mine or load.index is None or load.metadata is None or load.decision is None:
            raise PlanMismatch(
                f"this rank found {mine}, the coordinator {choice}",
                key=mine.checkpoint,
                next_step="load again, or name the checkpoint; do all ranks see the same storage?",
            )
        scatter = Scatter(plan.items, planner, load.metadata.storage_data, trust_objects=self._trust_objects)
        blocks = BlockReader(self.store, load.decision, load.index, workers=self._threads)
        blocks.read_all(scatter.payloads)
        scatter.open_payloads()
        served, alone = divide(scatter.tensors, pieces)
        return _Begun(scatter, blocks, served, alone)
