"""A writer that is killed at any operation of a save, or in the middle of an upload, leaves a whole checkpoint or none."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator

import pytest

from tests.servers.fixtures import Place
from txstore import catalog, open_store
from txstore.checksum import BLOCK_BYTES
from txstore.errors import AlreadyCommitted
from txstore.keys import LATEST_KEY
from txstore.store import BytesSource, Store
from txstore.sweep import sweep
from txstore.testing import saves
from txstore.testing.faults import Crashed, FaultyStore, Mode

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

OLD, NEW = [b"old"], [b"new 0" * 1000, b"new 1"]


@pytest.fixture
def opened(place: Place) -> Iterator[Callable[[], Store]]:
    stores: list[Store] = []

    def make() -> Store:
        stores.append(open_store(place.url, **place.options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def in_child(task: Callable[[], object]) -> int:
    """How a child process that runs `task` ends: exit status, or minus the signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_or_die(store: Store, at: int, mode: Mode) -> None:
    try:
        saves.save(FaultyStore(store, at, mode), "step-2", NEW)
    except Crashed:  # raised by the operation itself, on the spot
        die()


@pytest.fixture
def operations(opened) -> list[tuple[str, str]]:
    """What a save does. Also the old checkpoint, which everybody must find meanwhile."""
    saves.save(opened(), "step-1", OLD)
    counting = FaultyStore(opened())
    decision = saves.save(counting, "step-0", NEW)
    assert decision.kind == "commit"
    return counting.log


def check_killed(opened, at: int, mode: Mode) -> bool:
    """Kill one save; returns whether it had committed."""
    assert in_child(lambda: save_or_die(opened(), at, mode)) == -signal.SIGKILL
    store = opened()
    newest = catalog.newest(store)
    committed = newest.checkpoint == "step-2"
    assert saves.load(store, newest) == (NEW if committed else OLD)
    # The next run saves the same step.
    if committed:
        with pytest.raises(AlreadyCommitted):
            saves.save(store, "step-2", NEW)
    else:
        saves.save(store, "step-2", NEW)
    sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
    assert saves.load(store, catalog.newest(store)) == NEW
    return committed


def decides(operation: tuple[str, str]) -> bool:
    return operation[0] == "create" and operation[1].startswith("commits/")


def kill_at(opened, operations, mode: Mode, every: int) -> None:
    deciding = next(index for index, operation in enumerate(operations) if decides(operation))
    assert 8 < deciding < len(operations) - 1
    store = opened()
    for at in sorted({*range(0, len(operations), every), deciding}):
        committed = check_killed(opened, at, mode)
        assert committed == (at > deciding or (at == deciding and mode == "crash-after")), operations[at]
        for info in list(store.list("")):
            if "step-2" in info.key or info.key == LATEST_KEY:  # else it would show that a record was lost
                store.delete(info.key)


@pytest.mark.parametrize("mode", ["crash-before", "crash-after"])
def test_a_writer_that_is_killed_at_every_fourth_operation(mode: Mode, opened, operations) -> None:
    kill_at(opened, operations, mode, 4)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["crash-before", "crash-after"])
def test_a_writer_that_is_killed_at_any_operation(mode: Mode, opened, operations) -> None:
    kill_at(opened, operations, mode, 1)


@pytest.mark.parametrize("stop_at", [8 * BLOCK_BYTES, 40 * BLOCK_BYTES])
def test_a_writer_that_is_killed_in_the_middle_of_an_upload(stop_at: int, opened) -> None:
    class Deadly(BytesSource):
        def read(self, start, stop):
            if stop > stop_at:
                die()
            return super().read(start, stop)

    assert in_child(lambda: opened().put("data/shard", Deadly(bytes(48 * BLOCK_BYTES)))) == -signal.SIGKILL
    assert list(opened().list("")) == []
