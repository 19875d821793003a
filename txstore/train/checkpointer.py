"""`Checkpointer`: saves beside training, resumes that are judged and proved, and no failure that can be overlooked."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import torch.distributed as dist
from msgspec.structs import replace

from txstore.dcp.boundary import connect
from txstore.dcp.one_at_a_time import one_at_a_time
from txstore.dcp.snapshot import Snapshot, SnapshotBuffers, estimate_bytes
from txstore.dcp.writer import StorageWriter
from txstore.errors import (
    ConfigError,
    SaveError,
    TransactionStateError,
    TxStoreError,
)
from txstore.events import Observer, SavePhase
from txstore.field_types import check
from txstore.manifest import Decision, Description
from txstore.retry import RetryPolicy
from txstore.store import Store
from txstore.train import exit_guard
from txstore.train.applied_once import on_record
from txstore.train.captured import Captured, refuse_unequal
from txstore.train.choice import examine
from txstore.train.exchange import Exchange, raise_first, typed
from txstore.train.history import StepRecord, record_of
from txstore.train.interrupted import refuse_in_the_middle_of_a_step
from txstore.train.ledger import Ledger
from txstore.train.lineage import Lineage, Origin
from txstore.train.policy import SavePolicy
from txstore.train.proof import ProofPolicy
from txstore.train.proof_watch import ProofWatch
from txstore.train.repeats import Repeats
from txstore.train.report import ResumeReport
from txstore.train.request import Request, SaveHandle
from txstore.train.resume import Resume, ResumeOptions
from txstore.train.saves import BackgroundSaves
from txstore.train.state import TrainState
from txstore.train.telling import Teller, observers_in

log = logging.getLogger(__name__)

T = TypeVar("T")

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]


class Checkpointer:
    """Saves and resumes one training run. All methods but `record` are collective: every rank calls them, in one order.

    ::

        description = Description(topology=compat.Topology(world=8, dp=8).as_dict(), settings={"batch_size": 32})
        with Checkpointer("s3://bucket/run-7", state, description=description) as saves:
            report = saves.resume()
            while state.progress.global_step < steps:
                saves.record(loss=train_step())
                if state.progress.global_step % 100 == 0:
                    saves.save()

    A save that failed is raised by the next `save`, by `wait`, `close` or the end of the `with`. If none of them
    comes, the interpreter ends with a message and exit status 70.

    Args:
        store: URL of the store's root, or an open store.
        state: What a recovery point holds.
        description: Topology, fingerprints and settings of this run; each save adds its progress. Without a topology
            the number of ranks is recorded.
        policy: Limits of background saves.
        proof: What counts as a jump in the first steps after a resume.
        overwrite: As for `StorageWriter`. Without it a run commits again what its own resume passed over as damaged,
            and a step of its own at a later micro step; nothing else.
        retry: Attempts and deadlines of store operations.
        process_group: The ranks; the default group if None. Two gloo groups of the checkpointer's own are made.
        observers: Who is told every event: metrics, an event log, a function of your own.
        own_groups: Two gloo groups for this checkpointer and nothing else, instead of new ones.
        options: Passed to the backend.
    """

    def __init__(
        self,
        store: str | Store,
        state: TrainState,
        *,
        description: Description | None = None,
        policy: SavePolicy | None = None,
        proof: ProofPolicy | None = None,
        overwrite: bool = False,
        retry: RetryPolicy | None = None,
        observers: Iterable[Observer] = (),
        process_group: dist.ProcessGroup | None = None,
        own_groups: Groups | None = None,
        **options: object,
    ) -> None:
        check("state", state, TrainState)
        check("description", description, Description | None)
        check("policy", policy, SavePolicy | None)
        check("proof", proof, ProofPolicy | None)
        check("retry", retry, RetryPolicy | None)
        check("overwrite", overwrite, bool)
        observers = observers_in(observers)
        self.state = state
        self.policy = policy or SavePolicy()
        self.description = description or Description()
        self._overwrite = overwrite
        self.store = connect(store, retry, options)
        self._writer = StorageWriter(self.store, overwrite=overwrite, description=self.description)
        front, back = own_groups or (None, None)
        # A rank may come to an exchange as late as its own save is allowed to be.
        patience_s = 1.5 * self.policy.deadline_s
        self._front = Exchange("training thread", patience_s, process_group, own=front)
        self._back = Exchange("background saves", patience_s, process_group, own=back)
        if not self.description.topology:
            # Else nothing would stop another number of ranks: what nobody records, nobody compares.
            self.description = replace(self.description, topology={"world": self._front.world_size})
        world = self.description.topology.get("world", self._front.world_size)
        if world != self._front.world_size:
            raise ConfigError(
                f"the description's topology has a world of {world}, there are {self._front.world_size} ranks",
                next_step="describe this run as it is: every later resume is judged by what is recorded",
            )
        self._lineage = Lineage(self.store, self._front, self.policy.deadline_s)
        self._ledger = Ledger(self.policy, self._front, self._writer)
        self._repeats = Repeats(self.store, state, self._front, self._ledger, self.policy.deadline_s)
        self._teller = Teller(observers, self._front.rank, self._front.world_size)
        read_back = self._read_back if self.policy.verify else None
        self._saves = BackgroundSaves(self._writer, self._back, read_back)
        self._buffers = [SnapshotBuffers() for _ in range(self.policy.max_in_flight)]
        self._proof_policy = proof or ProofPolicy()
        self._size_is_known = False
        self._closed = False
        self._process = os.getpid()
        self.inside: set[int] = set()
        exit_guard.guard(self)

    @one_at_a_time
    def save(self, step: int | None = None) -> SaveHandle:
        """Take a snapshot now and write it in the background; returns when the snapshot is safe on all ranks.

        A save that would repeat the last one of this checkpointer, with every counter and every byte as it was, is
        that one: its handle is returned, and nothing is written. `overwrite` asks for another one all the same.

        Args:
            step: The global step, if you want it checked: `state.progress.global_step` is what counts.

        Raises:
            AlreadyCommitted: The last save is of this step, and the state has changed since. Nothing was copied.
            SaveBusy: The limit is reached, and the policy is to raise.
            NotResumed: The store holds checkpoints, and this run has not resumed. Nothing was copied.
            NotNewest: A newer checkpoint stands: the next resume would take that one. Nothing was copied.
            Conflict, StoreReplaced: What was resumed is no longer the newest, or no longer there.
            SnapshotTooLarge: The snapshots would take more than `max_staging_bytes`. Nothing was copied.
            NotProved: The loop over the data is one from before the last `resume`.
            UnsupportedValue, SaveError: The state cannot be stored exactly, on some rank. Nothing was written.
            PlanMismatch: The ranks save different checkpoints, or differ in what is equal on all ranks.
            DeadlineExceeded: An earlier save, or another rank, did not come to an end in time.
            TransactionStateError: A signal has interrupted a step, or another call of this checkpointer.
            TxStoreError: An earlier save failed.
        """
        refuse_in_the_middle_of_a_step()
        self._check_open()
        requested_s = time.monotonic()
        at = self.state.progress.global_step
        handle = SaveHandle(f"step-{at}", at)
        if step in {None, at} and not self._overwrite:
            last = self._told(handle, "wait", lambda: self._repeats.find(handle.checkpoint))
            if last is not None:
                return last
        self._teller.requested(handle, self.policy.when_busy)
        skipped = self._told(handle, "wait", lambda: self._ledger.make_room(handle.checkpoint))
        if step not in {None, at}:
            raise ConfigError(
                f"save({step}), but state.progress.global_step is {at}",
                next_step="count steps in state.progress: it is what the checkpoint records",
            )
        if skipped is not None:
            log.warning("skipped the save of %s: %s", handle.checkpoint, skipped)
            self._teller.skipped(handle, skipped)
            return SaveHandle(handle.checkpoint, at, skipped=skipped)
        self._told(handle, "wait", lambda: self._lineage.admit(handle.checkpoint, at))
        waited_s = time.monotonic() - requested_s
        captured, snapshot, capture_s = self._told(handle, "capture", self._stage)
        handle.staged.set_result(None)
        request = Request(
            handle=handle,
            snapshot=snapshot,
            description=replace(on_record(self.description, self.state.accepted), progress=captured.progress),
            overwrite=self._overwrite or self._lineage.overwrites(handle.checkpoint, captured.progress),
            tell=self._teller.ended,
            requested_s=requested_s,
            waited_s=waited_s,
            staged_s=time.monotonic(),
        )
        self._teller.staged(request, capture_s)
        self._ledger.add(request)
        self._repeats.keep(request, captured)
        self._saves.submit(request)
        return handle

    def _told(self, handle: SaveHandle, phase: SavePhase, work: Callable[[], T]) -> T:
        """Do `work`; tell the observers if it fails."""
        try:
            return work()
        except TxStoreError as error:
            self._teller.refused(handle, phase, error)
            raise

    def _stage(self) -> tuple[Captured, Snapshot, float]:
        """Capture and copy the state, on all ranks or on none; also how long the capture took, in seconds."""
        taken: list[Snapshot] = []

        def take() -> tuple[Captured, Snapshot, float]:
            started_s = time.monotonic()
            captured = self.state.capture(self._front.rank, self._front.world_size)
            capture_s = time.monotonic() - started_s
            if not self._size_is_known:
                self.policy.refuse_larger(estimate_bytes(captured.state))
                self._size_is_known = True
            self._repeats.forget()  # its copy may lie in these buffers
            taken.append(self._buffers[0].stage(captured.state))
            return captured, taken[0], capture_s

        found, error = typed(take, "snapshot", self._front.rank, SaveError)
        try:
            digests = dict(found[0].shared_digests) if found else {}
            outcomes = self._front.gather("snapshot", (error, digests))
            raise_first(outcome for outcome, _ in outcomes)
            records = partial(self._front.gather, "records", list(self.state.history))
            refuse_unequal([digests for _, digests in outcomes], records)
        except TxStoreError:
            for snapshot in taken:
                snapshot.release()
            raise
        assert found is not None
        self._buffers.append(self._buffers.pop(0))
        return found

    @one_at_a_time
    def resume(self, options: ResumeOptions | None = None) -> ResumeReport:
        """Bring back the newest recovery point that is committed, sound and compatible; raises as `Resume.run`.

        Saves of this checkpointer that are on their way are waited for.
        """
        self._check_open()
        check("options", options, ResumeOptions | None, "pass ResumeOptions(checkpoint='step-100')")
        self._ledger.wait_for_all()
        self._repeats.forget()
        options = options or ResumeOptions()
        resume = Resume(
            store=self.store,
            state=self.state,
            exchange=self._front,
            today=on_record(self.description, self.state.accepted),
            options=options,
            teller=self._teller,
            deadline_s=self.policy.deadline_s,
        )
        report = resume.run()
        passed_over = tuple(one.checkpoint for one in report.fell_back)
        origin = Origin(resume.decision, options.checkpoint is not None, passed_over, resume.counts_anew)
        self._lineage.resumed(origin, self.state.progress.recorded())
        self._ledger.goes_on_from(-1 if report.step is None else report.step)
        if resume.decision is not None:
            self._writer.know(resume.decision)
        self.state.accepted = tuple(report.accepted)
        if not report.fresh:
            window, policy = tuple(self.state.history), self._proof_policy
            self.state.watch = ProofWatch(report, window, policy, self.state.start, self._teller.proved)
        return report

    def record(
        self,
        *,
        loss: float,
        grad_norm: float | None = None,
        update_norm: float | None = None,
        batch_id: str | None = None,
    ) -> StepRecord:
        """Note what the step that was just counted showed.

        The next save carries it, and the first steps after a resume are compared with it. Not collective, but all
        ranks must record the same values.

        Args:
            loss: The loss, a mean over the ranks.
            grad_norm: Norm of the gradient before clipping.
            update_norm: Norm of the parameters' change.
            batch_id: Names the batch.

        Raises:
            NotProved: Training does not go on where it stood, and the policy is to raise; or the loop over the data is
                one from before the last `resume`, whatever the policy.
            TransactionStateError: This checkpointer is closed: no save would carry it.
        """
        if self._closed:
            raise TransactionStateError("this checkpointer is closed")
        self.state.loops.refuse()
        record = record_of(
            self.state.progress, loss=loss, grad_norm=grad_norm, update_norm=update_norm, batch_id=batch_id
        )
        self.state.history.add(record)
        self._teller.step(record)
        if self.state.watch is not None:
            self.state.watch.see(record)
        return record

    def _read_back(self, decision: Decision) -> None:
        """On the background thread of the coordinator, after a commit."""
        if self.policy.verify is not None:
            examine(self.store, decision, self.policy.verify, self._teller.verified)

    @one_at_a_time
    def wait(self) -> list[Decision]:
        """Wait until all saves have ended; the decisions of those that this call accounted for.

        Raises:
            DeadlineExceeded: A save is stuck, and was given up. The message says whether it is committed; if not, it
                never will be. So does its handle.
            CommitUnknown: A save is stuck, and may have been committed, or may yet be.
            TxStoreError: A save failed, the same error on all ranks.
        """
        self._check_open()
        return self._ledger.wait_for_all()

    @one_at_a_time
    def close(self) -> None:
        """Wait for all saves, raise what went wrong, give threads and groups back. A second call does nothing.

        `max_failed_in_a_row` tolerates nothing here: if the newest save has failed, no later one will make it good.
        """
        if self._closed or self._is_forked:
            return
        try:
            self._check_open()
            self._ledger.end()
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        exit_guard.release(self)
        if self._saves.close(10.0 if self._ledger.all_ended else 0.0):
            self._back.close()
        self._front.close()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this checkpointer saved or resumed; -1 if there is none.

        A save that is on its way counts; one that failed does not, once the call that raises its error has said so.
        The same on all ranks at the same place of the loop, so a condition of a collective call may ask it.
        """
        return self._ledger.standing_step

    def overlooked(self) -> str:
        """Wait for what is on its way, on this rank alone; what nobody has been told, or ""."""
        return self._ledger.overlooked()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_forked:
            return
        if error is None:
            self.close()
            return
        # This rank may be the only one that leaves: nothing collective. And the first error stays the one raised.
        if told := self.overlooked():
            error.add_note(f"txstore: {told}")
            exit_guard.remember(told, self.store.url, self._ledger.asked_step)
        self._release()

    @property
    def _is_forked(self) -> bool:
        # Saves on their way end in the process that began them: a fork would wait for ever, and then abort them.
        return os.getpid() != self._process

    def _check_open(self) -> None:
        if self._closed:
            raise TransactionStateError("this checkpointer is closed")
        if self._is_forked:
            raise TransactionStateError(
                f"this checkpointer belongs to process {self._process}, and this is a fork of it",
                next_step="save in the process that trains; one that is to train itself makes its own Checkpointer",
            )
        if self._ledger.stuck is not None:
            raise self._ledger.stuck
