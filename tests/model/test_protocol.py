"""The commit protocol, explored exhaustively in small worlds, and with each of its rules removed in turn.

The code under test is the real one. A mutation patches one function or flag of it, and a world must then reach a
state that breaks an invariant: otherwise the rule is idle, or the model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import msgspec
import pytest

from txstore import catalog, decisions, manifest, retry, slot_walk, store, sweep, transaction
from txstore.errors import AlreadyExistsError, CommitUnknown, StoreError
from txstore.keys import LATEST_KEY, SlotName, decision_key, manifest_key
from txstore.testing import invariants, model, protocol
from txstore.testing.explorer import Explored, explore
from txstore.testing.invariants import check_content, check_outcome, check_rest, frozen, watch
from txstore.testing.model import Actor, Request, Violation, World
from txstore.testing.protocol import (
    READER,
    READER_OF_NEWEST,
    reader,
    resolver,
    retention,
    standing,
    sweeper,
    writer,
)

A, B = writer("A"), writer("B", overwrite=True)


def faulty(_actor: str, request: Request) -> tuple[str, ...]:
    """What can happen to a request: everything to the conditional write, the plain faults to the others."""
    if request.verb == "create":
        return ("lost", "late", "denied", "down")
    if request.verb == "put" and request.key.endswith(".safetensors"):
        return ("late", "early")
    if request.verb == "put" and request.key.endswith("manifest.json"):
        return ("late", "down")
    if request.verb == "read" and request.key.startswith("commits/"):
        return ("down",)
    if request.verb == "put" and request.key == LATEST_KEY:
        return ("late",)
    return ("late",) if request.verb == "delete" else ()


def hidden(_actor: str, request: Request) -> bool:
    """The puts of index and manifest are taken together with the operation before them.

    Before the decision only a sweep can see them, and it treats them as it treats the shard, whose put stays an event
    of its own, faults included; so does that of `begin.json`, which a sweep reads. Where the documents' puts can fail
    (`only_the_hint`) this abstraction is off. The hint shows nothing in most worlds; where it does (`hinted`), it is seen.
    """
    return only_documents(_actor, request) or only_the_hint(_actor, request)


def only_documents(_actor: str, request: Request) -> bool:
    return request.verb == "put" and request.key.endswith(("index.msgpack", "manifest.json"))


def only_the_hint(_actor: str, request: Request) -> bool:
    return request.key == LATEST_KEY


def hurried(actor: str, request: Request) -> bool:
    """B runs from its first listing to its end in one go, T up to its tombstone and from it: fewer orders, not more."""
    if actor == "B":
        return request.verb != "list"
    return hidden(actor, request) or (actor == "T" and request.verb != "create")


def world(*actors: Actor, content: dict[str, bytes] | None = None, **faults: int) -> World:
    content = standing() if content is None else content
    return World(
        actors=actors,
        content={key: data for key, data in content.items() if key != LATEST_KEY},
        faults=faults,
        faulty=faulty,
        frozen=frozen,
        hidden=hidden,
        check_content=check_content,
        check_outcome=check_outcome,
        check_rest=check_rest,
        watch=watch,
        apply=invariants.apply,
    )


def hinted(*actors: Actor, content: dict[str, bytes], **faults: int) -> World:
    """A world with a hint, which readers, retention and sweeps ask whether a record was lost."""
    whole = world(*actors, **faults)
    return replace(whole, content=content, hidden=only_documents, apply=invariants.apply_with_hint)


def newer(*names: str) -> dict[str, bytes]:
    return standing(*names, newer=True)


WORLDS: dict[str, Callable[[], World]] = {
    # Two writers and everything that can happen to a conditional write; one aborts when it does not know.
    "writers": lambda: world(writer("A", give_up=True), B, late=2, denied=1, down=1),
    "writers, lost replies": lambda: world(A, B, lost=2, late=1, denied=1),
    "overwriting": lambda: world(A, B, lost=1, late=1, content=standing("X")),
    # The same with an abort from a third process.
    "abort": lambda: world(A, B, resolver("C", "A"), late=2),
    "abort, refusals": lambda: world(A, resolver("C", "A"), lost=1, late=1, denied=1, down=1),
    # A sweep with no age limit: with late shards, invisible shards and late deletes; two writers; two sweeps.
    "sweep": lambda: world(A, sweeper("S"), lost=1, late=2, early=1),
    "sweep, two writers": lambda: world(A, B, sweeper("S")),
    "two sweeps": lambda: world(A, sweeper("S"), sweeper("S2")),
    # Retention: of what two writers fight over, of the newest, before another save.
    "retention": lambda: world(A, B, retention("T"), late=1, content=newer()),
    "retention of the newest": lambda: world(A, B, retention("T", of=None), lost=1),
    "retired name": lambda: world(A, retention("T"), lost=1, late=1, content=newer("X")),
    # One attempt stalls; another commits and is retired; a sweep runs.
    "stalled": lambda: replace(world(A, B, sweeper("S"), retention("T"), content=newer()), hidden=hurried),
    # Everybody at once.
    "all": lambda: replace(world(A, B, sweeper("S"), retention("T"), reader(), content=newer()), hidden=hurried),
    # Readers by name and of the newest, during saves, retention and removal.
    "reader of saves": lambda: world(A, B, reader(READER), lost=1, late=1),
    "reader of overwriting": lambda: world(B, reader(READER_OF_NEWEST), late=1, content=standing("X")),
    "reader of retention": lambda: world(B, retention("T"), reader(READER), content=newer("X")),
    "reader of removal": lambda: world(retention("T"), sweeper("S"), reader(READER), content=newer("X", "Y")),
    # Nobody takes a record for lost, whenever the hint is moved and read; no late hint is one that runs ahead.
    "hint": lambda: hinted(B, reader(READER_OF_NEWEST), late=1, content=standing("X")),
    "hint of retention": lambda: hinted(B, retention("T"), reader(READER), content=newer("X")),
    "hint of an abort": lambda: hinted(A, resolver("C", "A"), late=1, content=standing()),
    "hint of a sweep": lambda: hinted(B, sweeper("S"), reader(READER_OF_NEWEST), content=standing("X")),
    # The documents' puts fail or are delayed, and the caller calls commit once more.
    "commit again": lambda: replace(
        world(writer("A", again=True), reader(READER), late=2, down=1), hidden=only_the_hint
    ),
    # A shard that its rank believes stored and that nobody sees yet.
    "invisible shard": lambda: world(A, reader(READER), early=1, late=1),
}


@cache
def explored(name: str) -> Explored:
    return explore(WORLDS[name]())


def report(name: str, seen: Explored, begun: float) -> None:
    print(
        f"{name}: {seen.states} states, {seen.events} events, {seen.contents} contents, "
        f"{seen.histories} histories, {time.perf_counter() - begun:.1f} s"
    )


@pytest.mark.parametrize("name", WORLDS)
def test_every_order_of_events_keeps_the_invariants(name: str) -> None:
    begun = time.perf_counter()
    seen = explored(name)
    report(name, seen, begun)
    assert seen.states < 300_000
    assert all(seen.outcomes.values()), "some actor never ended"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "build",
    [
        lambda: world(A, B, resolver("C", "A"), lost=1, late=2, denied=1, down=1),
        lambda: world(A, B, sweeper("S"), retention("T"), content=newer()),
        lambda: world(A, B, sweeper("S"), late=1),
        lambda: replace(world(A, B, sweeper("S"), retention("T"), late=1, lost=1, content=newer()), hidden=hurried),
    ],
    ids=["abort", "sweep and retention", "sweep", "sweep and retention, faults"],
)
def test_larger_worlds(build: Callable[[], World]) -> None:
    begun = time.perf_counter()
    report("larger", explore(replace(build(), most_states=20_000_000)), begun)


def test_the_worlds_reach_every_outcome() -> None:
    """An exploration in which nobody ever conflicts proves nothing about conflicts."""
    writers = explored("writers").outcomes
    assert {outcome[0] for outcome in writers["A"] | writers["B"]} == {
        *("committed", "already committed", "conflict", "settled", "unknown", "failed")
    }
    assert ("committed", 1) in writers["B"], "B never overwrote A"
    assert {outcome[2] for outcome in writers["A"] if outcome[0] == "settled"} == {"abort", "commit"}
    swept = explored("sweep").outcomes
    assert {outcome[0] for outcome in swept["A"]} >= {"committed", "aborted", "unknown"}
    assert {outcome[0] for outcome in swept["S"]} == {"swept", "stopped"}
    read = explored("reader of retention").outcomes[READER]
    assert read == {("loaded", "step-1", 0), ("loaded", "step-1", 1), ("retired",)}


# Rules removed, one at a time

Decision = manifest.Decision
Transaction = transaction.Transaction
Patch = AbstractContextManager[object]

real_begin = transaction.begin
real_begin_record = transaction.Begin
real_claim = slot_walk.claim
real_commit = Transaction.commit
real_delete_attempt = sweep._delete_attempt
real_is_settled = slot_walk._is_settled
real_list_records = catalog.list_records
real_must_stop = Transaction._must_stop
real_why_orphan = sweep._why_orphan


def patch(where: object, name: str, value: object) -> Patch:
    return mock.patch.object(where, name, value)


def both(*patches: Patch) -> Patch:
    stack = ExitStack()
    for each in patches:
        stack.enter_context(each)
    return stack


def no_abort(_store: store.Store, checkpoint: str, txn: str) -> Decision:
    return Decision(kind="abort", checkpoint=checkpoint, slot=0, step=1, txn=txn, writer="nobody", decided_at="never")


def abort_and_ignore_the_answer(target: store.Store, checkpoint: str, txn: str) -> Decision:
    slot_walk.claim_abort(target, checkpoint, txn)
    return no_abort(target, checkpoint, txn)


def dead_once_its_slot_names_another(target: store.Store, checkpoint: str, txn: str) -> str | None:
    """The rule as first proposed: no abort is needed if another's commit lies where this attempt would have to."""
    why = real_why_orphan(target, checkpoint, txn)
    if why == "undecided" and any(found.kind == "commit" for found in decisions.walk_slots(target, checkpoint)):
        return "aborted"
    return why


