"""What readers take for committed: order, aborted, superseded, retired, damaged, partial."""

import pytest

from txstore import catalog, open_store
from txstore.errors import (
    AccessDeniedError,
    AlreadyCommitted,
    CheckpointNotFound,
    CheckpointRetired,
    ConfigError,
    FormatError,
    IntegrityError,
    TransientError,
)
from txstore.keys import SlotName, decision_key, retired_key
from txstore.manifest import Decision, FileRef, Tombstone, Totals, encode, seal
from txstore.memory import MemoryStore
from txstore.ops.verify import verify_store
from txstore.root import ensure_store
from txstore.slot_walk import resolve
from txstore.store import BytesSource
from txstore.sweep import retire, sweep
from txstore.testing.faults import FaultyStore
from txstore.testing.saves import load, save
from txstore.transaction import begin


@pytest.fixture
def store():
    store = MemoryStore()
    ensure_store(store)
    return store


def decide(store, checkpoint, slot=0, kind="commit"):
    """A decision record alone, for questions that no manifest answers."""
    ref = FileRef("data/x/y/manifest.json", 1, "0" * 64)
    fields = {"manifest": ref, "totals": Totals(0, 0, 0, 0, 1)} if kind == "commit" else {}
    decision = Decision(
        kind=kind,
        checkpoint=checkpoint,
        slot=slot,
        step=catalog.step_of(checkpoint),
        txn=f"{hash((checkpoint, slot)) & ((1 << 128) - 1):032x}",
        writer="test",
        decided_at="now",
        **fields,
    )
    decision = seal(decision)
    store.create(decision_key(checkpoint, slot), encode(decision))
    return decision


def bury(store, decision):
    tomb = Tombstone(checkpoint=decision.checkpoint, slot=decision.slot, txn=decision.txn, reason="test")
    store.create(retired_key(decision.checkpoint, decision.slot), encode(tomb))


def listed(store):
    return [(entry.decision.checkpoint, entry.decision.slot, entry.state) for entry in catalog.entries(store)]


def test_order_is_numeric_by_step(store):
    names = ["step-9", "step-10", "step-100000", "step-0900000", "step-8", "handpicked"]
    for name in names:
        decide(store, name)
    assert [name for name, *_ in listed(store)] == [
        "handpicked",
        "step-8",
        "step-9",
        "step-10",
        "step-100000",
        "step-0900000",
    ]
    assert catalog.newest(store).checkpoint == "step-0900000"


def test_a_checkpoint_without_a_number_is_newest_only_when_alone(store):
    decide(store, "best")
    assert catalog.newest(store).checkpoint == "best"
    decide(store, "step-0")
    assert catalog.newest(store).checkpoint == "step-0"
    assert catalog.find(store, "best").checkpoint == "best"


@pytest.mark.parametrize("names", [("step-7", "run-7"), ("step-7", "step-007"), ("best", "worst")])
def test_equal_steps_are_not_ordered_by_name(store, names):
    for name in names:
        decide(store, name)
    with pytest.raises(ConfigError, match="both newest"):
        catalog.newest(store)
    assert catalog.find(store, names[0]).checkpoint == names[0]


def test_equal_steps_do_not_matter_below_the_newest_or_when_aborted(store):
    decide(store, "a-7")
    decide(store, "b-7")
    decide(store, "a-8")
    decide(store, "b-8", kind="abort")
    assert catalog.newest(store).checkpoint == "a-8"


def test_the_highest_slot_that_is_a_commit_and_not_retired_is_taken(store):
    first = decide(store, "step-1", 0)
    second = decide(store, "step-1", 1)
    decide(store, "step-1", 2, kind="abort")
    third = decide(store, "step-1", 3)
    assert catalog.find(store, "step-1") == catalog.newest(store) == third
    assert [state for *_, state in listed(store)] == ["superseded", "superseded", "aborted", "committed"]
    bury(store, third)
    assert catalog.find(store, "step-1") == catalog.newest(store) == second
    assert [state for *_, state in listed(store)] == ["superseded", "committed", "aborted", "retired"]
    bury(store, second)
    bury(store, first)
    with pytest.raises(CheckpointRetired):
        catalog.find(store, "step-1")
    with pytest.raises(CheckpointNotFound):
        catalog.newest(store)


