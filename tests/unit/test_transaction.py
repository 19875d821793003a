"""Begin, write, commit, abort, resolve on a store that works; and two writers of one checkpoint at once."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from dataclasses import replace

import msgspec
import pytest

import txstore_posix
from txstore import keys, transaction
from txstore.catalog import find, newest
from txstore.checksum import BLOCK_BYTES
from txstore.errors import (
    Aborted,
    AlreadyCommitted,
    AlreadyExistsError,
    CheckpointNotFound,
    CommitUnknown,
    ConfigError,
    Conflict,
    FormatError,
    IntegrityError,
    PlanMismatch,
    TransactionStateError,
    TransientError,
)
from txstore.keys import LATEST_KEY, begin_key, decision_key
from txstore.manifest import Description, Progress, decode_begin, decode_pointer
from txstore.memory import MemoryStore
from txstore.slot_walk import TWO_JOBS, claim_abort, resolve
from txstore.store import BytesSource, ObjectInfo
from txstore.testing.faults import FaultyStore
from txstore.testing.invariants import check_content
from txstore.testing.saves import AT_ONCE, contents, index_of, load, save
from txstore.transaction import Transaction, begin, write_shard


@pytest.fixture
def store():
    return MemoryStore()


def prepare(store, checkpoint="step-1", values=(b"a", b"bc"), **options):
    attempt = begin(store, checkpoint, world_size=len(values), **options)
    shards = [write_shard(store, attempt.ticket, rank, 0, BytesSource(value)) for rank, value in enumerate(values)]
    return attempt, shards


def commit(attempt, shards, **options):
    return attempt.commit(shards, index_of(shards), visibility=AT_ONCE, **options)


def test_a_commit_is_what_was_written(store):
    attempt, shards = prepare(store, "step-7", (b"", b"x" * (2 * BLOCK_BYTES + 3)), writer="me")
    described = Description(Progress(7, 1, 2, 3), {"dp": 2}, {"code": "abc"})
    decision = commit(attempt, shards, software={"torch": "2"}, description=described)
    assert (decision.kind, decision.checkpoint, decision.slot, decision.step) == ("commit", "step-7", 0, 7)
    assert (decision.txn, decision.writer) == (attempt.ticket.txn, "me")
    assert (decision.totals.bytes, decision.totals.shards, decision.totals.tensors) == (2 * BLOCK_BYTES + 3, 2, 2)
    assert load(store, find(store, "step-7")) == [b"", b"x" * (2 * BLOCK_BYTES + 3)]
    manifest = transaction.decode_manifest(store.read(decision.manifest.key), decision)
    assert (manifest.description, manifest.software) == (described, {"torch": "2"})
    started = decode_begin(store.read(begin_key("step-7", decision.txn)), begin_key("step-7", decision.txn))
    assert (started.world_size, started.overwrite, started.writer) == (2, False, "me")
    assert decode_pointer(store.read(LATEST_KEY), LATEST_KEY).txn == decision.txn


def test_a_failing_hint_does_not_fail_the_commit(store, caplog):
    attempt, shards = prepare(store)
    puts = FaultyStore(store, at=2, mode="before", verb="put")  # index, manifest, then the hint
    attempt._store = puts
    assert commit(attempt, shards).kind == "commit"
    assert puts.log[-1] == ("put", LATEST_KEY)
    assert "hint" in caplog.text


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["epoch=1-step=20.ckpt", "epoch=2-step=40.ckpt"], ["epoch=1-step=20.ckpt"]),  # once, not at every save
        (["step=20-best", "v2.pt"], ["step=20-best", "v2.pt"]),
        (["epoch=1-step=20", "step-7", "1000", "last", "handpicked"], []),
    ],
)
def test_a_name_whose_number_is_no_step_is_told_before_the_save(names, told, store, caplog):
    keys._told.clear()
    for name in names:
        begin(store, name, world_size=1)
    found = [one.getMessage() for one in caplog.records if "does not end in a step" in one.getMessage()]
    assert [one.split(" does")[0] for one in found] == [repr(name) for name in told]
    assert all("without a suffix such as .ckpt" in one for one in found)


def test_a_standing_checkpoint_needs_overwrite(store):
    first = save(store, "step-1", [b"one"])
    with pytest.raises(AlreadyCommitted) as refused:
        begin(store, "step-1", world_size=1)
    assert first.writer in refused.value.message
    assert refused.value.next_step.startswith(TWO_JOBS), "before overwrite, which would let two runs mix"
    second = save(store, "step-1", [b"two"], overwrite=True)
    assert second.slot == 1
    assert load(store, first) == [b"one"], "the old one stays readable"
    assert load(store, find(store, "step-1")) == [b"two"]


def test_the_old_commit_is_read_until_the_new_decision_stands(store):
    save(store, "step-1", [b"one"])
    attempt, shards = prepare(store, values=(b"two",), overwrite=True)
    assert load(store, find(store, "step-1")) == [b"one"]
    commit(attempt, shards)
    assert load(store, find(store, "step-1")) == [b"two"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_that_was_not_there_at_the_beginning_is_a_conflict(store, overwrite):
    attempt, shards = prepare(store, overwrite=overwrite)
    winner = save(store, "step-1", [b"other"], writer="the other")
    with pytest.raises(Conflict, match="the other") as caught:
        commit(attempt, shards)
    assert caught.value.winner == winner.txn
    assert load(store, find(store, "step-1")) == [b"other"]


def damage(store, slot, checkpoint="step-1"):
    key = f"commits/{checkpoint}.{slot}.json"
    store.put(key, BytesSource(store.read(key)[:-1]))


def test_a_damaged_decision_is_refused_like_one_that_stands(store):
    save(store, "step-1", [b"one"])
    damage(store, 0)
    with pytest.raises(
        FormatError, match=r"overwrite=True: the damaged slot stays as it is, and the next one is taken"
    ):
        begin(store, "step-1", world_size=1)
    assert len(list(store.list("data/"))) == 4, "nothing was written"


def test_a_checkpoint_whose_decision_is_damaged_is_committed_again_in_the_next_slot(store):
    save(store, "step-1", [b"one"])
    damage(store, 0)
    second = save(store, "step-1", [b"two"], overwrite=True)
    assert second.slot == 1
    assert find(store, "step-1") == newest(store) == second
    third = save(store, "step-1", [b"three"], overwrite=True)
    assert (third.slot, find(store, "step-1")) == (2, third)


def test_a_record_that_is_damaged_after_the_beginning_may_be_an_abort_of_this_transaction(store):
    save(store, "step-1", [b"one"])
    damage(store, 0)
    attempt, shards = prepare(store, values=(b"two",), overwrite=True)
    assert claim_abort(store, "step-1", attempt.ticket.txn, damaged={0}).slot == 1
    damage(store, 1)
    with pytest.raises(FormatError):
        commit(attempt, shards)
    assert sorted(info.key for info in store.list("commits/")) == ["commits/step-1.0.json", "commits/step-1.1.json"]


def test_an_abort_passes_what_was_damaged_when_its_transaction_began_and_nothing_else(store):
    save(store, "step-1", [b"one"])
    damage(store, 0)
    attempt, _ = prepare(store, values=(b"two",), overwrite=True)
    assert (attempt.abort().kind, attempt.abort().slot) == ("abort", 1)
    with pytest.raises(FormatError):
        claim_abort(store, "step-1", "0" * 32)


def test_behind_a_damaged_record_only_what_is_found_is_answered(store):
    save(store, "step-1", [b"one"])
    damage(store, 0)
    second = save(store, "step-1", [b"two"], overwrite=True)
    assert resolve(store, "step-1", second.txn) == second
    for force in (False, True):
        with pytest.raises(FormatError, match=r"step-1\.0"):
            resolve(store, "step-1", "0" * 32, force=force)
    damage(store, 1)
    with pytest.raises(FormatError, match=r"step-1\.1"):
        find(store, "step-1")


def test_a_commit_below_a_damaged_record_is_not_the_answer(store):
    save(store, "step-1", [b"one"])
    save(store, "step-1", [b"two"], overwrite=True)
    damage(store, 1)
    with pytest.raises(FormatError, match=r"step-1\.1"):
        find(store, "step-1")


def test_an_aborted_transaction_cannot_commit_and_the_next_one_takes_the_next_slot(store):
    attempt, shards = prepare(store)
    assert claim_abort(store, "step-1", attempt.ticket.txn, writer="sweeper").kind == "abort"
    with pytest.raises(Aborted, match="sweeper"):
        commit(attempt, shards)
    assert save(store, "step-1", [b"x"]).slot == 1


def test_an_abort_after_the_commit_finds_the_commit(store):
    attempt, shards = prepare(store)
    decision = commit(attempt, shards)
    assert attempt.abort() == decision
    assert claim_abort(store, "step-1", attempt.ticket.txn) == decision
    assert list(store.list("commits/"))[1:] == []


def test_aborting_twice_leaves_one_record(store):
    attempt, _ = prepare(store)
    assert attempt.abort() == claim_abort(store, "step-1", attempt.ticket.txn)
    assert len(list(store.list("commits/"))) == 1


def test_the_same_transaction_committed_by_two_incarnations_is_one_commit(store):
    attempt, shards = prepare(store)
    twin = Transaction(store, attempt.ticket, stood=frozenset(), world_size=2, writer=attempt._writer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction, "now", lambda: "now")
        assert commit(attempt, shards) == commit(twin, shards)
    assert len(list(store.list("commits/"))) == 1


def test_the_same_transaction_with_another_manifest_is_refused(store):
    attempt, shards = prepare(store)
    twin = Transaction(store, attempt.ticket, stood=frozenset(), world_size=2, writer="twin")
    commit(attempt, shards)
    with pytest.raises(FormatError, match="two different manifests"):
        commit(twin, shards)


def test_resolve_gives_one_answer(store):
    attempt, shards = prepare(store)
    txn = attempt.ticket.txn
    assert resolve(store, "step-1", txn) is None
    decision = commit(attempt, shards)
    assert resolve(store, "step-1", txn) == resolve(store, "step-1", txn, force=True) == decision
    other, _ = prepare(store, "step-2")
    abort = resolve(store, "step-2", other.ticket.txn, force=True)
    assert abort.kind == "abort"
    assert resolve(store, "step-2", other.ticket.txn) == abort


def test_a_transaction_ends_once(store):
    attempt, shards = prepare(store)
    commit(attempt, shards)
    with pytest.raises(TransactionStateError):
        commit(attempt, shards)
    aborted, shards = prepare(store, "step-2")
    aborted.abort()
    with pytest.raises(TransactionStateError):
        commit(aborted, shards)


def test_a_transaction_stays_with_its_coordinator_and_its_ticket_travels(store):
    attempt, _ = prepare(store)
    with pytest.raises(TypeError, match="ticket"):
        pickle.dumps(attempt)
    assert pickle.loads(pickle.dumps(attempt.ticket)) == attempt.ticket


@pytest.mark.parametrize("name", ["../x", "", ".x", "a/b"])
def test_a_name_that_is_none_is_refused_before_anything_is_written(store, name):
    with pytest.raises(ConfigError):
        begin(store, name, world_size=1)
    assert list(store.list("")) == []


# What commit refuses. In each case nothing is committed and nothing deleted.


def damage_missing(store, shards):
    store.delete(shards[1].key)
    return shards


def damage_truncated(store, shards):
    store.put(shards[1].key, BytesSource(store.read(shards[1].key)[:-1]))
    return shards


def damage_zero_length(store, shards):
    store.put(shards[1].key, BytesSource(b""))
    return shards


def damage_flipped(store, shards):
    store.put(shards[1].key, BytesSource(b"cc"))
    return shards


def damage_swapped(store, shards):
    first, second = (store.read(shard.key) for shard in shards)
    store.put(shards[0].key, BytesSource(second))
    store.put(shards[1].key, BytesSource(first))
    return shards


def result_of_another_attempt(store, shards):
    _, others = prepare(store)
    return [shards[0], others[1]]


def result_twice(store, shards):
    return [shards[0], shards[0]]


def result_of_another_size(store, shards):
    return [shards[0], replace(shards[1], size=1)]


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (damage_missing, IntegrityError),
        (damage_truncated, IntegrityError),
        (damage_zero_length, IntegrityError),
        (damage_flipped, IntegrityError),
        (damage_swapped, IntegrityError),
        (result_of_another_size, IntegrityError),
        (result_of_another_attempt, PlanMismatch),
        (result_twice, FormatError),
    ],
)
def test_shards_that_are_not_as_reported_are_not_committed(store, damage, error):
    attempt, shards = prepare(store)
    shards = damage(store, shards)
    before = contents(store)
    with pytest.raises(error) as caught:
        commit(attempt, shards)
    assert caught.value.key
    assert contents(store) == before
    with pytest.raises(CheckpointNotFound):
        newest(store)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda index: msgspec.structs.replace(index, items=(*index.items, index.items[0])),
        lambda index: msgspec.structs.replace(index, items=(msgspec.structs.replace(index.items[0], shape=(2,)),)),
        lambda index: msgspec.structs.replace(index, items=(msgspec.structs.replace(index.items[0], itemsize=65),)),
        lambda index: msgspec.structs.replace(
            index, files=(msgspec.structs.replace(index.files[0], blocks=b""), *index.files[1:])
        ),
        lambda index: msgspec.structs.replace(index, items=(msgspec.structs.replace(index.items[0], dtype="x" * 513),)),
    ],
    ids=["twice", "hole", "itemsize", "blocks", "dtype"],
)
def test_an_index_that_would_not_be_read_is_not_committed(store, spoil):
    attempt, shards = prepare(store)
    before = contents(store)
    with pytest.raises(FormatError):
        attempt.commit(shards, spoil(index_of(shards)), visibility=AT_ONCE)
    assert contents(store) == before


@pytest.mark.parametrize(
    "options",
    [
        {"description": Description(Progress(-1))},
        {"software": {"torch": "\ud800"}},
    ],
    ids=["negative", "surrogate"],
)
def test_a_description_that_would_not_be_read_is_not_committed(store, options):
    attempt, shards = prepare(store)
    before = contents(store)
    with pytest.raises(FormatError):
        commit(attempt, shards, **options)
    assert contents(store) == before


def test_an_index_of_other_files_is_refused(store):
    attempt, shards = prepare(store)
    with pytest.raises(PlanMismatch):
        attempt.commit(shards, index_of(shards[::-1]), visibility=AT_ONCE)


def test_a_store_that_reports_another_checksum_is_caught_at_once(store):
    class Liar(MemoryStore):
        def put(self, key, source):
            info = super().put(key, source)
            return ObjectInfo(key, info.size, (info.crc32c or 0) ^ 1) if key.endswith("safetensors") else info

    with pytest.raises(IntegrityError) as caught:
        prepare(Liar())
    assert caught.value.rank == 0


def test_a_peers_object_is_waited_for(store):
    attempt, shards = prepare(store)
    hidden = store.read(shards[1].key)
    store.delete(shards[1].key)
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        if now[0] > 1:
            store.put(shards[1].key, BytesSource(hidden))

    patience = transaction.Visibility(wait_s=2, poll_s=0.25, sleep=sleep, clock=lambda: now[0])
    assert attempt.commit(shards, index_of(shards), visibility=patience).kind == "commit"
    assert 1 < now[0] <= 2


# Two writers of one checkpoint at once. One wins; each loser is told who did.


def race(store, rounds, name="step-{}"):
    """All `rounds` saves of this writer: the txn that won each, or the one named by the error."""
    outcomes = []
    for number in range(rounds):
        try:
            decision = save(store, name.format(number), [os.urandom(8)])
            outcomes.append(("won", decision.txn))
        except Conflict as error:
            outcomes.append(("lost", error.winner))
        except AlreadyCommitted:
            outcomes.append(("late", find(store, name.format(number)).txn))
    return outcomes


def check_race(store, outcomes):
    for number, results in enumerate(zip(*outcomes, strict=True)):
        assert [how for how, _ in results].count("won") == 1, f"round {number}: {results}"
        assert len({txn for _, txn in results}) == 1, f"round {number}: two winners are named"
        assert find(store, f"step-{number}").txn == results[0][1]
        assert len(load(store, find(store, f"step-{number}"))) == 1
    check_content(contents(store))


@pytest.fixture
def restless():
    """Threads take turns a thousand times as often, or one would save all before the next one looks."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 1000)
    yield
    sys.setswitchinterval(usual)


