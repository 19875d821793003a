"""Which recovery point to resume: chosen once, by the coordinator, from what is committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from txstore.catalog import find, left_behind, newest
from txstore.decisions import read_manifest
from txstore.errors import CheckpointNotFound, CheckpointRetired, FormatError, IntegrityError, LoadError, UnknownVersion
from txstore.keys import SlotName, parse_decision_key
from txstore.manifest import Decision, Manifest
from txstore.ops.report import Depth, Report
from txstore.ops.verify import verify
from txstore.store import Store

log = logging.getLogger(__name__)


def choose(store: Store, checkpoint: str | None, damaged: Collection[SlotName] = ()) -> Decision | None:
    """The commit to resume: the named one, else the newest that is not `damaged`; None if nothing is committed yet.

    Raises:
        CheckpointNotFound: The named one does not exist.
        IntegrityError: All that is committed is damaged, or its record was lost (`txstore.decisions.lost_record`).
        TxStoreError: The store could not be read. That is never "no checkpoint yet" (failure case B6).
    """
    if checkpoint is not None:
        return find(store, checkpoint)
    try:
        return newest(store, passed_over={one.checkpoint for one in damaged})
    except CheckpointNotFound as error:
        if not damaged:
            if left_behind(store):  # as after a first save that was killed: right, and yet not to be silent about
                log.warning("a fresh start, nothing is resumed: %s", error)
            return None
        raise IntegrityError(
            f"all {len(damaged)} committed checkpoints are damaged",
            key=store.url,
            next_step=f"txstore verify {store.url} --all names what is wrong; restore the objects from a copy",
        ) from None


def newest_readable(store: Store, passed_over: Collection[str]) -> tuple[Decision | None, tuple[str, ...]]:
    """The newest commit whose record can be read, or None; and the checkpoints whose records are damaged.

    Args:
        store: The store.
        passed_over: Names of checkpoints that are known to be damaged.

    Raises:
        ConfigError: Two checkpoints are newest.
        TxStoreError: The store could not be read.
    """
    damaged: list[str] = []
    while True:
        try:
            return newest(store, passed_over={*passed_over, *damaged}), tuple(damaged)
        except CheckpointNotFound:
            return None, tuple(damaged)
        except FormatError as error:
            name = parse_decision_key(error.key)
            if isinstance(error, UnknownVersion) or name is None or name.checkpoint in damaged:
                raise
            damaged.append(name.checkpoint)


def examine(store: Store, decision: Decision, depth: Depth, tell: Callable[[Report, float], object]) -> Manifest:
    """Verify a commit and return its manifest.

    Args:
        store: The store.
        decision: The commit.
        depth: How deep.
        tell: Is told what was found, and how long it took in seconds, before anything is raised.

    Raises:
        IntegrityError: It is damaged; names every object.
        CheckpointRetired: Retention is removing it.
        LoadError: An object cannot be read.
    """
    started_s = time.monotonic()
    found = verify(store, decision, depth=depth)
    tell(found, time.monotonic() - started_s)
    if found.state == "retired":
        raise CheckpointRetired(f"checkpoint {decision.checkpoint} was removed by retention", key=decision.checkpoint)
    if found.problems:
        first = found.problems[0]
        kind = IntegrityError if found.state == "damaged" else LoadError
        raise kind(
            f"{decision.checkpoint} is {found.state}: "
            + "; ".join(f"{one.key}: {one.what}" for one in found.problems[:5]),
            key=first.key,
            next_step=first.next_step,
        )
    return read_manifest(store, decision)
