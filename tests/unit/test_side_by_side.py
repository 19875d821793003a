"""Many looks at a store at once: bounded, in order, ended by the first error; and who does it so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from txstore import side_by_side as module
from txstore.catalog import entries
from txstore.errors import IntegrityError, NotFoundError
from txstore.memory import MemoryStore
from txstore.ops.verify import READERS, verify, verify_store
from txstore.side_by_side import LOOKS, side_by_side
from txstore.store import ObjectInfo
from txstore.testing.samples import commit_sample
from txstore.transaction import Visibility

MEETING_S = 20.0


class Meeting:
    """Lets nobody of the first `parties` pass before all of them are there: a serial caller never gets through."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties)
        self._lock = threading.Lock()
        self._left = parties

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            early = self._left >= 0
        if early:
            self._barrier.wait(MEETING_S)


class MeetingStore(MemoryStore):
    """Asks a meeting before each answer about a shard or a decision."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[str, Callable[[], None]] = {}

    def _meet(self, verb: str, key: str) -> None:
        documents = ("txstore.json", "latest.json", "begin.json", "manifest.json", "index.msgpack")
        if verb in self.before and not key.endswith(documents):
            self.before[verb]()

    def head(self, key: str) -> ObjectInfo:
        self._meet("head", key)
        return super().head(key)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        self._meet("read", key)
        return super().read(key, start, size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        self._meet("read_into", key)
        data = MemoryStore.read(self, key, start, buffer.nbytes) if "read" not in self.before else b""
        buffer[: len(data)] = data
        return len(data)


def test_results_are_in_order_and_no_more_than_wanted_run_at_once() -> None:
    meeting, lock, running, most = Meeting(5), threading.Lock(), [0], [0]

    def work(number: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        meeting()
        time.sleep(0.001 * (40 - number) / 40)
        with lock:
            running[0] -= 1
        return 2 * number

    assert side_by_side(work, range(40), at_once=5) == [2 * number for number in range(40)]
    assert most[0] == 5


@pytest.mark.parametrize("items", [[], [7]])
def test_one_item_or_none_needs_no_thread(items: list[int]) -> None:
    assert side_by_side(lambda item: (item, threading.current_thread()), items) == [
        (item, threading.current_thread()) for item in items
    ]


def test_the_first_error_ends_it_and_the_earliest_is_raised() -> None:
    begun: list[int] = []
    meeting = Meeting(4)

    def work(number: int) -> None:
        begun.append(number)
        if number < 4:
            meeting()  # all of the first four fail, in any order
            raise ValueError(number)
        time.sleep(0.01)

    with pytest.raises(ValueError, match=r"^0$"):
        side_by_side(work, range(1000), at_once=4)
    assert len(begun) < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("txstore-look")]


def test_an_interrupted_caller_does_not_wait_for_what_has_not_begun(monkeypatch) -> None:
    def interrupted(*_args: object, **_kwargs: object) -> None:
        time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "wait", interrupted)
    begun: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        side_by_side(lambda number: begun.append(number) or time.sleep(0.01), range(1000), at_once=2)
    assert len(begun) < 100


def test_a_commit_looks_at_many_shards_at_once() -> None:
    store = MeetingStore()
    store.before["head"] = Meeting(LOOKS)
    decision = commit_sample(store, "step-1", ranks=2 * LOOKS, rows=1)
    assert decision.totals.shards == 2 * LOOKS


def test_a_commit_waits_for_all_missing_shards_together() -> None:
    class Late(MemoryStore):
        def head(self, key: str) -> ObjectInfo:
            if key.endswith("-00000.safetensors") and "rank-00000" not in key:
                raise NotFoundError("no such object", key=key)
            return super().head(key)

    began = time.monotonic()
    with pytest.raises(IntegrityError, match="the object is missing") as caught:
        commit_sample(Late(), "step-1", ranks=LOOKS, rows=1, visibility=Visibility(wait_s=0.3, poll_s=0.05))
    assert time.monotonic() - began < 0.3 * LOOKS / 2
    assert caught.value.rank == 1


def test_ls_reads_many_decisions_at_once() -> None:
    store = MeetingStore()
    for step in range(2 * LOOKS):
        commit_sample(store, f"step-{step}", ranks=1, rows=1)
    store.before["read"] = Meeting(LOOKS)
    assert [entry.decision.step for entry in entries(store)] == list(range(2 * LOOKS))


@pytest.mark.parametrize("depth", ["sample", "full"])
def test_verify_reads_several_shards_at_once(depth: str) -> None:
    store = MeetingStore()
    decision = commit_sample(store, "step-1", ranks=2 * READERS, rows=1)
    store.before.update(head=Meeting(READERS), read_into=Meeting(READERS))
    assert verify(store, decision, depth=depth).state == "sound"


def test_verify_names_damage_in_the_order_of_the_shards() -> None:
    store = MemoryStore()
    decision = commit_sample(store, "step-1", ranks=40, rows=1)
    shards = sorted(info.key for info in store.list("data/") if info.key.endswith(".safetensors"))
    for key in shards:
        data, modified_s = store._objects[key]
        store._objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), modified_s)
    for key in shards[3::7]:
        del store._objects[key]
    report = verify(store, decision, depth="full")
    assert [problem.key for problem in report.problems if problem.kind == "missing"] == shards[3::7]
    read = [problem.key for problem in report.problems if "fail their CRC32C" in problem.what]
    assert read == [key for key in shards if key not in shards[3::7]]
    assert len(read) > 2 * READERS


def test_verify_reads_many_decisions_at_once() -> None:
    store = MeetingStore()
    for step in range(LOOKS):
        commit_sample(store, f"step-{step}", ranks=1, rows=1)
    store.before["read"] = Meeting(LOOKS)
    assert len(verify_store(store, depth="documents").reports) == LOOKS
