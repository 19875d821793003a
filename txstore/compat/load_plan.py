"""The load plan: what migrations make of the keys, and with it what a load does for each key of today's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from txstore.compat.differences import Difference
from txstore.compat.key_tables import KeyTable, TensorFact, compare_keys
from txstore.compat.migrations import KeyPlan, Migration, Transform
from txstore.errors import ConfigError, describe


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How to load; empty if no migration was used.

    Attributes:
        renamed: Today's key to the saved key it is loaded from.
        dropped: Saved keys that are not loaded.
        fresh: Today's keys that are not loaded.
        transforms: Today's key to the function that makes its value from the saved and the fresh one.
        parameters: Parameters, saved or today's, that the migrations cover: they may be in one optimizer only, or at
            another place.
        keys: Patterns of the keys that the migrations cover.
        anew: Parameters that get another value than the saved one: their state in an optimizer begins anew.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    anew: frozenset[str] = frozenset()

    def covers(self, key: str) -> bool:
        """Whether a migration speaks of this key, or of state that would have it."""
        return any(fnmatchcase(key, pattern) for pattern in self.keys)

    @property
    def changes_keys(self) -> bool:
        """Whether a key is not loaded as ever."""
        return bool(self.renamed or self.dropped or self.fresh or self.transforms)

    def made(self) -> dict[str, str]:
        """Today's keys that do not get the value which was saved under their name, and what they get, in words."""
        made = {key: f"the value of {source}" for key, source in self.renamed.items()}
        made |= dict.fromkeys(self.fresh, "the value of the new model")
        return made | dict.fromkeys(self.transforms, "a value that the migration makes")

    def source(self, key: str) -> str | None:
        """The saved key from which today's `key` is loaded; None if it stays fresh."""
        return None if key in self.fresh else self.renamed.get(key, key)


@dataclass(frozen=True, slots=True)
class Migrated:
    """Keys after all migrations.

    Attributes:
        plan: What to load.
        settled: What the migrations do, one item a key.
        left: Differences that no migration settles.
        used: The migrations that had something to do.
    """

    plan: LoadPlan
    settled: tuple[Difference, ...]
    left: tuple[Difference, ...]
    used: tuple[Migration, ...]


def migrate(
    migrations: Sequence[Migration], saved: KeyTable, today: KeyTable, others: Iterable[Difference]
) -> Migrated:
    """Apply migrations in order. One that covers no difference is not asked: it was used up by an earlier resume.

    Args:
        migrations: In the order in which they apply; each sees the keys as the one before left them.
        saved: The checkpoint's keys.
        today: This run's keys.
        others: Differences that are none of keys, such as fingerprints.

    Raises:
        ConfigError: A migration fails, touches what it does not cover, or contradicts the keys or another migration.
    """
    rows = {name: (name, fact) for name, fact in saved.items()}
    fresh: dict[str, TensorFact] = {}
    dropped: list[str] = []
    transforms: dict[str, Transform] = {}
    settled: list[Difference] = []
    used = []
    others = tuple(others)
    for migration in migrations:
        table = {name: fact for name, (_, fact) in rows.items()}
        wanted = {name: fact for name, fact in today.items() if name not in fresh}
        if not any(map(migration.covers, (*others, *compare_keys(table, wanted)))):
            continue
        plan = _ask(migration, table, wanted)
        _check(migration, plan, table, wanted, transforms)
        by = f"migration {migration.name}"
        for name in plan.drop:
            dropped.append(rows.pop(name)[0])
            settled.append(_item(by, name, str(table[name]), None))
        moved = {new: rows.pop(old) for old, new in plan.rename.items()}
        settled += [_item(by, old, str(table[old]), f"loaded as {new}") for old, new in plan.rename.items()]
        rows |= moved
        for name in plan.fresh:
            fresh[name] = today[name]
            settled.append(_item(by, name, None, f"fresh {today[name]}"))
        for name, transform in plan.transform.items():
            source, fact = rows[name]
            rows[name] = (source, today[name])
            transforms[name] = transform
            settled.append(_item(by, name, str(fact), f"transformed to {today[name]}"))
        used.append(migration)
    final = {name: fact for name, (_, fact) in rows.items()}
    left = compare_keys(final, {name: fact for name, fact in today.items() if name not in fresh})
    renamed = {name: source for name, (source, _) in rows.items() if name != source}
    return Migrated(
        LoadPlan(renamed, tuple(dropped), tuple(fresh), transforms), tuple(settled), tuple(left), tuple(used)
    )


def _ask(migration: Migration, table: KeyTable, wanted: KeyTable) -> KeyPlan:
    try:
        plan = migration.planner(dict(table), dict(wanted))
    except Exception as error:
        raise ConfigError(f"migration {migration.name!r} failed: {describe(error)}", key=migration.name) from error
    if not isinstance(plan, KeyPlan):
        raise ConfigError(
            f"migration {migration.name!r} returned {type(plan).__name__}", key=migration.name, next_step="a KeyPlan"
        )
    return plan


def _check(
    migration: Migration, plan: KeyPlan, table: KeyTable, wanted: KeyTable, transformed: Mapping[str, Transform]
) -> None:
    def refuse(names: Iterable[str], what: str) -> None:
        wrong = sorted(set(names))
        if wrong:
            raise ConfigError(f"migration {migration.name!r} {what}: {', '.join(wrong)}", key=wrong[0])

    touched = {*plan.rename, *plan.rename.values(), *plan.drop, *plan.fresh, *plan.transform}
    refuse((name for name in touched if not migration.covers_key(name)), "touches keys that it does not cover")
    refuse({*plan.rename, *plan.drop} - table.keys(), "renames or drops keys that were not saved")
    refuse(set(plan.rename).intersection(plan.drop), "renames and drops the same keys")
    targets = Counter(plan.rename.values())
    refuse((name for name, count in targets.items() if count > 1), "renames two keys to one")
    kept = table.keys() - set(plan.rename) - set(plan.drop)
    refuse(kept.intersection(targets), "renames to keys that were saved, too")
    refuse({*targets, *plan.fresh, *plan.transform} - wanted.keys(), "makes keys that today's state does not have")
    loaded = kept | set(targets)
    refuse(loaded.intersection(plan.fresh), "keeps keys fresh and loads them, too; drop the saved ones")
    refuse(plan.transform.keys() - loaded, "transforms keys that are not loaded")
    refuse(set(plan.transform).intersection(transformed), "transforms keys that another migration has transformed")


def _item(by: str, name: str, saved: str | None, now: str | None) -> Difference:
    item = Difference("migrated_key", name, saved, now, change_class=3)
    return replace(item, verdict="accepted", by=by)
