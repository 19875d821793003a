"""Is what was committed still there, byte for byte? Reads everything it is asked to, repairs nothing.

A verification goes the way of a reader, decision -> manifest -> index -> blocks, but collects what it
finds instead of stopping at the first error. It never deletes, never writes and never unpickles: objects
are bytes with a checksum here. Shards are read through buffers of 8 MiB, `READERS` at once, whatever their size.

A commit that retention removes meanwhile is not damaged: ``retired/`` is looked at before anything is said
(commit protocol, "Readers").
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from txstore.catalog import by_step, list_records
from txstore.checksum import sha256_hex
from txstore.decisions import REMAKE, is_retired, missing_record, read_decision, read_store_format
from txstore.errors import (
    FormatError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
    TxStoreError,
)
from txstore.index import Index, decode_index
from txstore.keys import (
    STORE_KEY,
    SlotName,
    decision_key,
)
from txstore.manifest import Decision, FileRef, Manifest, ShardRef, decode_manifest
from txstore.ops.report import SAMPLE_BLOCKS, Depth, Kind, Problem, Report, Step, StoreReport, verdict
from txstore.ops.shard_check import WINDOW_BYTES, Expected, Finding, ShardCheck, expected_entries
from txstore.side_by_side import side_by_side
from txstore.store import Store

Observer = Callable[[Step], None]

_SILENT = (TransientError, OutcomeUnknownError)
"""Errors of a store that did not answer, or not clearly, though the retry layer asked repeatedly."""

READERS = 8
"""Shards that are read at once; each has a buffer of `WINDOW_BYTES`."""

_RESTORE_IT = "restore this object from a copy of the store"
_RESTORE = f"{_RESTORE_IT}, or load an earlier checkpoint"
_NEXT_STEP: dict[Kind, str] = {
    "missing": _RESTORE,
    "size": _RESTORE,
    "digest": _RESTORE,
    "format": _RESTORE,
    "checksum": _RESTORE,
    "header": "load an earlier checkpoint, and keep this one: its writer disagrees with its index",
    "unreadable": "give this user the right to read the store, or repair the storage, and verify again",
}


def verify(
    store: Store,
    decision: Decision,
    *,
    depth: Depth = "full",
    seed: int | None = None,
    sample_blocks: int = SAMPLE_BLOCKS,
    progress: Observer | None = None,
) -> Report:
    """Verify one commit.

    Args:
        store: The store.
        decision: The commit, as the catalog found it.
        depth: ``documents``: decision, manifest and index by digest, each shard's size. ``sample``: also
            the first, the last and `sample_blocks` random blocks of each shard. ``full``: every block,
            each file's checksum against the manifest, and its header against the index.
        seed: Chooses the sampled blocks; a random one if None. The report names it.
        sample_blocks: See `depth`.
        progress: Called after each read, one call at a time, from any thread.

    Returns:
        The report. Damage is in it, not raised.

    Raises:
        TransientError, OutcomeUnknownError: The store stopped answering, for any object.
    """
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    run = _Run(store, decision, depth, seed, sample_blocks, progress)
    run.documents()
    # Asked last: a tombstone is set before the first delete, so whatever a removal took is covered by it.
    retired = is_retired(store, decision)
    problems = () if retired else tuple(run.problems)
    return Report(
        decision=decision,
        depth=depth,
        seed=seed,
        state="retired" if retired else verdict(problems),
        problems=problems,
        shards=run.shards,
        blocks=run.blocks,
        bytes_read=run.bytes_read,
    )


def verify_store(
    store: Store,
    *,
    checkpoint: str | None = None,
    depth: Depth = "full",
    seed: int | None = None,
    sample_blocks: int = SAMPLE_BLOCKS,
    progress: Observer | None = None,
) -> StoreReport:
    """Verify every commit that is not retired, superseded ones too, and the records themselves.

    Args:
        store: The store.
        checkpoint: Only commits of this name.
        depth: As for `verify`.
        seed: As for `verify`; one seed serves all commits.
        sample_blocks: As for `verify`.
        progress: As for `verify`.

    Returns:
        The report; empty if there is no commit.

    Raises:
        StoreError: The store could not be listed. That is never an empty report.
    """
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    problems, commits = _commits(store, checkpoint)
    reports = tuple(
        verify(store, decision, depth=depth, seed=seed, sample_blocks=sample_blocks, progress=progress)
        for decision in commits
    )
    return StoreReport(problems=tuple(problems), reports=reports)


def _commits(store: Store, checkpoint: str | None) -> tuple[list[Problem], list[Decision]]:
    """Every readable commit that is not retired, and what is wrong with the records."""
    records = list_records(store, checkpoint)
    problems = _format_problems(store, has_decisions=bool(records.highest))
    names = sorted(records.names(), key=lambda name: (*by_step(name.checkpoint), name.slot))
    commits: list[Decision] = []
    found = side_by_side(partial(_decision, store, records.lost), names)
    for slot_name, (decision, wrong) in zip(names, found, strict=True):
        problems += wrong
        if decision and decision.kind == "commit" and slot_name not in records.retired:
            commits.append(decision)
    return problems, commits


def _format_problems(store: Store, *, has_decisions: bool) -> list[Problem]:
    try:
        if read_store_format(store) or not has_decisions:
            return []
    except TxStoreError as error:
        return [_problem_of(store, error, STORE_KEY)]
    return [
        Problem("missing", STORE_KEY, "the store has decisions but no format document", f"{_RESTORE_IT}; or {REMAKE}")
    ]


def _decision(store: Store, lost: SlotName | None, name: SlotName) -> tuple[Decision | None, list[Problem]]:
    key = decision_key(name.checkpoint, name.slot)
    try:
        decision = read_decision(store, name.checkpoint, name.slot)
    except TxStoreError as error:
        return None, [_problem_of(store, error, key)]
    if decision is None:
        gone = missing_record(name, lost=lost)
        return None, [Problem("missing", key, gone.message, gone.next_step)]
    return decision, []


def problem(kind: Kind, key: str, what: str) -> Problem:
    """A problem with the next step that fits its kind."""
    return Problem(kind, key, what, _NEXT_STEP[kind])


def _problem_of(store: Store, error: TxStoreError, key: str) -> Problem:
    """The problem that an error of a read amounts to.

    Raises:
        TransientError, OutcomeUnknownError: The error itself, if the store does not answer about its
            format document either: asking for every other object would take a retry budget each. If it
            does answer, the fault is the object's, as a bad sector is.
    """
    if isinstance(error, _SILENT):
        try:
            store.head(STORE_KEY)
        except _SILENT:
            raise error from None
        except StoreError:
            pass
    kind: Kind = "format"
    if isinstance(error, NotFoundError):
        kind = "missing"
    elif isinstance(error, StoreError):
        kind = "unreadable"
    next_step = error.next_step if kind == "format" else ""  # of a store's answer the kind says more
    return Problem(kind, error.key or key, error.message, next_step or _NEXT_STEP[kind])


@dataclass(slots=True)
class _Run:
    """One verification of one commit, and what it has found so far."""

    store: Store
    decision: Decision
    depth: Depth
    seed: int
    sample_blocks: int
    progress: Observer | None
    problems: list[Problem] = field(default_factory=list)
    shards: int = 0
    blocks: int = 0
    bytes_read: int = 0
    total_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def documents(self) -> None:
        """Follow the documents as a reader does, then look at every shard that the manifest names."""
        self._record()
        ref = self.decision.manifest
        if ref is None:
            key = decision_key(self.decision.checkpoint, self.decision.slot)
            self._found(key, Finding("format", "an abort has no manifest"))
            return
        manifest, index = None, None
        if (data := self._document(ref)) is not None:
            with self._collected(ref.key):
                manifest = decode_manifest(data, self.decision)
        if manifest is None:
            return  # nothing else is named by anything that can be believed
        if manifest.writer != self.decision.writer:
            key = decision_key(self.decision.checkpoint, self.decision.slot)
            self._found(key, Finding("format", "the decision and its manifest name different writers"))
        if (data := self._document(manifest.index)) is not None:
            with self._collected(manifest.index.key):
                index = decode_index(data, manifest)
        del data
        self._shards(manifest, index)

    @contextmanager
    def _collected(self, key: str) -> Iterator[None]:
        try:
            yield
        except FormatError as error:
            self.problems.append(_problem_of(self.store, error, key))

    def _document(self, ref: FileRef) -> bytes | None:
        """A document's bytes if they are those that were committed."""
        try:
            data = self.store.read(ref.key, 0, ref.size + 1)
            size = self.store.head(ref.key).size if len(data) > ref.size else len(data)
        except StoreError as error:
            self._lost(ref.key, error)
            return None
        if size != ref.size:
            self._found(ref.key, Finding("size", f"the object has {size} bytes, {ref.size} were committed"))
        elif sha256_hex(data) != ref.sha256:
            self._found(ref.key, Finding("digest", "the object has another SHA-256 than was committed"))
        else:
            return data
        return None

    def _record(self) -> None:
        """The decision once more: the caller's copy may be older than the damage."""
        found, problems = _decision(self.store, None, SlotName(self.decision.checkpoint, self.decision.slot))
        self.problems += problems
        if found is not None and found != self.decision:
            key = decision_key(self.decision.checkpoint, self.decision.slot)
            self.problems.append(problem("format", key, "the decision record has changed since it was read"))

    def _shards(self, manifest: Manifest, index: Index | None) -> None:
        expected = None
        if index is not None and self.depth == "full":
            with self._collected(manifest.index.key):
                expected = expected_entries(index)
        sound = side_by_side(self._look, manifest.shards)
        work: list[_Work] = []
        for number, (shard, (there, problems)) in enumerate(zip(manifest.shards, sound, strict=True)):
            self.problems += problems
            if there and self.depth != "documents":
                blocks = index.files[number].blocks if index is not None else None
                work.append(_Work(shard, blocks, None if expected is None else expected[number]))
        self.shards = len(sound)
        self.total_bytes = sum(stop - start for one in work for start, stop in self._ranges(one.check()))
        for problems in side_by_side(self._read, work, at_once=READERS):
            self.problems += problems

    def _look(self, shard: ShardRef) -> tuple[bool, list[Problem]]:
        """Whether a shard is there with the size, and the checksum if the store keeps one, of the manifest."""
        problems: list[Problem] = []
        there = False
        try:
            info = self.store.head(shard.key)
        except StoreError as error:
            problems.append(_problem_of(self.store, error, shard.key))
        else:
            there = info.size == shard.size
            if not there:
                what = f"the object has {info.size} bytes, {shard.size} were committed"
                problems.append(problem("size", shard.key, what))
            elif info.crc32c not in {None, shard.crc32c}:
                what = "the store reports another CRC32C than was committed"
                problems.append(problem("checksum", shard.key, what))
        self._observe(shard.key)
        return there, problems

    def _ranges(self, check: ShardCheck) -> list[tuple[int, int]]:
        return check.ranges(self._chosen(check))

    def _chosen(self, check: ShardCheck) -> list[int] | None:
        """The blocks to read: None for all."""
        if self.depth == "full":
            return None
        if check.blocks is None:
            return []  # without the index there is nothing to compare a block with
        count = check.block_count
        # Seeded by key too: the sample of a shard does not depend on which shards came before.
        chosen = random.Random(f"{self.seed}:{check.shard.key}")  # noqa: S311 - a sample, not a secret
        return sorted({0, count - 1, *chosen.sample(range(count), min(self.sample_blocks, count))}) if count else []

    def _read(self, work: _Work) -> list[Problem]:
        """Read what the depth asks of one shard, and what is wrong with it. In a thread of its own."""
        check = work.check()  # made here and let go with this shard: it keeps the header
        key, size = check.shard.key, check.shard.size
        buffer = memoryview(bytearray(min(WINDOW_BYTES, size)))
        for start, stop in self._ranges(check):
            window = buffer[: stop - start]
            try:
                count = self.store.read_into(key, start, window)
            except StoreError as error:
                return [_problem_of(self.store, error, key)]
            whole = count == stop - start
            self._observe(key, count, check.feed(start, window) if whole else 0)
            if not whole:
                return [problem("size", key, f"the object has at most {start + count} bytes, {size} were committed")]
        return [problem(found.kind, key, found.what) for found in check.findings(whole=self.depth == "full")]

    def _lost(self, key: str, error: StoreError) -> None:
        self.problems.append(_problem_of(self.store, error, key))

    def _found(self, key: str, finding: Finding) -> None:
        self.problems.append(problem(finding.kind, key, finding.what))

    def _observe(self, key: str, nbytes: int = 0, blocks: int = 0) -> None:
        with self.lock:
            self.bytes_read += nbytes
            self.blocks += blocks
            if self.progress is not None:
                self.progress(Step(self.decision, key, self.bytes_read, self.total_bytes))


@dataclass(frozen=True, slots=True)
class _Work:
    """One shard to be read."""

    shard: ShardRef
    blocks: bytes | None
    expected: dict[str, Expected] | None

    def check(self) -> ShardCheck:
        return ShardCheck(self.shard, self.blocks, self.expected)
