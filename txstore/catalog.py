"""What is committed: listing, the newest, one by name. Reads decisions and nothing else; never repairs.

Order is numeric by step, from names that carry their step and records that must agree with them, never
text order, modification times or a clock. ``latest.json`` chooses nothing: it only shows that a record was lost
(`txstore.decisions.lost_record`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from txstore.decisions import (
    REMAKE,
    is_retired,
    lost_record,
    missing_record,
    read_decision,
    read_store_format,
    walk_slots,
)
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
    DATA_PREFIX,
    LATEST_KEY,
    RETIRED_PREFIX,
    STORE_KEY,
    SlotName,
    check_checkpoint,
    decision_prefix,
    parse_attempt,
    parse_decision_key,
    parse_retired_key,
    retired_key,
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
    listing = list_records(store)
    listing.check_format(store)
    retired, names = listing.retired, listing.names()
    decisions = side_by_side(lambda name: _read_or_note(store, name, listing, damaged), names)
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
        IntegrityError: A record on the way is missing: see `lost_record`.
    """
    listing = list_records(store)
    listing.check_format(store)
    best: Decision | None = None
    for checkpoint in sorted(listing.highest.keys() - set(passed_over), key=by_step, reverse=True):
        if best is not None and step_of(checkpoint) != best.step:
            break
        decision = _standing(store, checkpoint, listing)
        if decision is not None and best is not None:
            raise ConfigError(
                f"{best.checkpoint} and {decision.checkpoint} are both newest: "
                + ("neither name ends in a step" if best.step is None else "they have the same step"),
                next_step="name the checkpoint; keep one run per store root",
            )
        best = decision or best
    if best is None:
        raise nothing_committed(store)
    return best


def find(store: Store, checkpoint: str) -> Decision:
    """The commit of `checkpoint` that readers take: the highest slot that is a commit and not retired.

    Raises:
        CheckpointNotFound: No such commit.
        CheckpointRetired: All its commits were removed by retention.
        FormatError: A record that may be it is damaged.
        IntegrityError: A record that may be it is missing: see `lost_record`.
    """
    check_checkpoint(checkpoint)
    lost = lost_record(store)
    unreadable: dict[int, FormatError] = {}
    decisions = list(walk_slots(store, checkpoint, damaged=unreadable))
    damaged: dict[int, FormatError | IntegrityError] = {**unreadable}
    if lost is not None and lost.checkpoint == checkpoint and all(found.slot != lost.slot for found in decisions):
        damaged[lost.slot] = missing_record(lost, lost=lost)
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
        next_step=f"txstore ls {store.url} --all shows what there is",
    )


@dataclass(frozen=True, slots=True)
class Records:
    """Which records a store has.

    Attributes:
        highest: The highest slot of each checkpoint.
        retired: The commits that have a tombstone.
        lost: See `lost_record`; its slot counts in `highest`.
    """

    highest: dict[str, int]
    retired: frozenset[SlotName]
    lost: SlotName | None

    def names(self) -> list[SlotName]:
        """Every slot, by ascending step and name; of each checkpoint the highest first.

        Slots are contiguous and records are never deleted: one that the listing lacks was filled meanwhile, or is gone.
        """
        return [
            SlotName(checkpoint, slot)
            for checkpoint in sorted(self.highest, key=by_step)
            for slot in range(self.highest[checkpoint], -1, -1)
        ]

    def check_format(self, store: Store) -> None:
        """Refuse records in a place that does not say that it is a store.

        Raises:
            IntegrityError: It is part of a store.
            FormatError: As `read_store_format`.
        """
        if read_store_format(store) or not self.highest:
            return
        if self.lost is not None:
            raise IntegrityError(
                f"{STORE_KEY} is gone, and so is the record of {self.lost.checkpoint}.{self.lost.slot}, which "
                f"{LATEST_KEY} says was committed",
                key=STORE_KEY,
                next_step=f"restore both from a copy of the store; deleted on purpose? Then delete {LATEST_KEY} too",
            )
        raise IntegrityError(
            "the store has decisions but no format document",
            key=STORE_KEY,
            next_step=f"copy txstore.json too: a partial copy is not a store. If there is none to copy, {REMAKE}",
        )


def list_records(store: Store, checkpoint: str | None = None) -> Records:
    """Which records there are, of one checkpoint or of all. None of them is read.

    Raises:
        StoreError: The listing failed; that is never an empty answer.
    """
    lost = lost_record(store)  # first: what it names is in the listing, unless it is gone
    if lost is not None and checkpoint not in {None, lost.checkpoint}:
        lost = None
    highest: defaultdict[str, int] = defaultdict(int, {} if lost is None else {lost.checkpoint: lost.slot})
    for info in store.list(COMMITS_PREFIX if checkpoint is None else decision_prefix(checkpoint)):
        name = parse_decision_key(info.key)
        if name and checkpoint in {None, name.checkpoint}:
            highest[name.checkpoint] = max(highest[name.checkpoint], name.slot)
    # Tombstones are listed last: one set meanwhile is seen.
    prefix = RETIRED_PREFIX if checkpoint is None else retired_key(checkpoint, 0)[:-1]
    retired = frozenset(name for info in store.list(prefix) if (name := parse_retired_key(info.key)))
    return Records(dict(highest), retired, lost)


def left_behind(store: Store) -> int:
    """How many attempts have data here; asked where nothing is committed."""
    return len({attempt for info in store.list(DATA_PREFIX) if (attempt := parse_attempt(info.key))})


def nothing_committed(store: Store) -> CheckpointNotFound:
    """The error for a store, or a place, that holds no checkpoint: says what is there instead."""
    is_store, attempts = read_store_format(store) is not None, left_behind(store)
    if attempts:
        data = "data of 1 attempt" if attempts == 1 else f"data of {attempts} attempts"
        return CheckpointNotFound(
            f"no committed checkpoint in {store.url}: there is {data}, and no record says that any was ever committed"
            + ("" if is_store else f"; {STORE_KEY} is not there either"),
            key=store.url,
            next_step="a first save that was killed leaves this: start again. If there were checkpoints, do not: "
            f"restore {COMMITS_PREFIX} and {STORE_KEY} from a copy of the store",
        )
    if is_store:
        return CheckpointNotFound(f"no committed checkpoint in {store.url}", key=store.url)
    return CheckpointNotFound(
        f"no store at {store.url}: nothing was ever saved there",
        key=store.url,
        next_step="check the URL, or save the first checkpoint",
    )


def by_step(checkpoint: str) -> tuple[int, str]:
    """What names of checkpoints are sorted by: the step, those without one first; then the name."""
    step = step_of(checkpoint)
    return (-1 if step is None else step, checkpoint)


def _read_or_note(store: Store, name: SlotName, listing: Records, damaged: Damaged | None) -> Decision | None:
    try:
        return _must_read(store, name, listing)
    except (FormatError, IntegrityError) as error:
        if damaged is None or isinstance(error, UnknownVersion):
            raise
        damaged[name] = error
        return None


def _must_read(store: Store, name: SlotName, listing: Records) -> Decision:
    decision = read_decision(store, name.checkpoint, name.slot)
    if decision is None:
        raise missing_record(name, lost=listing.lost)
    return decision


def _standing(store: Store, checkpoint: str, listing: Records) -> Decision | None:
    # A slot that the listing lacks is read all the same: it was filled meanwhile, or its decision was deleted.
    for slot in range(listing.highest[checkpoint], -1, -1):
        name = SlotName(checkpoint, slot)
        if name in listing.retired:
            continue
        decision = _must_read(store, name, listing)
        if decision.kind == "commit":
            return decision
    return None
