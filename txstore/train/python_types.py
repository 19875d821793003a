"""How each type of plain Python state is written: one codec a type, looked up by the exact type.

A bare msgpack value is None, a bool, an int of 64 bits, a float, a str or bytes. Everything else is an array
that begins with the name of its type. Subclasses have no codec: they would come back as their base.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from txstore.dcp.tensors import dtype_name, dtype_of
from txstore.errors import FormatError, UnsupportedValue

MAX_DEPTH = 100
"""Deepest nesting that is saved: below Python's own limit, so that what was saved can be read."""

BARE = frozenset({type(None), bool, int, float, str, bytes})
"""Types that msgpack itself tells apart."""

_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str)}
_NUMPY_DTYPE = re.compile(
    r"[<>|=](?:b1|[iu][1248]|f[248]|c8|c16|[SU][0-9]{1,9}|[Mm]8(?:\[[0-9]{0,9}[a-zA-Z]{1,2}\])?)\Z"
)
_DEVICE = re.compile(r"[a-z]{1,16}(?::[0-9]{1,4})?\Z")


def malformed(why: str) -> FormatError:
    """Saved Python state that `flatten` did not make."""
    return FormatError(f"malformed Python state: {why}")


class Walk(Protocol):
    """The walk that a container hands its parts to."""

    def encode(self, value: Any, path: str) -> Any:
        """A part."""

    def key(self, value: Any, path: str) -> Any:
        """A key, or an element of a set."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A type without parts."""

    name: str
    encode: Callable[[Any, str], Any]
    decode: Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Container:
    """A type with parts, which the walk encodes and decodes."""

    name: str
    encode: Callable[[Any, str, Walk], list[Any]]
    decode: Callable[[list[Any], Callable[[Any], Any]], Any]


C = TypeVar("C", Leaf, Container)


class Codecs(Generic[C]):
    """Codecs by type and by name."""

    def __init__(self, codecs: dict[type, C]) -> None:
        self.by_type: dict[type, C] = codecs
        self.by_name: dict[str, C] = {codec.name: codec for codec in codecs.values()}


def child(path: str, key: object, at: int) -> str:
    """The path of a value below `path`; two keys of one container never share one.

    A key with parts is told by its position `at`: the text of a frozenset differs between processes.
    """
    if type(key) in CONTAINERS.by_type:
        return f"{path}[#{at}]"
    if type(key) is str and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", key):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


# Leaves.


def _same(value: Any, path: str) -> Any:  # noqa: ARG001 - a codec's signature
    return value


def _never(fields: list[Any]) -> Any:
    raise malformed(f"a type that is written bare, with {len(fields)} fields")


