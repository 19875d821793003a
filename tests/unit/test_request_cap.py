"""The cap on requests in flight: where its number comes from, and that no slot is lost or waited for in vain."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from txstore import request_cap
from txstore.errors import ConfigError
from txstore.request_cap import max_requests, request_slot, requests_allowed

WAIT_S = 20


def free_slots() -> int:
    """How many threads get a slot at once; a cap of its own number must be set."""
    limit = max_requests()
    together = threading.Barrier(limit)

    def enter(_number):
        with request_slot():
            together.wait(WAIT_S)

    with ThreadPoolExecutor(limit) as pool:
        list(pool.map(enter, range(limit)))
    return limit


def test_the_number_comes_from_the_environment(set_max_requests, monkeypatch):
    set_max_requests(7)
    assert max_requests() == 7
    monkeypatch.delenv(request_cap.VARIABLE)
    assert max_requests() == 7, "it is read once: what is in flight was counted against it"
    request_cap.forget()
    assert max_requests() == request_cap.DEFAULT


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "4097", "1" * 50, "٣"])
def test_what_is_no_number_of_requests_is_refused(text, set_max_requests, monkeypatch):
    set_max_requests(1)
    monkeypatch.setenv(request_cap.VARIABLE, text)
    with pytest.raises(ConfigError, match=request_cap.VARIABLE):
        max_requests()
    with pytest.raises(ConfigError, match=request_cap.VARIABLE), request_slot():
        pass


def test_one_more_than_allowed_waits_for_a_slot(set_max_requests):
    set_max_requests(2)
    order = []
    hold = threading.Event()
    inside = threading.Barrier(3)

    def first(_number):
        with request_slot():
            inside.wait(WAIT_S)
            assert hold.wait(WAIT_S)
            order.append("first")

    def third():
        with request_slot():
            order.append("third")

    with ThreadPoolExecutor(3) as pool:
        holding = [pool.submit(first, number) for number in range(2)]
        inside.wait(WAIT_S)
        waiting = pool.submit(third)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        hold.set()
        for one in [*holding, waiting]:
            one.result(WAIT_S)
    assert "first" in order[: order.index("third")]


def test_a_failed_request_gives_its_slot_back(set_max_requests):
    set_max_requests(2)
    for _ in range(5):
        with pytest.raises(RuntimeError), request_slot():
            raise RuntimeError
    assert free_slots() == 2


def test_a_request_within_a_request_needs_no_second_slot(set_max_requests):
    # A put whose source reads from another store: with a slot each they would wait for each other.
    set_max_requests(1)
    with ThreadPoolExecutor(1) as pool:
        with request_slot():
            with request_slot():
                pass
            other = pool.submit(free_slots)
            with pytest.raises(TimeoutError):  # the end of the inner one gave nothing back
                other.result(0.2)
        assert other.result(WAIT_S) == 1


def in_flight(number, inside):
    """Have `number` requests in flight together; `inside` gets the slot of each when all are."""
    together = threading.Barrier(number)

    def one():
        with request_slot() as slot:
            together.wait(WAIT_S)
            inside(slot)

    with ThreadPoolExecutor(number) as pool:
        for future in [pool.submit(one) for _ in range(number)]:
            future.result(WAIT_S)


def test_a_store_that_throttles_halves_what_is_in_flight_once_for_all_that_were(set_max_requests):
    set_max_requests(32)
    together = threading.Barrier(8)

    def refused(slot):
        slot.throttled()
        together.wait(WAIT_S)  # all eight are refused before any of them has ended

    in_flight(8, refused)
    assert requests_allowed() == 4, (
        "half of the eight that were in flight, not of what was allowed, and not eight times"
    )


def test_each_answer_lets_the_number_grow_again_up_to_the_cap(set_max_requests):
    set_max_requests(4)
    with request_slot() as slot:
        slot.throttled()
    assert requests_allowed() == 1, "never none: nobody would find out that the store takes more"
    counts = []
    for _ in range(12):
        with request_slot():
            pass
        counts.append(requests_allowed())
    # About one more for as many answers as are allowed at once: slowly, since a step too far costs half.
    assert counts == [2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 4]


def test_a_request_without_an_answer_changes_nothing(set_max_requests):
    set_max_requests(4)
    with request_slot() as slot:
        slot.throttled()
    for _ in range(20):
        with pytest.raises(RuntimeError), request_slot():
            raise RuntimeError
    assert requests_allowed() == 1


def test_a_request_within_a_request_is_throttled_with_it(set_max_requests):
    set_max_requests(8)
    with request_slot() as outer, request_slot() as inner:
        assert inner is outer


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_slots_of_its_own(set_max_requests):
    set_max_requests(1)
    with request_slot():
        request_cap._lock.acquire()  # as another thread of the parent may hold it at that moment
        child = os.fork()
        if child == 0:
            signal.alarm(WAIT_S)  # a child that hangs must not outlive the test
            with ThreadPoolExecutor(1) as pool:
                os._exit(0 if pool.submit(free_slots).result() == 1 else 1)
        request_cap._lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
