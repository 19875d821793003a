"""The protocol under every fault at once, as a Hypothesis state machine, over any store.

Rules: a writer begins, writes, commits, aborts, is resolved or killed; a checkpoint is overwritten or retired; a sweep
runs with or without a grace; a reader takes the newest; requests are lost before, after or long before they are applied.
After every rule the invariants of the protocol are asked of the store itself, behind the faults.
"""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from txstore import catalog, root, transaction
from txstore.errors import (
    Aborted,
    AlreadyCommitted,
    CheckpointNotFound,
    CommitUnknown,
    ConfigError,
    Conflict,
    StoreError,
)
from txstore.keys import (
    COMMITS_PREFIX,
    DATA_PREFIX,
    RETIRED_PREFIX,
    parse_attempt,
    parse_decision_key,
    parse_retired_key,
)
from txstore.manifest import Decision, decode_decision
from txstore.slot_walk import resolve
from txstore.store import BytesSource, Store
from txstore.sweep import retire, sweep
from txstore.testing.lost_replies import patient
from txstore.testing.saves import AT_ONCE, index_of, load
from txstore.transaction import Shard, Transaction

SEED_VARIABLE = "TXSTORE_SEED"
CHECKPOINTS = ("step-2", "step-10", "step-9")  # as text, 9 would be the newest
GRACE_S = 2 * 24 * 3600.0
FORWARDS = ("now", "never", "later")
LOST = (StoreError, CommitUnknown)


class World(ABC):
    """An empty store, and the faults on the way to it.

    Attributes:
        direct: The truth.
        remote: The same store, behind the faults.
        replies: Ways in which an answer can be lost.
    """

    direct: Store
    remote: Store
    replies: tuple[Any, ...] = ("reset",)

    @abstractmethod
    def lose(self, *, decisions: bool, skip: int, times: int, forward: str, reply: Any) -> None:
        """Of the next requests, or of those about decisions, let `skip` pass and lose `times`.

        They are applied ``now``, ``never``, or when `release` is called.
        """

    @abstractmethod
    def heal(self) -> None:
        """No more losses; what is held stays held."""

    @abstractmethod
    def release(self) -> None:
        """Apply the held requests."""

    @abstractmethod
    def close(self) -> None:
        """Lose what is held, and end."""


@dataclass
class Writer:
    """A coordinator. `alive` until it was told an end, or was killed."""

    attempt: Transaction
    overwrite: bool
    stood: set[str]
    shards: list[Shard] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    alive: bool = True

    @property
    def txn(self) -> str:
        return self.attempt.ticket.txn


