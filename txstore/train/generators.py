"""Generators that code may draw from: among what objects and functions hold, and the global names that functions use.

Not looked into: modules, classes, arrays, tensors, code of libraries, and what is beyond `MOST_LOOKED_AT`. The global
generators of Python, NumPy and torch are no finding: they are streams of the process.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from txstore.train.rng import Generator

MOST_LOOKED_AT = 2000
"""Values in all. Of a container its first `_MOST_IN_ONE`: a dataset may hold a million samples."""

_MOST_IN_ONE = 64
_DEEPEST = 12
_NOT_INTO = (type, ModuleType, np.ndarray, torch.Tensor, torch.nn.Module, str, bytes, int, float, type(None))
_LIBRARIES = frozenset({"torch", "torchdata", "numpy", "random"})


def generators_in(**roots: object) -> dict[str, Generator]:
    """Those that some objects reach, each once, by where it is: ``collate_fn.rng``.

    Args:
        roots: The objects by name. Of one that is no function its own methods are read, too.
    """
    of_process = (random._inst, np.random.mtrand._rand, torch.default_generator)  # noqa: SLF001 - no other way to them
    seen: dict[int, object] = {id(one): one for one in of_process}
    found: dict[str, Generator] = {}
    waiting = [(name, one, 0) for name, one in roots.items()]
    for place, value, depth in itertools.islice(_drained(waiting), MOST_LOOKED_AT):
        if id(value) in seen or isinstance(value, _NOT_INTO):
            continue
        seen[id(value)] = value  # held: an id belongs to an object only as long as that lives
        if isinstance(value, Generator):
            if not isinstance(value, random.SystemRandom):
                found[place] = value
        elif depth < _DEEPEST:
            waiting += [(f"{place}.{name}" if name else place, one, depth + 1) for name, one in _parts(value)]
    return found


def _drained(waiting: list[tuple[str, Any, int]]) -> Iterator[tuple[str, Any, int]]:
    """What waits, and what is added meanwhile; the nearest first."""
    at = 0
    while at < len(waiting):
        yield waiting[at]
        at += 1


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((str(key), one) for key, one in itertools.islice(value.items(), _MOST_IN_ONE))
    elif isinstance(value, list | tuple):
        yield from ((str(at), one) for at, one in enumerate(value[:_MOST_IN_ONE]))
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), *value.keywords.items(), *((str(at), one) for at, one in enumerate(value.args)))
    else:
        yield from itertools.islice(getattr(value, "__dict__", {}).items(), _MOST_IN_ONE)
        for kind in type(value).__mro__:
            for name, one in vars(kind).items():
                if name != "__init__" and isinstance(one, FunctionType | Generator):  # that draws before a save could
                    yield name, one


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    if str(function.__module__).split(".")[0] in _LIBRARIES:
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != CellType():  # not assigned yet
            yield name, cell.cell_contents
    yield from (("", one) for one in (function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    for name in _names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
