"""Whether a dataset that iterates, and has no state, can be read again to the same place.

Such a dataset is begun anew at a resume, and what was read is read again and dropped. It cannot be asked twice, as a
sampler is: it may read a queue, or download. So its code is read, and must be made of what is known to give the same
again: plain attributes, files, arithmetic. What is not on the lists below is not proved. Where a list, dict or array is
there before an epoch and after it, wherever that is, nothing may be changed but what the function has made itself.
"""

from __future__ import annotations

import builtins
import dis
import itertools
from collections.abc import Iterator
from pathlib import PurePath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from txstore.train.in_place import change as _change
from txstore.train.in_place import own_names

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
OF_PLAIN = frozenset(
    name for kind in (list, dict, str, tuple, int, float, bytes, range) for name in dir(kind) if name[:2] != "__"
)
# fmt: on
_LIBRARIES = frozenset({"builtins", "typing", "abc", "torch"})
_SCALARS = (bool, int, float, str, bytes, type(None), PurePath, torch.dtype, np.generic)


def why_not_again(dataset: Any) -> str:
    """Why nobody can tell that the dataset gives the same again, as the rest of a sentence; "" if it does."""
    for name, value in vars(dataset).items():
        if isinstance(value, IterableDataset):
            inner = why_not_again(value)
            if inner:
                return f"reads a {type(value).__name__}, which {inner}"
        elif not is_plain(value):
            return f"has a {type(value).__name__} in its attribute {name!r}"
    start = type(dataset).__iter__
    if hasattr(type(dataset), "__getattr__") or "__slots__" in vars(type(dataset)):
        return "answers for attributes that nobody sees"
    if not isinstance(start, FunctionType):
        return "has an __iter__ that is no plain method"
    reader = _Reader(type(dataset), set(vars(dataset)), holds=_holds_containers(dataset))
    seen: set[int] = set()
    waiting: list[Any] = [start]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        calls, why = reader.read(function)
        if why:
            return f"{why} in {function.__name__}"
        waiting += calls
    # Known only now: any function may name the container, and any other change it.
    return reader.change if reader.holds else ""


def _holds_containers(dataset: Any) -> bool:
    """Whether something that can be changed outlives an epoch: among its attributes, its class's, or those in it."""
    kinds = [kind for kind in type(dataset).__mro__ if kind.__module__.split(".")[0] not in _LIBRARIES]
    of_classes = [value for kind in kinds for name, value in vars(kind).items() if not name.startswith("__")]
    return any(
        _holds_containers(value) if isinstance(value, IterableDataset) else is_container(value)
        for value in [*vars(dataset).values(), *of_classes]
    )


def is_container(value: Any) -> bool:
    """Whether a value can be changed in place, or holds one that can."""
    if isinstance(value, tuple):
        return any(map(is_container, value))
    return isinstance(value, list | dict | set | bytearray | torch.Tensor | np.ndarray)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, an array, or a list, tuple or dict of such: none runs code of its own."""
    if isinstance(value, _SCALARS) or type(value) in {range, torch.Tensor, np.ndarray}:
        return True
    if type(value) in {list, tuple}:
        return all(map(is_plain, value))
    return type(value) is dict and all(map(is_plain, value.values())) and all(map(is_plain, value))


class _Reader:
    """Reads the instructions of functions, one after the other.

    Attributes:
        holds: Whether a container was met that is there before an epoch and after it.
        change: What may change such a one, as the rest of a sentence: it counts if there is one.
    """

    def __init__(self, kind: type, attributes: set[str], *, holds: bool) -> None:
        self.holds = holds
        self.change = ""
        self._kind = kind
        self._attributes = attributes
        self._globals: dict[str, Any] = {}
        self._calls: list[Any] = []

    def read(self, function: Any) -> tuple[list[Any], str]:
        """The functions that a function calls, and what in it is not known to give the same again."""
        self._globals, self._calls = function.__globals__, []
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        kept = {name: cell.cell_contents for name, cell in cells.items() if name != "__class__"}
        for name, value in kept.items():
            if not is_plain(value):
                return [], f"uses {name!r} of the function around it"
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self.holds |= any(map(is_container, [*kept.values(), *defaults]))
        for code in codes(function.__code__):
            why = self._code(code, function.__name__)
            if why:
                return [], why
        return self._calls, ""

    def _code(self, code: CodeType, function: str) -> str:
        own = own_names(code)
        before: dis.Instruction | None = None
        for instruction, after in itertools.pairwise([*dis.get_instructions(code), None]):
            assert instruction is not None
            why = self._why(instruction, code)
            if why:
                return why
            change = _change(before, instruction, after, own)
            if change and not self.change:
                self.change = f"may change a list, dict or array of its own ({change}) in {function}"
            before = instruction
        return ""

    def _why(self, instruction: dis.Instruction, code: CodeType) -> str:
        """Why this instruction may not give the same again; "" if it does."""
        operation, name = instruction.opname, str(instruction.argval)
        if operation in {"LOAD_GLOBAL", "LOAD_NAME"}:
            return self._of_global(name)
        if operation in {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}:
            return self._of_attribute(name)
        if operation == "IMPORT_NAME":
            return "" if name in _MODULES else f"imports {name!r}"
        # A variable of its own that a function in it reads is a cell, too.
        of_around = operation in {"STORE_DEREF", "DELETE_DEREF"} and name in code.co_freevars
        if of_around or operation in {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}:
            return f"sets {name!r}"
        return "goes through a set" if operation in {"BUILD_SET", "SET_ADD"} else ""

    def _of_global(self, name: str) -> str:
        is_builtin = name not in self._globals
        value = getattr(builtins, name, None) if is_builtin else self._globals[name]
        if isinstance(value, FunctionType) and value is not get_worker_info:
            self._calls.append(value)
            return ""
        self.holds |= is_container(value)
        return "" if _is_known(value) or (is_builtin and name in _BUILTINS) else f"uses {name!r}"

    def _of_attribute(self, name: str) -> str:
        method = getattr(self._kind, name, None)
        if isinstance(method, FunctionType) and name not in self._attributes:
            self._calls.append(method)
            return ""
        if isinstance(method, property) and method.fget is not None:
            self._calls.append(method.fget)
            return ""
        is_of_class = method is not None and is_plain(method)
        return "" if is_of_class or name in self._attributes | _NAMES | OF_PLAIN else f"uses {name!r}"


def _is_known(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in _MODULES
    return value is get_worker_info or (value is not None and is_plain(value))


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)
