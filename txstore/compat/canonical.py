"""One text for one configuration: canonical JSON of plain values, whatever held them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath

import msgspec

from txstore.errors import ConfigError

_DEEPEST = 100


def canonical_json(value: object, path: str = "config") -> bytes:
    """Canonical JSON: the order of names does not count, the order of lists does, and floats are exact.

    A dataclass, a msgspec Struct, an `argparse.Namespace` and any mapping are their names and values; an enum is its
    value, a path its text. Names need not be strings: ``1`` and ``"1"`` stay different.

    Args:
        value: The configuration.
        path: What errors call it.

    Raises:
        ConfigError: A value has no exact form (NaN, infinities, arrays, functions, ...), or is nested without end.
    """
    return dump(plain_form(value, path))


def dump(plain: object) -> bytes:
    """The text of a plain form."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plain_form(value: object, path: str = "config", depth: int = 0) -> object:
    """Dicts, lists and scalars that say the same as `value`; names in dicts are JSON texts. As `canonical_json`."""
    if depth > _DEEPEST:
        raise ConfigError(
            f"{path[:200]}... is nested deeper than {_DEEPEST} levels, or contains itself", key=path[:200]
        )
    if isinstance(value, Enum):
        return plain_form(value.value, path, depth + 1)
    if value is None or isinstance(value, (bool, int, float, str, PurePath)):
        return _scalar(value, path)
    pairs = _pairs(value)
    if pairs is not None:
        # The JSON text of the name, so that 1 and "1" differ; the bare word `set` below can then be no name.
        return {_name(key, path): plain_form(one, f"{path}.{key}", depth + 1) for key, one in pairs}
    if isinstance(value, AbstractSet):
        return {"set": sorted(dump(plain_form(one, f"{path}{{}}", depth + 1)).decode() for one in value)}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain_form(one, f"{path}[{place}]", depth + 1) for place, one in enumerate(value)]
    raise _refusal(
        path, f"a {type(value).__module__}.{type(value).__qualname__} has no exact text", "pass a plain value"
    )


def _scalar(value: float | str | PurePath | None, path: str) -> object:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refusal(path, f"{value!r} has no JSON form", "use None or a text")
        return float(value)  # a subclass, such as NumPy's, may print itself otherwise
    return str(value) if isinstance(value, PurePath) else value


def _pairs(value: object) -> Iterator[tuple[object, object]] | None:
    if isinstance(value, Mapping):
        return iter(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return ((field.name, getattr(value, field.name)) for field in fields(value))
    if isinstance(value, msgspec.Struct):
        return ((name, getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, argparse.Namespace):
        return iter(vars(value).items())
    return None


def _name(key: object, path: str) -> str:
    if isinstance(key, Enum) or not (key is None or isinstance(key, (bool, int, float, str))):
        raise _refusal(path, f"a name is of type {type(key).__qualname__}", "use strings")
    return dump(_scalar(key, path)).decode()


def _refusal(path: str, what: str, next_step: str) -> ConfigError:
    return ConfigError(f"{path} cannot be fingerprinted: {what}", key=path, next_step=next_step)