def create_without_reading_back(self: retry.RetryingStore, key: str, data: bytes) -> None:
    self._call(self.inner.create, key, data)


def create_that_forgets_unclear_answers(self: retry.RetryingStore, key: str, data: bytes) -> None:
    def attempt() -> None:
        try:
            self.inner.create(key, data)
        except AlreadyExistsError:
            if self._read_back(key, data) is not True:
                raise

    self._retrier.call(attempt)  # ends with the last answer, whatever came before it


def create_with_fresh_bytes(self: retry.RetryingStore, key: str, data: bytes) -> None:
    """Each attempt builds the record anew, and takes the time again."""

    def attempt() -> None:
        nonlocal data
        found = msgspec.json.decode(data, type=Decision)
        data = manifest.encode(manifest.seal(msgspec.structs.replace(found, decided_at=found.decided_at + "0")))
        try:
            self.inner.create(key, data)
        except AlreadyExistsError:
            if self._read_back(key, data) is not True:
                raise

    self._retrier.call(attempt)


def create_that_replaces(content: model.Content, request: Request) -> tuple[model.Reply, model.Content]:
    return invariants.apply(content, request._replace(verb="put") if request.verb == "create" else request)


def no_commit_is_mine(found: Decision, wanted: Decision) -> bool:
    return found.kind == "abort" and real_is_settled(found, wanted)


