"""Fixtures of the GCS tests: a proxy in front of fake-gcs-server, and stores behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers.fake_gcs import FakeGcs
from txstore.testing.proxy import LostReplyProxy
from txstore_gcs import GcsStore, open_store


@pytest.fixture
def proxy(gcs_server: FakeGcs) -> Iterator[LostReplyProxy]:
    with LostReplyProxy(gcs_server.url) as proxy:
        yield proxy


@pytest.fixture
def opened(proxy: LostReplyProxy, gcs_prefix: str) -> Iterator[Callable[..., GcsStore]]:
    """Function: a store behind the proxy, with options; anonymous unless told otherwise."""
    stores = []

    def make(**options: object) -> GcsStore:
        stores.append(
            open_store(f"gs://bucket/{gcs_prefix}", **{"endpoint_url": proxy.url, "token": "anon", **options})
        )
        return stores[-1]

    yield make
    for store in stores:
        store.close()
