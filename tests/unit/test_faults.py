import pytest

from txstore.errors import NotFoundError, OutcomeUnknownError, TransientError
from txstore.memory import MemoryStore
from txstore.store import BytesSource
from txstore.testing.faults import MODES, Crashed, FaultyStore

ERRORS = {
    "before": TransientError,
    "unknown": OutcomeUnknownError,
    "after": OutcomeUnknownError,
    "crash-before": Crashed,
    "crash-after": Crashed,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("verb", ["put", "create", "delete"])
def test_a_fault_is_applied_or_not_as_its_mode_says(mode, verb):
    inner = MemoryStore()
    if verb == "delete":
        inner.create("x", b"old")
    store = FaultyStore(inner, at=0, mode=mode)
    call = {
        "put": lambda: store.put("x", BytesSource(b"new")),
        "create": lambda: store.create("x", b"new"),
        "delete": lambda: store.delete("x"),
    }[verb]
    with pytest.raises(ERRORS[mode]):
        call()
    applied = mode in {"after", "crash-after"}
    assert bool(list(inner.list(""))) is (applied != (verb == "delete"))


@pytest.mark.parametrize("mode", ["crash-before", "crash-after"])
def test_after_a_crash_every_call_crashes(mode):
    inner = MemoryStore()
    store = FaultyStore(inner, at=1, mode=mode)
    store.create("x", b"1")
    with pytest.raises(Crashed):
        list(store.list(""))
    for call in (
        lambda: store.put("y", BytesSource(b"1")),
        lambda: store.create("y", b"1"),
        lambda: store.read("x"),
        lambda: store.read_into("x", 0, memoryview(bytearray(1))),
        lambda: store.head("x"),
        lambda: list(store.list("")),
        lambda: store.delete("x"),
    ):
        with pytest.raises(Crashed):
            call()
    assert [info.key for info in inner.list("")] == ["x"]


def test_operations_are_counted_with_verb_and_key():
    store = FaultyStore(MemoryStore(), at=1, mode="before", times=2)
    store.create("x", b"1")
    for _ in range(2):
        with pytest.raises(TransientError):
            store.read("x")
    assert store.read("x") == b"1"
    with pytest.raises(NotFoundError):
        store.head("y")
    assert [info.key for info in store.list("")] == ["x"]
    assert store.log == [("create", "x"), ("read", "x"), ("read", "x"), ("read", "x"), ("head", "y"), ("list", "")]


def test_one_verb_can_be_counted_alone():
    store = FaultyStore(MemoryStore(), at=1, mode="after", verb="create")
    store.create("x", b"1")
    store.put("y", BytesSource(b"2"))
    with pytest.raises(OutcomeUnknownError):
        store.create("z", b"3")
    assert store.read("z") == b"3"
    assert store.log == [("create", "x"), ("create", "z")]
