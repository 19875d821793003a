"""Plain Python state comes back as itself, type for type, or is refused by its path; hostile bytes are refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import io
import math
import struct
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txstore.errors import FormatError, TxStoreError, UnsupportedValue
from txstore.train.python_state import flatten, lifted_tensors, unflatten


def identical(a: Any, b: Any) -> bool:
    """Equality that tells types, bits of floats, orders and layouts apart."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and bool((a == b).all())
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and a.dtype.str == b.dtype.str and a.shape == b.shape
        kept = not (a.flags.forc and b.flags.forc) or a.flags.f_contiguous == b.flags.f_contiguous
        return same and kept and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        extra = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return extra and identical(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(identical(x, y) for y in b) for x in a)  # sets in sets have no order
    if isinstance(a, (list, tuple, collections.deque)):
        same = getattr(a, "maxlen", None) == getattr(b, "maxlen", None) and len(a) == len(b)
        return same and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def round_trip(value: Any) -> Any:
    data, tensors = flatten(value, "root")
    again, _ = flatten(unflatten(data, tensors), "root")
    assert again == data
    return unflatten(data, tensors)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(1 << 200), 1 << 200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
)
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)), max_leaves=4
)
VALUES = st.recursive(
    st.one_of(
        SCALARS,
        st.binary().map(bytearray),
        st.integers(-(1 << 31), (1 << 31) - 1).map(np.int32),
        st.floats(width=32).map(np.float32),
        st.lists(st.integers(0, 255), max_size=4).map(lambda v: np.array(v, np.uint8)),
        st.sampled_from(
            [torch.bfloat16, torch.float8_e4m3fn, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 0])]
        ),
        st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(torch.tensor),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4).map(collections.OrderedDict),
        st.dictionaries(HASHABLE, inner, max_size=4).map(lambda v: collections.defaultdict(list, v)),
        st.sets(HASHABLE, max_size=4),
        st.lists(inner, max_size=4).map(lambda v: collections.deque(v, maxlen=7)),
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(VALUES)
def test_any_plain_value_comes_back_as_itself(value: Any) -> None:
    assert identical(round_trip(value), value)


@pytest.mark.parametrize(
    "value",
    [
        [True, 1, 1.0, np.True_, np.int64(1), np.float64(1.0)],
        {True: "a", 2: "b", 2.5: "c", None: "d", (1, ("x",)): "e", b"k": "f"},
        [0.0, -0.0, math.inf, -math.inf, math.nan, struct.unpack("<d", bytes.fromhex("010000000000f07f"))[0]],
        [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 10**400],
        collections.Counter("abracadabra"),
        collections.defaultdict(None, {1: 2}),
        collections.deque([1, 2]),
        [np.datetime64("2020-01-02T03:04:05.006"), np.timedelta64(3, "D"), np.float16(1.5), np.complex64(1j)],
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["a", "bc\0d"]),
        np.array([], np.float32).reshape(0, 4),
        np.array(3),
        np.arange(12)[::2],
        {"a": torch.arange(3), "b": [torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True)]},
        {"a.b": 1, "a": {"b": 2}, 1: 3, "1": 4, "": 5, "[0]": [6]},
    ],
)
def test_what_types_must_not_be_confused(value: Any) -> None:
    assert identical(round_trip(value), value)


class Colour(enum.Enum):
    RED = 1


class Count(enum.IntEnum):
    ONE = 1


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Plain:
    x: int = 1


class Packed(msgspec.Struct):
    x: int = 1


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Count.ONE,
        Point(1),
        Plain(),
        Packed(),
        Text("a"),
        "\ud800",
        lambda: 1,
        object(),
        range(3),
        np.longdouble(1),
        np.array([object()]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.ma.array([1]),
        collections.defaultdict(lambda: 1),
        torch.nn.Linear(1, 1),
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_by_its_path(value: Any) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        flatten([{"lr_lambdas": [None, value]}], "scheduler")
    assert caught.value.key.startswith("scheduler[0].lr_lambdas[1]")


def test_an_object_with_a_state_dict_is_asked_for_it() -> None:
    with pytest.raises(UnsupportedValue, match=r"pass its state_dict\(\)"):
        flatten({"inner": torch.nn.Linear(1, 1)})


def test_cycles_and_bottomless_nesting_are_refused() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(UnsupportedValue, match="contains itself") as caught:
        flatten(cycle, "x")
    assert caught.value.key == "x[1].again"
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnsupportedValue, match="nested deeper"):
        flatten(deep)