def a_commit_is_mine_if_bytes_agree(found: Decision, wanted: Decision) -> bool:
    return real_is_settled(found, wanted) and (found == wanted or wanted.kind == "abort")


def an_abort_passes_a_commit(found: Decision, wanted: Decision) -> bool:
    return found.kind == wanted.kind and real_is_settled(found, wanted)


def go_on_past_my_abort(self: Transaction, found: Decision) -> None:
    if found.kind != "abort":
        real_must_stop(self, found)


def go_on_past_any_commit(self: Transaction, found: Decision) -> None:
    if found.kind == "abort":
        real_must_stop(self, found)


def stop_at_retired_commits(self: Transaction, found: Decision) -> None:
    with patch(transaction, "is_retired", lambda *_: False):
        real_must_stop(self, found)


def begin_overwriting(*args: object, **options: object) -> Transaction:
    return real_begin(*args, **{**options, "overwrite": True})  # type: ignore[arg-type]


def abort_in_slot_1(
    target: store.Store,
    build: Callable[[int], Decision],
    must_stop: Callable[[Decision], None],
    damaged: Collection[int] = (),
) -> Decision:
    wanted = build(1)
    if wanted.kind == "commit":
        return real_claim(target, build, must_stop, damaged)
    target.create(decision_key(wanted.checkpoint, 1), manifest.encode(wanted))
    return wanted


