"""The invariants of the commit protocol, asked of every state that the explorer reaches.

They are written from the protocol and read the store's content alone. Of the code under test they use the decoders, and
resolver and sweep where the promise is about them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from txstore import slot_walk
from txstore.checksum import crc32c
from txstore.errors import (
    NotFoundError,
    TxStoreError,
)
from txstore.index import decode_index
from txstore.keys import (
    COMMITS_PREFIX,
    DATA_PREFIX,
    LATEST_KEY,
    RETIRED_PREFIX,
    STORE_KEY,
    begin_key,
    parse_attempt,
    parse_decision_key,
    retired_key,
)
from txstore.manifest import Decision, decode_begin, decode_decision, decode_manifest
from txstore.store import Store
from txstore.sweep import sweep
from txstore.testing import model
from txstore.testing.model import Broken, Content, Outcome, Reply, Request
from txstore.testing.protocol import CHECKPOINT, READER, READER_OF_NEWEST, deterministic, txn_of

GHOST, RETIRED = "ghost/", "retired:"
"""Keys that only the model sees: the commits that were decided when an attempt's ``begin.json`` was stored."""


# The store, with a memory for the invariants


def frozen(key: str) -> bool:
    """Decisions, tombstones and the format document never change once they exist (`check_content` sees to it)."""
    return key == STORE_KEY or key.startswith((COMMITS_PREFIX, RETIRED_PREFIX))


def apply(content: Content, request: Request) -> tuple[Reply, Content]:
    """`model.apply`; with ``begin.json`` the commits decided so far are noted; the hint is forgotten.

    Without it ``latest.json`` shows nothing, and its content would only multiply the states: see `apply_with_hint`.
    """
    if request.key == LATEST_KEY:
        return Reply(NotFoundError if request.verb == "read" else None), content
    reply, after = model.apply(content, request)
    if after is not content:
        for key in content:
            if frozen(key) and after.get(key) != content[key]:
                raise Broken(f"{key} was {'replaced' if key in after else 'deleted'} (invariant 1)")
    attempt = parse_attempt(request.key)
    if request.verb == "put" and attempt and request.key == begin_key(*attempt):
        seen = ((RETIRED if is_retired(content, found) else "") + found.txn for found in _commits(content))
        after = {**after, GHOST + attempt[1]: " ".join(seen).encode()}
    return reply, after


def apply_with_hint(content: Content, request: Request) -> tuple[Reply, Content]:
    """As `apply`, and the hint is kept: for worlds in which a reader asks it whether a record was lost."""
    return (model.apply if request.key == LATEST_KEY else apply)(content, request)


@lru_cache(maxsize=65536)
def _decision(key: str, data: bytes) -> Decision:
    name = parse_decision_key(key)
    if name is None:
        raise Broken(f"{key} is not the key of a decision")
    return decode_decision(data, key, checkpoint=name.checkpoint, slot=name.slot)


def decisions(content: Content) -> list[Decision]:
    """All decisions, by checkpoint and slot."""
    found = [_decision(key, content[key]) for key in content if key.startswith(COMMITS_PREFIX)]
    return sorted(found, key=lambda decision: (decision.checkpoint, decision.slot))


def _commits(content: Content) -> list[Decision]:
    return [decision for decision in decisions(content) if decision.kind == "commit"]


def is_retired(content: Content, decision: Decision) -> bool:
    """Whether a tombstone lies on this commit."""
    return retired_key(decision.checkpoint, decision.slot) in content


# The invariants of the commit protocol


def check_content(content: Content) -> None:
    """What must hold of the store in every state."""
    found = decisions(content)
    for checkpoint in {decision.checkpoint for decision in found}:
        slots = [decision.slot for decision in found if decision.checkpoint == checkpoint]
        if slots != list(range(len(slots))):
            raise Broken(f"the slots of {checkpoint} are {slots}, not contiguous from 0")
    settled: dict[str, Decision] = {}
    for decision in found:
        other = settled.setdefault(decision.txn, decision)
        if other.kind != decision.kind or (decision.kind == "commit" and other is not decision):
            raise Broken(f"{decision.txn} is both {other.kind} and {decision.kind} (invariants 1 and 4)")
    live = [decision for decision in _commits(content) if not is_retired(content, decision)]
    for decision in live:
        check_readable(content, decision)
    if _commits(content) and not live:
        raise Broken("every commit was retired, the newest too")
    for decision in _commits(content):
        _check_superseding(content, decision)


def check_readable(content: Content, decision: Decision) -> None:
    """A standing commit is whole, byte for byte (invariants 2, 5 and 6)."""
    try:
        assert decision.manifest is not None
        manifest = decode_manifest(content[decision.manifest.key], decision)
        index = decode_index(content[manifest.index.key], manifest)
        for file in index.files:
            if len(content[file.key]) != file.size or crc32c(content[file.key]).to_bytes(4, "little") != file.blocks:
                raise Broken(f"{file.key} is not what was committed (invariant 2)")
    except (KeyError, TxStoreError) as error:
        raise Broken(f"commit {decision.checkpoint}.{decision.slot} dangles: {error!r} (invariant 5)") from error