def _encode_int(value: int, path: str) -> Any:  # noqa: ARG001
    if -(1 << 63) <= value < 1 << 64:
        return value
    return ["int", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _encode_str(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValue(
            f"{path!r} is a str with a lone surrogate", key=path, next_step="encode it to bytes"
        ) from error
    return value


def _encode_numpy_scalar(value: Any, path: str) -> list[Any]:  # noqa: ARG001
    return ["numpy", value.dtype.str, value.tobytes()]


def _decode_numpy_scalar(fields: list[Any]) -> Any:
    name, data = fields_of(fields, str, bytes)
    return _array(name, (), "C", data)[()]


def _encode_array(value: Any, path: str) -> list[Any]:
    name = value.dtype.str
    if not _NUMPY_DTYPE.match(name) or np.dtype(name) != value.dtype:
        raise UnsupportedValue(
            f"{path!r} is an array of dtype {value.dtype}", key=path, next_step="use numbers, bools, text or times"
        )
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    return ["array", name, list(value.shape), order, value.tobytes(order)]


def _decode_array(fields: list[Any]) -> Any:
    name, shape, order, data = fields_of(fields, str, list, str, bytes)
    if order not in {"C", "F"}:
        raise malformed(f"array order {order!r}")
    return _array(name, extents(shape), order, data)


def _array(name: str, shape: tuple[int, ...], order: Any, data: bytes) -> Any:
    if not _NUMPY_DTYPE.match(name):
        raise malformed(f"array dtype {name[:40]!r}")
    try:
        dtype = np.dtype(name)
        if math.prod(shape) * dtype.itemsize != len(data):
            raise malformed(f"{len(data)} bytes for an array {name}{shape}")
        if not data:
            return np.empty(shape, dtype, order)
        return np.ndarray(shape, dtype, data, order=order).copy(order)
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        raise malformed(f"array {name}{shape}: {error}") from error


def _decode_dtype(fields: list[Any]) -> torch.dtype:
    return dtype_of(fields_of(fields, str)[0], "")


def _decode_device(fields: list[Any]) -> torch.device:
    (text,) = fields_of(fields, str)
    if not _DEVICE.match(text):
        raise malformed(f"device {text[:40]!r}")
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise malformed(f"device {text!r}") from error


def _decode_int(fields: list[Any]) -> int:
    return int.from_bytes(fields_of(fields, bytes)[0], "little", signed=True)


def fields_of(fields: list[Any], *kinds: type) -> list[Any]:
    """`fields`, if they have exactly these types."""
    if [type(field) for field in fields] != list(kinds):
        raise malformed(f"fields of types {[type(field).__name__ for field in fields][:5]}")
    return fields


def extents(values: list[Any]) -> tuple[int, ...]:
    """A shape."""
    if len(values) > 64 or any(type(value) is not int or value < 0 for value in values):
        raise malformed("a shape that is none")
    return tuple(values)


_NUMPY_SCALARS = [
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128, np.datetime64, np.timedelta64),
]

LEAVES: Codecs[Leaf] = Codecs(
    {
        type(None): Leaf("None", _same, _never),
        bool: Leaf("bool", _same, _never),
        float: Leaf("float", _same, _never),
        bytes: Leaf("bytes", _same, _never),
        str: Leaf("str", _encode_str, _never),
        int: Leaf("int", _encode_int, _decode_int),
        bytearray: Leaf("bytearray", lambda v, _: ["bytearray", bytes(v)], lambda f: bytearray(fields_of(f, bytes)[0])),
        complex: Leaf(
            "complex", lambda v, _: ["complex", v.real, v.imag], lambda f: complex(*fields_of(f, float, float))
        ),
        torch.Size: Leaf("size", lambda v, _: ["size", list(v)], lambda f: torch.Size(extents(fields_of(f, list)[0]))),
        torch.dtype: Leaf("dtype", lambda v, _: ["dtype", dtype_name(v)], _decode_dtype),
        torch.device: Leaf("device", lambda v, _: ["device", str(v)], _decode_device),
        np.ndarray: Leaf("array", _encode_array, _decode_array),
        **dict.fromkeys(_NUMPY_SCALARS, Leaf("numpy", _encode_numpy_scalar, _decode_numpy_scalar)),
    }
)


# Containers.


def _sequence(name: str, kind: Callable[[list[Any]], Any]) -> Container:
    def encode(value: Any, path: str, walk: Walk) -> list[Any]:
        return [name, *(walk.encode(item, f"{path}[{at}]") for at, item in enumerate(value))]

    return Container(name, encode, lambda fields, build: kind([build(field) for field in fields]))


def _unordered(name: str, kind: Callable[[list[Any]], Any]) -> Container:
    def encode(value: Any, path: str, walk: Walk) -> list[Any]:
        # Sorted, because the order of a set differs between processes, and ranks compare digests of their state.
        return [name, *sorted((walk.key(item, f"{path}{{{item!r}}}") for item in value), key=repr)]

    def decode(fields: list[Any], build: Callable[[Any], Any]) -> Any:
        return _hashed(lambda: kind([build(field) for field in fields]), len(fields))

    return Container(name, encode, decode)


def _hashed(make: Callable[[], Any], count: int) -> Any:
    try:
        made = make()
    except TypeError as error:
        raise malformed(f"a key that cannot be one: {error}") from error
    if len(made) != count:
        raise malformed("a key twice")
    return made


def _encode_items(value: Any, path: str, walk: Walk) -> list[Any]:
    items = []
    for at, (key, item) in enumerate(value.items()):
        below = child(path, key, at)
        items += [walk.key(key, below), walk.encode(item, below)]
    return items


def _decode_items(fields: list[Any], build: Callable[[Any], Any]) -> dict[Any, Any]:
    if len(fields) % 2:
        raise malformed("a key without a value")
    pairs = [(build(key), build(item)) for key, item in zip(fields[::2], fields[1::2], strict=True)]
    made: dict[Any, Any] = _hashed(lambda: dict(pairs), len(pairs))
    return made


def _mapping(name: str, kind: Callable[[dict[Any, Any]], Any]) -> Container:
    return Container(
        name,
        lambda value, path, walk: [name, *_encode_items(value, path, walk)],
        lambda fields, build: kind(_decode_items(fields, build)),
    )


def _encode_defaultdict(value: Any, path: str, walk: Walk) -> list[Any]:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name or "") is not factory:
        raise UnsupportedValue(
            f"{path!r} is a defaultdict of {factory!r}",
            key=path,
            next_step=f"use one of {', '.join(_FACTORIES)}, or a dict",
        )
    return ["defaultdict", name, *_encode_items(value, path, walk)]


def _decode_defaultdict(fields: list[Any], build: Callable[[Any], Any]) -> Any:
    if not fields or (fields[0] is not None and (type(fields[0]) is not str or fields[0] not in _FACTORIES)):
        raise malformed("a defaultdict of something else")
    factory = None if fields[0] is None else _FACTORIES[fields[0]]
    return collections.defaultdict(factory, _decode_items(fields[1:], build))


def _encode_deque(value: Any, path: str, walk: Walk) -> list[Any]:
    return ["deque", value.maxlen, *(walk.encode(item, f"{path}[{at}]") for at, item in enumerate(value))]


def _decode_deque(fields: list[Any], build: Callable[[Any], Any]) -> Any:
    if not fields or not (fields[0] is None or (type(fields[0]) is int and len(fields) - 1 <= fields[0] < 1 << 62)):
        raise malformed("a deque longer than it may be")
    return collections.deque([build(field) for field in fields[1:]], maxlen=fields[0])


CONTAINERS: Codecs[Container] = Codecs(
    {
        list: _sequence("list", list),
        tuple: _sequence("tuple", tuple),
        set: _unordered("set", set),
        frozenset: _unordered("frozenset", frozenset),
        dict: _mapping("dict", dict),
        collections.OrderedDict: _mapping("OrderedDict", collections.OrderedDict),
        collections.Counter: _mapping("Counter", collections.Counter),
        collections.defaultdict: Container("defaultdict", _encode_defaultdict, _decode_defaultdict),
        collections.deque: Container("deque", _encode_deque, _decode_deque),
    }
)
