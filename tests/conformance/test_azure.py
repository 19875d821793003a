import pytest
from azure.core.exceptions import ResourceNotFoundError

from tests.servers.azurite import ACCOUNT, KEY
from txstore.testing.conformance import StoreConformance
from txstore_azure import open_store


class RawBlobs:
    def __init__(self, container, prefix):
        self._container = container
        self._prefix = prefix

    def write(self, key, data):
        self._container.upload_blob(f"{self._prefix}/{key}", data, overwrite=True)

    def read(self, key):
        try:
            return self._container.download_blob(f"{self._prefix}/{key}").readall()
        except ResourceNotFoundError:
            return None


class TestAzure(StoreConformance):
    @pytest.fixture
    def store(self, azure_server, azure_prefix):
        options = {"connection_string": azure_server.connection_string}
        with open_store(f"az://checkpoints/{azure_prefix}", **options) as store:
            yield store

    @pytest.fixture
    def raw(self, azure_server, azure_prefix):
        with azure_server.container("checkpoints") as container:
            yield RawBlobs(container, azure_prefix)


class TestAzureOddPrefix(TestAzure):
    """The prefix may hold what a key may not; small blocks and pages make everything take several."""

    @pytest.fixture
    def azure_prefix(self, azure_prefix):
        return f"{azure_prefix}/50% off + été/=@,;'\"(ключ)"

    @pytest.fixture
    def store(self, azure_server, azure_prefix):
        url = f"abfs://checkpoints@{ACCOUNT}//" + azure_prefix.replace("%", "%25") + "//"
        small = {"part_bytes": 1 << 20, "page_objects": 100, "block_md5": True}
        with open_store(url, account_url=azure_server.account_url, account_key=KEY, **small) as store:
            yield store
