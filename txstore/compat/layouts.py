"""Optimizer layouts: which parameter is at which place of which group.

torch matches optimizer state by position (pytorch/pytorch#1489): two parameters of one shape that changed places would
take each other's moments, and no shape would tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from txstore.compat.differences import Difference, accept_step
from txstore.errors import ConfigError

LAYOUT = "optimizer:layout"
"""What ``accept=`` calls layouts that only one side knows."""


@dataclass(frozen=True, slots=True)
class OptimizerLayout:
    """One optimizer: its class and the ordered parameter names of each group.

    Raises:
        ConfigError: A parameter is named twice.
    """

    kind: str
    """Its class, such as ``AdamW``."""

    groups: tuple[tuple[str, ...], ...]
    """Parameter names in the optimizer's order, one tuple a group."""

    def __post_init__(self) -> None:
        counts = Counter(name for group in self.groups for name in group)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ConfigError(f"an optimizer layout names a parameter twice: {', '.join(twice)}", key=twice[0])

    @property
    def counted(self) -> str:
        """``groups of 10, 2, 1 parameters``."""
        return f"groups of {', '.join(str(len(group)) for group in self.groups)} parameters"

    def without(self, is_left_out: Callable[[str], bool]) -> OptimizerLayout:
        """The layout without some parameters."""
        groups = (tuple(name for name in group if not is_left_out(name)) for group in self.groups)
        return OptimizerLayout(self.kind, tuple(groups))


def compare_layouts(
    saved: Sequence[OptimizerLayout] | None, today: Sequence[OptimizerLayout] | None
) -> list[Difference]:
    """Every difference between the optimizers, in order; None is a side that does not know."""
    if saved is None and today is None:
        return []
    if saved is None or today is None:
        was, now = (None if side is None else _count(len(side), "layout") for side in (saved, today))
        step = accept_step(LAYOUT)
        return [Difference("optimizer", "layout", was, now, change_class=3, accept_as=LAYOUT, next_step=step)]
    found: list[Difference] = []
    if len(saved) != len(today):
        surplus = [f"optimizer:{number}" for number in range(*sorted((len(saved), len(today))))]
        found.append(_optimizer("count", _count(len(saved), "optimizer"), _count(len(today), "optimizer"), surplus))
    for number, (before, after) in enumerate(zip(saved, today, strict=False)):
        anew = ["optimizer" if len(saved) == len(today) == 1 else f"optimizer:{number}"]
        if len(before.groups) != len(after.groups):
            anew.append("scheduler")  # one that is restored moves settings of each group
            was, now = (_count(len(side.groups), "group") for side in (before, after))
            found.append(_optimizer(f"{number} groups", was, now, anew))
        if before.kind != after.kind:
            found.append(_optimizer(f"{number} class", before.kind, after.kind, anew))
        found += _parameters(before, after, f"optimizer {number}", anew)
    return found


def _parameters(before: OptimizerLayout, after: OptimizerLayout, where: str, anew: Sequence[str]) -> list[Difference]:
    was, now = ({n: g for g, group in enumerate(side.groups) for n in group} for side in (before, after))
    found = [
        _parameter(name, _place(where, was.get(name)), _place(where, now.get(name)), anew)
        for name in dict.fromkeys([*was, *now])
        if was.get(name) != now.get(name)
    ]
    for number, (old, new) in enumerate(zip(before.groups, after.groups, strict=False)):
        # Only those that stayed: one parameter that came must not make all behind it look moved.
        stayed = set(old) & set(new)
        order = zip((n for n in old if n in stayed), (n for n in new if n in stayed), strict=True)
        for place, (had, has) in enumerate(order):
            if had != has:
                spot = f"place {place} of {where}, group {number}"
                found.append(_parameter(had, spot, f"{has} is there", anew))
    return found


def _optimizer(name: str, saved: str, now: str, anew: Sequence[str]) -> Difference:
    step = f"as it was saved, or begin it anew: {_fresh(anew)}"
    return Difference("optimizer", name, saved, now, change_class=3, next_step=step)


def _parameter(name: str, saved: str, now: str, anew: Sequence[str]) -> Difference:
    step = f"build the groups as saved, {_covered(anew)}"
    return Difference("parameter", name, saved, now, change_class=3, next_step=step)


def _fresh(anew: Sequence[str]) -> str:
    with_scheduler = ", with the schedulers, which move settings of each group" if "scheduler" in anew else ""
    return f"fresh={{{', '.join(map(repr, anew))}}}{with_scheduler}"


def _covered(anew: Sequence[str] = ("optimizer",)) -> str:
    return (
        "a migration whose parameters= covers this parameter (what is new begins without moments), "
        f"or begin the whole optimizer anew: {_fresh(anew)}"
    )


def compare_values(made: Mapping[str, str]) -> list[Difference]:
    """Parameters whose saved state in an optimizer belongs to another value than a migration gives them.

    Moments of the old shape would be loaded, and the optimizer's first step fail; of the same shape, nothing would.

    Args:
        made: What each gets, in words, by its name.
    """
    saved = "its value, and moments of it"
    return [
        Difference("parameter", name, saved, what, change_class=3, next_step=_covered()) for name, what in made.items()
    ]


def _place(where: str, group: int | None) -> str:
    return f"not in {where}" if group is None else f"{where}, group {group}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
