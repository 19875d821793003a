"""``txstore probe``."""

from __future__ import annotations

import json

from txstore.cli import outcome
from txstore.cli.outcome import OK, STORE
from txstore.memory import MemoryStore
from txstore.store import BytesSource, Store


class OverwritingStore(MemoryStore):
    """Accepts the condition of a conditional write and ignores it."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, BytesSource(data))


def test_an_honest_store_is_usable_and_left_as_it_was(cli, store: Store, url: str) -> None:
    answer = cli("probe", url)
    assert answer.code == OK
    assert "create never replaces an object" in answer.out
    assert list(store.list("")) == []
    document = json.loads(cli("probe", url, "--json").out)
    assert document["usable"] is True
    assert len(document["checks"]) >= 6
    assert {check["problem"] for check in document["checks"]} == {""}


def test_a_store_that_overwrites_is_not_usable(cli, monkeypatch) -> None:
    monkeypatch.setattr(outcome, "open_store", lambda url: OverwritingStore())
    answer = cli("probe", "memory://")
    assert answer.code == STORE
    assert "two writers of one checkpoint could both win" in answer.err
    document = json.loads(cli("probe", "memory://", "--json").out)
    assert document["usable"] is False
    assert any("create never replaces" in check["sentence"] and check["problem"] for check in document["checks"])
