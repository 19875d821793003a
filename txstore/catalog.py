"""What is committed: listing, the newest, one by name. Reads decisions and nothing else; never repairs.

Order is numeric by step, from names that carry their step and records that must agree with them, never
text order, modification times or a clock. ``latest.json`` is not consulted: one listing answers more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from txstore.decisions import is_retired, read_decision, read_store_format, walk_slots
from txstore.errors import (
    CheckpointNotFound,
    CheckpointRetired,
    ConfigError,
    FormatError,
    IntegrityError,
    UnknownVersion,
)
from txstore.keys import (
    COMMITS_PREFIX,
    RETIRED_PREFIX,
    STORE_KEY,
    SlotName,
    check_checkpoint,
    decision_key,
    parse_decision_key,
    parse_retired_key,
    step_of,
)
from txstore.manifest import Decision
from txstore.side_by_side import side_by_side
from txstore.store import Store

State = Literal["committed", "superseded", "retired", "aborted", "unknown"]
"""``unknown`` is a commit below a damaged record: nobody can tell whether it is superseded, and no reader takes it."""

Damaged = dict[SlotName, FormatError | IntegrityError]
"""Records that are damaged or missing, and what is wrong with each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision and what it means for readers now."""

    decision: Decision
    state: State


def entries(store: Store, *, damaged: Damaged | None = None) -> list[Entry]:
    """Every decision in the store, by ascending step, name and slot.

    Args:
        store: The store.
        damaged: Gets the records that cannot be read; they have no entry. None: damage is an error. A record of another
            version is not damaged, and always an error.

    Raises:
        FormatError, IntegrityError: Some record is damaged, or missing.
        StoreError: The listing failed; that is never an empty answer.
    """
    slots, retired = _listing(store)
    names = [
        SlotName(checkpoint, slot)
        for checkpoint in sorted(slots, key=by_step)
        for slot in range(max(slots[checkpoint]), -1, -1)
    ]
    decisions = side_by_side(lambda name: _read_or_note(store, name, damaged), names)
    found: list[Entry] = []
    above: dict[str, State] = {}  # what a commit is below what was seen so far of its checkpoint
    for name, decision in zip(names, decisions, strict=True):  # of each checkpoint the highest slot first
        state: State = "aborted"
        if name in retired:
            state = "retired"
        elif decision is None:
            above.setdefault(name.checkpoint, "unknown")
        elif decision.kind == "commit":
            state = above.get(name.checkpoint, "committed")
            if state == "committed":
                above[name.checkpoint] = "superseded"
        if decision is not None:
            found.append(Entry(decision, state))
    return sorted(found, key=lambda entry: (*by_step(entry.decision.checkpoint), entry.decision.slot))


def newest(store: Store, *, passed_over: Collection[str] = ()) -> Decision:
    """The commit with the highest step that stands.

    Args:
        store: The store.
        passed_over: Names of checkpoints that are known to be damaged; their records are not read.

    Raises:
        CheckpointNotFound: A successful listing holds none.
        ConfigError: Two checkpoints have that step: only their names can tell them apart.
        FormatError: A record on the way is damaged.
    """
    slots, retired = _listing(store)
    best: Decision | None = None
    for checkpoint in sorted(slots.keys() - set(passed_over), key=by_step, reverse=True):
        if best is not None and step_of(checkpoint) != best.step:
            break
        decision = _standing(store, checkpoint, slots[checkpoint], retired)
        if decision is not None and best is not None:
            raise ConfigError(
                f"{best.checkpoint} and {decision.checkpoint} are both newest: "
                + ("neither name ends in a step" if best.step is None else "they have the same step"),
                next_step="name the checkpoint; keep one run per store root",
            )
        best = decision or best
    if best is None:
        what = "no committed checkpoint in" if read_store_format(store) else "no store, nothing was ever saved, at"
        raise CheckpointNotFound(f"{what} {store.url}", key=store.url)
    return best


def find(store: Store, checkpoint: str) -> Decision:
    """The commit of `checkpoint` that readers take: the highest slot that is a commit and not retired.

    Raises:
        CheckpointNotFound: No such commit.
        CheckpointRetired: All its commits were removed by retention.
        FormatError: A record that may be it is damaged.
    """
    check_checkpoint(checkpoint)
    damaged: dict[int, FormatError] = {}
    decisions = list(walk_slots(store, checkpoint, damaged=damaged))
    read_store_format(store)  # a store of a layout that this release does not know is refused by name, too
    was_retired = False
    for decision in reversed(decisions):
        if any(slot > decision.slot for slot in damaged):
            break
        if decision.kind != "commit":
            continue
        if not is_retired(store, decision):
            return decision
        was_retired = True
    if damaged:  # none above a commit that stands: that one is the answer, whatever they were
        raise damaged[max(damaged)]
    if was_retired:
        raise CheckpointRetired(f"checkpoint {checkpoint} was removed by retention", key=checkpoint)
    raise CheckpointNotFound(
        f"no committed checkpoint {checkpoint} in {store.url}",
        key=checkpoint,
        next_step="txstore ls shows what there is",
    )


def by_step(checkpoint: str) -> tuple[int, str]:
    """What names of checkpoints are sorted by: the step, those without one first; then the name."""
    step = step_of(checkpoint)
    return (-1 if step is None else step, checkpoint)


def _listing(store: Store) -> tuple[dict[str, set[int]], set[SlotName]]:
    """Slots by checkpoint, and the retired ones. Tombstones are listed last: one set meanwhile is seen."""
    slots: defaultdict[str, set[int]] = defaultdict(set)
    for info in store.list(COMMITS_PREFIX):
        if name := parse_decision_key(info.key):
            slots[name.checkpoint].add(name.slot)
    _check_format(store, has_decisions=bool(slots))
    retired = {name for info in store.list(RETIRED_PREFIX) if (name := parse_retired_key(info.key))}
    return dict(slots), retired


def _check_format(store: Store, *, has_decisions: bool) -> None:
    if not read_store_format(store) and has_decisions:
        raise IntegrityError(
            "the store has decisions but no format document",
            key=STORE_KEY,
            next_step="copy txstore.json too: a partial copy is not a store",
        )


def _read_or_note(store: Store, name: SlotName, damaged: Damaged | None) -> Decision | None:
    try:
        return _must_read(store, name.checkpoint, name.slot)
    except (FormatError, IntegrityError) as error:
        if damaged is None or isinstance(error, UnknownVersion):
            raise
        damaged[name] = error
        return None


def _must_read(store: Store, checkpoint: str, slot: int) -> Decision:
    decision = read_decision(store, checkpoint, slot)
    if decision is None:
        raise IntegrityError(
            f"the decision of {checkpoint}.{slot} is missing, although it or a later one is listed",
            key=decision_key(checkpoint, slot),
        )
    return decision


def _standing(store: Store, checkpoint: str, slots: set[int], retired: set[SlotName]) -> Decision | None:
    # A slot that the listing lacks is read all the same: it was filled meanwhile, or its decision was deleted.
    for slot in range(max(slots), -1, -1):
        if SlotName(checkpoint, slot) in retired:
            continue
        decision = _must_read(store, checkpoint, slot)
        if decision.kind == "commit":
            return decision
    return None
