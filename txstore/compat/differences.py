"""Differences between a checkpoint and today, one typed and printable item each; settings and fingerprints compared."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from txstore.compat.names import CODE_VERSION, PACKAGES, TRAINING_CONFIG, UNKNOWN
from txstore.compat.topology import FIELDS, without_derived_world

Kind = Literal[
    "topology",
    "setting",
    "fingerprint",
    "optimizer",
    "parameter",
    "missing_key",
    "unexpected_key",
    "dtype",
    "shape",
    "migrated_key",
    "state",
]
"""What differs:

* ``topology``: a size or strategy of the parallelism;
* ``setting``: a plain value of the trainer;
* ``fingerprint``: a digest of configuration, tokenizer, data or code;
* ``optimizer``: class or number of groups of an optimizer;
* ``parameter``: which group of an optimizer a parameter is in, and at which place;
* ``missing_key``: today's state needs it, the checkpoint lacks it;
* ``unexpected_key``: the checkpoint holds it, today's state has no place for it;
* ``dtype``, ``shape``: of a tensor that both have;
* ``migrated_key``: what a migration does about a key;
* ``state``: what the code makes of a piece of training state: a class, a function, a setting, a buffer.
"""

Verdict = Literal["blocked", "allowed", "accepted", "noted"]
"""``blocked`` forbids the resume; the matrix ``allowed`` it; somebody ``accepted`` it by name; only ``noted``."""

ChangeClass = Literal[1, 2, 3] | None
"""1: only the data-parallel size changed; 2: the parallel mix; 3: what the state means; None: a setting."""

REPORTED = frozenset({CODE_VERSION, PACKAGES})
"""Fingerprints that are told and do not block: a fix of the code must not need an override to be resumed with.

`judge(required={"code_version"})` makes one block.
"""

ACCEPTABLE = frozenset({TRAINING_CONFIG, *REPORTED})
"""Fingerprints whose change may be accepted by name. All others, unknown names included, need a migration."""

_PREFIXES = ("fingerprint:", "topology:", "optimizer:", "setting:", "scheduler:", "scaler:", "data:", "extra:")


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference.

    Attributes:
        kind: What differs.
        name: Which one: a setting, a fingerprint, a key.
        saved: The value in the checkpoint, as text; None if it has none.
        now: Today's value, as text; None if there is none.
        change_class: The class of the change.
        accept_as: The name for ``accept=``; "" if it cannot be accepted.
        verdict: What was decided; blocked until something allows it.
        by: What allowed it.
        next_step: What would allow it.
    """

    kind: Kind
    name: str
    saved: str | None
    now: str | None
    change_class: ChangeClass = None
    accept_as: str = ""
    verdict: Verdict = "blocked"
    by: str = ""
    next_step: str = ""

    def __str__(self) -> str:
        saved = _ABSENT.get(self.kind, "not recorded") if self.saved is None else self.saved
        now = _ABSENT.get(self.kind, "not recorded") if self.now is None else self.now
        return f"{self.kind.replace('_', ' ')} {self.name}: saved {saved}, now {now}"

    def to_dict(self) -> dict[str, str | int | None]:
        """JSON form."""
        return {
            "kind": self.kind,
            "name": self.name,
            "saved": self.saved,
            "now": self.now,
            "change_class": self.change_class,
            "verdict": self.verdict,
            "by": self.by,
            "accept_as": self.accept_as,
            "next_step": self.next_step,
        }


_ABSENT: Mapping[Kind, str] = {
    "missing_key": "nothing",
    "unexpected_key": "nothing",
    "migrated_key": "nothing",
    "state": "nothing",
}


def accept_step(name: str) -> str:
    """The next step of a difference that can be accepted."""
    return f"if it is meant: accept={{{name!r}}}"


def compare_settings(
    saved: Mapping[str, int | float | str | bool], today: Mapping[str, int | float | str | bool]
) -> list[Difference]:
    """Every setting that differs, or that only one side has."""
    found = []
    for name in sorted(saved.keys() | today.keys()):
        was, now = saved.get(name), today.get(name)
        # True == 1 in Python; a flag that became a count is another setting.
        if was == now and isinstance(was, bool) == isinstance(now, bool):
            continue
        # A setting that is called like another kind's name must not be accepted along with it.
        accept_as = f"setting:{name}" if name.startswith(_PREFIXES) else name
        found.append(
            Difference("setting", name, _text(was), _text(now), accept_as=accept_as, next_step=accept_step(accept_as))
        )
    return found


def compare_fingerprints(
    saved: Mapping[str, str], today: Mapping[str, str], required: Collection[str] = ()
) -> list[Difference]:
    """Every fingerprint that differs, and every one that is unknown on either side.

    Args:
        saved: Of the checkpoint.
        today: Of this run.
        required: Names that must be known on both sides and equal, those that are otherwise only reported included.
    """
    found = []
    for name in sorted({*saved, *today, *required}):
        was, now = saved.get(name), today.get(name)
        is_unknown = bool({was, now} & {None, UNKNOWN})
        if was == now and not is_unknown:
            continue
        accept_as = f"fingerprint:{name}" if is_unknown or name in ACCEPTABLE else ""
        step = accept_step(accept_as) if accept_as else f"a migration that covers the fingerprint {name!r}"
        is_reported = name in REPORTED and name not in required
        found.append(
            Difference(
                "fingerprint",
                name,
                was,
                now,
                change_class=None if name in ACCEPTABLE else 3,
                accept_as=accept_as,
                verdict="noted" if is_reported else "blocked",
                next_step="" if is_reported else step,
            )
        )
    return found


def compare_topologies(saved: Mapping[str, int | str], today: Mapping[str, int | str]) -> list[Difference]:
    """Every field that differs; `world` only where it is not dp x tp x pp anyhow.

    A field that one side does not record is unknown, and may be accepted by name. A change may not: only the
    matrix allows one.
    """
    before, after = without_derived_world(saved), without_derived_world(today)
    names = sorted(before.keys() | after.keys(), key=lambda name: (name not in FIELDS, name))
    changed = [name for name in names if before.get(name) != after.get(name)]
    change_class: ChangeClass = 1 if changed == ["dp"] else 2
    found = []
    for name in changed:
        is_unknown = name not in before or name not in after
        accept_as = f"topology:{name}" if is_unknown else ""
        found.append(
            Difference(
                "topology",
                name,
                _text(before.get(name)),
                _text(after.get(name)),
                change_class=change_class,
                accept_as=accept_as,
                next_step=accept_step(accept_as) if is_unknown else "",
            )
        )
    return found


def _text(value: object) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)
