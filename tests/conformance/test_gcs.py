import pytest

from txstore.testing.conformance import StoreConformance
from txstore_gcs import open_store


class RawObjects:
    def __init__(self, server, prefix):
        self._server = server
        self._prefix = prefix

    def write(self, key, data):
        self._server.write("bucket", f"{self._prefix}/{key}", data)

    def read(self, key):
        return self._server.read("bucket", f"{self._prefix}/{key}")


class TestGcs(StoreConformance):
    @pytest.fixture
    def store(self, gcs_server, gcs_prefix):
        with open_store(f"gs://bucket/{gcs_prefix}", endpoint_url=gcs_server.url, token="anon") as store:
            yield store

    @pytest.fixture
    def raw(self, gcs_server, gcs_prefix):
        return RawObjects(gcs_server, gcs_prefix)


class TestGcsOddPrefix(TestGcs):
    """The prefix may hold what a key may not; small windows make every object take several."""

    list_count = 30
    test_create_has_one_winner_among_processes = None  # seconds, and the same as above

    @pytest.fixture
    def gcs_prefix(self, gcs_prefix):
        return f"{gcs_prefix}/50% off + été/=@,;'\"(ключ)"

    @pytest.fixture
    def store(self, gcs_server, gcs_prefix):
        url = "gcs://bucket//" + gcs_prefix.replace("%", "%25") + "//"
        with open_store(url, endpoint_url=gcs_server.url + "/", token="anon", window_bytes=1 << 20) as store:
            yield store
