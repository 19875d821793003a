"""The state machine over a memory store whose requests are lost; and planted bugs, each of which it must find.

`TXSTORE_SEED=<number>` replays a run: the command is printed with every failure.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.machine.machine import World, run
from txstore import catalog, slot_walk, sweep, transaction
from txstore.errors import OutcomeUnknownError, StoreError, TransientError, TxStoreError
from txstore.keys import COMMITS_PREFIX
from txstore.memory import MemoryStore
from txstore.store import BytesSource, ObjectInfo, Source, Store


class Lossy(Store):
    """Loses requests: `faults` are ``[skip, times, forward, prefix of the key]``, `held` what lands later."""

    needs_probe = False

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.inner = inner
        self.faults: list[list] = []
        self.held: list[Callable[[], object]] = []

    def _do(self, key, call, *, writes):
        for fault in self.faults:
            if not key.startswith(fault[3]):
                continue
            if fault[0] > 0:
                fault[0] -= 1
                continue
            if fault[1] > 0:
                fault[1] -= 1
                return self._lose(call, fault[2], writes=writes)
        return call()

    def _lose(self, call, forward, *, writes):
        if forward == "now":
            try:
                call()
            except StoreError:
                pass  # an answer as any other: lost
        elif forward == "later" and writes:
            self.held.append(call)
        raise (OutcomeUnknownError if writes else TransientError)("lost")

    def put(self, key: str, source: Source) -> ObjectInfo:
        data = bytes(source.read(0, source.size))
        return self._do(key, lambda: self.inner.put(key, BytesSource(data)), writes=True)

    def create(self, key: str, data: bytes) -> None:
        self._do(key, lambda: self.inner.create(key, data), writes=True)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        return self._do(key, lambda: self.inner.read(key, start, size), writes=False)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._do(key, lambda: self.inner.read_into(key, start, buffer), writes=False)

    def head(self, key: str) -> ObjectInfo:
        return self._do(key, lambda: self.inner.head(key), writes=False)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        yield from self._do(prefix, lambda: [*self.inner.list(prefix, start_after)], writes=False)

    def delete(self, key: str) -> None:
        self._do(key, lambda: self.inner.delete(key), writes=True)

    def close(self) -> None:
        self.inner.close()


class Memory(World):
    def __init__(self) -> None:
        self.direct = MemoryStore()
        self.remote = Lossy(self.direct)

    def lose(self, *, decisions, skip, times, forward, reply):
        self.remote.faults.append([skip, times, forward, COMMITS_PREFIX if decisions else ""])

    def heal(self):
        self.remote.faults.clear()

    def release(self):
        held, self.remote.held = self.remote.held, []
        for call in held:
            try:
                call()
            except StoreError:
                pass  # its sender has gone

    def close(self):
        self.remote.held.clear()


def test_the_protocol_holds_under_all_faults_at_once() -> None:
    run(Memory, examples=80, steps=40, replay="tests/machine/test_memory.py -k all_faults")


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_the_protocol_holds_in_many_histories(part: int) -> None:
    run(Memory, examples=400, steps=50, replay="-m soak tests/machine/test_memory.py -k many")


def test_a_seed_means_one_history_whatever_modules_are_loaded(tmp_path, monkeypatch) -> None:
    def requests() -> list[str]:
        seen: list[str] = []

        class Recorded(Memory):
            def __init__(self) -> None:
                super().__init__()
                do = self.remote._do
                self.remote._do = lambda key, call, **how: (seen.append(key), do(key, call, **how))[1]

        run(Recorded, examples=25, steps=40, replay="", seed=1)
        return [re.sub("probe/.*", "probe", key) for key in seen if not key.startswith("data/step-1/")]

    first = requests()
    assert len(first) > 200
    source = tmp_path / "of_the_project.py"
    source.write_text(f"NUMBERS = {[*range(100, 255)]}\n")
    spec = importlib.util.spec_from_file_location("of_the_project", source)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "of_the_project", module)
    assert requests() == first


# Planted: what the machine must find. The seeds are fixed: whether it finds them is no matter of luck.


def unknown_is_failure(monkeypatch):
    """A commit that was not answered is reported as failed."""
    monkeypatch.setattr(slot_walk, "_unknown", lambda wanted, key, cause: StoreError(cause, key=key))


def sweep_without_abort(monkeypatch):
    """Data of an undecided attempt goes before its abort stands."""

    class Never:
        kind = "abort"

    monkeypatch.setattr(sweep, "claim_abort", lambda *_arguments: Never)


def newest_by_name(monkeypatch):
    """step-9 is taken for newer than step-10."""
    monkeypatch.setattr(catalog, "by_step", lambda checkpoint: (0, checkpoint))


def retired_without_tombstone(monkeypatch):
    """Data is deleted although no tombstone says so."""
    monkeypatch.setattr(sweep, "retired_key", lambda checkpoint, slot: f"other/{checkpoint}.{slot}")


def overwriting_all(monkeypatch):
    """A writer passes commits that it has not seen."""
    monkeypatch.setattr(transaction.Transaction, "_must_stop", lambda self, found: None)


PLANTED = [unknown_is_failure, sweep_without_abort, newest_by_name, retired_without_tombstone, overwriting_all]
SEEDS = range(1, 61)  # the rarest bug shows in one of eight


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant, monkeypatch, capsys) -> None:
    plant(monkeypatch)
    seed = 0
    with pytest.raises((AssertionError, TxStoreError)):
        for seed in SEEDS:
            run(Memory, examples=25, steps=40, replay="", seed=seed)
    assert f"TXSTORE_SEED={seed}" in capsys.readouterr().out
