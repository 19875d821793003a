from collections.abc import Callable, Iterator

import pytest

from tests.servers.azurite import ACCOUNT, KEY
from txstore.testing.proxy import LostReplyProxy
from txstore_azure import AzureStore, open_store


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No account of the person who runs the tests."""
    for name in ("CONNECTION_STRING", "ACCOUNT", "ACCOUNT_NAME", "KEY", "ACCOUNT_KEY", "SAS_TOKEN"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)


@pytest.fixture
def proxy(azure_server) -> Iterator[LostReplyProxy]:
    with LostReplyProxy(f"http://{azure_server.host_port}") as proxy:
        yield proxy


@pytest.fixture
def opened(proxy: LostReplyProxy, azure_prefix: str) -> Iterator[Callable[..., AzureStore]]:
    """Function: options -> a store behind the proxy; closed after the test."""
    stores = []

    def opened(url: str = f"az://checkpoints/{azure_prefix}", **options: object) -> AzureStore:
        given = {"account_url": f"{proxy.url}/{ACCOUNT}", "account_key": KEY, **options}
        stores.append(open_store(url, **{name: value for name, value in given.items() if value is not None}))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()
