"""How the code made an object: its class, its settings, its functions. Recorded beside its state, compared at a resume.

A state dict tells where an object stands, and often not what it is: a scheduler of another class takes it, a function
is not in it at all, and a changed learning rate loses to the saved one without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from txstore.compat.differences import Difference, accept_step

_MOST_TEXT = 200
_PLAIN = (bool, int, float, str, type(None))
_NESTED = frozenset({"_schedulers", "lr_lambdas"})
_MOVING = frozenset({"last_epoch", "base_lrs"})
"""Entries of a scheduler's state that only repeat what others say: one changed learning rate is told once."""

PROBED = [*range(257), *sorted({int(257 * 1.02**power) for power in range(420)})]
"""Steps at which functions of a step are compared: each one at first, then one in fifty, up to a million."""


def class_of(item: object) -> str:
    """The class with its module; of a scheduler made of schedulers also theirs."""
    kind = type(item)
    name = f"{kind.__module__}.{kind.__qualname__}"
    parts = [type(part).__qualname__ for part in _parts(item)]
    return f"{name}[{', '.join(parts)}]" if parts else name


def functions_of(scheduler: object) -> dict[str, str]:
    """What the functions of a scheduler do, each as a digest: torch leaves functions out of a scheduler's state.

    A function of the step is asked for its values at the steps `PROBED`, since its code says little: it may move, and
    what it reads may change. An object that can be called keeps its state in the scheduler's; of it the class counts.
    """
    found: dict[str, str] = {}
    known: dict[int, str] = {}
    for path, function in _functions(scheduler, ""):
        if id(function) not in known:
            known[id(function)] = _values(function) if callable(function) else class_of(function)
        found[path] = known[id(function)]
    return found


def settings_of(state: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """The plain values of a state dict as text, by path: what the code chose, if nothing has happened yet."""
    found: dict[str, str] = {}
    for name, value in state.items():
        at = f"{path}{name}"
        if name in _NESTED:
            for number, part in enumerate(value):
                found |= settings_of(part, f"{at}[{number}].") if isinstance(part, Mapping) else {}
        elif not name.startswith("_") and name not in _MOVING and (text := as_text(value)) is not None:
            found[at] = text
    return found


def as_text(value: Any) -> str | None:
    """A plain value as text; None for one that is not plain, or long."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 and value.device.type != "meta" else None
        return None if value is None else repr(value)
    is_plain = isinstance(value, _PLAIN) or (
        isinstance(value, list | tuple) and all(isinstance(one, _PLAIN) for one in value)
    )
    text = repr(value) if is_plain else ""
    return text if 0 < len(text) <= _MOST_TEXT else None


def compare_built(what: str, saved: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """What the code chooses in another way than the code that saved. The saved values win, so each is told."""
    return [
        Difference(
            "state",
            f"{what} {name}, as the code sets it",
            saved.get(name),
            now.get(name),
            verdict="noted",
            by="the saved one is in force",
        )
        for name in sorted(saved.keys() & now.keys())
        if saved[name] != now[name]
    ]


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


def _parts(item: object) -> Sequence[object]:
    """The schedulers that a scheduler is made of, or wraps."""
    parts = getattr(item, "_schedulers", None)
    if isinstance(parts, list | tuple):
        return parts
    inner = getattr(item, "scheduler", None)
    return [inner] if isinstance(inner, lr_scheduler.LRScheduler) else ()


def _functions(scheduler: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(scheduler, lr_scheduler.LambdaLR | lr_scheduler.MultiplicativeLR):
        for at, function in enumerate(scheduler.lr_lambdas):
            yield f"{path}lr_lambdas[{at}]", function
    elif isinstance(scheduler, lr_scheduler.CyclicLR):
        custom = getattr(scheduler, "_scale_fn_custom", None)
        if custom is not None:
            yield f"{path}scale_fn", custom
    for at, part in enumerate(_parts(scheduler)):
        yield from _functions(part, f"{path}{at}.")


def _values(function: Callable[[int], Any]) -> str:
    """Digest of a function's values. An object with state of its own is not asked: that may move it."""
    if getattr(function, "__dict__", None):
        return class_of(function)
    digest = hashlib.sha256()
    for step in PROBED:
        try:
            value = f"{float(function(step)):.12g}"  # the last bits are the machine's
        except Exception as error:  # noqa: BLE001 - a function may end where the training does
            value = type(error).__name__
        digest.update(f"{value}\n".encode())
    return f"sha256:{digest.hexdigest()[:16]}"
