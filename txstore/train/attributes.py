"""Plain attributes of modules, optimizers, schedulers, such as a counter that `forward` moves: no state dict has them.

Whether the next step depends on one nobody can tell: a cache is made again, a counter is not. So they are neither
saved nor refused, but told.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from txstore.train.names import Models
from txstore.train.rng import Generator

log = logging.getLogger(__name__)

_NOT_OURS = (
    "torch.",
    "lightning.",
    "lightning_fabric.",
    "pytorch_lightning.",
    "builtins.",
    "typing.",
    "abc.",
    "weakref.",
)
_MOST_TOLD = 8
LOOKS = 3
"""So many saves look at everything: training stands still for it."""
_FEW = 16
"""So many things in a list are looked at, and of an array at least..."""
_ELEMENTS = 2048
"""...so many elements."""
ANY = object()
_KEPT = frozenset({"training", "state", "param_groups", "defaults"})
"""Attributes of modules and optimizers that are saved, or made by the code."""
_NOT_OF_STATE = frozenset({"optimizer", "base_lrs", "last_epoch"})
"""Attributes of schedulers that a state dict may leave out: what another object has, or the code makes."""
_PLAIN = (bool, int, float, complex, str, type(None))
_NUMBERS = frozenset({bool, int, float})


class Answers(dict[type, bool]):
    """What is asked of a class, once for each: `isinstance` takes too long for all attributes."""

    def __init__(self, ask: Callable[[type], bool]) -> None:
        self._ask = ask

    def __missing__(self, kind: type) -> bool:
        self[kind] = self._ask(kind)
        return self[kind]


class PlainAttributes:
    """What the attributes of all modules, optimizers and schedulers were when this was made.

    Looked at are public attributes of the training's own classes: plain values, tensors that belong to no graph,
    arrays, and tuples, lists, sets, dicts and deques of them. Of torch's classes they are numbers, such as the rate of
    a dropout; of a scheduler those that its state dict leaves out. A module with a ``get_extra_state`` tells itself
    what it keeps.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Mapping[str, Any] = MappingProxyType({}),
        others: Collection[object] = (),
    ) -> None:
        self._models = models
        self._others = others  # extras: what is one of them is saved
        self._schedulers = {f"scheduler.{name}": one for name, one in schedulers.items()}
        self._optimizers = optimizers
        self._is_own = Answers(lambda kind: is_own(kind) and not _tells_more(kind))
        self._has_settings = Answers(lambda kind: not is_own(kind))
        self._draws = Answers(lambda kind: issubclass(kind, Generator))
        self._before = self._found()
        self._looks = LOOKS

    def tell(self) -> None:
        """Warn, once, of attributes that are not what they were. At the first saves only: training stands still."""
        if not self._looks:
            return
        self._looks -= 1
        moved = [name for name, value in self._found().items() if self._before.get(name, self) != value]
        if moved:
            self._looks = 0
            more = f" and {len(moved) - _MOST_TOLD} more" if len(moved) > _MOST_TOLD else ""
            log.warning(
                "not saved: training changes %s%s. If the next step depends on such an attribute, make it a buffer, or "
                "give its module get_extra_state and set_extra_state, or put it into the optimizer's state or the "
                "scheduler's state_dict, or set it after resume(); a resume starts with what the constructor sets",
                ", ".join(moved[:_MOST_TOLD]),
                more,
            )

    def _objects(self) -> Iterator[tuple[str, object]]:
        yield from self._models.named_modules()
        for at, optimizer in enumerate(self._optimizers):
            yield f"optimizer.{at}", optimizer
        yield from self._schedulers.items()

    def _found(self) -> dict[str, object]:
        found: dict[str, object] = {}
        objects = list(self._objects())
        # A buffer that stands in a list as well is saved.
        saved = {id(one) for _, module in objects for one in getattr(module, "_buffers", {}).values()}
        for prefix, one in objects:
            is_ours, has_settings = self._is_own[type(one)], self._has_settings[type(one)]
            kept = _NOT_OF_STATE.union(one.state_dict()) if prefix in self._schedulers else _KEPT  # type: ignore[attr-defined]
            for name, value in vars(one).items():
                # A generator that came or went is another than the one that is saved, whoever keeps it.
                is_looked_at = self._draws[type(value)] or (
                    (is_ours or (has_settings and type(value) in _NUMBERS))
                    and name not in kept
                    and not name.startswith("_")
                    and not any(value is other for other in self._others)
                )
                if is_looked_at:
                    mark = mark_of(value, saved)
                    if mark is not ANY:
                        found[f"{prefix}.{name}" if prefix else name] = mark
        return found


def is_own(kind: type) -> bool:
    """Whether a class, or one that it is derived from, is the training's own. FSDP2 derives one from each class."""
    return any(not f"{one.__module__}.".startswith(_NOT_OURS) for one in kind.__mro__)


def _tells_more(kind: type) -> bool:
    return issubclass(kind, torch.nn.Module) and kind.get_extra_state is not torch.nn.Module.get_extra_state


def mark_of(value: object, saved: Collection[int], depth: int = 3) -> object:
    """What tells a value from another, or `ANY` if it is not looked at.

    Plain values are compared themselves, a tensor by identity and version, an array by its bytes, what holds others by
    its length and, three levels deep, by them: all of a few, of many those at both ends, where they come and go.
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None or id(value) in saved or isinstance(value, torch.nn.Parameter):
            return ANY
        return id(value), value._version  # noqa: SLF001 - counts writes
    if isinstance(value, np.generic | np.ndarray):
        # A file of tokens would be read for it.
        return ANY if isinstance(value, np.memmap) else _mark_of_array(np.asarray(value))
    if isinstance(value, tuple | list | deque | dict | set | frozenset):
        marks = [mark_of(one, saved, depth - 1) for one in (_ends(value) if depth else ())]
        # The same set, made again, may come in another order.
        return type(value), len(value), frozenset(marks) if isinstance(value, set | frozenset) else tuple(marks)
    return id(value) if isinstance(value, Generator) else _mark_of_object(value, saved, depth)


def _mark_of_object(value: object, saved: Collection[int], depth: int) -> object:
    """Marks of tensors that an object holds, such as an average of weights: its counters and clocks say little."""
    if not depth or isinstance(value, type | torch.nn.Module | torch.optim.Optimizer) or not is_own(type(value)):
        return ANY
    held = [(name, one) for name, one in getattr(value, "__dict__", {}).items() if _has_tensors(one)]
    return tuple((name, mark_of(one, saved, depth - 1)) for name, one in held) if held else ANY


def _has_tensors(value: object) -> bool:
    inner = _ends(value) if isinstance(value, tuple | list | deque | dict) else [value]
    return any(isinstance(one, torch.Tensor) for one in inner)


def _ends(value: Collection[Any]) -> list[object]:
    if isinstance(value, dict):
        first, last = islice(value.items(), _FEW // 2), islice(reversed(value.items()), _FEW // 2)
        return [one for pair in (*first, *last) for one in pair]
    if isinstance(value, tuple | list | deque):
        return [*islice(value, _FEW // 2), *islice(reversed(value), _FEW // 2)]
    return list(value) if len(value) <= _FEW else []


def _mark_of_array(array: np.ndarray) -> object:
    step = max(1, array.size // _ELEMENTS)
    seen = 0 if array.dtype.hasobject else zlib.crc32(array.flat[::step].tobytes())
    return array.dtype.str, array.shape, seen