def _check_superseding(content: Content, decision: Decision) -> None:
    """A commit lies above another only if that one was retired, or was decided when this one began to overwrite it."""
    ghost = content.get(GHOST + decision.txn)
    if ghost is None:
        return
    key = begin_key(decision.checkpoint, decision.txn)
    overwrite = decode_begin(content[key], key).overwrite if key in content else True
    for other in _commits(content):
        below = other.checkpoint == decision.checkpoint and other.slot < decision.slot
        if below and not is_retired(content, other) and not (overwrite and other.txn in ghost.decode().split()):
            raise Broken(f"{decision.txn} superseded {other.txn}, which it had never seen")


def check_outcome(name: str, outcome: Outcome, ghost: Hashable, content: Content) -> None:
    """What an actor was told must be true, now and in every later state."""
    mine = [decision for decision in decisions(content) if decision.txn == txn_of(name)]
    kinds = {decision.kind for decision in mine}
    if outcome[0] == "committed" and not any(d.kind == "commit" and d.slot == outcome[1] for d in mine):
        raise Broken(f"{name} was told that it committed, and it did not (invariant 2)")
    if outcome[0] in {"conflict", "aborted", "failed", "already committed"} and "commit" in kinds:
        raise Broken(f"{name} was told {outcome!r}, and it did commit (invariant 4)")
    if outcome[0] == "aborted" and "abort" not in kinds:
        raise Broken(f"{name} was told that it was aborted, and no record says so")
    if outcome[0] == "conflict" and outcome[1] not in {d.txn for d in _commits(content) if d.txn != txn_of(name)}:
        raise Broken(f"{name} was told of a conflict with {outcome[1]}, which holds nothing (invariant 3)")
    if outcome[0] == "conflict" and f"{RETIRED}{outcome[1]}".encode() in content.get(GHOST + txn_of(name), b"").split():
        raise Broken(f"{name} was told of a conflict with {outcome[1]}, which was retired before {name} began")
    if outcome[0] == "settled" and (outcome[1], outcome[2]) not in {(d.txn, d.kind) for d in decisions(content)}:
        raise Broken(f"{name} was told {outcome!r}, and the records say otherwise (invariant 4)")
    if isinstance(ghost, tuple):
        _check_reader(name, outcome, ghost, content)


def watch(name: str, content: Content) -> Hashable:
    """For a reader: the commits that stand when it begins, and the number of tombstones."""
    if name not in {READER, READER_OF_NEWEST}:
        return model.UNSEEN
    live = tuple((d.checkpoint, d.slot) for d in _commits(content) if not is_retired(content, d))
    return live, sum(key.startswith(RETIRED_PREFIX) for key in content)


def _check_reader(name: str, outcome: Outcome, ghost: tuple[Any, ...], content: Content) -> None:
    """A reader gets a whole checkpoint, one at least as new as any that stood from its begin to its end."""
    stood, tombstones = ghost
    wanted = [(c, s) for c, s in stood if c == CHECKPOINT or name == READER_OF_NEWEST]
    retired = {(d.checkpoint, d.slot) for d in _commits(content) if is_retired(content, d)}
    if outcome[0] in {"torn", "failed"}:
        raise Broken(f"a reader got {outcome!r} (invariant 6)")
    kept = [name for name in wanted if name not in retired]
    if outcome[0] == "nothing" and kept:
        raise Broken(f"a reader was told that there is nothing, and {kept} stood when it began")
    if outcome[0] == "retired" and wanted and len(retired) <= tombstones:
        raise Broken(f"a reader was told of a retirement that had been over when it began; {wanted} stood")
    if outcome[0] == "loaded" and kept and outcome[1:] < max(kept):
        raise Broken(f"a reader loaded {outcome[1:]!r} although {max(kept)} stood when it began")


def check_rest(content: Content, flying: Sequence[Request], ended: Mapping[str, Outcome]) -> None:
    """If everybody stops here: every unknown has one answer, whatever lands late; the dead are reclaimed.

    Invariants 4 and 7. A resolver and a sweep run alone, without faults; then all late requests land; then again.
    """
    store = _Direct(content)
    unknown = [txn_of(name) for name, outcome in ended.items() if outcome == ("unknown",)]
    with deterministic("later"):
        first = _answers(store, unknown)
        sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 0.0)
        for request in flying:
            store.content = apply(store.content, request)[1]
        check_content(store.content)
        if _answers(store, unknown) != first:
            raise Broken("an unknown commit was given two answers (invariant 4)")
        sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 0.0)
    check_content(store.content)
    live = {d.txn for d in _commits(store.content) if not is_retired(store.content, d)}
    left = [key for key in store.content if key.startswith(DATA_PREFIX) and (parse_attempt(key) or "??")[1] not in live]
    if left:
        raise Broken(f"a sweep left the dead attempt of {left[0]} (invariant 7)")


def _answers(store: Store, txns: Sequence[str]) -> list[str]:
    found = [slot_walk.resolve(store, CHECKPOINT, txn, force=True) for txn in txns]
    return [decision.kind for decision in found if decision is not None]


class _Direct(model.ReplayStore):
    """A store that applies at once."""

    def __init__(self, content: Content) -> None:
        super().__init__(())
        self.content = content

    def _ask(self, request: Request) -> object:
        reply, self.content = apply(self.content, request)
        if reply.error is not None:
            raise reply.error("simulated", key=request.key)
        return reply.value
