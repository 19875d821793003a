"""The retry layer against a scripted store: what is repeated, what is read back, and when it gives up.

The numbers in brackets are those of the protocol's fault scenarios.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from txstore.catalog import find
from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    CommitUnknown,
    ConfigError,
    Conflict,
    NotFoundError,
    OutcomeUnknownError,
    PlanMismatch,
    StoreError,
    StoreFullError,
    TransientError,
    UnusableStoreError,
)
from txstore.keys import decision_key
from txstore.memory import MemoryStore
from txstore.retry import RetryingStore, RetryPolicy
from txstore.slot_walk import resolve
from txstore.store import BytesSource, ChecksummedSource
from txstore.testing.saves import AT_ONCE, contents, index_of, load, save
from txstore.transaction import begin, write_shard

KEY, MINE, OTHER = "commits/step-1.0.json", b"mine", b"other"


class Clock:
    """Time that passes only when somebody sleeps, or when a request takes long."""

    def __init__(self):
        self.now_s = 0.0
        self.slept = []

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now_s += seconds


class ScriptedStore(MemoryStore):
    """Follows a script for one verb: each attempt takes the next step, and the true effect when it is over.

    A step is an exception class: raised without effect; or a pair ``(effect, exception)`` with effect ``apply`` (of the
    request), ``other`` (another client's object lands first) or ``delete`` (the object vanishes); or a callable.
    """

    def __init__(self, clock=None, took_s=0.0):
        super().__init__()
        self.scripts = {}
        self.seen = []
        self._clock = clock
        self._took_s = took_s

    def script(self, verb, *steps):
        self.scripts[verb] = list(steps)
        return self

    def _play(self, verb, key, act):
        self.seen.append((verb, key))
        if self._clock is not None:
            self._clock.now_s += self._took_s
        steps = self.scripts.get(verb)
        if not steps:
            return act()
        step = steps.pop(0)
        if isinstance(step, type):
            raise step("scripted", key=key)
        if callable(step):
            return step()
        effect, error = step
        if effect == "apply":
            act()
        elif effect == "other":
            MemoryStore.put(self, key, BytesSource(OTHER))
        elif effect == "delete":
            MemoryStore.delete(self, key)
        if error is not None:
            raise error("scripted", key=key)
        return None

    def create(self, key, data):
        return self._play("create", key, lambda: MemoryStore.create(self, key, data))

    def put(self, key, source):
        return self._play("put", key, lambda: MemoryStore.put(self, key, source))

    def read(self, key, start=0, size=None):
        return self._play("read", key, lambda: MemoryStore.read(self, key, start, size))

    def delete(self, key):
        return self._play("delete", key, lambda: MemoryStore.delete(self, key))

    def count(self, verb):
        return sum(seen == verb for seen, _ in self.seen)


def retrying(store, clock=None, **policy):
    clock = clock or Clock()
    options = {"attempts": 4, "deadline_s": 1000.0, "first_wait_s": 1.0, "longest_wait_s": 8.0, **policy}
    return RetryingStore(store, RetryPolicy(**options), sleep=clock.sleep, clock=clock)


LOST = ("apply", OutcomeUnknownError)
UNKNOWN, DOWN, DENIED, EXISTS = OutcomeUnknownError, TransientError, AccessDeniedError, AlreadyExistsError


@pytest.mark.parametrize(
    "script",
    [
        [],
        [LOST],  # [1-5] applied; 500, proxy 503, reset, timeout, garbled reply
        [LOST] * 4,  # [6] every reply lost until the budget ends
        [DOWN, DOWN, DOWN],  # [8]
        [UNKNOWN, UNKNOWN],  # never applied, never said so
        [UNKNOWN, ("apply", OutcomeUnknownError)],
        [UNKNOWN, ("apply", AlreadyExistsError)],  # [11] the first request lands just before the second
        [EXISTS, EXISTS],  # [14] "exists", and nothing is there: 409 until the other request is over
        [LOST, DENIED],  # [9] a refusal after an unclear answer: the record is read back
        [LOST, StoreFullError],
        [LOST, CapabilityError],
        [LOST, ConfigError],  # the disk was unmounted, the bucket removed
    ],
)
def test_create_says_won_exactly_when_the_record_is_ours(script):
    store = ScriptedStore().script("create", *script)
    retrying(store).create(KEY, MINE)
    assert MemoryStore.read(store, KEY) == MINE


@pytest.mark.parametrize(
    "script",
    [
        [("other", AlreadyExistsError)],
        [UNKNOWN, ("other", AlreadyExistsError)],
        [("other", OutcomeUnknownError)],
        [("other", OutcomeUnknownError)] * 4,
        [("other", TransientError), EXISTS],
        [EXISTS, ("other", AlreadyExistsError)],
        [UNKNOWN, ("other", AccessDeniedError)],
        [DOWN] * 3 + [("other", OutcomeUnknownError)],
    ],
)
def test_create_says_exists_exactly_when_the_record_is_anothers(script):
    store = ScriptedStore().script("create", *script)
    with pytest.raises(AlreadyExistsError) as caught:
        retrying(store).create(KEY, MINE)
    assert caught.value.key == KEY
    assert MemoryStore.read(store, KEY) == OTHER


@pytest.mark.parametrize("prefix", [MINE[:-1], MINE + b"!", b""])
def test_a_record_that_begins_like_ours_is_anothers(prefix):
    store = ScriptedStore()
    MemoryStore.put(store, KEY, BytesSource(prefix))
    with pytest.raises(AlreadyExistsError):
        retrying(store).create(KEY, MINE)


@pytest.mark.parametrize(
    "script",
    [
        [UNKNOWN] * 4,
        [UNKNOWN, DENIED],  # [9] a definite refusal does not undo what was unclear
        [UNKNOWN, DOWN, DOWN, DOWN],
        [EXISTS] * 4,  # [14] 409 until the budget ends
        [EXISTS, DENIED],
        [UNKNOWN, StoreFullError],
        [UNKNOWN, ConfigError],
    ],
)
def test_create_says_unknown_when_it_may_still_land(script):
    store = ScriptedStore().script("create", *script)
    with pytest.raises(OutcomeUnknownError) as caught:
        retrying(store).create(KEY, MINE)
    assert caught.value.key == KEY
    with pytest.raises(NotFoundError):
        MemoryStore.read(store, KEY)


@pytest.mark.parametrize("error", [AccessDeniedError, StoreFullError, CapabilityError, ConfigError])
@pytest.mark.parametrize("before", [[], [DOWN], [DOWN, DOWN]], ids=len)
def test_a_definite_refusal_stands_if_nothing_was_unclear(error, before):
    store = ScriptedStore().script("create", *before, error)
    with pytest.raises(error):
        retrying(store).create(KEY, MINE)
    assert store.count("create") == len(before) + 1, "a refusal is not repeated"


def test_create_that_could_not_be_sent_is_transient():
    store = ScriptedStore().script("create", *[DOWN] * 4)
    with pytest.raises(TransientError):
        retrying(store).create(KEY, MINE)
    assert store.count("create") == 4
    assert store.count("read") == 0


@pytest.mark.parametrize(
    "create", [[LOST] * 9, [("other", OutcomeUnknownError)] * 9, [EXISTS] * 9], ids=["ours", "other", "none"]
)
@pytest.mark.parametrize("error", [TransientError, OutcomeUnknownError, AccessDeniedError, ConfigError])
def test_create_that_cannot_be_read_back_is_unknown(create, error):
    store = ScriptedStore().script("create", *create).script("read", *[error] * 99)
    with pytest.raises(OutcomeUnknownError, match="read back") as caught:
        retrying(store).create(KEY, MINE)
    assert caught.value.__cause__ is not None
    assert store.count("create") <= 4
    assert store.count("read") <= 5 * 4, "bounded: four attempts and the last look, four reads each"


def test_a_failed_read_back_is_remembered_as_unclear():
    # "Exists" may be our own record, sent by a layer below that retries: a later refusal must not settle it.
    store = ScriptedStore().script("create", ("apply", AlreadyExistsError), DENIED).script("read", *[DOWN] * 4)
    retrying(store).create(KEY, MINE)
    assert MemoryStore.read(store, KEY) == MINE

    store = ScriptedStore().script("create", EXISTS, DENIED).script("read", *[DOWN] * 4)
    with pytest.raises(OutcomeUnknownError):
        retrying(store).create(KEY, MINE)


# Budgets


def test_waits_are_random_bounded_and_doubled():
    clock = Clock()
    store = ScriptedStore().script("read", *[DOWN] * 7)
    MemoryStore.put(store, KEY, BytesSource(MINE))
    assert retrying(store, clock, attempts=8).read(KEY) == MINE
    assert len(clock.slept) == 7
    assert all(0 <= waited <= min(8, 2**number) for number, waited in enumerate(clock.slept))
    assert len(set(clock.slept)) > 1, "no jitter"


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_no_more_attempts_than_allowed(attempts):
    store = ScriptedStore().script("delete", *[UNKNOWN] * 99)
    with pytest.raises(OutcomeUnknownError):
        retrying(store, attempts=attempts).delete(KEY)
    assert store.count("delete") == attempts


def test_no_attempt_begins_after_the_deadline():
    clock = Clock()
    begun = []
    store = ScriptedStore(clock, took_s=3.0)
    store.script("delete", *[lambda: begun.append(clock.now_s - 3.0) or store._refuse()] * 99)
    store._refuse = lambda: (_ for _ in ()).throw(TransientError("down"))
    with pytest.raises(TransientError):
        retrying(store, clock, attempts=99, deadline_s=20.0).delete(KEY)
    assert len(begun) > 2
    assert max(begun) < 20.0
    assert clock.now_s < 20.0 + 3.0 + 8.0


def test_a_long_listing_keeps_its_budget():
    """The budget is one of each step: a listing of many pages may take longer than the deadline of one request."""
    clock = Clock()

    class Paged(MemoryStore):
        failures = 0

        def list(self, prefix, start_after=""):
            for number, info in enumerate(super().list(prefix, start_after)):
                clock.now_s += 1.0
                if number == 3:
                    self.failures += 1
                    raise TransientError("page lost")
                yield info

    store = Paged()
    for number in range(100):
        store.put(f"data/{number:03}", BytesSource(b""))
    found = [info.key for info in retrying(store, clock, deadline_s=10.0).list("data/")]
    assert found == [f"data/{number:03}" for number in range(100)], "no key twice, none left out"
    assert store.failures > 20
    assert clock.now_s > 100


def test_a_listing_that_stays_broken_ends():
    class Broken(MemoryStore):
        calls = 0

        def list(self, prefix, start_after=""):
            self.calls += 1
            raise TransientError("down")
            yield

    store = Broken()
    with pytest.raises(TransientError):
        list(retrying(store).list("data/"))
    assert store.calls == 4


def test_a_listing_resumes_after_the_last_key_and_before_its_bound():
    asked = []

    class OneAtATime(MemoryStore):
        def list(self, prefix, start_after=""):
            asked.append(start_after)
            for info in super().list(prefix, start_after):
                yield info
                raise OutcomeUnknownError("page lost")

    store = OneAtATime()
    for name in "abcd":
        store.put(f"data/{name}", BytesSource(b""))
    assert [info.key for info in retrying(store).list("data/", "data/a")] == ["data/b", "data/c", "data/d"]
    assert asked == ["data/a", "data/b", "data/c", "data/d"]


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"deadline_s": -1}, {"first_wait_s": -0.1}, {"longest_wait_s": -1}]
)
def test_a_policy_that_is_none_is_refused(options):
    with pytest.raises(ConfigError):
        replace(RetryPolicy(), **options)


def test_other_errors_surface_at_once():
    for verb, call in (
        ("put", lambda store: store.put(KEY, BytesSource(b""))),
        ("read", lambda store: store.read(KEY)),
        ("delete", lambda store: store.delete(KEY)),
    ):
        for error in (AccessDeniedError, StoreFullError, CapabilityError, NotFoundError, StoreError):
            store = ScriptedStore().script(verb, error)
            with pytest.raises(error):
                call(retrying(store))
            assert store.count(verb) == 1


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("put", lambda store: store.put(KEY, BytesSource(b""))),
        ("create", lambda store: store.create(KEY, MINE)),
        ("read", lambda store: store.read(KEY)),
        ("read_into", lambda store: store.read_into(KEY, 0, memoryview(bytearray(1)))),
        ("head", lambda store: store.head(KEY)),
        ("list", lambda store: list(store.list(""))),
        ("delete", lambda store: store.delete(KEY)),
    ],
)
@pytest.mark.parametrize("before", [[], [DOWN]], ids=len)
@pytest.mark.parametrize("hint", ["", "make the bucket"])
def test_a_store_that_leads_nowhere_answers_so(verb, call, before, hint):
    """For whoever goes on without storage by `except StoreError`: a bucket may vanish in the middle of a run."""
    steps = [*before, ConfigError]
    store = MemoryStore()

    def answer(*_args):
        step = steps.pop(0)
        raise step("no such bucket", key=KEY, next_step=hint)

    setattr(store, verb, answer)
    with pytest.raises(UnusableStoreError, match="no such bucket") as caught:
        call(retrying(store))
    assert isinstance(caught.value, ConfigError)
    assert caught.value.key == KEY
    assert caught.value.next_step == hint or (not hint and "check path, bucket" in caught.value.next_step)
    assert steps == [], "and it is not asked again"


def test_a_put_is_repeated_from_its_start_and_notices_other_bytes():
    data = bytearray(b"before")
    source = ChecksummedSource(BytesSource(data), "shard")
    store = ScriptedStore().script("put", LOST, DOWN)
    retrying(store).put("data/x", source)
    assert store.count("put") == 3

    def train():
        data[:] = b"after!"
        raise OutcomeUnknownError("reset")

    store.script("put", train)
    source = ChecksummedSource(BytesSource(data), "shard")
    source.read(0, 6)
    with pytest.raises(PlanMismatch):
        retrying(store).put("data/y", source)


# A whole save


def test_a_lost_reply_is_a_commit():
    store = ScriptedStore()
    save(store, "step-0", [b"x"])
    store.script("create", LOST)
    decision = save(retrying(store), "step-1", [b"one"])
    assert load(store, find(store, "step-1")) == [b"one"]
    assert find(store, "step-1") == decision


def test_unknown_is_resolved_later_to_one_answer():
    """[7] Every reply is lost and the reads fail too; a later process settles it."""
    store = ScriptedStore()
    save(store, "step-0", [b"x"])
    attempt = begin(retrying(store), "step-1", world_size=1)
    shard = write_shard(store, attempt.ticket, 0, 0, BytesSource(b"one"))
    store.script("create", *[LOST] * 4)
    # The slot walk's look at the slot works, everything after it is down.
    looked = [lambda: MemoryStore.read(store, decision_key("step-1", 0))]
    store.script("read", *looked, *[DOWN] * 99)
    before = contents_of(store)
    with pytest.raises(CommitUnknown) as caught:
        attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
    assert before.keys() <= contents_of(store).keys(), "something was deleted"
    store.scripts.clear()
    answers = {resolve(store, "step-1", caught.value.txn, force=True).kind for _ in range(3)}
    assert answers == {"commit"}


def contents_of(store):
    scripts, store.scripts = store.scripts, {}
    try:
        return contents(store)
    finally:
        store.scripts = scripts


def test_a_refusal_after_an_unclear_attempt_is_unknown_and_deletes_nothing():
    """[9]"""
    store = ScriptedStore()
    save(store, "step-0", [b"x"])
    attempt = begin(retrying(store), "step-1", world_size=1)
    shard = write_shard(store, attempt.ticket, 0, 0, BytesSource(b"one"))
    store.script("create", UNKNOWN, DENIED)
    with pytest.raises(CommitUnknown):
        attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
    assert store.count("delete") == 0
    assert resolve(store, "step-1", attempt.ticket.txn) is None
    assert resolve(store, "step-1", attempt.ticket.txn, force=True).kind == "abort"


def test_another_writer_is_a_conflict_even_through_409s():
    """[12, 14]"""
    store = ScriptedStore()
    save(store, "step-0", [b"x"])
    attempt = begin(retrying(store), "step-1", world_size=1)
    shard = write_shard(store, attempt.ticket, 0, 0, BytesSource(b"one"))

    def another_commits():
        store.scripts.clear()
        another_commits.txn = save(store, "step-1", [b"other"]).txn
        raise AlreadyExistsError("409")

    store.script("create", EXISTS, another_commits)
    with pytest.raises(Conflict) as caught:
        attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
    assert caught.value.winner == another_commits.txn
    assert load(store, find(store, "step-1")) == [b"other"]


def test_one_attempt_is_one_request():
    """[18] The store sees exactly one request for each of our attempts."""
    store = ScriptedStore().script("create", DOWN, UNKNOWN)
    retrying(store).create(KEY, MINE)
    assert store.count("create") == 3


def test_throttling_never_becomes_a_conflict():
    """[16]"""
    store = ScriptedStore()
    save(store, "step-0", [b"x"])
    store.script("create", *[DOWN] * 3)
    assert save(retrying(store), "step-1", [b"one"]).slot == 0


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("landed", [False, True])
def test_an_interrupt_inside_create_deletes_nothing_and_can_be_resolved(interrupt, landed):
    """[20]"""
    store = ScriptedStore()
    save(store, "step-0", [b"x"])
    attempt = begin(retrying(store), "step-1", world_size=1)
    shard = write_shard(store, attempt.ticket, 0, 0, BytesSource(b"one"))
    store.script("create", ("apply" if landed else "nothing", interrupt_class(interrupt)))
    with pytest.raises(interrupt):
        attempt.commit([shard], index_of([shard]), visibility=AT_ONCE)
    assert store.count("delete") == 0
    assert attempt.abort().kind == ("commit" if landed else "abort")
    assert save(retrying(store), "step-2", [b"two"]).kind == "commit", "the process goes on"


def interrupt_class(kind):
    return lambda *_, **__: kind()


def test_repetitions_inside_the_backend_are_counted_with_those_of_whole_verbs():
    class Counting(MemoryStore):
        failed = False

        @property
        def retries(self):
            return {"503 SlowDown": 2, "timeout": 1}  # parts of an upload

        def put(self, key, source):
            if not self.failed:
                self.failed = True
                raise TransientError("slow down", key=key).because("503 SlowDown")
            return super().put(key, source)

    store = RetryingStore(Counting(), sleep=lambda _s: None)
    store.put("x", BytesSource(b"x"))
    assert store.retries == {"503 SlowDown": 3, "timeout": 1}
    assert RetryingStore(MemoryStore()).retries == {}
