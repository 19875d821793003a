"""The probe: a store that ignores, rejects or mishandles conditional create is refused before the first write."""

import pytest

from txstore.errors import AlreadyExistsError, CapabilityError, TransientError
from txstore.memory import MemoryStore
from txstore.probe import probe, prove
from txstore.retry import RetryingStore
from txstore.store import BytesSource
from txstore.transaction import begin


class Remote(MemoryStore):
    needs_probe = True


class Overwriting(Remote):
    """As `rclone serve s3` does: accepts the condition and ignores it."""

    def create(self, key, data):
        self.put(key, BytesSource(data))


class Rejecting(Remote):
    def create(self, key, data):
        raise CapabilityError("501 NotImplemented: If-None-Match", key=key)


class Lying(Remote):
    """Says that the object exists, and replaces it all the same."""

    def create(self, key, data):
        try:
            super().create(key, data)
        except AlreadyExistsError:
            self.put(key, BytesSource(data))
            raise


class Blind(Remote):
    """Conditions hold against objects that `create` made, and not against those that `put` made."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def create(self, key, data):
        if key in self.made:
            raise AlreadyExistsError("object exists", key=key)
        self.made.add(key)
        self.put(key, BytesSource(data))

    def delete(self, key):
        self.made.discard(key)
        super().delete(key)


class Forgetful(Remote):
    def list(self, prefix, start_after=""):
        return iter(())


class Undying(Remote):
    def delete(self, key):
        pass


def test_an_honest_store_passes_and_keeps_no_trace():
    store = RetryingStore(Remote())
    assert all(not check.problem for check in probe(store))
    assert list(store.list("")) == []


@pytest.mark.parametrize("kind", [Overwriting, Rejecting, Lying, Blind, Forgetful, Undying])
def test_a_store_that_breaks_the_contract_is_refused_before_anything_is_written(kind):
    store = RetryingStore(kind(), sleep=lambda _: None)
    with pytest.raises(CapabilityError, match="does not keep the contract"):
        begin(store, "step-1", world_size=1)
    assert [info.key for info in store.list("") if not info.key.startswith("probe/")] == []


def test_a_store_that_cannot_be_reached_is_not_judged():
    class Down(Remote):
        def create(self, key, data):
            raise TransientError("connection refused", key=key)

    with pytest.raises(TransientError):
        prove(Down())


def test_a_store_is_asked_once():
    class Counting(Remote):
        creates = 0

        def create(self, key, data):
            self.creates += key.startswith("probe/")
            super().create(key, data)

    inner = Counting()
    store = RetryingStore(inner)
    begin(store, "step-1", world_size=1)
    asked = inner.creates
    begin(store, "step-2", world_size=1)
    assert asked == inner.creates > 0
