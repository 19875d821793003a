"""The compatibility matrix: which changes of the parallelism have passed a drill. A YAML file that the user owns."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from txstore.compat.topology import FIELDS, check_field, with_world, without_derived_world
from txstore.errors import ConfigError

Status = Literal["verified", "blocked_until_drill_passes"]

_ROOT = "resume_compatibility"
_KEYS = ("from", "to", "status")

Sizes = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry.

    It matches a pair of topologies if every field that it names has exactly that value, and every field that it does
    not name is the same on both sides. `world` need not be named where it is dp x tp x pp.

    Attributes:
        number: Its place in the file, from 1.
        saved: What the checkpoint has (``from``).
        today: What this run has (``to``).
        status: Whether a drill has passed.
    """

    number: int
    saved: Sizes
    today: Sizes
    status: Status

    def matches(self, saved: Sizes, today: Sizes) -> bool:
        """Whether this entry speaks of this pair."""
        for named, side in ((self.saved, saved), (self.today, today)):
            known = with_world(side)
            if any(known.get(name) != value for name, value in named.items()):
                return False
        before, after = without_derived_world(saved), without_derived_world(today)
        unnamed = (before.keys() | after.keys()) - self.saved.keys()
        return all(before.get(name) == after.get(name) for name in unnamed)


@dataclass(frozen=True, slots=True)
class Matrix:
    """All entries, and where they came from."""

    entries: tuple[Entry, ...] = ()
    source: str = ""

    def matching(self, saved: Sizes, today: Sizes) -> tuple[Entry, ...]:
        """The entries that speak of this pair. One that is not verified outweighs the others."""
        return tuple(entry for entry in self.entries if entry.matches(saved, today))


def read_matrix(path: str | os.PathLike[str]) -> Matrix:
    """Read and decode a matrix file.

    Raises:
        ConfigError: It cannot be read, or is not a matrix.
    """
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            return parse_matrix(file.read(), source=name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the compatibility matrix: {error}", key=name) from error


def parse_matrix(text: str, *, source: str = "") -> Matrix:
    """Decode a matrix strictly: nothing in it is skipped or guessed.

    Raises:
        ConfigError: No YAML, unknown keys or statuses, wrong types, an entry twice, or entries that contradict one
            another or themselves; with the line or the number of the entry.
    """
    document = _load(text, source)
    if not isinstance(document, dict) or set(document) != {_ROOT} or not isinstance(document[_ROOT], list):
        raise ConfigError(f"a compatibility matrix is a mapping with one key {_ROOT!r}, a list of entries", key=source)
    entries = tuple(_entry(number, raw, source) for number, raw in enumerate(document[_ROOT], 1))
    for entry in entries:
        for other in entries[: entry.number - 1]:
            if (entry.saved, entry.today) == (other.saved, other.today):
                what = "repeats" if entry.status == other.status else "contradicts"
                raise ConfigError(f"matrix entry {entry.number} {what} entry {other.number}", key=source)
    return Matrix(entries, source)


def entry_for(saved: Sizes, today: Sizes) -> str:
    """The text to paste into the matrix for a pair; its status is for the user to change when a drill has passed."""
    both = without_derived_world(saved), without_derived_world(today)
    known = [name for name in FIELDS if all(name in side for side in both)]
    sides = ("{" + ", ".join(f"{name}: {_yaml(side[name])}" for name in known) + "}" for side in both)
    return "  - from: {}\n    to:   {}\n    status: blocked_until_drill_passes\n".format(*sides)


def _yaml(value: int | str) -> str:
    """A number or a quoted text. JSON would write one character as two surrogates, which YAML reads as two."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\x7f")
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _entry(number: int, raw: object, source: str) -> Entry:
    where = f"matrix entry {number}"
    if not isinstance(raw, dict) or set(raw) != set(_KEYS):
        found = ", ".join(map(repr, raw)) if isinstance(raw, dict) else repr(raw)
        raise ConfigError(f"{where} must have exactly the keys {', '.join(_KEYS)}, not {found}", key=source)
    saved, today, status = (raw[name] for name in _KEYS)
    if status not in get_args(Status):
        raise ConfigError(
            f"{where}: unknown status {status!r}", key=source, next_step=f"one of {', '.join(get_args(Status))}"
        )
    for side, values in (("from", saved), ("to", today)):
        if not isinstance(values, dict) or not values:
            raise ConfigError(f"{where}: {side!r} must be a mapping of sizes, such as {{dp: 8, tp: 8}}", key=source)
        for name, value in values.items():
            check_field(str(name), value, f"{where}, {side!r}")
        if {"dp", "tp", "pp", "world"} <= values.keys() and "world" in without_derived_world(values):
            raise ConfigError(f"{where}, {side!r}: world is not dp x tp x pp", key=source)
    if saved.keys() != today.keys():
        lonely = ", ".join(sorted(saved.keys() ^ today.keys()))
        raise ConfigError(
            f"{where}: only one of 'from' and 'to' names {lonely}", key=source, next_step="name it in both"
        )
    if saved == today:
        raise ConfigError(f"{where}: 'from' and 'to' are the same", key=source, next_step="remove it")
    return Entry(number, saved, today, status)


def _load(text: str, source: str) -> object:
    try:
        import yaml  # noqa: PLC0415 - only a run that has a matrix needs it
    except ImportError as error:
        raise ConfigError(
            "the compatibility matrix needs PyYAML", next_step="pip install '.[train]' in txstore's checkout"
        ) from error

    class Strict(yaml.SafeLoader):  # type: ignore[misc]
        """`safe_load`, but of two equal keys it does not take the last in silence."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
            keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for at, key in enumerate(keys):
                if key in keys[:at]:
                    line = node.value[at][0].start_mark.line + 1
                    raise ConfigError(f"line {line} of the matrix repeats the key {key[1]!r}", key=source)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    try:
        return yaml.load(text, Loader=Strict)  # noqa: S506 - a SafeLoader
    except ConfigError:
        raise
    # What PyYAML lets through from odd scalars, such as a date that does not exist, is no bug of ours to report.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"the compatibility matrix is no YAML{line}: {error}", key=source) from error