def test_threads_that_save_one_checkpoint_have_one_winner(store, restless):
    threads, rounds = 8, 40
    outcomes = [None] * threads
    barrier = threading.Barrier(threads)

    def run(number):
        barrier.wait()
        outcomes[number] = race(store, rounds)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    check_race(store, outcomes)


def race_in_process(url, rounds, barrier, queue, number):
    barrier.wait()
    queue.put((number, race(txstore_posix.open_store(url), rounds)))


def test_processes_that_save_one_checkpoint_have_one_winner(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes, rounds = 3, 15
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        url = f"file://{folder}/root"
        barrier, queue = context.Barrier(processes), context.Queue()
        workers = [
            context.Process(target=race_in_process, args=(url, rounds, barrier, queue, number))
            for number in range(processes)
        ]
        for worker in workers:
            worker.start()
        outcomes = dict(queue.get(timeout=60) for _ in workers)
        for worker in workers:
            worker.join(60)
            assert worker.exitcode == 0
        check_race(txstore_posix.open_store(url), list(outcomes.values()))


# Errors of the store while a decision is settled


def test_an_own_record_that_cannot_be_confirmed_is_unknown_not_failed(store):
    attempt, shards = prepare(store)
    commit(attempt, shards)
    for mode in ("before", "unknown"):
        with pytest.raises(CommitUnknown) as caught:
            resolve(FaultyStore(store, 0, mode, verb="create"), "step-1", attempt.ticket.txn)
        assert caught.value.txn == attempt.ticket.txn


def test_an_abort_without_an_answer_is_unknown(store):
    attempt, _ = prepare(store)
    for at in range(2):
        with pytest.raises(CommitUnknown):
            claim_abort(FaultyStore(store, at, "before", times=99), "step-1", attempt.ticket.txn)
    assert decision_key("step-1", 0) not in contents(store)


class OwnLink(MemoryStore):
    """Answers "exists" for what this very request has made, as NFS may, and then does not answer a read of it."""

    def create(self, key, data):
        super().create(key, data)
        if key.startswith("commits/"):
            raise AlreadyExistsError("the link was there", key=key)

    def read(self, key, start=0, size=None):
        if key.startswith("commits/") and key in self._objects:
            raise TransientError("no answer", key=key)
        return super().read(key, start, size)


def test_a_record_that_exists_and_cannot_be_read_may_be_our_own():
    store = OwnLink()
    attempt, shards = prepare(store)
    with pytest.raises(CommitUnknown):
        commit(attempt, shards)
    assert not attempt.give_up(), "it stands, so nobody may say that it never will"
    assert decision_key("step-1", 0) in store._objects
