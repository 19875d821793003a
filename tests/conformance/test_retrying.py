"""The retry layer is a store: it passes the suite over a store that works, and over one that keeps failing."""

import itertools
import threading
import time

import pytest

from txstore.errors import AlreadyExistsError, OutcomeUnknownError, TransientError
from txstore.memory import MemoryStore
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import Store
from txstore.testing.conformance import StoreConformance


class RawMemory:
    def __init__(self, store):
        self._objects = store._objects

    def write(self, key, data):
        self._objects[key] = (data, time.time())

    def read(self, key):
        return self._objects.get(key, (None, 0))[0]


class Unreliable(Store):
    """Every second call of a thread fails: in turn before the request, instead of it, and after it was applied.

    Of a thread, since several that took turns at one list of faults could give all of them to one call of one thread.
    """

    def __init__(self, inner):
        self.url = inner.url
        self._inner = inner
        self._of_thread = threading.local()

    def _call(self, verb, *args):
        if not hasattr(self._of_thread, "kinds"):
            self._of_thread.kinds = itertools.cycle([None, "before", None, "instead", None, "after"])
        kind = next(self._of_thread.kinds)
        if kind == "before":
            raise TransientError("injected", key=args[0])
        if kind == "instead":
            raise OutcomeUnknownError("injected", key=args[0])
        result = verb(*args)
        if kind == "after":
            raise OutcomeUnknownError("injected", key=args[0])
        return result

    def put(self, key, source):
        return self._call(self._inner.put, key, source)

    def create(self, key, data):
        return self._call(self._inner.create, key, data)

    def read(self, key, start=0, size=None):
        return self._call(self._inner.read, key, start, size)

    def read_into(self, key, start, buffer):
        return self._call(self._inner.read_into, key, start, buffer)

    def head(self, key):
        return self._call(self._inner.head, key)

    def list(self, prefix, start_after=""):
        for info in self._call(self._inner.list, prefix, start_after):
            yield info
            self._call(lambda _key: None, info.key)  # the next page fails

    def delete(self, key):
        return self._call(self._inner.delete, key)

    def close(self):
        self._inner.close()


def retrying(store):
    policy = RetryPolicy(attempts=12, deadline_s=60, first_wait_s=0, longest_wait_s=0)
    return RetryingStore(store, policy, sleep=lambda _s: None)


class TestRetrying(StoreConformance):
    picklable = False

    @pytest.fixture
    def inner(self):
        return MemoryStore()

    @pytest.fixture
    def store(self, inner):
        return retrying(inner)

    @pytest.fixture
    def raw(self, inner):
        return RawMemory(inner)

    def test_create_never_replaces(self, store, raw):
        """As for any store, but the same bytes are our own record: an earlier attempt won."""
        raw.write("commits/step-1.0.json", b"winner")
        for data in (b"other", b""):
            with pytest.raises(AlreadyExistsError) as caught:
                store.create("commits/step-1.0.json", data)
            assert caught.value.key == "commits/step-1.0.json"
        store.create("commits/step-1.0.json", b"winner")
        assert raw.read("commits/step-1.0.json") == b"winner"


class TestRetryingOverFaults(TestRetrying):
    @pytest.fixture
    def store(self, inner):
        return retrying(Unreliable(inner))
