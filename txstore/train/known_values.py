"""What a function of a step may use: values, functions and objects which are known to read only."""

from __future__ import annotations

import builtins
import inspect
from enum import Enum, EnumType
from types import BuiltinFunctionType, FunctionType, MethodWrapperType, ModuleType
from typing import Any

import numpy as np
import torch

from txstore.train.in_place import METHODS
from txstore.train.iterated import OF_PLAIN, is_plain

# fmt: off
_BUILTINS = frozenset((
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "int", "isinstance", "iter", "len",
    "list", "map", "max", "min", "next", "pow", "range", "reversed", "round", "slice", "sorted", "str", "sum", "tuple",
    "zip", "ArithmeticError", "AssertionError", "IndexError", "KeyError", "NotImplementedError", "RuntimeError",
    "StopIteration", "TypeError", "ValueError", "ZeroDivisionError",
))
_MODULES = frozenset({"math", "cmath", "_bisect"})
_MADE_ANEW = frozenset((
    "arange", "array", "as_tensor", "asarray", "clamp", "clip", "cumsum", "full", "interp", "linspace", "max", "mean",
    "min", "ones", "prod", "round", "searchsorted", "sum", "tensor", "where", "zeros",
    "cos", "exp", "log", "maximum", "minimum", "pow", "sin", "sqrt", "tanh",
))
"""Functions of numpy and torch that make a new value."""
OF_VALUES = OF_PLAIN | {"item", "tolist", "shape", "numel", "dtype"}
_SPECIAL = frozenset((
    "__init__", "__repr__", "__str__", "__eq__", "__ne__", "__hash__", "__post_init__", "__setattr__", "__delattr__",
    "__contains__", "__replace__", "__getstate__", "__setstate__", "__init_subclass__", "__reduce__", "__sizeof__",
))
"""Special methods that a record may have: none is called when an attribute is read, and none is there to act."""
# fmt: on
_ARRAYS = (np.ndarray, torch.Tensor)
VALUES = frozenset({list, tuple, dict, set, frozenset, bool, int, float, complex, str, bytes, range, *_ARRAYS})
_CONFIGS = frozenset({"omegaconf", "ml_collections", "transformers", "easydict", "addict", "munch"})
"""Libraries whose configurations answer for attributes by code of their own, and only read."""
UNKNOWN: Any = object()


def attribute_of(owner: Any, name: str) -> Any:
    """What an attribute is, but for a property that itself; unknown if only code of the object could tell."""
    kind = type(owner)
    if _is_config(owner) or isinstance(owner, EnumType):
        return getattr(owner, name, UNKNOWN)
    if isinstance(kind.__getattribute__, FunctionType):
        return UNKNOWN
    value = inspect.getattr_static(owner, name, UNKNOWN)
    if isinstance(value, property) or (name in getattr(owner, "__dict__", {}) and not isinstance(owner, type)):
        return value
    if isinstance(getattr(type(value), "__get__", None), FunctionType):
        return UNKNOWN
    return value if value is UNKNOWN else getattr(owner, name, UNKNOWN)  # bound by code of C


def _is_config(value: object) -> bool:
    return type(value).__module__.split(".")[0] in _CONFIGS


def is_library(value: Any) -> bool:
    """What is known to read only, whatever is done with it."""
    name, owner = getattr(value, "__name__", ""), getattr(value, "__self__", None)
    if isinstance(value, ModuleType | np.ufunc | Enum) or _is_config(value):
        return True
    if isinstance(value, type):
        return (
            value is getattr(builtins, name, None) if name in _BUILTINS else issubclass(value, (np.generic, *_ARRAYS))
        )
    if name in _BUILTINS and value is getattr(builtins, name):
        return True
    if isinstance(value, BuiltinFunctionType | MethodWrapperType) and type(owner) in VALUES:
        return name in OF_VALUES | {"__getitem__"} and name not in METHODS and is_plain(owner)
    if isinstance(value, BuiltinFunctionType) and value.__module__ in _MODULES:
        return not name.startswith("insort")
    return name in _MADE_ANEW and any(value is getattr(module, name, None) for module in (np, torch))


def is_record(value: object) -> bool:
    """Whether to read an object runs none of its code."""
    kinds = type(value).__mro__[:-1]
    special = [name for kind in kinds for name, one in vars(kind).items() if isinstance(one, FunctionType)]
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and all(name in _SPECIAL or not name.startswith("__") for name in special)
    )
