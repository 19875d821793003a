"""The state machine over the server of each cloud backend, through the proxy that loses replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest

from tests.machine.machine import World, run
from tests.servers.fixtures import Place
from txstore import open_store
from txstore.testing.proxy import Answer, LostReplyProxy, Rule

DECISIONS = "commits(/|%2F)"


class Cloud(World):
    replies = ("reset", Answer(500), "garble", "close", Answer(503), "truncate")

    def __init__(self, place: Place, proxy: LostReplyProxy) -> None:
        self.direct = open_store(place.url, **place.options)
        self.remote = open_store(place.url, **place.options_by(proxy.url, read_timeout_s=5.0))
        self.proxy = proxy

    def lose(self, *, decisions, skip, times, forward, reply):
        target = DECISIONS if decisions else ""
        self.proxy.add(Rule(target=target, skip=skip, times=times, forward=forward, reply=reply))

    def heal(self):
        self.proxy.clear()

    def release(self):
        self.proxy.release()

    def close(self):
        self.proxy.clear()
        self.proxy.drop_held()
        self.remote.close()
        self.direct.close()


@pytest.fixture
def make_world(place: Place) -> Iterator[Callable[[], World]]:
    numbers = count()
    with LostReplyProxy(place.upstream) as proxy:
        yield lambda: Cloud(replace(place, url=f"{place.url}/{next(numbers)}"), proxy)


def test_the_protocol_holds_under_all_faults_at_once(make_world, request) -> None:
    run(make_world, examples=2, steps=15, replay=f"tests/machine -k '{request.node.name}'")


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))  # each within the time that one test may take
def test_the_protocol_holds_in_many_histories(part: int, make_world, request) -> None:
    run(make_world, examples=5, steps=40, replay=f"-m soak tests/machine -k '{request.node.name}'")
