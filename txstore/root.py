"""The root of a store: made once, by the first attempt to save, and then the same one for as long as a writer lives."""

from __future__ import annotations

from txstore.decisions import read_decision, read_store_format
from txstore.errors import AlreadyExistsError, ConfigError, FormatError, StoreReplaced
from txstore.keys import SPREAD_PREFIX, STORE_KEY, decision_key, spread_part
from txstore.manifest import Decision, StoreFormat, encode, spread_of, store_format
from txstore.probe import prove
from txstore.store import Store


class KnownStore:
    """What one writer has seen of its store, so that a deleted one is not silently made anew.

    A store is known by its format document and by a commit that was seen in it: decisions are never deleted, and a
    transaction id is never used again, so no other store holds the same.
    """

    def __init__(self) -> None:
        self._layout: StoreFormat | None = None
        self._decision: Decision | None = None

    def see(self, layout: StoreFormat | None = None, decision: Decision | None = None) -> None:
        """The store has this format document, and holds `decision`."""
        self._layout = layout or self._layout
        self._decision = decision or self._decision

    def check(self, store: Store) -> None:
        """Compare a store with the one that was seen.

        Raises:
            StoreReplaced: It was deleted, emptied or replaced.
            StoreError: It could not be read.
        """
        if self._layout is not None and (layout := read_store_format(store)) != self._layout:
            what = "is gone" if layout is None else "is now another"
            raise _replaced(store, STORE_KEY, f"its format document {what}")
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


def ensure_store(store: Store, known: KnownStore | None = None, *, spread: int | None = None) -> StoreFormat:
    """Create ``txstore.json`` once; the first use of the store's `create`, before any shard is written.

    Args:
        store: The store.
        known: What this writer has seen of it; a store that is known is not made anew.
        spread: How many prefixes a new store spreads its shards over, 0 for none. None takes a store as it is, and
            makes a new one without.

    Returns:
        The format document that stands.

    Raises:
        StoreReplaced: It is known, and is not what was seen.
        FormatError: The root belongs to another format version.
        CapabilityError: The store cannot create exclusively (`txstore.probe`).
        ConfigError: The store, or what lies there without a document, has another spread; or none can have this one.
    """
    wanted = store_format(spread or 0)
    if known is not None:
        known.check(store)
    prove(store)
    found = read_store_format(store)
    if found is None:
        _check_shards(store, spread_of(wanted))
        try:
            store.create(STORE_KEY, encode(wanted))
        except AlreadyExistsError:
            found = read_store_format(store)
            if found is None:
                raise
        else:
            found = wanted
    if spread is not None and found != wanted:
        raise ConfigError(
            f"the store spreads its shards over {spread_of(found)} prefixes, not {spread}",
            key=STORE_KEY,
            next_step="a store keeps its layout: choose another root, or leave it as it is",
        )
    if known is not None:
        known.see(found)
    return found


def _check_shards(store: Store, spread: int) -> None:
    """Refuse a document that shards contradict which lie here already: a removal would leave them for ever."""
    last, after = -1, ""
    while (info := next(iter(store.list(SPREAD_PREFIX, after)), None)) is not None:
        part = spread_part(info.key)
        last = max(last, -1 if part is None else part)
        after = info.key if part is None else f"{SPREAD_PREFIX}{part:02x}/~"  # beyond all keys below it
    if last >= spread:
        raise ConfigError(
            f"{STORE_KEY} is gone, and shards here are spread over prefixes up to {SPREAD_PREFIX}{last:02x}",
            key=STORE_KEY,
            next_step=f"`txstore init URL --spread N` with the N of before, {max(2, last + 1)} or more",
        )


def _replaced(store: Store, key: str, what: str) -> StoreReplaced:
    return StoreReplaced(
        f"{store.url} was deleted, emptied or replaced while this writer used it: {what}",
        key=key,
        next_step="nothing was committed; find out what happened to it before you start again",
    )
