import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from txstore.testing.conformance import StoreConformance
from txstore_fsspec import open_store


class RawFiles:
    def __init__(self, root):
        self._fs = fsspec.filesystem("memory")
        self._root = root

    def write(self, key, data):
        self._fs.pipe_file(f"/{self._root}/{key}", data)

    def read(self, key):
        path = f"/{self._root}/{key}"
        return self._fs.cat_file(path) if self._fs.isfile(path) else None


class TestFsspecMemory(StoreConformance):
    picklable = False

    @pytest.fixture
    def store(self, memory_root):
        with open_store(f"memory://{memory_root}") as store:
            yield store

    @pytest.fixture
    def raw(self, memory_root):
        return RawFiles(memory_root)

    def test_create_has_one_winner_though_the_filesystem_looks_and_then_writes(self, store, raw, monkeypatch):
        # Between the look and the write every other racer gets its turn.
        commit = MemoryFile.commit
        monkeypatch.setattr(MemoryFile, "commit", lambda file: (time.sleep(0.002), commit(file)))
        self.test_create_has_one_winner_among_threads(store, raw)


class TestFsspecMemoryOddPrefix(TestFsspecMemory):
    @pytest.fixture
    def memory_root(self, memory_root):
        return f"{memory_root}/50% off + été/=@,;'\"(ключ)"

    @pytest.fixture
    def store(self, memory_root):
        with open_store("fsspec+memory:////" + memory_root.replace("%", "%25") + "//") as store:
            yield store