def test_slots_are_ordered_as_numbers(store):
    decisions = [decide(store, "step-1", slot) for slot in range(12)]
    assert catalog.find(store, "step-1") == catalog.newest(store) == decisions[11]
    assert [slot for _, slot, _ in listed(store)] == list(range(12))


def test_stray_objects_are_ignored(store):
    decide(store, "step-1")
    for key in (
        "commits/README",
        "commits/step-2.json",
        "commits/step-2.x.json",
        "commits/step-2.00.json",
        "commits/step-9.0.json.bak",
        "commits/sub/step-3.0.json",
        "retired/step-1",
        "retired/step-1.x",
        "retired/step-1.0.json",
        "data/step-5/stray",
        "latest.json",
    ):
        store.put(key, BytesSource(b"stray"))
    assert listed(store) == [("step-1", 0, "committed")]
    assert catalog.newest(store).checkpoint == "step-1"


def test_a_checkpoint_whose_name_begins_with_anothers_is_another(store):
    decide(store, "a")
    decide(store, "a.1")
    decide(store, "a.1", 1)
    assert listed(store) == [("a", 0, "committed"), ("a.1", 0, "superseded"), ("a.1", 1, "committed")]
    assert catalog.find(store, "a").slot == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"null", b'{"version":2}'])
def test_a_damaged_newest_record_is_an_error_not_an_older_checkpoint(store, damage):
    decide(store, "step-1")
    store.put(decision_key("step-2", 0), BytesSource(damage))
    for ask in (catalog.newest, catalog.entries, lambda store: catalog.find(store, "step-2")):
        with pytest.raises(FormatError) as caught:
            ask(store)
        assert caught.value.key == decision_key("step-2", 0)
    assert catalog.find(store, "step-1").checkpoint == "step-1"
    with pytest.raises(FormatError):
        begin(store, "step-2", world_size=1)


def test_a_damaged_old_record_does_not_hide_the_newest(store):
    store.put(decision_key("step-1", 0), BytesSource(b"?"))
    decide(store, "step-2")
    assert catalog.newest(store).checkpoint == "step-2"
    with pytest.raises(FormatError):
        catalog.entries(store)


def test_a_failed_listing_is_never_an_empty_answer(store):
    with pytest.raises(CheckpointNotFound):
        catalog.newest(store)
    for at in range(3):  # the decisions, the format document, the tombstones
        with pytest.raises(TransientError):
            catalog.newest(FaultyStore(store, at, "before", times=99))
    with pytest.raises(TransientError):
        catalog.find(FaultyStore(store, 0, "before", times=99), "step-1")


def test_more_commits_than_one_page(store):
    for step in range(1200):
        decide(store, f"step-{step}")
    assert len(catalog.entries(store)) == 1200
    assert catalog.newest(store).checkpoint == "step-1199"


def test_a_partial_copy_without_its_format_document_is_refused(store):
    decision = save(store, "step-1", [b"x"])
    store.delete("txstore.json")
    for ask in (catalog.newest, catalog.entries):
        with pytest.raises(IntegrityError, match="partial copy"):
            ask(store)
    # A commit that is named outright needs no listing, and its own digests tell the truth.
    assert load(store, catalog.find(store, "step-1")) == [b"x"]
    assert catalog.find(store, "step-1") == decision


def test_another_format_version_is_refused_everywhere(store):
    store.put("txstore.json", BytesSource(b'{"format":"txstore","version":2}'))
    for ask in (catalog.newest, catalog.entries, lambda store: begin(store, "step-1", world_size=1)):
        with pytest.raises(FormatError, match="version 2"):
            ask(store)