def data_before_tombstone(target: store.Store, decision: Decision) -> None:
    sweep._delete_attempt(target, decision.checkpoint, decision.txn, 0)
    target.create(f"retired/{decision.checkpoint}.{decision.slot}", b"{}")


def delete_the_decision_too(target: store.Store, checkpoint: str, txn: str, spread: int) -> None:
    slots = [found.slot for found in decisions.walk_slots(target, checkpoint) if found.txn == txn]
    real_delete_attempt(target, checkpoint, txn, spread)
    for slot in slots:
        target.delete(decision_key(checkpoint, slot))


def commit_that_cleans_up(self: Transaction, *args: object, **options: object) -> Decision:
    try:
        return real_commit(self, *args, **options)  # type: ignore[arg-type]
    except (StoreError, CommitUnknown):
        sweep._delete_attempt(self._store, self.ticket.checkpoint, self.ticket.txn, 0)
        raise


def commit_before_the_manifest(self: Transaction, *args: object, **options: object) -> Decision:
    target, put = self._store, self._store.put
    held: list[store.Source] = []
    key = manifest_key(self.ticket.checkpoint, self.ticket.txn)

    def put_later(wanted: str, source: store.Source) -> store.ObjectInfo:
        if wanted != key:
            return put(wanted, source)
        held.append(source)
        return store.ObjectInfo(key, source.size)

    with patch(target, "put", put_later):
        decision = real_commit(self, *args, **options)  # type: ignore[arg-type]
    put(key, held[0])
    return decision


def hint_before_decision(
    target: store.Store,
    build: Callable[[int], Decision],
    must_stop: Callable[[Decision], None],
    damaged: Collection[int] = (),
) -> Decision:
    slot = len(list(decisions.walk_slots(target, build(0).checkpoint)))
    transaction._point_at(target, build(slot))
    return real_claim(target, build, must_stop, damaged)


def hint_after_the_listing(target: store.Store, checkpoint: str | None = None) -> catalog.Records:
    with patch(catalog, "lost_record", lambda _: None):
        records = real_list_records(target, checkpoint)
    hint = manifest.decode_pointer(target.read(LATEST_KEY), LATEST_KEY)
    if records.highest.get(hint.checkpoint, -1) >= hint.slot:
        return records
    raise catalog.missing_record(SlotName(hint.checkpoint, hint.slot))


def find_lowest(target: store.Store, checkpoint: str) -> Decision:
    for found in decisions.walk_slots(target, checkpoint):
        if found.kind == "commit" and not decisions.is_retired(target, found):
            return found
    raise catalog.CheckpointNotFound("nothing", key=checkpoint)


