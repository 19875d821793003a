"""Whether a dataset that iterates, and has no state, can be read again to the same place.

Such a dataset is begun anew at a resume, and what was read is read again and dropped. It cannot be asked twice, as a
sampler is: it may read a queue, or download. So its code is read, and must be made of what is known to give the same
again: plain attributes, files, arithmetic. What is not on the lists below is not proved.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

# fmt: off
_BUILTINS = frozenset((
    "abs", "all", "any", "bool", "bytes", "chr", "dict", "divmod", "enumerate", "filter", "float", "int",
    "isinstance", "iter", "len", "list", "map", "max", "min", "next", "open", "ord", "pow", "print", "range",
    "repr", "reversed", "round", "slice", "sorted", "str", "sum", "super", "tuple", "zip", "True", "False", "None",
    "AssertionError", "IndexError", "KeyError", "RuntimeError", "StopIteration", "TypeError", "ValueError",
))
_MODULES = frozenset((
    "csv", "gzip", "io", "itertools", "json", "math", "operator", "torch", "numpy", "torch.utils.data",
    "torch.utils",
))
_NAMES = frozenset((
    "utils", "data", "get_worker_info", "id", "num_workers", "islice", "chain", "count", "cycle", "repeat",
    "accumulate", "zip_longest", "ceil", "floor", "sqrt", "loads", "load", "reader", "DictReader", "open", "read",
    "readline", "readlines", "close", "tensor", "as_tensor", "arange", "from_numpy", "array", "asarray", "zeros",
    "ones", "full", "stack", "cat", "float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "long",
    "float", "int", "bool", "shape", "size", "numel", "tolist", "item", "to", "__enter__", "__exit__", "__iter__",
    "__next__", "__len__",
))
_OF_PLAIN = frozenset(name for kind in (list, dict, str, tuple, int, float, bytes, range) for name in dir(kind))
_CHANGES = frozenset((
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update", "setdefault", "popitem",
))
# fmt: on
_SCALARS = (bool, int, float, str, bytes, type(None), PurePath, torch.dtype, np.generic)


def why_not_again(dataset: Any) -> str:
    """Why nobody can tell that the dataset gives the same again, as the rest of a sentence; "" if it does."""
    for name, value in vars(dataset).items():
        if isinstance(value, IterableDataset):
            inner = why_not_again(value)
            if inner:
                return f"reads a {type(value).__name__}, which {inner}"
        elif not _is_plain(value):
            return f"has a {type(value).__name__} in its attribute {name!r}"
    has_containers = any(isinstance(value, list | dict | torch.Tensor | np.ndarray) for value in vars(dataset).values())
    start = type(dataset).__iter__
    if hasattr(type(dataset), "__getattr__") or "__slots__" in vars(type(dataset)):
        return "answers for attributes that nobody sees"
    if not isinstance(start, FunctionType):
        return "has an __iter__ that is no plain method"
    seen: set[int] = set()
    waiting: list[Any] = [start]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        more, why = _read(function, type(dataset), set(vars(dataset)), has_containers=has_containers)
        if why:
            return f"{why} in {function.__name__}"
        waiting += more
    return ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, _SCALARS) or type(value) in {range, torch.Tensor, np.ndarray}:
        return True
    if type(value) in {list, tuple}:
        return all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, value.values())) and all(map(_is_plain, value))


def _read(function: Any, kind: type, attributes: set[str], *, has_containers: bool) -> tuple[list[Any], str]:
    """The functions that a function calls, and what in it is not known to give the same again."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name, cell in cells.items():
        if name != "__class__" and not _is_plain(cell.cell_contents):
            return [], f"uses {name!r} of the function around it"
    reader = _Reader(function, kind, attributes, has_containers=has_containers)
    whys = (reader.why(instruction) for instruction in _instructions(function.__code__))
    why = next((why for why in whys if why), "")
    return reader.calls, why


class _Reader:
    """Reads the instructions of one function, one after the other."""

    def __init__(self, function: Any, kind: type, attributes: set[str], *, has_containers: bool) -> None:
        self.calls: list[Any] = []
        self._globals: dict[str, Any] = function.__globals__
        self._kind = kind
        self._attributes = attributes
        self._has_containers = has_containers
        self._after_number = False

    def why(self, instruction: dis.Instruction) -> str:
        """Why this instruction may not give the same again; "" if it does."""
        operation, name = instruction.opname, str(instruction.argval)
        if operation in {"LOAD_GLOBAL", "LOAD_NAME"}:
            found = self._of_global(name)
        elif operation in {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}:
            found = self._of_attribute(name)
        elif operation == "IMPORT_NAME" and name not in _MODULES:
            found = f"imports {name!r}"
        else:
            found = self._of_change(instruction, name)
        is_constant = operation in {"LOAD_CONST", "LOAD_SMALL_INT"}
        self._after_number = is_constant and isinstance(instruction.argval, int | float)
        return found

    def _of_change(self, instruction: dis.Instruction, name: str) -> str:
        operation = instruction.opname
        if operation in {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}:
            return f"sets {name!r}"
        if operation in {"BUILD_SET", "SET_ADD"}:
            return "goes through a set"
        # What is added to a number is no list. Else it may be one of the dataset's, under another name.
        in_place = operation == "BINARY_OP" and instruction.argrepr.endswith("=") and not self._after_number
        changes = in_place or operation in {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
        return "may change a list, dict or array of its own" if changes and self._has_containers else ""

    def _of_global(self, name: str) -> str:
        is_builtin = name not in self._globals
        value = getattr(builtins, name, None) if is_builtin else self._globals[name]
        if isinstance(value, FunctionType) and value is not get_worker_info:
            self.calls.append(value)
            return ""
        return "" if _is_known(value) or (is_builtin and name in _BUILTINS) else f"uses {name!r}"

    def _of_attribute(self, name: str) -> str:
        method = getattr(self._kind, name, None)
        if name in _CHANGES and self._has_containers:
            return f"may change a list or dict of its own by {name!r}"
        if isinstance(method, FunctionType) and name not in self._attributes:
            self.calls.append(method)
            return ""
        if isinstance(method, property) and method.fget is not None:
            self.calls.append(method.fget)
            return ""
        is_of_class = method is not None and _is_plain(method)
        return "" if is_of_class or name in self._attributes | _NAMES | _OF_PLAIN else f"uses {name!r}"


def _is_known(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in _MODULES
    return value is get_worker_info or (value is not None and _is_plain(value))


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Of a function and of those in it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