def test_a_plain_copy_of_a_store_is_a_store(store):
    save(store, "step-1", [b"one"])
    save(store, "step-2", [b"two"])
    copy = MemoryStore()
    for info in store.list(""):
        copy.put(info.key, BytesSource(store.read(info.key)))
    assert load(copy, catalog.newest(copy)) == [b"two"]
    with pytest.raises(AlreadyCommitted):
        begin(copy, "step-1", world_size=1)


# A decision that was deleted behind our back


@pytest.fixture
def gap(store):
    """Slot 0 of step-1 was deleted, slot 1 is a commit."""
    save(store, "step-1", [b"one"])
    decision = save(store, "step-1", [b"two"], overwrite=True)
    store.delete(decision_key("step-1", 0))
    return decision


@pytest.mark.parametrize(
    "ask",
    [
        catalog.entries,
        lambda store: catalog.find(store, "step-1"),
        lambda store: begin(store, "step-1", world_size=1),
        lambda store: begin(store, "step-1", world_size=1, overwrite=True),
        lambda store: resolve(store, "step-1", "0" * 32),
    ],
    ids=["entries", "find", "begin", "overwrite", "resolve"],
)
def test_a_deleted_decision_is_noticed(store, gap, ask):
    with pytest.raises(IntegrityError, match=r"step-1\.0 is missing"):
        ask(store)


def test_a_deleted_decision_does_not_hide_the_newest(store, gap):
    assert load(store, catalog.newest(store)) == [b"two"]


def test_nothing_is_retired_or_swept_on_the_word_of_a_store_with_a_gap(store, gap):
    with pytest.raises(IntegrityError):
        sweep(store, grace_s=0, force=True, dry_run=False)
    assert load(store, gap) == [b"two"]
    save(store, "step-2", [b"new"])
    retire(store, gap)  # named and verified: a gap below it changes nothing


# A record that was lost, and that only the hint shows


@pytest.fixture(params=["memory", "posix"])
def place(request, tmp_path):
    """An empty place."""
    return MemoryStore() if request.param == "memory" else open_store(str(tmp_path))


def test_a_newest_record_that_was_lost_is_noticed(place):
    save(place, "step-1", [b"one"])
    save(place, "step-2", [b"two"])
    place.delete(decision_key("step-2", 0))
    assert catalog.lost_record(place) == SlotName("step-2", 0)
    txn = place.read("latest.json").decode().partition('"txn":"')[2][:32]
    for ask in (
        catalog.newest,
        catalog.entries,
        lambda store: catalog.find(store, "step-2"),
        sweep,
        lambda store: resolve(store, "step-2", txn),
        lambda store: resolve(store, "step-2", txn, force=True),  # else it was committed, and is aborted
    ):
        with pytest.raises(IntegrityError, match=r"the record of step-2\.0 was lost") as caught:
            ask(place)
        assert caught.value.key == "commits/step-2.0.json"
        assert "delete latest.json too" in caught.value.next_step
    damaged = {}
    assert [entry.decision.checkpoint for entry in catalog.entries(place, damaged=damaged)] == ["step-1"]
    assert list(damaged) == [SlotName("step-2", 0)]
    (problem,) = verify_store(place).problems
    assert (problem.kind, problem.key) == ("missing", "commits/step-2.0.json")
    assert [load(place, find(place)) for find in (one_before, by_name)] == [[b"one"]] * 2
    place.delete("latest.json")  # the next step, if it was meant
    assert catalog.newest(place).checkpoint == "step-1"


def one_before(store):
    return catalog.newest(store, passed_over={"step-2"})


def by_name(store):
    return catalog.find(store, "step-1")


def test_all_records_lost_is_no_empty_store(place):
    save(place, "step-1", [b"one"])
    save(place, "step-2", [b"two"])
    for step in (1, 2):
        place.delete(decision_key(f"step-{step}", 0))
    assert verify_store(place).state == "damaged"
    for ask in (catalog.newest, catalog.entries):
        with pytest.raises(IntegrityError, match=r"the record of step-2\.0 was lost"):
            ask(place)
    place.delete("txstore.json")
    for ask in (catalog.newest, catalog.entries):
        with pytest.raises(IntegrityError, match=r"txstore\.json is gone, and so is the record of step-2\.0"):
            ask(place)
    with pytest.raises(IntegrityError):
        sweep(place, grace_s=0, force=True, dry_run=False)


