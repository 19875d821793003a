"""Lost, delayed and falsified replies in front of a real server, as tests: subclass `LostReplies` for a backend.

::

    class TestMyStore(LostReplies):
        wire = MyWire()

        @pytest.fixture
        def upstream(self): ...   # the server's URL

        @pytest.fixture
        def opener(self): ...     # function: endpoint URL, read timeout in seconds -> store of one place, empty

The proxy stands between the store under test (`remote`) and the server; `direct` sees the truth behind it. A stalled
reply costs the read timeout, so that of `remote` is short. The numbers at the sections are those of the fault scenarios
in the survey behind the protocol.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from txstore.catalog import find, newest
from txstore.errors import (
    Aborted,
    CheckpointNotFound,
    CommitUnknown,
    Conflict,
    IntegrityError,
    OutcomeUnknownError,
    StoreError,
    TxStoreError,
)
from txstore.manifest import Decision
from txstore.retry import RetryingStore, RetryPolicy
from txstore.slot_walk import claim_abort, resolve
from txstore.store import BytesSource, Store
from txstore.sweep import sweep
from txstore.testing.proxy import Answer, Loss, LostReplyProxy, Rule
from txstore.testing.saves import AT_ONCE, index_of, load, save
from txstore.transaction import begin, write_shard

VALUES = [b"rank 0", b"rank 1"]
KEY = "commits/step-1.0.json"
LOSSES: tuple[Loss, ...] = ("reset", "close", "stall", "truncate", "truncate-stall", "garble")
"""Every way to lose a reply that leaves its receiver without a status."""


Opener = Callable[[str, float], Store]


class Wire(ABC):
    """How a backend's verbs look on the wire.

    Attributes:
        throttled: The server asks to slow down.
        denied: The server refuses the caller.
        undecided: A "conflict" that decides nothing (S3: 409 ConditionalRequestConflict), or None if there is none.
        refused: Statuses with which the server refuses a create because the object exists.
    """

    throttled: Answer = Answer(503)
    denied: Answer = Answer(403)
    undecided: Answer | None = None
    refused: frozenset[int] = frozenset({412})

    @abstractmethod
    def create(self, key: str, **what: Any) -> Rule:
        """A rule for the exclusive creation of a key (a regular expression)."""

    @abstractmethod
    def read(self, key: str, **what: Any) -> Rule:
        """A rule for reads of a key."""


def patient(store: Store, attempts: int = 4, **collaborators: Any) -> RetryingStore:
    """Retries without waiting."""
    policy = RetryPolicy(attempts=attempts, deadline_s=1e9, first_wait_s=0, longest_wait_s=0)
    return RetryingStore(store, policy, **{"sleep": lambda _s: None, "clock": lambda: 0.0, **collaborators})


class LostReplies:
    """The scenarios. Each test's name is a sentence."""

    wire: Wire
    read_timeout_s = 0.5
    """Read timeout of `remote`."""

    rounds = 3
    """Rounds of the race of writers."""

    @pytest.fixture
    def upstream(self) -> str:
        """URL of the real server."""
        raise NotImplementedError

    @pytest.fixture
    def opener(self) -> Opener:
        """Opens one place, empty for each test, by way of an endpoint URL, with a read timeout in seconds."""
        raise NotImplementedError

    @pytest.fixture
    def proxy(self, upstream: str) -> Iterator[LostReplyProxy]:
        """Between `remote` and the server."""
        with LostReplyProxy(upstream) as proxy:
            yield proxy

    @pytest.fixture
    def direct(self, opener: Opener, upstream: str) -> Iterator[Store]:
        """The truth."""
        with opener(upstream, 60.0) as store:
            yield store

    @pytest.fixture
    def remote(self, opener: Opener, proxy: LostReplyProxy) -> Iterator[Store]:
        """The store under test, behind the proxy."""
        with opener(proxy.url, self.read_timeout_s) as store:
            yield store

    # 1-6: the reply to a decision is lost

    def check_won(self, direct: Store, decision: Decision) -> None:
        """The commit stands, once, and is whole."""
        assert decision.kind == "commit"
        assert newest(direct) == decision
        assert [info.key for info in direct.list("commits/")] == [KEY]
        assert load(direct, decision) == VALUES

    @pytest.mark.parametrize("reply", [*LOSSES, "garble-body", Answer(500), Answer(503), Answer(502, b"<html>proxy")])
    def test_a_commit_whose_reply_is_lost_is_won(
        self, remote: Store, direct: Store, proxy: LostReplyProxy, reply: Loss | Answer
    ) -> None:
        proxy.add(self.wire.create(KEY, reply=reply))
        self.check_won(direct, save(patient(remote), "step-1", VALUES))
        # The retry was told "exists" by our own record; an intact status line may pass for a reply.
        assert self._creates(proxy) in ({1, 2} if reply in {"garble-body", "truncate"} else {2})

    @pytest.mark.parametrize("reply", ["reset", Answer(500)])
    def test_a_commit_whose_every_reply_is_lost_is_won_by_reading(
        self, remote: Store, direct: Store, proxy: LostReplyProxy, reply: Loss | Answer
    ) -> None:
        proxy.add(self.wire.create(KEY, reply=reply, times=None))
        self.check_won(direct, save(patient(remote, attempts=3), "step-1", VALUES))
        assert self._creates(proxy) == 3

    # 7, 9: and then nothing can be read either

    def _unknown(self, remote: Store, attempts: int = 2) -> CommitUnknown:
        with pytest.raises(CommitUnknown) as caught:
            save(patient(remote, attempts), "step-1", VALUES)
        return caught.value

    @pytest.mark.parametrize("later", [Answer(500), "reset", None], ids=["500", "reset", "denied"])
    def test_a_commit_that_cannot_be_read_back_is_unknown_and_resolves_to_commit(
        self, remote: Store, direct: Store, proxy: LostReplyProxy, later: Loss | Answer | None
    ) -> None:
        answer = later or self.wire.denied
        fail = [self.wire.read(KEY, reply=answer, forward="never", times=None)]
        if later is None:  # credentials that ran out: every later request is refused
            fail.append(self.wire.create(KEY, reply=answer, forward="never", times=None))
        proxy.add(self.wire.create(KEY, reply="reset", call=lambda: proxy.add(*fail)))
        txn = self._unknown(remote).txn
        assert {info.key.rpartition("/")[2] for info in direct.list("data/")} >= {"index.msgpack", "manifest.json"}
        proxy.clear()
        for _ in range(2):
            answer_later = resolve(patient(remote), "step-1", txn, force=True)
            assert answer_later is not None
            self.check_won(direct, answer_later)

    # 8, 16, 18, 37: nothing is applied

    def test_failures_that_were_not_applied_are_repeated_until_one_is(
        self, remote: Store, direct: Store, proxy: LostReplyProxy
    ) -> None:
        proxy.add(self.wire.create(KEY, reply=Answer(500), forward="never", times=3))
        store = patient(remote)
        self.check_won(direct, save(store, "step-1", VALUES))
        assert self._creates(proxy) == 4
        assert sum(store.retries.values()) == 3
        assert any("500" in cause for cause in store.retries), store.retries

    def test_one_attempt_is_one_request(self, remote: Store, proxy: LostReplyProxy) -> None:
        for reply in (Answer(500), Answer(503), Answer(429), "reset", "stall"):
            proxy.clear()
            proxy.add(self.wire.create(KEY, reply=reply, forward="never", times=None))
            with pytest.raises(StoreError):
                remote.create(KEY, b"x")
            assert self._creates(proxy) == 1, reply

    def test_a_throttled_commit_is_never_a_conflict(self, remote: Store, direct: Store, proxy: LostReplyProxy) -> None:
        proxy.add(self.wire.create(KEY, reply=self.wire.throttled, forward="never", times=None))
        error = self._unknown(remote, attempts=3)
        assert not isinstance(error, Conflict)
        proxy.clear()
        decided = resolve(patient(remote), "step-1", error.txn, force=True)
        assert decided is not None
        assert decided.kind == "abort"
        with pytest.raises(CheckpointNotFound):
            newest(direct)

    def test_the_deadline_bounds_a_stalled_create(self, remote: Store, proxy: LostReplyProxy) -> None:
        proxy.add(Rule(reply="stall", forward="never", times=None))
        policy = RetryPolicy(attempts=99, deadline_s=1.0, first_wait_s=0.01, longest_wait_s=0.1)
        store = RetryingStore(remote, policy)
        began = time.monotonic()
        with pytest.raises(OutcomeUnknownError):
            store.create(KEY, b"x")
        # One attempt may begin just before the deadline, and the read-back has a deadline of its own.
        assert time.monotonic() - began < 2 * (1.0 + self.read_timeout_s) + 2.0

    # 10, 11: the request itself is late

    def test_a_late_decision_loses_against_an_abort(self, remote: Store, direct: Store, proxy: LostReplyProxy) -> None:
        proxy.add(
            self.wire.create(KEY, reply="reset", forward="later"),
            self.wire.create(KEY, reply="reset", forward="never", times=None),
        )
        txn = self._unknown(remote).txn
        assert claim_abort(direct, "step-1", txn).kind == "abort"
        (status,) = proxy.release()
        assert status in self.wire.refused
        proxy.clear()
        decided = resolve(patient(remote), "step-1", txn)
        assert decided is not None
        assert decided.kind == "abort"
        after = save(patient(remote), "step-1", VALUES)
        assert after.slot == 1
        assert load(direct, after) == VALUES

    def test_a_late_decision_that_lands_before_the_retry_is_won(
        self, remote: Store, direct: Store, proxy: LostReplyProxy
    ) -> None:
        proxy.add(self.wire.create(KEY, reply="reset", forward="later"))
        released: list[int] = []
        store = patient(remote, sleep=lambda _s: released.extend(proxy.release()))
        self.check_won(direct, save(store, "step-1", VALUES))
        assert [status // 100 for status in released] == [2]

    # 12, 13: others

    def test_of_many_writers_one_commits_and_the_others_learn_its_name(self, direct: Store) -> None:
        writers = 8
        barrier = Barrier(writers)

        def write(number: int, checkpoint: str) -> Decision | TxStoreError:
            attempt = begin(direct, checkpoint, world_size=1, writer=f"writer {number}")
            shard = write_shard(direct, attempt.ticket, 0, 0, BytesSource(b"%d" % number))
            barrier.wait()
            try:
                return attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
            except TxStoreError as error:
                return error

        with ThreadPoolExecutor(writers) as pool:
            for round_ in range(self.rounds):
                name = f"step-{round_}"
                ends = list(pool.map(write, range(writers), [name] * writers))
                (won,) = (end for end in ends if isinstance(end, Decision))
                assert {getattr(end, "winner", end) for end in ends if end is not won} == {won.txn}
                assert find(direct, name) == won

    # 14: a conflict that decides nothing

    def test_an_undecided_conflict_is_asked_again(self, remote: Store, direct: Store, proxy: LostReplyProxy) -> None:
        if self.wire.undecided is None:
            return
        proxy.add(self.wire.create(KEY, reply=self.wire.undecided, forward="never"))
        self.check_won(direct, save(patient(remote), "step-1", VALUES))

    def test_an_undecided_conflict_with_another_record_there_is_a_conflict(
        self, remote: Store, direct: Store, proxy: LostReplyProxy
    ) -> None:
        if self.wire.undecided is None:
            return
        others: list[Decision] = []
        one_at_a_time = threading.Lock()  # on a busy machine the client's next attempt comes before the save has ended

        def overtake() -> None:
            with one_at_a_time:
                if not others:
                    others.append(save(direct, "step-1", VALUES))

        proxy.add(self.wire.create(KEY, reply=self.wire.undecided, forward="never", times=None, call=overtake))
        with pytest.raises(Conflict) as caught:
            save(patient(remote, attempts=10), "step-1", [b"mine"])
        assert caught.value.winner == others[0].txn

    # 19, 20: behind our back, and interrupted

    def test_a_deleted_decision_below_another_is_noticed(self, direct: Store) -> None:
        save(direct, "step-1", VALUES)
        save(direct, "step-1", VALUES, overwrite=True)
        direct.delete(KEY)
        with pytest.raises(IntegrityError):
            find(direct, "step-1")
        with pytest.raises(IntegrityError):
            save(direct, "step-1", VALUES, overwrite=True)

    def test_a_deleted_only_decision_is_a_lost_checkpoint(self, direct: Store) -> None:
        # Only the hint tells it from one that never was: this is why docs ask for a policy that forbids the delete.
        save(direct, "step-1", VALUES)
        direct.delete(KEY)
        with pytest.raises(IntegrityError, match=r"the record of step-1\.0 was lost"):
            newest(direct)
        assert save(direct, "step-1", VALUES).slot == 0

    def test_an_interrupted_claim_deletes_nothing_and_can_be_resolved(
        self, remote: Store, direct: Store, proxy: LostReplyProxy
    ) -> None:
        def interrupt(_seconds: float) -> None:
            raise KeyboardInterrupt

        proxy.add(self.wire.create(KEY, reply="reset"))
        with pytest.raises(KeyboardInterrupt):
            save(patient(remote, sleep=interrupt), "step-1", VALUES)
        self.check_won(direct, newest(direct))
        assert save(patient(remote), "step-2", VALUES).kind == "commit"

    # 21: a sweep and a stalled writer

    def test_a_stalled_writer_is_aborted_by_a_sweep_and_the_next_takes_the_next_slot(
        self, remote: Store, direct: Store
    ) -> None:
        stalled = begin(remote, "step-1", world_size=1)
        shard = write_shard(remote, stalled.ticket, 0, 0, BytesSource(b"late"))
        sweep(direct, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
        with pytest.raises(Aborted):
            stalled.commit([shard], index_of([shard]), visibility=AT_ONCE)
        assert list(direct.list("data/")) == []
        assert save(remote, "step-1", VALUES).slot == 1

    # 22, 38: any request, lost in any way

    def test_any_one_lost_reply_of_a_save_is_survived(
        self, remote: Store, direct: Store, proxy: LostReplyProxy
    ) -> None:
        ways: list[Loss | Answer] = ["reset", Answer(503), "truncate", "garble", Answer(500, b"<html>"), "close"]
        store = patient(remote)
        save(store, "step-0", VALUES)  # the probe is made once, and is no part of what follows
        at = 0
        while proxy.count() >= at:
            proxy.clear()
            proxy.add(Rule(reply=ways[at % len(ways)], skip=at))
            at += 1
            decision = save(store, f"step-{at}", VALUES)
            assert decision.kind == "commit"
            assert newest(direct) == decision
            assert load(direct, decision) == VALUES
        assert at > 10, "a save has more requests than this"
        assert sweep(direct, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12) == []
        assert len(list(direct.list("commits/"))) == at + 1

    def _creates(self, proxy: LostReplyProxy) -> int:
        rule = self.wire.create(KEY)
        return proxy.count(rule.method, rule.target, rule.header, rule.body)
