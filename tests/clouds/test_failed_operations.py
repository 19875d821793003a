"""One operation of a save fails, once or from then on, in every way: all or nothing, on each cloud backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import test_commit_sweep as sweeping
from tests.servers.fixtures import Place
from txstore import open_store
from txstore.errors import TxStoreError
from txstore.testing.faults import MODES, Crashed, FaultyStore
from txstore.testing.saves import contents, save


def fail_at(place: Place, at: int, mode: str, times: int) -> bool:
    """Whether the save has such an operation."""
    there = replace(place, url=f"{place.url}/{mode}-{times}-{at}")
    with open_store(there.url, **there.options) as store:
        old = save(store, "step-1", sweeping.OLD)
        before = contents(store)
        faulty = FaultyStore(store, at, mode, times=times)
        outcome: object
        try:
            outcome = save(sweeping.retrying(faulty, attempts=2), "step-2", sweeping.NEW)
        except (TxStoreError, Crashed) as error:
            outcome = error
        if len(faulty.log) <= at:
            return False
        sweeping.after_failure(store, before, old, outcome, "step-2", f"operation {at} {faulty.log[at]}")
        return True


def fail_everywhere(place: Place, mode: str, times: int, first: int, step: int) -> None:
    at = first
    while fail_at(place, at, mode, times):
        at += step
    assert at > 10, "a save has more operations than this"


@pytest.mark.parametrize(("mode", "first"), [(mode, 2 * number) for number, mode in enumerate(MODES)])
def test_a_save_is_all_or_nothing_in_a_sample(place: Place, mode: str, first: int) -> None:
    fail_everywhere(place, mode, 99, first, step=2 * len(MODES))


@pytest.mark.soak
@pytest.mark.parametrize("times", [1, 99])
@pytest.mark.parametrize("mode", MODES)
def test_a_save_is_all_or_nothing(place: Place, mode: str, times: int) -> None:
    fail_everywhere(place, mode, times, first=0, step=1)
