"""What an object holds, as digests: to see afterwards which of its attributes something has moved.

By content, and not by identity: a list that is made anew with the same numbers has not moved. Looked through are
containers, arrays, tensors, generators, attributes of objects, and what functions keep in defaults and closures.
Not looked into: modules, classes, loggers, iterators and other objects of C, and what is beyond `MOST_LOOKED_AT`.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import logging
import random
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from txstore.train.python_state import flatten
from txstore.train.rng import Generator, own_streams

MOST_LOOKED_AT = 1 << 17
"""Values of one attribute, where 64 bytes of an array or of numbers count as one. A larger attribute is looked at in
part: a sampler may hold a data set."""

_LEAVES = (bool, int, float, complex, str, bytes, bytearray, range, slice, np.generic, torch.dtype, itertools.count)
_LISTS = (list, tuple, set, frozenset, collections.deque)
_NUMBERS = {bool, int, float, str}
_DEEPEST = 50


def digest_of(value: object) -> bytes:
    """Of one value, and of all in it."""
    look = _Look()
    look.at(value, 0)
    return look.digest()


def of_class(kind: type) -> Iterator[tuple[str, object]]:
    """What a class, and those below it that are not a library's, keeps for all of its objects, by name."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] in {"builtins", "typing", "abc", "torch", "torchdata"}:
            continue
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) or not name.startswith("__"):
                yield f"{base.__name__}.{name}", value


class _Look:
    def __init__(self) -> None:
        self._sum = hashlib.blake2b()
        self._left = MOST_LOOKED_AT
        self._seen: dict[int, object] = {}

    def digest(self) -> bytes:
        return self._sum.digest()

    def at(self, value: Any, depth: int) -> None:
        if self._left <= 0 or depth > _DEEPEST:
            return
        self._left -= 1
        self._sum.update(type(value).__name__.encode())
        if value is None or isinstance(value, _LEAVES):
            self._add(repr(value).encode())
        elif not isinstance(value, type | ModuleType | logging.Logger) and id(value) not in self._seen:
            self._seen[id(value)] = value  # held: an id belongs to an object only as long as that lives
            for part in self._parts(value):
                self.at(part, depth + 1)

    def _add(self, data: bytes) -> None:
        self._left -= len(data) // 64
        self._sum.update(data)

    def _parts(self, value: Any) -> Iterator[Any]:
        """What is in a value that is not a leaf."""
        if isinstance(value, np.ndarray | torch.Tensor):
            self._numbers(value)
        elif isinstance(value, Generator) and not isinstance(value, random.SystemRandom):
            self._add(flatten([stream.get() for stream in own_streams({"one": value}).values()], "one")[0])
        elif isinstance(value, _LISTS):
            yield len(value)
            yield from [repr(value)] if type(value) is list and _NUMBERS.issuperset(map(type, value)) else value
        elif isinstance(value, dict):
            for key, one in value.items():
                yield key
                yield one
        elif isinstance(value, FunctionType):
            yield from (value.__defaults__, value.__kwdefaults__, value.__dict__)
            yield from (_held(cell) for cell in value.__closure__ or ())
        elif isinstance(value, MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        yield from _attributes(value)

    def _numbers(self, value: Any) -> None:
        self._add(repr((tuple(value.shape), value.dtype)).encode())
        most = max(0, self._left) * 64 // max(1, value.dtype.itemsize)
        if isinstance(value, np.ndarray):
            # One that cannot be written is a file of tokens, mapped.
            self._add(value.flat[:most].tobytes() if value.flags.writeable else b"")
            return
        self._add(str(value._version).encode() if value.numel() > most else b"")  # noqa: SLF001 - counts writes
        try:
            self._add(value.detach().reshape(-1)[:most].cpu().view(torch.uint8).numpy().tobytes())
        except (RuntimeError, NotImplementedError):  # sparse, quantized, without memory
            self._add(str(value._version).encode())  # noqa: SLF001 - as above


def _attributes(value: object) -> Iterator[object]:
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not isinstance(value, FunctionType):
        yield inner
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield getattr(value, name, None)


def _held(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
