"""One cap on requests for all backends of a process, and stores that cross to another process."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.servers.fixtures import Place
from txstore import open_store
from txstore.errors import NotFoundError
from txstore.store import BytesSource, Store
from txstore.testing.proxy import LostReplyProxy, Rule


@pytest.fixture
def store(place: Place) -> Iterator[Store]:
    with open_store(place.url, **place.options) as store:
        yield store


@pytest.mark.parametrize("limit", [1, 3])
def test_stores_of_all_backends_together_never_exceed_the_cap(limit: int, places, set_max_requests) -> None:
    set_max_requests(limit)
    lock = threading.Lock()
    all_at_once, too_many = threading.Barrier(limit), threading.Event()
    active = most = seen = 0

    def enter():
        nonlocal active, most, seen
        with lock:
            active, seen = active + 1, seen + 1
            most = max(most, active)
            first = seen <= limit
            if active > limit:
                too_many.set()
        if first:
            all_at_once.wait(20)  # that many do come together
            too_many.wait(0.5)  # and no more: while these are under way nobody else may come
        with lock:
            active -= 1

    data = os.urandom((10 << 20) + 1)  # in parts, where a backend has parts
    with ExitStack() as opened:
        stores = []
        for place in places:
            proxy = opened.enter_context(LostReplyProxy(place.upstream))
            proxy.add(Rule("PUT", call=enter, times=None), Rule("POST", call=enter, times=None))
            stores.append(opened.enter_context(open_store(place.url, **place.options_by(proxy.url))))
        with ThreadPoolExecutor(2 * len(stores)) as pool:
            list(pool.map(lambda n: stores[n % 3].put(f"data/{n}", BytesSource(data)), range(6)))
        assert most == limit
        for number in range(6):
            assert stores[number % 3].head(f"data/{number}").size == len(data)


def test_one_slot_is_enough_for_every_verb(store: Store, set_max_requests) -> None:
    set_max_requests(1)
    for call in (store.head, store.read):
        with pytest.raises(NotFoundError):
            call("absent")  # looks at the bucket too
    store.delete("absent")
    data = os.urandom((10 << 20) + 1)
    store.put("x", BytesSource(data))
    assert store.read("x") == data
    store.create("y", b"y")
    assert [info.key for info in store.list("")] == ["x", "y"]


def test_a_listing_that_nobody_reads_to_its_end_keeps_no_slot(store: Store, set_max_requests) -> None:
    set_max_requests(1)
    for number in range(3):
        store.create(f"commits/{number}", b"x")
    listing = store.list("commits/")
    assert next(listing).key == "commits/0"
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.read, "commits/2").result(20) == b"x"
    assert [info.key for info in listing] == ["commits/1", "commits/2"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_used_store_survives_a_fork_in_the_middle_of_a_request(place: Place, set_max_requests) -> None:
    # Another thread's request is under way while the process forks: its slot and its locks stay taken in the child.
    set_max_requests(1)
    forked, under_way = threading.Event(), threading.Event()

    def fork_now():
        under_way.set()
        forked.wait(20)

    with LostReplyProxy(place.upstream) as proxy, open_store(place.url, **place.options_by(proxy.url)) as store:
        store.put("x", BytesSource(b"parent"))
        proxy.add(Rule(call=fork_now))
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(store.read, "x")
            assert under_way.wait(20)
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # a child that hangs must not outlive the test
                try:
                    good = store.read("x") == b"parent"
                    store.put("y", BytesSource(b"child"))
                    store.close()
                    os._exit(0 if good else 3)
                except BaseException:
                    traceback.print_exc()
                    os._exit(4)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            forked.set()
            assert reading.result(20) == b"parent", "the child used a connection of its parent"
        assert store.read("y") == b"child"


def locks_of(store: Store) -> list[threading.Lock]:
    """The locks that a store takes to connect."""
    import txstore_azure.client

    client = getattr(store, "_clients", None) or store._client
    return [getattr(client, "_lock", None) or txstore_azure.client._lock]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_uses_neither_locks_nor_connections_of_its_parent(place: Place) -> None:
    accepted = []
    with LostReplyProxy(place.upstream) as proxy, open_store(place.url, **place.options_by(proxy.url)) as store:
        accept = proxy._server.process_request
        proxy._server.process_request = lambda *arguments: (accepted.append(1), accept(*arguments))
        store.put("x", BytesSource(b"parent"))
        assert store.read("x") == b"parent"
        assert accepted == [1], "connections are used again"
        with ExitStack() as held:
            for lock in locks_of(store):  # as another thread of the parent may hold it at that moment
                held.enter_context(lock)
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                try:
                    os._exit(0 if store.read("x") == b"parent" else 3)
                except BaseException:
                    traceback.print_exc()
                    os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert accepted == [1, 1]
        assert store.read("x") == b"parent"
        assert accepted == [1, 1]


def test_a_used_store_is_pickled_without_its_connections(store: Store) -> None:
    store.put("x", BytesSource(b"1"))
    with pickle.loads(pickle.dumps(store)) as copy:
        assert copy.url == store.url
        assert copy.read("x") == b"1"
        assert store.read("x") == b"1"
