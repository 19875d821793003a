"""Arguments and fields of another type are refused where they are given, by name, and not where they are used first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from txstore.errors import ConfigError

_LITERAL = "one of "
_NUMBERS: dict[type, Any] = {int: Integral, float: Real}


def check(name: str, value: object, kind: Any, next_step: str = "") -> None:
    """Compare a value with the type that its argument or field has.

    Known are classes, `None`, unions, `Literal`, callables, and collections of them, which a text is not. A `bool` is
    no number, and NaN is none.

    Args:
        name: Of the argument.
        value: Its value.
        kind: Its type, as it would be annotated.
        next_step: For the error.

    Raises:
        ConfigError: It is of another type.
    """
    if _fits(value, kind):
        return
    if isinstance(value, float) or (isinstance(value, str) and _LITERAL in _text(kind)):
        raise ConfigError(f"{name}={value!r} is not {_text(kind)}", next_step=next_step)
    given = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    hint = "make an object of it" if isinstance(value, type) else f"pass {_text(kind)}"
    raise ConfigError(f"{name} is {given}, not {_text(kind)}", next_step=next_step or hint)


def check_fields(one: Any) -> None:
    """`check` every field of a dataclass: the first thing in its ``__post_init__``.

    Raises:
        ConfigError: A field is of another type.
    """
    hints = get_type_hints(type(one))
    for field in fields(one):
        check(field.name, getattr(one, field.name), hints[field.name])


def _fits(value: object, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:
        return any(_fits(value, one) for one in args)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if origin is not None:
        return isinstance(value, origin) and not isinstance(value, str) and _holds(value, origin, args)
    if kind in {int, float}:
        return not isinstance(value, bool) and isinstance(value, _NUMBERS[kind]) and not math.isnan(value)
    return kind is Any or (value is None if kind is None else isinstance(value, kind))


def _holds(value: Any, origin: type, args: tuple[Any, ...]) -> bool:
    if issubclass(origin, Mapping):
        return all(_fits(key, args[0]) and _fits(held, args[1]) for key, held in value.items())
    return not issubclass(origin, Collection) or all(_fits(held, args[0]) for held in value)


def _text(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:
        return " or ".join(_text(one) for one in args)
    if origin is Literal:
        return _LITERAL + ", ".join(repr(one) for one in args)
    if kind is type(None):
        return "None"
    name = getattr(origin or kind, "__name__", str(kind))
    return f"{name} of {_text(args[0])}" if origin is not None and issubclass(origin, Collection) else name
