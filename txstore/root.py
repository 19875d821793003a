"""The root of a store: made once, by the first attempt to save, and then the same one for as long as a writer lives."""

from __future__ import annotations

from txstore.decisions import read_decision, read_store_format
from txstore.errors import AlreadyExistsError, FormatError, StoreReplaced
from txstore.keys import STORE_KEY, decision_key
from txstore.manifest import Decision, StoreFormat, encode
from txstore.probe import prove
from txstore.store import Store


class KnownStore:
    """What one writer has seen of its store, so that a deleted one is not silently made anew.

    A store is known by its format document and by a commit that was seen in it: decisions are never deleted, and a
    transaction id is never used again, so no other store holds the same.
    """

    def __init__(self) -> None:
        self._seen = False
        self._decision: Decision | None = None

    @property
    def seen(self) -> bool:
        """Whether the store was there before."""
        return self._seen

    def see(self, decision: Decision | None = None) -> None:
        """The store is there, and holds `decision`."""
        self._seen = True
        self._decision = decision or self._decision

    def check(self, store: Store) -> None:
        """Compare a store with the one that was seen.

        Raises:
            StoreReplaced: It was deleted, emptied or replaced.
            StoreError: It could not be read.
        """
        if self._seen and not read_store_format(store):
            raise _replaced(store, STORE_KEY, "its format document is gone")
        known = self._decision
        if known is None:
            return
        try:
            found = read_decision(store, known.checkpoint, known.slot)
        except FormatError:
            return  # damaged, and so still there: told by whoever reads it, and saves go on
        if found != known:
            what = "is gone" if found is None else f"is now that of {found.txn}, by {found.writer}"
            key = decision_key(known.checkpoint, known.slot)
            raise _replaced(store, key, f"the decision {known.checkpoint}.{known.slot} {what}")


def ensure_store(store: Store, known: KnownStore | None = None) -> None:
    """Create ``txstore.json`` once; the first use of the store's `create`, before any shard is written.

    Args:
        store: The store.
        known: What this writer has seen of it; a store that is known is not made anew.

    Raises:
        StoreReplaced: It is known, and is not what was seen.
        FormatError: The root belongs to another format version.
        CapabilityError: The store cannot create exclusively (`txstore.probe`).
    """
    if known is not None and known.seen:
        known.check(store)
        prove(store)
        return
    prove(store)
    if not read_store_format(store):
        try:
            store.create(STORE_KEY, encode(StoreFormat()))
        except AlreadyExistsError:
            if not read_store_format(store):
                raise
    if known is not None:
        known.see()


def _replaced(store: Store, key: str, what: str) -> StoreReplaced:
    return StoreReplaced(
        f"{store.url} was deleted, emptied or replaced while this writer used it: {what}",
        key=key,
        next_step="nothing was committed; find out what happened to it before you start again",
    )