class Protocol(RuleBasedStateMachine):
    """One history. Subclasses say in which `world`."""

    make_world: Callable[[], World]

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).make_world()
        self.writers: list[Writer] = []
        self.records: dict[str, bytes] = {}  # decisions and tombstones: for ever
        self.answers: dict[str, str] = {}  # transaction -> what somebody was told became of it
        self.newest: tuple[int, int] = (-1, -1)
        self.values: dict[str, list[bytes]] = {}
        self.count = 0
        self.begun = 0

    def store(self) -> Store:
        """The store as one process sees it that has just started."""
        return patient(self.world.remote, attempts=3)

    @initialize()
    def first_checkpoint(self) -> None:
        """A store that was proved, with one checkpoint: nobody may lose it."""
        direct = self.world.direct
        attempt = transaction.begin(direct, "step-1", world_size=1)
        shard = transaction.write_shard(direct, attempt.ticket, 0, 0, BytesSource(b"first"))
        self.values[attempt.ticket.txn] = [b"first"]
        attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
        root.ensure_store(self.world.remote)
        self.told(attempt.ticket.txn, "commit")

    # the network

    @rule(
        skip=st.integers(0, 12),
        times=st.sampled_from([1, 1, 2, 9]),
        forward=st.sampled_from(FORWARDS),
        reply=st.integers(0, 99),
    )
    def replies_are_lost(self, skip: int, times: int, forward: str, reply: int) -> None:
        way = self.world.replies[reply % len(self.world.replies)]
        self.world.lose(decisions=False, skip=skip, times=times, forward=forward, reply=way)

    @rule(
        skip=st.integers(0, 3),
        times=st.sampled_from([1, 2, 9]),
        forward=st.sampled_from(FORWARDS),
        reply=st.integers(0, 99),
    )
    def replies_about_decisions_are_lost(self, skip: int, times: int, forward: str, reply: int) -> None:
        way = self.world.replies[reply % len(self.world.replies)]
        self.world.lose(decisions=True, skip=skip, times=times, forward=forward, reply=way)

    @rule()
    def the_network_heals(self) -> None:
        self.world.heal()

    @rule()
    def late_requests_land(self) -> None:
        self.world.release()

    # writers

    @rule(name=st.sampled_from(CHECKPOINTS), overwrite=st.booleans())
    def begin(self, name: str, overwrite: bool) -> None:
        stood = {decision.txn for decision in self.decisions() if decision.kind == "commit"}
        self.begun += 1
        # Random ids would be listed, and so swept, in another order each time: a seed would not mean one history.
        txn = sha256(b"%d" % self.begun).hexdigest()[:32]
        try:
            with patch.object(transaction, "new_txn", lambda: txn):
                attempt = transaction.begin(self.store(), name, world_size=1, overwrite=overwrite)
        except AlreadyCommitted:
            assert not overwrite
            assert any(decision.checkpoint == name for decision in self.standing())
        except StoreError:
            pass
        else:
            self.writers.append(Writer(attempt, overwrite, stood))

    def living(self, number: int) -> Writer:
        living = [writer for writer in self.writers if writer.alive]
        return living[number % len(living)]

    def has_living(self) -> bool:
        return any(writer.alive for writer in self.writers)

    @precondition(has_living)
    @rule(number=st.integers(0, 9), size=st.sampled_from([0, 1, 3000]))
    def write(self, number: int, size: int) -> None:
        writer = self.living(number)
        self.count += 1
        value = b"%d" % self.count + bytes(size)
        try:
            shard = transaction.write_shard(
                self.store(), writer.attempt.ticket, 0, len(writer.shards), BytesSource(value)
            )
        except StoreError:
            writer.alive = False  # DCP fails the save
            return
        writer.shards.append(shard)
        writer.values.append(value)

    @precondition(has_living)
    @rule(number=st.integers(0, 9))
    def commit(self, number: int) -> None:
        writer = self.living(number)
        self.values[writer.txn] = writer.values
        writer.alive = False
        try:
            decision = writer.attempt.commit(writer.shards, index_of(writer.shards), visibility=AT_ONCE)
        except CommitUnknown as error:
            assert error.txn == writer.txn
        except Conflict as error:
            self.told(writer.txn, "never")
            assert error.winner in {one.txn for one in self.decisions() if one.kind == "commit"} - {writer.txn}
        except Aborted:
            self.told(writer.txn, "abort")
        except StoreError:  # damage is none: nobody may take what is undecided
            self.told(writer.txn, "never")
        else:
            assert decision.txn == writer.txn
            self.told(writer.txn, decision.kind)

    @precondition(has_living)
    @rule(number=st.integers(0, 9))
    def abort(self, number: int) -> None:
        writer = self.living(number)
        writer.alive = False
        try:
            decision = writer.attempt.abort()
        except CommitUnknown:
            return
        assert decision.txn == writer.txn
        self.told(writer.txn, decision.kind)

    @precondition(has_living)
    @rule(number=st.integers(0, 9))
    def kill(self, number: int) -> None:
        self.living(number).alive = False  # what it has sent may still land

    @precondition(lambda self: self.writers)
    @rule(number=st.integers(0, 9), force=st.booleans())
    def resolve(self, number: int, force: bool) -> None:
        writer = self.writers[number % len(self.writers)]
        try:
            decision = resolve(self.store(), writer.attempt.ticket.checkpoint, writer.txn, force=force)
        except LOST:
            return
        if decision is not None:
            self.told(writer.txn, decision.kind)
        else:
            assert self.answers.get(writer.txn, "never") == "never"

    def told(self, txn: str, answer: str) -> None:
        """Somebody relies on it: a later answer must not differ. ``never`` is that it did not commit."""
        before = self.answers.get(txn)
        if before == "never" and answer == "abort":
            before = None
        assert before in {None, answer} or {before, answer} == {"abort", "never"}, f"{txn}: {before}, then {answer}"
        self.answers[txn] = answer

    # retention, sweeps, readers

    @rule(number=st.integers(0, 9))
    def retire(self, number: int) -> None:
        commits = [decision for decision in self.decisions() if decision.kind == "commit"]
        try:
            retire(self.store(), commits[number % len(commits)])
        except (*LOST, ConfigError):
            pass

    @rule(grace=st.booleans(), later=st.booleans())
    def sweep(self, grace: bool, later: bool) -> None:
        clock = partial(float, time.time() + (2 * GRACE_S if later else 0))
        undecided = self.undecided()
        try:
            sweep(self.store(), grace_s=GRACE_S if grace else 0, force=True, dry_run=False, clock=clock)
        except LOST:
            return
        if grace and not later:
            assert self.undecided() == undecided, "younger than the grace"

    @rule()
    def read_newest(self) -> None:
        truth = catalog.newest(self.world.direct)
        try:
            found = catalog.newest(self.store())
            values = load(self.store(), found)
        except CheckpointNotFound:
            raise AssertionError("there is one: that it cannot be read is another error") from None
        except StoreError:
            return
        assert found == truth
        assert values == self.values[found.txn]

    # what must hold

    @invariant()
    def the_promises_hold(self) -> None:
        self.a_committed_checkpoint_reads_back_bit_for_bit()
        self.what_was_answered_stays_true()
        self.one_wins()
        self.the_newest_never_goes_back()

    def decisions(self) -> list[Decision]:
        """The records, by checkpoint and slot."""
        found = []
        for info in self.world.direct.list(COMMITS_PREFIX):
            name = parse_decision_key(info.key)
            assert name is not None, info.key
            data = self.world.direct.read(info.key)
            assert self.records.setdefault(info.key, data) == data, f"{info.key} was replaced"
            found.append(decode_decision(data, info.key, checkpoint=name.checkpoint, slot=name.slot))
        assert {key for key in self.records if key.startswith(COMMITS_PREFIX)} == {
            info.key for info in self.world.direct.list(COMMITS_PREFIX)
        }, "a decision was deleted"
        return sorted(found, key=lambda one: (one.checkpoint, one.slot))

    def tombstones(self) -> set[tuple[str, int]]:
        names = [parse_retired_key(info.key) for info in self.world.direct.list(RETIRED_PREFIX)]
        return {(name.checkpoint, name.slot) for name in names if name is not None}

    def standing(self) -> list[Decision]:
        gone = self.tombstones()
        return [one for one in self.decisions() if one.kind == "commit" and (one.checkpoint, one.slot) not in gone]

    def attempts(self) -> set[str]:
        keys = [parse_attempt(info.key) for info in self.world.direct.list(DATA_PREFIX)]
        return {attempt[1] for attempt in keys if attempt is not None}

    def undecided(self) -> set[str]:
        return self.attempts() - {decision.txn for decision in self.decisions()}

    def a_committed_checkpoint_reads_back_bit_for_bit(self) -> None:
        for decision in self.standing():
            assert load(self.world.direct, decision) == self.values[decision.txn], decision

    def what_was_answered_stays_true(self) -> None:
        found: dict[str, str] = {}
        for decision in self.decisions():
            assert (decision.txn, decision.kind) not in found.items(), f"{decision.txn} was decided twice"
            found.setdefault(decision.txn, decision.kind)
        for txn, answer in self.answers.items():
            if answer == "never":
                assert found.get(txn) != "commit", f"{txn} was reported as failed, and is committed"
            else:
                assert found.get(txn) == answer, f"{txn}: {answer}, and now {found.get(txn)}"

    def one_wins(self) -> None:
        gone = self.tombstones()
        writers = {writer.txn: writer for writer in self.writers}
        below: dict[str, list[Decision]] = {}
        for decision in self.decisions():
            if decision.kind != "commit":
                continue
            for other in below.setdefault(decision.checkpoint, []):
                writer = writers[decision.txn]
                seen = writer.overwrite and other.txn in writer.stood
                assert seen or (other.checkpoint, other.slot) in gone, f"{decision.txn} passed {other.txn}"
            below[decision.checkpoint].append(decision)

    def the_newest_never_goes_back(self) -> None:
        found = catalog.newest(self.world.direct)
        assert (found.step or 0, found.slot) >= self.newest
        self.newest = (found.step or 0, found.slot)

    def teardown(self) -> None:
        """Whatever happened: everything can be settled, and the dead are reclaimed."""
        try:
            if self.records:  # it began
                self.settle()
        finally:
            self.world.close()

    def settle(self) -> None:
        self.world.heal()
        self.world.release()
        for writer in self.writers:
            decision = resolve(self.store(), writer.attempt.ticket.checkpoint, writer.txn, force=True)
            assert decision is not None
            self.told(writer.txn, decision.kind)
        sweep(self.store(), grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
        assert self.attempts() == {decision.txn for decision in self.standing()}
        self.the_promises_hold()


def run(world: Callable[[], World], *, examples: int, steps: int, replay: str, seed: int | None = None) -> None:
    """Run histories in fresh worlds. A failure is printed with its seed and with the command that replays it.

    Args:
        world: Makes an empty world.
        examples: How many histories.
        steps: Most rules of one.
        replay: What pytest is told to run this test alone.
        seed: The histories; else those of the environment variable, else new ones each time.
    """
    if seed is None:
        seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbelow(1 << 32))
    print(f"replay with: {SEED_VARIABLE}={seed} make test ARGS='{replay}'")
    machine = hypothesis.seed(seed)(type("Seeded", (Protocol,), {"make_world": staticmethod(world)}))
    # Hypothesis draws one number in twenty from the source of the project's modules that are loaded: a seed would mean
    # one history in a test run alone and another in a run of all.
    with patch.object(HypothesisProvider, "_maybe_draw_constant", lambda *_args, **_kwargs: None):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,  # an old failure must not change what a seed means
                phases=(Phase.generate,),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
