import time

import pytest

from txstore.memory import MemoryStore
from txstore.testing.conformance import StoreConformance


class RawMemory:
    def __init__(self, store):
        self._objects = store._objects

    def write(self, key, data):
        self._objects[key] = (data, time.time())

    def read(self, key):
        return self._objects.get(key, (None, 0))[0]


class TestMemory(StoreConformance):
    picklable = False

    @pytest.fixture
    def store(self):
        return MemoryStore()

    @pytest.fixture
    def raw(self, store):
        return RawMemory(store)
