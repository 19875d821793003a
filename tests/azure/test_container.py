"""A container that is not there."""

from __future__ import annotations

import pytest

from txstore import catalog
from txstore.errors import ConfigError
from txstore.store import BytesSource
from txstore_azure import open_store


def test_a_missing_container_is_not_an_empty_store(azure_server):
    with open_store("az://no-such-box/run", connection_string=azure_server.connection_string) as store:
        calls = [
            lambda: catalog.newest(store),
            lambda: store.head("commits/x"),
            lambda: store.read("commits/x"),
            lambda: store.create("commits/x", b"x"),
            lambda: store.put("x", BytesSource(b"x")),
            lambda: store.delete("x"),
            lambda: list(store.list("commits/")),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match="create it"):
                call()