def test_the_record_of_a_later_slot_that_was_lost_is_not_replaced_by_the_slot_before(store):
    save(store, "step-1", [b"one"])
    save(store, "step-1", [b"two"], overwrite=True)
    store.delete(decision_key("step-1", 1))
    for ask in (catalog.newest, lambda store: catalog.find(store, "step-1")):
        with pytest.raises(IntegrityError, match=r"the record of step-1\.1 was lost"):
            ask(store)


def test_a_lost_record_that_no_reader_would_take_hides_nothing(store):
    """The hint may name an older step, and an older slot: it is told, and what readers take is not in question."""
    newer, older = save(store, "step-9", [b"new"]), save(store, "step-1", [b"old"])
    store.delete(decision_key("step-1", 0))
    assert catalog.newest(store) == newer == catalog.find(store, "step-9")
    with pytest.raises(IntegrityError, match=r"step-1\.0 was lost"):
        catalog.entries(store)
    again = save(store, "step-1", [b"again"])
    assert (again.slot, older.slot) == (0, 0)
    assert catalog.lost_record(store) is None


def test_a_hint_that_lags_behind_shows_nothing(store):
    save(store, "step-1", [b"one"])
    hint = store.read("latest.json")
    save(store, "step-2", [b"two"])
    store.put("latest.json", BytesSource(hint))
    assert catalog.newest(store).checkpoint == "step-2"
    retire(store, catalog.find(store, "step-1"))
    store.delete(decision_key("step-1", 0))  # as in a copy without what was retired
    assert catalog.lost_record(store) is None


@pytest.mark.parametrize("hint", [b"", b"{", b'{"version":2}', b"\xff" * 9000, None])
def test_a_hint_that_cannot_be_read_is_no_error(store, hint, caplog):
    save(store, "step-1", [b"one"])
    if hint is None:
        store = Refusing(store)
    else:
        store.put("latest.json", BytesSource(hint))
    assert catalog.newest(store).checkpoint == catalog.find(store, "step-1").checkpoint == "step-1"
    assert "whether a record was lost cannot be seen" in caplog.text
    assert listed(store) == [("step-1", 0, "committed")]


class Refusing(MemoryStore):
    """Nobody may read the hint."""

    def __init__(self, inner):
        super().__init__()
        self._objects = inner._objects

    def read(self, key, start=0, size=None):
        if key == "latest.json":
            raise AccessDeniedError("no", key=key)
        return super().read(key, start, size)


@pytest.mark.parametrize("moment", ["commits/", "retired/"])
def test_a_writer_that_commits_meanwhile_loses_no_record(store, moment):
    """The hint is read before the records: it cannot name one that is made after they were listed."""
    save(store, "step-1", [b"one"])

    class Meanwhile(MemoryStore):
        def list(self, prefix, start_after=""):
            if prefix == moment and not saved:
                saved.append(save(store, "step-2", [b"two"]))
            return super().list(prefix, start_after)

    saved = []
    reader = Meanwhile()
    reader._objects = store._objects
    assert catalog.newest(reader).checkpoint == ("step-2" if moment == "commits/" else "step-1")
    assert catalog.newest(reader) == saved[0]


def test_data_without_any_record_is_told(store):
    begin(store, "step-1", world_size=1)
    with pytest.raises(CheckpointNotFound, match="data of 1 attempt, and no record says that any was ever committed"):
        catalog.newest(store)
    begin(store, "step-2", world_size=1)
    store.delete("txstore.json")
    with pytest.raises(CheckpointNotFound, match=r"data of 2 attempts, .*; txstore\.json is not there either"):
        catalog.newest(store)
