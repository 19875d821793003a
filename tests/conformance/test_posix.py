import pytest

from txstore.testing.conformance import StoreConformance
from txstore_posix import open_store


class RawFiles:
    def __init__(self, root):
        self._root = root

    def write(self, key, data):
        path = self._root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def read(self, key):
        path = self._root / key
        return path.read_bytes() if path.is_file() else None


class TestPosix(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return open_store(f"file://{tmp_path}/made/on/first/write")

    @pytest.fixture
    def raw(self, tmp_path):
        return RawFiles(tmp_path / "made/on/first/write")
