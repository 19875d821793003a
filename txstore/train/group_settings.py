"""Plain settings of an optimizer's groups as the code made them: recorded beside its state, compared at a resume."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from txstore.compat.layouts import OptimizerLayout
from txstore.train.built import as_text

log = logging.getLogger(__name__)

Settings = dict[str, str]


def made_settings(group: Mapping[str, Any]) -> Settings:
    """Those of one group as text. A scheduler has moved the rate that stands beside an initial one."""
    values = {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group
    found = {name: as_text(value) for name, value in values.items() if name not in {"params", "initial_lr"}}
    return {name: text for name, text in found.items() if text is not None}


def saved_settings(entry: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """By group, as a checkpoint has them. Earlier saves have none of the groups that training added."""
    return [*entry["settings"], *[{}] * (len(entry["groups"]) - len(entry["settings"]))]


def followed(
    before: OptimizerLayout, known: Sequence[Settings], now: OptimizerLayout, groups: Sequence[Mapping[str, Any]]
) -> list[Settings]:
    """Settings of today's groups: known ones go with the parameters, so that a group that went takes its own along.

    Args:
        before: The layout of which settings are known.
        known: Of each of its groups.
        now: Today's layout.
        groups: Its groups, read where nothing is known.
    """
    of_parameter = {fqn: one for names, one in zip(before.groups, known, strict=True) for fqn in names}
    return [
        next((of_parameter[fqn] for fqn in names if fqn in of_parameter), {}) or made_settings(group)
        for names, group in zip(now.groups, groups, strict=True)
    ]


def tell_changed(before: Sequence[OptimizerLayout], now: Sequence[OptimizerLayout]) -> None:
    """Warn of groups that training has changed: a resume may refuse them."""
    for at, (had, has) in enumerate(zip(before, now, strict=True)):
        if had != has:
            log.warning(
                "optimizer %d (%s) has %s; before it had %s, or others. A resume takes this only if the code makes the "
                "same groups before it. Best make all at the start, with requires_grad_(False) for what is not trained "
                "yet: an optimizer skips what has no gradient",
                *(at, has.kind, has.counted, had.counted),
            )