class AlwaysOpen:
    """`Transaction._open`, never closed."""

    def __get__(self, *_: object) -> bool:
        return True

    def __set__(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Mutation:
    """A rule taken out of the code, the world in which that must show, and the invariant that is then seen to break."""

    remove: Callable[[], Patch]
    world: str
    breaks: str
    change: Callable[[World], World] = lambda world: world


READ_BACK = (
    lambda: patch(retry.RetryingStore, "create", create_without_reading_back),
    lambda: patch(slot_walk, "_is_settled", no_commit_is_mine),
)
SAME_BYTES = (
    lambda: patch(retry.RetryingStore, "create", create_with_fresh_bytes),
    lambda: patch(slot_walk, "_is_settled", a_commit_is_mine_if_bytes_agree),
)

RULES: dict[str, Mutation] = {
    "a sweep aborts before it deletes": Mutation(lambda: patch(sweep, "claim_abort", no_abort), "sweep", "dangles"),
    "a sweep believes the commit that its abort met": Mutation(
        lambda: patch(sweep, "claim_abort", abort_and_ignore_the_answer), "sweep", "dangles"
    ),
    "a sweep aborts first even when another's commit holds the slot": Mutation(
        lambda: patch(sweep, "_why_orphan", dead_once_its_slot_names_another), "stalled", "dangles"
    ),
    "only a commit that stood when I began is passed": Mutation(
        lambda: patch(Transaction, "_must_stop", go_on_past_any_commit), "writers", "never seen"
    ),
    "a standing commit is passed only with overwrite": Mutation(
        lambda: both(
            patch(transaction, "begin", begin_overwriting),
            patch(transaction, "Begin", lambda **fields: real_begin_record(**{**fields, "overwrite": False})),
        ),
        "overwriting",
        "never seen",
    ),
    "a retired commit does not block its name": Mutation(
        lambda: patch(Transaction, "_must_stop", stop_at_retired_commits), "retired name", "was retired before"
    ),
    "what create left unclear is read back": Mutation(
        lambda: both(*(each() for each in READ_BACK)), "overwriting", "'conflict'.*it did commit"
    ),
    "every retry sends the same bytes": Mutation(
        lambda: both(*(each() for each in SAME_BYTES)), "overwriting", "'conflict'.*it did commit"
    ),
    "an unclear answer stays unclear": Mutation(
        lambda: patch(retry.RetryingStore, "create", create_that_forgets_unclear_answers),
        "writers, lost replies",
        "it did commit",
    ),
    "an abort that names me ends me": Mutation(
        lambda: patch(Transaction, "_must_stop", go_on_past_my_abort), "abort", "is both abort and commit"
    ),
    "an abort yields to the commit that it meets": Mutation(
        lambda: patch(slot_walk, "_is_settled", an_abort_passes_a_commit), "abort", "is both commit and abort"
    ),
    "slots are contiguous from 0": Mutation(
        lambda: patch(slot_walk, "claim", abort_in_slot_1), "abort", "not contiguous from 0"
    ),
    "create is conditional": Mutation(
        both, "writers", "was replaced", lambda world: replace(world, apply=create_that_replaces)
    ),
    "decisions are never deleted": Mutation(
        lambda: patch(sweep, "_delete_attempt", delete_the_decision_too), "retention", "was deleted"
    ),
    "a tombstone comes before the removal": Mutation(
        lambda: patch(protocol, "retire", data_before_tombstone), "retention", "dangles"
    ),
    "the newest is never retired": Mutation(
        lambda: patch(sweep, "_is_newest", lambda *_: False), "retention of the newest", "every commit was retired"
    ),
    "a commit that fails deletes nothing": Mutation(
        lambda: patch(Transaction, "commit", commit_that_cleans_up), "writers", "dangles"
    ),
    "a commit is tried once": Mutation(
        lambda: mock.patch.object(Transaction, "_open", AlwaysOpen(), create=True), "commit again", "dangles"
    ),
    "every shard is looked at before the decision": Mutation(
        lambda: patch(transaction, "_look_at", lambda *_: None), "invisible shard", "dangles"
    ),
    "the documents come before the decision": Mutation(
        lambda: patch(Transaction, "commit", commit_before_the_manifest), "commit again", "dangles"
    ),
    "the hint comes after the decision": Mutation(
        lambda: patch(transaction, "claim", hint_before_decision), "hint", "IntegrityError"
    ),
    "the hint is read before the decisions": Mutation(
        lambda: patch(catalog, "list_records", hint_after_the_listing), "hint", "IntegrityError"
    ),
    "readers take the highest slot": Mutation(
        lambda: patch(protocol, "find", find_lowest), "reader of removal", "stood when it began"
    ),
    "readers pass retired commits": Mutation(
        lambda: patch(catalog, "is_retired", lambda *_: False), "reader of removal", "had been over when it began"
    ),
    "a missing object is explained by its tombstone": Mutation(
        lambda: patch(decisions, "is_retired", lambda *_: False), "reader of removal", "IntegrityError"
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_removing_a_rule_breaks_an_invariant(rule: str) -> None:
    mutation = RULES[rule]
    with mutation.remove(), pytest.raises(Violation, match=mutation.breaks) as caught:
        explore(mutation.change(WORLDS[mutation.world]()))
    print(f"without {rule!r}: {caught.value}")


@pytest.mark.parametrize("halves", [READ_BACK, SAME_BYTES], ids=["read-back", "same bytes"])
def test_two_rules_are_kept_twice(halves: tuple[Callable[[], Patch], Callable[[], Patch]]) -> None:
    """Retry layer and slot walk each suffice to recognise our own record: one of them may fail us."""
    for half in halves:
        with half():
            explore(world(A, B, lost=1, late=1, content=standing()))
