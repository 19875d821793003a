"""How the code made an object: its class, its settings, its functions. Recorded beside its state, compared at a resume.

A state dict tells where an object stands, and often not what it is: a scheduler of another class takes it, a function
is not in it at all, and a changed learning rate loses to the saved one without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import lr_scheduler

from txstore.compat.differences import Difference, accept_step

_MOST_TEXT = 200
_PLAIN = (bool, int, float, str, type(None))
_NESTED = frozenset({"_schedulers", "lr_lambdas"})
_CHOSEN = frozenset({"_milestones"})
"""Entries that the code chooses though they look private: of a SequentialLR."""
_NEWER = frozenset({"optimizer"})
"""Facts that older checkpoints do not have: unknown is told, and does not block."""
_MOVING = frozenset({"last_epoch", "base_lrs"})
"""Entries of a scheduler's state that only repeat what others say: one changed learning rate is told once."""


def class_of(item: object) -> str:
    """The class with its module; of a scheduler made of schedulers also theirs."""
    kind = type(item)
    name = f"{kind.__module__}.{kind.__qualname__}"
    parts = [type(part).__qualname__ for part in parts_of(item)]
    return f"{name}[{', '.join(parts)}]" if parts else name


def settings_of(state: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """The plain values of a state dict as text, by path: what the code chose, if nothing has happened yet."""
    found: dict[str, str] = {}
    for name, value in state.items():
        at = f"{path}{name}"
        if name in _NESTED:
            for number, part in enumerate(value):
                found |= settings_of(part, f"{at}[{number}].") if isinstance(part, Mapping) else {}
        elif (name[0] != "_" or name in _CHOSEN) and name not in _MOVING and (text := as_text(value)) is not None:
            found[at] = text
    return found


def as_text(value: Any) -> str | None:
    """A plain value as text; None for one that is not plain, or long."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and value.device.type != "meta" else None
        return None if value is None else repr(value)
    value = sorted(value.elements()) if isinstance(value, Counter) else value  # milestones of a MultiStepLR
    is_plain = isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(isinstance(one, _PLAIN) for one in value)
    )
    text = repr(value) if is_plain else ""
    return text if 0 < len(text) <= _MOST_TEXT else None


def compare_built(
    what: str, saved: Mapping[str, str], now: Mapping[str, str], of_code: Collection[str] = ()
) -> list[Difference]:
    """What the code chooses in another way than the code that saved. The saved ones win, but for names in `of_code`."""
    return [
        Difference(
            "state",
            f"{what} {name}, as the code sets it",
            saved.get(name),
            now.get(name),
            verdict="noted",
            by="the code's is in force" if name in of_code else "the saved one is in force",
        )
        for name in sorted(saved.keys() & now.keys())
        if saved[name] != now[name]
    ]


def in_groups(difference: Difference, numbers: Sequence[int]) -> Difference:
    """A difference that some groups of an optimizer have alike."""
    kind = "group" if len(numbers) == 1 else "groups"
    return replace(difference, name=f"{difference.name}, in {kind} {_ranges(numbers)}")


def compare_facts(
    what: str, saved: Mapping[str, str], now: Mapping[str, str], piece: str, accept: Callable[[str], str]
) -> list[Difference]:
    """What makes a saved state mean something else: blocks.

    Args:
        what: The object, for people.
        saved: Facts in the checkpoint.
        now: Today's.
        piece: Its name among what may be left fresh.
        accept: The name under which a fact's difference may be accepted; "" if it cannot be.
    """
    found = []
    for name in sorted(saved.keys() | now.keys()):
        was, value = saved.get(name), now.get(name)
        if was == value:
            continue
        if was is None and name in _NEWER:
            found.append(Difference("state", f"{what} {name}", "not recorded", value, verdict="noted"))
            continue
        by = accept(name)
        fresh = f"make it as it was saved, or begin it anew: fresh={{{piece!r}}}"
        found.append(
            Difference(
                "state",
                f"{what} {name}",
                was,
                value,
                change_class=3,
                accept_as=by,
                next_step=accept_step(by) if by else fresh,
            )
        )
    return found


def driven_by(scheduler: object, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """The place of the optimizer that a scheduler drives, as a fact: its state fits no other. {} if none tells."""
    driven = optimizers_of(scheduler)
    places = [str(at) for at, one in enumerate(optimizers) if any(one is known for known in driven)]
    return {"optimizer": ", ".join(places) or "none of those given"} if driven else {}


def optimizers_of(scheduler: object) -> list[object]:
    """The optimizers that a scheduler, and those in it, tell to drive; what wraps one counts as that."""
    mine = getattr(scheduler, "optimizer", None)
    found = [one for part in parts_of(scheduler) for one in optimizers_of(part)]
    return [one for one in (mine, getattr(mine, "optimizer", None)) if isinstance(one, torch.optim.Optimizer)] + found


def parts_of(item: object) -> Sequence[object]:
    """The schedulers that a scheduler is made of, or wraps."""
    parts = getattr(item, "_schedulers", None)
    if isinstance(parts, list | tuple):
        return parts
    inner = getattr(item, "scheduler", None)
    return [inner] if isinstance(inner, lr_scheduler.LRScheduler) else ()


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2, 5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
