"""Resume: choose -> examine -> judge -> load -> restore -> validate, in step on all ranks; judged first, loaded second.

The coordinator chooses once and tells the others (failure case B2); a step that fails on any rank fails on all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from txstore.compat.judgement import NO_MATRIX, Judgement, judge
from txstore.compat.key_tables import KeyTable, TensorFact
from txstore.compat.load_plan import LoadPlan
from txstore.compat.matrix import Matrix
from txstore.dcp.metadata import build_metadata
from txstore.dcp.planner import StrictLoadPlanner
from txstore.dcp.reader import StorageReader
from txstore.decisions import read_index
from txstore.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    LoadError,
    NotProved,
    PlanMismatch,
    StateMismatch,
    TxStoreError,
    UnknownVersion,
)
from txstore.field_types import check_fields
from txstore.keys import SlotName, parse_decision_key
from txstore.manifest import Decision, Description
from txstore.ops.report import Depth
from txstore.store import Store
from txstore.train import applied_once
from txstore.train.captured import Compared, unaccounted
from txstore.train.choice import choose, examine, newest_readable
from txstore.train.deadline import within
from txstore.train.exchange import Exchange
from txstore.train.migrated import MigratedLoad, saved_table, unknown_after
from txstore.train.piece import FRESHABLE, LABELS, OnWorldSizeChange, is_freshable
from txstore.train.proof import Check
from txstore.train.proof_piece import way_on
from txstore.train.report import PassedOver, ResumeReport
from txstore.train.saves import cause_of
from txstore.train.state import TrainState
from txstore.train.telling import Teller

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """What a resume may do.

    Attributes:
        checkpoint: Its name; the newest committed if None.
        fallback: What to do if the newest is damaged: raise, or take the one before, and say so.
        depth: What is verified before the load: documents and sizes, a sample of blocks, or every byte. The load itself
            verifies every byte that it reads.
        matrix: Verified changes of the parallelism.
        accept: Names of differences that are meant.
        migrations: Names of registered migrations.
        required: Fingerprints that must be known and equal.
        fresh: State that is not restored, on purpose: pieces (`piece.FRESHABLE`), or single objects of a piece by label
            and name, such as ``extra:ema``, ``scheduler:1``, ``optimizer:1``, ``data:train``, ``rng:generator.noise``.
            Recorded in `accepted`, and applied once: a resume of what was saved after that restores them, and says so,
            unless it names its `checkpoint`.
        seen_samples: How many samples the run had consumed when it ended, if that is known: see
            `txstore.event_log.last_step`.
        on_world_size_change: What to do about random streams if another number of ranks saved.
    """

    checkpoint: str | None = None
    fallback: Literal["error", "previous"] = "error"
    depth: Depth = "documents"
    matrix: Matrix = NO_MATRIX
    accept: Collection[str] = ()
    migrations: Collection[str] = ()
    required: Collection[str] = ()
    fresh: Collection[str] = ()
    seen_samples: int | None = None
    on_world_size_change: OnWorldSizeChange = "error"

    def __post_init__(self) -> None:
        if isinstance(self.matrix, str | os.PathLike):
            step = f"matrix=compat.read_matrix({os.fspath(self.matrix)!r}), with `from txstore import compat`"
            raise ConfigError("matrix= takes what is in the file, not its name", key="matrix", next_step=step)
        check_fields(self)
        unknown = sorted(name for name in set(self.fresh) if not is_freshable(name))
        if unknown:
            raise ConfigError(
                f"fresh={self.fresh!r}: only {sorted(FRESHABLE)} can be left fresh, or one object",
                key=unknown[0],
                next_step="name one object by its label, as in 'extra:ema'; labels are " + ", ".join(LABELS),
            )

    def compared(self) -> tuple[object, ...]:
        """What must be equal on all ranks: the same choice, the same judgement."""
        names = (sorted(self.accept), list(self.migrations), sorted(self.required), sorted(self.fresh))
        return (self.checkpoint, self.fallback, self.depth, str(self.matrix), self.on_world_size_change, *names)


@dataclass(slots=True)
class Resume:
    """One resume of one rank. `run` is collective.

    Attributes:
        decision: What was resumed, after `run`; None for a fresh start.
    """

    store: Store
    state: TrainState
    exchange: Exchange
    today: Description
    options: ResumeOptions
    teller: Teller
    deadline_s: float
    decision: Decision | None = None
    _done: frozenset[str] = frozenset()

    def run(self) -> ResumeReport:
        """Bring the state back.

        Returns:
            The report; `fresh` if nothing is committed yet.

        Raises:
            Incompatible: The checkpoint is not this run's, or not any more; lists every difference. Nothing was loaded.
            IntegrityError, FormatError: It is damaged.
            StateMismatch: It does not fit the objects of this state.
            PlanMismatch: The ranks do not ask for the same.
            NotProved: The objects do not hold afterwards what was saved.
            TxStoreError: Some rank failed, the same error on all ranks.
        """
        different = self.exchange.equal("options of the resume", self.options.compared())
        if different is not None:
            raise PlanMismatch(
                f"rank {different} resumes with other options than rank 0",
                rank=different,
                next_step="pass the same ResumeOptions on all ranks",
            )
        report = ResumeReport(store=self.store.url, world_size=self.exchange.world_size)
        damaged: dict[SlotName, TxStoreError] = {}
        while True:
            decision: Decision | None = None
            try:
                decision = self._choose(report, damaged)
                if decision is not None:
                    self._resume(decision, report)
                else:  # all begins anew: the next start of the same command must not do so once more
                    report.accepted = applied_once.recorded(self.options.fresh, self.today.accepted)
                self.decision = decision
                return report
            except TxStoreError as error:
                name = self._damaged(decision, error)
                if name is not None and self.options.fallback == "error":
                    self._name_the_one_before(name, error)
                if decision is not None:
                    applied_once.tell(error, self._done, decision.checkpoint)
                self.teller.not_restored(decision, error)
                if name is None or name in damaged or self.options.fallback == "error":
                    raise
                log.warning("%s is damaged, falling back to the one before: %s", name.checkpoint, error)
                damaged[name] = error
                report.fell_back.append(PassedOver(name.checkpoint, str(error)))

    def _damaged(self, decision: Decision | None, error: TxStoreError) -> SlotName | None:
        """What is damaged by this error, if another checkpoint could be taken instead: the decision record included."""
        if self.options.checkpoint is not None:
            return None
        if not isinstance(error, IntegrityError | FormatError) or isinstance(error, UnknownVersion):
            return None
        return SlotName(decision.checkpoint, decision.slot) if decision else parse_decision_key(error.key)

    def _name_the_one_before(self, name: SlotName, error: TxStoreError) -> None:
        """Say in the error that `fallback` goes on, if it does: in step on all ranks, as the next choice would be."""
        try:
            found, _ = self._decide("choose", lambda: newest_readable(self.store, {name.checkpoint}))
        except TxStoreError:  # the damage is the news, and not what else is wrong
            return
        if found is not None:
            step = f"fallback='previous' takes the one before, {found.checkpoint}"
            error.next_step = f"{error.next_step}; {step}" if error.next_step else step

    def _choose(self, report: ResumeReport, damaged: Mapping[SlotName, TxStoreError]) -> Decision | None:
        with report.timed("choose"):
            decision = self._decide("choose", lambda: choose(self.store, self.options.checkpoint, frozenset(damaged)))
        if damaged and decision is not None:
            name, damage = list(damaged.items())[-1]
            self.teller.fell_back(decision, name.checkpoint, damage)
        return decision

    def _resume(self, decision: Decision, report: ResumeReport) -> None:
        with report.timed("examine"):
            manifest = self._decide(
                "examine", lambda: examine(self.store, decision, self.options.depth, self.teller.verified)
            )
            index = self._read("index", lambda: read_index(self.store, decision, manifest))
            metadata = self._attempt("index", lambda: build_metadata(index, manifest.index.key))
            reader = StorageReader(self.store, strict=False, share=self.exchange.group if self.store.distant else None)
            reader.pin(decision, manifest, index)
            notes = self._look_at_fresh(decision, manifest.description)
        with report.timed("judge"):
            today = self._key_tables()
            python, judgement = self._judge_all(manifest.description, reader, metadata, today)
            for override in judgement.overrides if self.exchange.rank == 0 else ():
                log.warning("%s", override)  # at each resume: one that is left in a script is soon out of mind
            load = MigratedLoad(metadata, judgement.plan, today)
            meant = {**self._meant, "plan": judgement.plan}
            self._attempt("python state", lambda: self.state.check(python, *self._place, **meant))
            self._account_for_all(load.metadata, judgement.plan)
        with report.timed("load"):
            asked: dict[str, Any] = {"fresh": self._fresh, "plan": judgement.plan}
            target = self._attempt("target", lambda: self.state.target(load.metadata, *self._place, **asked))
            self._load(reader, load.sources(target))
            self._attempt("migrate", lambda: load.finish(target))
        with report.timed("restore"):
            applied = self._attempt("restore", lambda: self.state.apply(target, *self._place, **meant))
        with report.timed("validate"):
            report.checks = self._validate(self._fresh | unknown_after(judgement.plan) | set(self.options.accept))
        report.checkpoint, report.step = decision.checkpoint, applied.progress.global_step
        report.slot, report.txn = decision.slot, decision.txn
        report.saved_world_size = applied.saved_world_size
        report.restored = dict(applied.restored)
        report.accepted = applied_once.recorded(self.options.fresh, judgement.record)
        lost = applied.restored.get("gradients", {}).get("passes left behind")
        notes += [f"gradients of {lost} backward passes are left behind, and their samples count as consumed"] * bool(
            lost
        )
        report.notes = [*judgement.notes, *notes]
        seen = None if self.counts_anew else self.exchange.gather("samples seen", self.options.seen_samples)[0]
        report.reprocessed_samples = None if seen is None else max(0, seen - applied.progress.consumed_samples)
        self.teller.restored(report, sum(_local_bytes(tensor) for tensor in target.values()))

    @property
    def _place(self) -> tuple[int, int]:
        return self.exchange.rank, self.exchange.world_size

    def _look_at_fresh(self, decision: Decision, saved: Description) -> list[str]:
        """Find the names in `fresh` that are done; what is to be told of them."""
        # Who names a checkpoint asks for what shall be done with that one, however often.
        named = self.options.checkpoint is not None
        self._done = frozenset() if named else applied_once.done(self.options.fresh, saved.accepted)
        notes = [applied_once.note(name, decision.checkpoint) for name in sorted(self._done)]
        for note in notes:
            log.warning("%s", note)  # now: if it does not fit, nothing else would tell why the name did not help
        return notes

    @property
    def _fresh(self) -> frozenset[str]:
        return frozenset(self.options.fresh) - self._done

    @property
    def counts_anew(self) -> bool:
        """Whether the counters were not restored."""
        return "progress" in self._fresh

    @property
    def _meant(self) -> dict[str, Any]:
        """The caller's choices, as `TrainState` takes them."""
        change = self.options.on_world_size_change
        return {"on_world_size_change": change, "fresh": self._fresh, "accept": tuple(self.options.accept)}

    def _load_python(self, reader: StorageReader, metadata: Metadata) -> dict[str, Any]:
        """Load the small part first: most of what does not fit shows in it, before the tensors move."""
        python = self._attempt("python state", lambda: self.state.python_target(metadata, *self._place))
        self._load(reader, python)
        return dict(python)

    def _validate(self, unknown: frozenset[str]) -> list[Check]:
        checks = self._attempt("validate", lambda: self.state.validate(fresh=unknown))
        failed = {check.name: check.detail for check in checks if check.ok is False}
        told = "; ".join(f"{name}: {detail}" for name, detail in failed.items())
        where: dict[str, Any] = {"rank": self.exchange.rank, "next_step": way_on(failed)}
        self.exchange.settle("validate", NotProved(f"after the restore: {told}", **where) if failed else None)
        return checks

    def _attempt(self, phase: str, work: Callable[[], T]) -> T:
        return self.exchange.attempt(phase, work, LoadError)

    def _read(self, phase: str, work: Callable[[], T]) -> T:
        """As `_attempt`, for work that waits for the store."""
        return self._attempt(phase, lambda: within(self.deadline_s, self.store, phase, work))

    def _decide(self, phase: str, work: Callable[[], T]) -> T:
        return self.exchange.decide(phase, lambda: within(self.deadline_s, self.store, phase, work), LoadError)

    def _key_tables(self) -> KeyTable:
        """The tables of all ranks together are today's."""
        mine = self._attempt("key table", self.state.key_table)
        today: dict[str, TensorFact] = {}
        for table in self.exchange.gather("key tables", mine):
            today |= table
        return today

    def _judge_all(
        self, saved: Description, reader: StorageReader, metadata: Metadata, today: KeyTable
    ) -> tuple[dict[str, Any], Judgement]:
        """The small Python state, and the judgement with what it shows: all that blocks is told at once.

        Raises:
            Incompatible: Something blocks. That is told as well if the Python state cannot be loaded or compared.
        """
        judgement = self._judge(saved, metadata, today)
        try:
            python = self._load_python(reader, metadata)
            judgement = self._judge(saved, metadata, today, python)
        except TxStoreError:
            self._attempt("judge", judgement.raise_if_blocked)
            raise
        self._attempt("judge", judgement.raise_if_blocked)
        return python, judgement

    def _judge(
        self, saved: Description, metadata: Metadata, today: KeyTable, python: Mapping[str, Any] | None = None
    ) -> Judgement:
        """Compare, without what the Python state shows or with it."""
        shown = Compared()
        if python is not None:
            meant: dict[str, Any] = {
                "on_world_size_change": self.options.on_world_size_change,
                "fresh": self._fresh,
            }
            shown = self._attempt("compare", lambda: self.state.compare(python, *self._place, **meant))
        # Of all ranks, since each must come to the same judgement.
        found = [one for theirs in self.exchange.gather("differences", shown.differences) for one in theirs]

        def decide() -> Judgement:
            return judge(
                saved,
                self.today,
                saved_table(metadata),
                today,
                self.options.matrix,
                migrations=self.options.migrations,
                accept=self.options.accept,
                required=self.options.required,
                saved_layouts=shown.saved_layouts,
                today_layouts=shown.today_layouts,
                with_moments=shown.with_moments,
                others=dict.fromkeys(found),
            )

        return self._attempt("judge", decide)

    def _account_for_all(self, metadata: Metadata, plan: LoadPlan) -> None:
        """Refuse to leave saved state behind."""
        asked: dict[str, Any] = {"fresh": self._fresh, "plan": plan}
        mine = self._attempt("keys", lambda: self.state.expected_keys(metadata, *self._place, **asked))
        left = unaccounted(metadata, self.exchange.gather("keys of all", mine))
        if left:
            pieces = sorted({key.partition(".")[0] for key in left} & FRESHABLE)
            which = "{" + ", ".join(map(repr, pieces)) + "}"
            raise StateMismatch(
                f"{len(left)} saved keys have no place in this state: {', '.join(left[:10])}",
                key=left[0],
                next_step="build the state with all that was saved"
                + (f", or begin it anew, on purpose: fresh={which}" if pieces else ""),
            )

    def _load(self, reader: StorageReader, target: dict[str, Any]) -> None:
        """Load on all ranks."""

        def load() -> None:
            try:
                state_dict_loader.load(
                    target,
                    storage_reader=reader,
                    planner=StrictLoadPlanner(),
                    process_group=self.exchange.group,
                    no_dist=self.exchange.group is None,
                )
            except CheckpointException as error:  # a BaseException
                raise cause_of(error, self.exchange.rank, "", LoadError) from error

        self._read("load", load)


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
