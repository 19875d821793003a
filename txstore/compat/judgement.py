"""The judgement: may this run resume from this checkpoint? Every difference is listed, never only the first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from txstore.compat.differences import (
    Difference,
    Verdict,
    compare_fingerprints,
    compare_settings,
    compare_topologies,
)
from txstore.compat.key_tables import KeyTable
from txstore.compat.layouts import OptimizerLayout, compare_layouts, compare_values
from txstore.compat.load_plan import LoadPlan, Migrated, migrate
from txstore.compat.matrix import Matrix, Sizes, entry_for
from txstore.compat.migrations import Migration, find_migrations, names_of
from txstore.compat.names import RECOVERY_POINT
from txstore.compat.near_misses import near_misses, vocabulary_hints
from txstore.compat.topology import FIELDS, with_world, without_derived_world
from txstore.errors import Incompatible
from txstore.manifest import Description

NO_MATRIX = Matrix()

ORDER: tuple[Verdict, ...] = ("blocked", "accepted", "allowed", "noted")
"""The order in which differences are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What differs, and what was decided about it.

    Attributes:
        differences: Every one, with its verdict.
        hints: What would explain several of them at once.
        remarks: What could not be compared, and names that were given in vain.
        record: For the next manifest: `Description.accepted` of a run that resumes with this judgement.
        plan: What migrations do to the load; empty without one.
        matrix_entry: The text to paste into the matrix, if the pair of topologies is not listed; or "".
    """

    differences: tuple[Difference, ...] = ()
    hints: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    record: tuple[str, ...] = ()
    plan: LoadPlan = field(default_factory=LoadPlan)
    matrix_entry: str = ""

    @property
    def allowed(self) -> bool:
        """Whether nothing blocks."""
        return not self.blocking

    @property
    def blocking(self) -> tuple[Difference, ...]:
        """What forbids the resume. A verdict that this release does not know forbids it, too."""
        return tuple(one for one in self.differences if one.verdict not in {"allowed", "accepted", "noted"})

    @property
    def accepted(self) -> tuple[Difference, ...]:
        """What was accepted by name or by a migration."""
        return tuple(one for one in self.differences if one.verdict == "accepted")

    @property
    def overrides(self) -> tuple[str, ...]:
        """What was accepted, with both values, in words; of keys, which a migration may have thousands of, none."""
        found = (one for one in self.accepted if one.kind not in _OF_KEYS)
        return tuple(f"{one}: in force by {one.by}, which accepts any other value as well" for one in found)

    @property
    def notes(self) -> tuple[str, ...]:
        """What blocks nothing and should be known."""
        return (*(_told(one) for one in self.differences if one.verdict == "noted"), *self.remarks)

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {
            "allowed": self.allowed,
            "differences": [one.to_dict() for one in self.differences],
            "hints": list(self.hints),
            "notes": list(self.notes),
            "record": list(self.record),
            "matrix_entry": self.matrix_entry,
        }

    def lines(self) -> list[str]:
        """The whole judgement as plain text, what blocks first."""
        told = [f"hint: {hint}" for hint in self.hints]
        for verdict in ORDER:
            ours = [one for one in self.differences if one.verdict == verdict]
            for why, group in groupby(ours, lambda one: one.by or one.next_step):
                lines = [f"{verdict}: {one}" for one in group]
                if why:
                    # Said once for a thousand keys: else the message is mostly this.
                    which = "" if len(lines) == 1 else f"for these {len(lines)}, "
                    lines.append(f"  {which}{'next' if verdict == 'blocked' else 'by'}: {why}")
                told += lines
        told += [f"note: {remark}" for remark in self.remarks]
        if self.matrix_entry:
            told += ["the entry for the matrix, for when a drill has passed:", *self.matrix_entry.splitlines()]
        return told

    def raise_if_blocked(self) -> None:
        """Do nothing if the resume is allowed.

        Raises:
            Incompatible: Something blocks; the message lists every difference and what would allow it.
        """
        if self.allowed:
            return
        count = len(self.blocking)
        what = (
            "1 difference between the checkpoint and this run blocks"
            if count == 1
            else (f"{count} differences between the checkpoint and this run block")
        )
        head = f"{what} the resume"
        # The end of the line: what is added to a message must not stick to the entry, which is there to be pasted.
        error = Incompatible(
            "\n  ".join([f"{head}:", *self.lines()]) + "\n",
            key=self.blocking[0].name,
            next_step="nothing was loaded; undo the change, or do what is said beside it: accept=, fresh=, migrations= "
            "are arguments of ResumeOptions, as in resume(ResumeOptions(accept={...}))",
        )
        error.judgement = self.to_dict()
        raise error


def judge(
    saved: Description,
    today: Description,
    saved_keys: KeyTable,
    today_keys: KeyTable,
    matrix: Matrix = NO_MATRIX,
    *,
    migrations: Iterable[str] = (),
    accept: Collection[str] = (),
    required: Collection[str] = (),
    saved_layouts: Sequence[OptimizerLayout] | None = None,
    today_layouts: Sequence[OptimizerLayout] | None = None,
    with_moments: Mapping[str, str] | None = None,
    others: Iterable[Difference] = (),
) -> Judgement:
    """Compare a checkpoint with today's run. Pure: nothing is opened, nothing is loaded.

    Args:
        saved: What the checkpoint's manifest says.
        today: What this run would write.
        saved_keys: The checkpoint's items, but for those that differ by nature (state of single ranks, blobs).
        today_keys: The same of this run.
        matrix: Which changes of the parallelism are verified.
        migrations: Names of registered migrations, in the order in which they apply.
        accept: Names of differences that are meant: settings (``batch_size``), the training configuration
            (``fingerprint:training_config``), and what only one side knows (``fingerprint:tokenizer``,
            ``topology:zero``).
        required: Fingerprints that must be known on both sides and equal.
        saved_layouts: Of the checkpoint's optimizers; None if they are not known.
        today_layouts: Of today's optimizers; None if they are not compared.
        with_moments: By key, the parameters of which the checkpoint's optimizers have state that would be loaded.
        others: Differences that the pieces of state have found themselves.

    Raises:
        ConfigError: A migration is unknown or broken, or a string was given for a collection.
    """
    accept, required = names_of(accept, "accept"), names_of(required, "required")
    chosen = find_migrations(migrations)
    facts = [
        *compare_settings(saved.settings, today.settings),
        *compare_fingerprints(saved.fingerprints, today.fingerprints, required),
        *others,
    ]
    layouts = compare_layouts(saved_layouts, today_layouts)
    migrated = migrate(chosen, saved_keys, today_keys, _open([*facts, *layouts], accept))
    layouts = _migrated_layouts(layouts, saved_layouts, today_layouts, migrated.used)
    made = migrated.plan.made()
    anew = {name: made[key] for key, name in (with_moments or {}).items() if key in made}
    layouts += [_by_migration(one, migrated.used) for one in compare_values(anew)]
    named = {name for side in (*(saved_layouts or ()), *(today_layouts or ())) for one in side.groups for name in one}
    facts = [_by_migration(_by_name(one, accept), migrated.used) for one in facts]
    topology = [_by_name(one, accept) for one in compare_topologies(saved.topology, today.topology)]
    topology, entry = _by_matrix(topology, saved.topology, today.topology, matrix)
    settled = [*facts, *topology, *(_by_name(one, accept) for one in layouts)]
    accepted = [str(one) for one in settled if one.by.startswith("accept")]
    record = (*saved.accepted, *accepted, *(f"migration {one.name}" for one in migrated.used))
    return Judgement(
        differences=(*settled, *migrated.settled, *migrated.left),
        hints=(*_near_misses(migrated), *vocabulary_hints(saved_keys, _blocked_shapes(migrated, today_keys))),
        remarks=(
            *_remarks(saved, today),
            *_in_vain(accept, settled, [one for one in chosen if one not in migrated.used]),
            *(
                ["optimizer layouts were not compared: they begin anew, or the Python state was not read"]
                if saved_layouts is today_layouts is None
                else []
            ),
        ),
        record=tuple(dict.fromkeys(record)),
        plan=replace(
            migrated.plan,
            parameters=frozenset(name for name in named if any(one.covers_parameter(name) for one in migrated.used)),
            keys=tuple(pattern for one in migrated.used for pattern in one.keys),
            anew=frozenset(anew),
        ),
        matrix_entry=entry,
    )


def _open(found: Iterable[Difference], accept: Collection[str]) -> list[Difference]:
    return [one for one in found if _by_name(one, accept).verdict == "blocked"]


def _by_name(one: Difference, accept: Collection[str]) -> Difference:
    if one.verdict == "blocked" and one.accept_as and one.accept_as in accept:
        return replace(one, verdict="accepted", by=f"accept {one.accept_as}")
    return one


def _by_migration(one: Difference, used: Sequence[Migration]) -> Difference:
    for migration in used:
        if one.verdict == "blocked" and migration.covers(one):
            return replace(one, verdict="accepted", by=f"migration {migration.name}")
    return one


def _migrated_layouts(
    found: list[Difference],
    saved: Sequence[OptimizerLayout] | None,
    today: Sequence[OptimizerLayout] | None,
    used: Sequence[Migration],
) -> list[Difference]:
    """The differences that migrations cover, accepted, and those that are left when what they cover is taken out."""
    if not (used and saved and today):
        return found

    def is_covered(name: str) -> bool:
        return any(migration.covers_parameter(name) for migration in used)

    left = compare_layouts([one.without(is_covered) for one in saved], [one.without(is_covered) for one in today])
    covered = [_by_migration(one, used) for one in found]
    return [one for one in covered if one.verdict == "accepted"] + [
        one for one in left if _by_migration(one, used).verdict == "blocked"
    ]


def _by_matrix(found: list[Difference], saved: Sizes, today: Sizes, matrix: Matrix) -> tuple[list[Difference], str]:
    """The verdict of the matrix on the fields that changed, and the entry to paste if there is none."""
    changed = [one for one in found if one.saved is not None and one.now is not None]
    if not changed:
        return found, ""
    # A field that one side does not know was accepted or blocks by itself; either way no entry can speak of it.
    unknown = {one.name for one in found} - {one.name for one in changed}
    before, after = (
        {name: value for name, value in without_derived_world(side).items() if name not in unknown}
        for side in (saved, today)
    )
    entries = matrix.matching(before, after)
    stopping = [entry for entry in entries if entry.status != "verified"]
    if entries and not stopping:
        by = f"matrix entry {entries[0].number}: {entries[0].status}"
        return [replace(one, verdict="allowed", by=by) if one in changed else one for one in found], ""
    strange = [one.name for one in changed if one.name not in FIELDS]
    step = "run a drill of this change, and list the pair in the matrix as verified"
    if strange:
        step = f"resume with the saved values: the matrix has no field {', '.join(strange)}"
    elif stopping:
        step = f"matrix entry {stopping[0].number} says {stopping[0].status}: run the drill, then set it to verified"
    entry = "" if entries or strange else entry_for(before, after)
    return [replace(one, next_step=step) if one in changed else one for one in found], entry


def _told(noted: Difference) -> str:
    return f"{noted}; {noted.by}" if noted.by else str(noted)


def _near_misses(migrated: Migrated) -> list[str]:
    missing, unexpected = ([one.name for one in migrated.left if one.kind == kind] for kind in _UNPAIRED)
    return near_misses(missing, unexpected) if missing and unexpected else []


_OF_KEYS = frozenset({"missing_key", "unexpected_key", "dtype", "shape", "migrated_key", "parameter"})

_UNPAIRED = ("missing_key", "unexpected_key")


def _blocked_shapes(migrated: Migrated, today: KeyTable) -> KeyTable:
    return {one.name: today[one.name] for one in migrated.left if one.kind == "shape"}


def _remarks(saved: Description, today: Description) -> list[str]:
    """What neither side records, and so nobody compared."""
    remarks = []
    silent = [name for name in RECOVERY_POINT if name not in saved.fingerprints and name not in today.fingerprints]
    if silent:
        remarks.append(_not_compared("fingerprint", silent, "fingerprints"))
    known = with_world(saved.topology).keys() | with_world(today.topology).keys()
    sizes = [name for name in FIELDS if name not in known]
    if sizes:
        remarks.append(_not_compared("topology", sizes, "topology"))
    return remarks


def _not_compared(what: str, names: Sequence[str], where: str) -> str:
    return (
        f"not compared, since neither side records it: {what} {', '.join(names)}; Description({where}=...) records it"
    )


def _in_vain(accept: Collection[str], found: Iterable[Difference], idle: Iterable[Migration]) -> list[str]:
    """Names that were given and changed nothing: used up by an earlier resume, or misspelt."""
    names = sorted(set(accept) - {one.accept_as for one in found if one.by.startswith("accept")})
    remarks = [f"accept={name!r} had nothing to accept" for name in names]
    return remarks + [f"migration {one.name!r} had nothing to migrate" for one in idle]