def test_an_alias_is_saved_as_a_copy() -> None:
    one = [1]
    first, second = round_trip([one, one])
    assert first == second == [1]
    assert first is not second


def test_tensors_are_lifted_under_paths_that_never_collide() -> None:
    t = [torch.full((1,), float(i)) for i in range(8)]
    assert flatten({frozenset({1}): t[0]})[1].keys() == {"[#0]"}
    value = {"a": {"b": t[0]}, "a.b": t[1], "x": [t[2]], "x[0]": t[3], 1: t[4], "1": t[5], (1,): t[6], "": t[7]}
    data, tensors = flatten(value, "root")
    assert len(tensors) == 8
    assert {"root.a.b", "root['a.b']", "root.x[0]", "root['x[0]']", "root[1]", "root['1']"} <= tensors.keys()
    assert identical(unflatten(data, tensors), value)
    assert lifted_tensors(data).keys() == tensors.keys()


def test_tensors_that_are_missing_superfluous_or_other_are_refused() -> None:
    data, tensors = flatten({"a": torch.ones(2)}, "r")
    for wrong in ({}, {**tensors, "r.b": torch.ones(1)}, {"r.a": torch.ones(3)}, {"r.a": torch.ones(2).double()}):
        with pytest.raises(FormatError):
            unflatten(data, wrong)


def test_the_order_of_a_set_does_not_show_in_the_bytes() -> None:
    # Ranks compare digests of their state, and a set of strings is ordered by each process in its own way.
    first, second = set(), set()
    names = [f"name-{i}" for i in range(50)]
    first.update(names)
    second.update(reversed(names))
    assert flatten(first)[0] == flatten(second)[0]


HOSTILE = [
    b"",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x7f\xff\xff\xff" * 50,
    b"\x91" * 100_000,
    b"\x80",
    *(
        msgspec.msgpack.encode(tree)
        for tree in [
            [],
            [1],
            ["no such type"],
            ["builtins.eval", "1"],
            ["int", "x"],
            ["list", ["dict", 1]],
            ["dict", ["list"], 1],
            ["dict", 1, 2, 1, 3],
            ["set", 1, 1],
            ["array", "<f8", [1 << 62], "C", b""],
            ["array", "<f8", [1 << 62, 1 << 62], "C", b"12345678"],
            ["array", "<f8", [-1], "C", b""],
            ["array", "<f8", [0, 1 << 62], "C", b""],
            ["array", "|O", [1], "C", b"12345678"],
            ["array", "<f8", [1], "K", b"12345678"],
            ["array", "<U999999999", [0], "C", b"1"],
            ["numpy", "|V8", b"12345678"],
            ["dtype", "Tensor"],
            ["device", "cpu; import os"],
            ["device", "nonsense"],
            ["size", [-1]],
            ["size", ["1"]],
            ["defaultdict", "eval"],
            ["defaultdict", ["list"]],
            ["deque", 1, 2, 3],
            ["deque", 1 << 63],
            ["deque", -1],
            ["tensor", "p", "float32", [1], True, False, False],
            ["tensor", "p", "float32", [1], True, False, False, "x"],
            ["tensor", "p", "save", [1], True, False, False, None],
            ["float", 1.0],
            ["None"],
        ]
    ),
    msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"x")),
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError):
        unflatten(data, {})


@settings(max_examples=100)
@given(VALUES, st.data())
def test_damaged_bytes_give_a_format_error_or_a_value_and_never_code(value: Any, data: st.DataObject) -> None:
    good, tensors = flatten(value)
    bad = bytearray(good)
    at = data.draw(st.integers(0, len(bad) - 1))
    bad[at] = data.draw(st.integers(0, 255))
    try:
        unflatten(bytes(bad), tensors)
    except TxStoreError as error:
        assert isinstance(error, FormatError)


def test_nothing_is_pickled() -> None:
    data, _ = flatten({"a": io.BytesIO.__name__, "n": np.arange(3)})
    assert b"numpy" not in data
    assert not data.startswith(b"\x80")
