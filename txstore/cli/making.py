"""``txstore init``: a store's format document, before anything is saved."""

from __future__ import annotations

from txstore.cli.outcome import OK, Outcome
from txstore.manifest import spread_of
from txstore.redact import redact
from txstore.root import ensure_store
from txstore.store import Store


def init(store: Store, url: str, spread: int | None) -> Outcome:
    """Make the store, or find it made the same way."""
    found = ensure_store(store, spread=spread)
    parts = spread_of(found)
    layout = f"shards are spread over {parts} prefixes" if parts else "shards lie below their checkpoint"
    document: dict[str, object] = {"format_version": found.version, "spread": parts}
    return Outcome(OK, document, (f"{redact(url)} is a store of format version {found.version}: {layout}",))
