"""An answer that says "well done" and nothing else, such as a proxy's, or one cut behind its status line, is no success."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.servers.fixtures import Place
from txstore import open_store
from txstore.errors import OutcomeUnknownError, TransientError
from txstore.store import BytesSource, Store
from txstore.testing.proxy import Answer, Loss, LostReplyProxy, Rule

SMALL, LARGE = b"small", bytes(20 << 20)

VERBS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("new", BytesSource(SMALL)),
    "put in parts": lambda store: store.put("new", BytesSource(LARGE)),
    "create": lambda store: store.create("new", SMALL),
    "read": lambda store: store.read("there"),
    "read a part": lambda store: store.read("there", 1, 2),
    "read into": lambda store: store.read_into("there", 0, memoryview(bytearray(4))),
    "head": lambda store: store.head("there"),
    "list": lambda store: [*store.list("")],
}


@pytest.mark.parametrize("reply", ["truncate", Answer(200), Answer(206)], ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_it_is_no_success_and_no_absence(place: Place, verb: str, reply: Loss | Answer) -> None:
    with open_store(place.url, **place.options) as direct:
        direct.put("there", BytesSource(SMALL))
    with (
        LostReplyProxy(place.upstream) as proxy,
        open_store(place.url, **place.options_by(proxy.url, read_timeout_s=5.0)) as store,
    ):
        proxy.add(Rule(forward="never", reply=reply, times=None))
        with pytest.raises((TransientError, OutcomeUnknownError)):
            VERBS[verb](store)
