"""Reading what was decided: one slot, all slots of a checkpoint, and the documents a decision names.

Shared by the transaction (which walks slots to claim one) and the catalog (which walks them to read).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from txstore.errors import CheckpointRetired, FormatError, IntegrityError, NotFoundError, StoreError, UnknownVersion
from txstore.index import Index, decode_index
from txstore.keys import (
    COMMITS_PREFIX,
    LATEST_KEY,
    STORE_KEY,
    SlotName,
    decision_key,
    decision_prefix,
    parse_decision_key,
    retired_key,
)
from txstore.manifest import (
    DECISION_MAX_BYTES,
    Decision,
    Manifest,
    StoreFormat,
    decode_decision,
    decode_manifest,
    decode_pointer,
    decode_store_format,
)
from txstore.store import Store

log = logging.getLogger(__name__)

REMAKE = (
    f"`txstore init URL` writes {STORE_KEY} anew, with --spread N as the store was made if there are folders data/_00, "
    "data/_01 and so on"
)
"""What to do about a format document that is gone: it says no more than that, and nothing else is lost with it."""


def read_store_format(store: Store) -> StoreFormat | None:
    """What this root says of itself, if it is a store of a version that we know; None if it is no store.

    Raises:
        FormatError: It is a store of another version, or ``txstore.json`` is not ours.
    """
    try:
        data = store.read(STORE_KEY, 0, DECISION_MAX_BYTES + 1)
    except NotFoundError:
        return None
    try:
        return decode_store_format(data, STORE_KEY)
    except UnknownVersion:
        raise
    except FormatError as error:
        error.next_step = f"restore it from a copy of the store; without one, move it out of the store, and {REMAKE}"
        raise


def read_decision(store: Store, checkpoint: str, slot: int) -> Decision | None:
    """The decision in one slot, or None if the slot is free.

    Raises:
        FormatError: The record is damaged. A damaged record still holds its slot: it is never "free".
    """
    key = decision_key(checkpoint, slot)
    try:
        data = store.read(key, 0, DECISION_MAX_BYTES + 1)
    except NotFoundError:
        return None
    return decode_decision(data, key, checkpoint=checkpoint, slot=slot)


def walk_slots(store: Store, checkpoint: str, *, damaged: dict[int, FormatError] | None = None) -> Iterator[Decision]:
    """The decisions of a checkpoint from slot 0 up to the first free slot; slots are contiguous.

    Args:
        store: The store.
        checkpoint: Its name.
        damaged: Gets the slots whose record is damaged, with what is wrong; they are passed over. None: damage is an
            error. A record of another version is not damaged, and always an error.

    Raises:
        FormatError: A record is damaged.
        IntegrityError: A slot is free and a higher one is not, so a decision was deleted behind our back. To walk on,
            or to stop here, would hide a commit, or give a transaction a second answer.
    """
    slot = 0
    while True:
        try:
            while (decision := read_decision(store, checkpoint, slot)) is not None:
                yield decision
                slot += 1
        except FormatError as error:
            if damaged is None or isinstance(error, UnknownVersion):
                raise
            damaged[slot] = error
            slot += 1
            continue
        if slot > _highest_slot(store, checkpoint):
            return
        if (decision := read_decision(store, checkpoint, slot)) is None:
            raise IntegrityError(
                f"the decision of {checkpoint}.{slot} is missing, and a later one exists",
                key=decision_key(checkpoint, slot),
                next_step="decisions are never deleted: restore it, or use another checkpoint name",
            )


def _highest_slot(store: Store, checkpoint: str) -> int:
    names = (parse_decision_key(info.key) for info in store.list(decision_prefix(checkpoint)))
    return max((name.slot for name in names if name is not None and name.checkpoint == checkpoint), default=-1)


def is_retired(store: Store, decision: Decision) -> bool:
    """Whether retention has taken this commit back."""
    try:
        store.head(retired_key(decision.checkpoint, decision.slot))
    except NotFoundError:
        return False
    return True


def lost_record(store: Store) -> SlotName | None:
    """The commit that ``latest.json`` names, if it has neither a record nor a tombstone: the record was lost.

    The hint is written after the commit and never before. So it may lag behind, and what it names was committed. That
    is all that is believed of it (ADR 0014). A hint that is missing, cannot be read or is of another version shows
    nothing.
    """
    try:
        hint = decode_pointer(store.read(LATEST_KEY, 0, DECISION_MAX_BYTES + 1), LATEST_KEY)
        name = SlotName(hint.checkpoint, hint.slot)
    except NotFoundError:
        return None
    except (StoreError, FormatError) as error:
        # Only a hint: nothing may depend on it. A store that does not answer fails at the next request.
        log.warning("whether a record was lost cannot be seen; the next commit writes the hint anew: %s", error)
        return None
    # After the hint, and the tombstone last: whatever is done meanwhile is seen.
    for key in (decision_key(name.checkpoint, name.slot), retired_key(name.checkpoint, name.slot)):
        try:
            store.head(key)
        except NotFoundError:
            continue
        return None
    return name


def missing_record(name: SlotName, *, lost: SlotName | None = None) -> IntegrityError:
    """The error for a record that is not there; `lost` as of `lost_record`."""
    key = decision_key(name.checkpoint, name.slot)
    next_step = f"restore {key} from a copy of the store"
    if name != lost:
        what = f"the decision of {name.checkpoint}.{name.slot} is missing, although it or a later one is listed"
        return IntegrityError(what, key=key, next_step=next_step)
    return IntegrityError(
        f"the record of {name.checkpoint}.{name.slot} was lost: {LATEST_KEY} says that it was committed",
        key=key,
        next_step=f"{next_step}, with all else that is gone from {COMMITS_PREFIX}; "
        f"if it was deleted on purpose, delete {LATEST_KEY} too",
    )


def read_manifest(store: Store, decision: Decision) -> Manifest:
    """The manifest that a commit names, verified by size and digest.

    Raises:
        CheckpointRetired, IntegrityError, FormatError: See `gone`, and the decoder.
    """
    ref = decision.manifest
    if ref is None:
        raise FormatError("an abort has no manifest", key=decision.txn)
    try:
        data = store.read(ref.key, 0, ref.size + 1)
    except NotFoundError as error:
        raise gone(store, decision, ref.key) from error
    return decode_manifest(data, decision)


def read_index(store: Store, decision: Decision, manifest: Manifest) -> Index:
    """The index that a manifest names, verified by size and digest. Errors as `read_manifest`."""
    ref = manifest.index
    try:
        data = store.read(ref.key, 0, ref.size + 1)
    except NotFoundError as error:
        raise gone(store, decision, ref.key) from error
    return decode_index(data, manifest)


def gone(store: Store, decision: Decision, key: str) -> CheckpointRetired | IntegrityError:
    """The error for an object that a commit names and that is not there (commit protocol, "Readers").

    The tombstone is read again: it is set before the first delete, so its absence means damage.
    """
    name = f"{decision.checkpoint}.{decision.slot}"
    if is_retired(store, decision):
        return CheckpointRetired(f"checkpoint {name} was removed by retention while it was read", key=key)
    return IntegrityError(
        f"an object of committed checkpoint {name} is missing",
        key=key,
        next_step=f"txstore verify {store.url} --all names all damage; load an earlier checkpoint or restore {key}",
    )
