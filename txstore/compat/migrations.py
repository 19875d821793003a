"""Migrations: the explicit way over a change of what the state means. Registered by name, recorded when used.

Nothing here knows torch: a tensor is an opaque `object` that the caller's functions turn into another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from txstore.compat.differences import Difference
from txstore.compat.key_tables import KeyTable
from txstore.errors import ConfigError

Transform = Callable[[object, object], object]
"""``transform(saved value, fresh value) -> value``, which has the fresh one's dtype and shape."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPlan:
    """What a migration does with keys; all names are exact. Keys that it does not name are loaded as ever.

    Attributes:
        rename: Saved key to today's key.
        drop: Saved keys that are not loaded.
        fresh: Today's keys that keep the value of the fresh model.
        transform: Today's key (after `rename`) to the function that makes its value; its dtype and shape may differ.
    """

    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Collection[str] = ()
    fresh: Collection[str] = ()
    transform: Mapping[str, Transform] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("drop", "fresh"):
            once = tuple(dict.fromkeys(names_of(getattr(self, name), name)))
            object.__setattr__(self, name, once)


Planner = Callable[[KeyTable, KeyTable], KeyPlan]
"""``planner(saved keys, today's keys) -> KeyPlan``: called when something that the migration covers differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A registered migration, and what it covers: exactly that is allowed, and nothing else.

    Attributes:
        name: What ``migrations=`` calls it, and the next manifest records.
        planner: Says what becomes of the keys.
        fingerprints: Fingerprints that may differ.
        keys: Patterns (``*``, ``?``) of the keys that the plan may touch, saved and today's.
        parameters: Patterns of the optimizer's parameters that may come, go or move, or get another value by the plan.
            What is new or has another value begins without moments; what moved keeps its own, by its name.
    """

    name: str
    planner: Planner
    fingerprints: frozenset[str]
    keys: tuple[str, ...]
    parameters: tuple[str, ...]

    def covers(self, difference: Difference) -> bool:
        """Whether it speaks of this difference. A key must also be settled by its plan."""
        match difference.kind:
            case "fingerprint":
                return difference.name in self.fingerprints
            case "parameter":
                return self.covers_parameter(difference.name)
            case "missing_key" | "unexpected_key" | "dtype" | "shape":
                return self.covers_key(difference.name)
            case _:
                return False

    def covers_key(self, name: str) -> bool:
        """Whether its plan may touch this key."""
        return any(fnmatchcase(name, pattern) for pattern in self.keys)

    def covers_parameter(self, name: str) -> bool:
        """Whether this parameter of an optimizer may come, go, move or get another value."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


_registered: dict[str, Migration] = {}


def migration(
    name: str,
    *,
    fingerprints: Collection[str] = (),
    keys: Collection[str] = (),
    parameters: Collection[str] = (),
) -> Callable[[Planner], Planner]:
    """Register the decorated planner as a migration. The arguments are those of `Migration`.

    Raises:
        ConfigError: A bad name, one that another function has, or a migration that covers nothing.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"not a name of a migration: {name!r}", next_step="a-z, 0-9, dot, dash and underscore")
    names = {
        what: names_of(given, what)
        for what, given in (("fingerprints", fingerprints), ("keys", keys), ("parameters", parameters))
    }
    if not any(names.values()):
        raise ConfigError(f"migration {name!r} covers nothing", next_step="name fingerprints, keys or parameters")

    def register(planner: Planner) -> Planner:
        known = _registered.get(name)
        if known and _home(known.planner) != _home(planner):
            raise ConfigError(f"two migrations are called {name!r}: {_home(known.planner)} and {_home(planner)}")
        _registered[name] = Migration(
            name=name,
            planner=planner,
            fingerprints=frozenset(names["fingerprints"]),
            keys=names["keys"],
            parameters=names["parameters"],
        )
        return planner

    return register


def find_migrations(names: Iterable[str]) -> tuple[Migration, ...]:
    """The registered migrations of these names, in this order.

    Raises:
        ConfigError: No migration has this name.
    """
    wanted = names_of(names, "migrations")
    unknown = [name for name in wanted if name not in _registered]
    if unknown:
        known = ", ".join(sorted(_registered)) or "none"
        raise ConfigError(
            f"no migration is called {', '.join(map(repr, unknown))}; registered: {known}",
            key=unknown[0],
            next_step="import the module that registers it",
        )
    return tuple(_registered[name] for name in wanted)


def names_of(given: Iterable[str], what: str) -> tuple[str, ...]:
    """`given` as a tuple. A bare string is refused: it would be taken for its letters."""
    if isinstance(given, str):
        raise ConfigError(f"{what} must be several names, not the string {given!r}", next_step=f"({given!r},)")
    return tuple(given)


def _home(planner: Planner) -> str:
    return f"{getattr(planner, '__module__', '?')}.{getattr(planner, '__qualname__', repr(planner))}"
