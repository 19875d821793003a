"""What holds the tensors of a snapshot is as `copy.deepcopy` would make it: same classes, sharing and order, nothing kept."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from txstore.dcp import SnapshotBuffers


class Holder:
    """An object with attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Labelled(dict[Any, Any]):
    """A dict with attributes."""

    label: Any = None


ATOMS = (None, 3, 2.5, "text", b"bytes", True, (1, 2))
KINDS = ("dict", "labelled", "ordered", "list", "tuple", "holder")


def _container(kind: str, parts: list[Any]) -> Any:
    # Keys of several types; 1 and True, and 1.0, are one key.
    keys = ["a", 1, (2, "b"), 1.5, "c"]
    pairs = list(zip(keys, parts, strict=False))
    if kind == "dict":
        return dict(pairs)
    if kind == "labelled":
        made = Labelled(pairs[1:])
        made.label = parts[0] if parts else None
        return made
    if kind == "ordered":
        return collections.OrderedDict(reversed(pairs))
    if kind == "holder":
        return Holder(parts[0] if parts else None)
    return parts if kind == "list" else tuple(parts)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """States whose containers share parts, and some of which hold themselves."""
    pool: list[Any] = [*ATOMS, torch.arange(3.0), torch.tensor(7), torch.empty(0), torch.ones(2, requires_grad=True)]
    made = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8)):
        made.append(_container(kind, [draw(st.sampled_from(pool)) for _ in range(draw(st.integers(0, 4)))]))
        pool.append(made[-1])
    if draw(st.booleans()):
        for one in made:
            if isinstance(one, dict):
                one["later"] = made[-1]
            elif isinstance(one, list):
                one.append(made[-1])
    return {f"key {at}": one for at, one in enumerate(made) if draw(st.booleans()) or one is made[-1]}


ATOM_TYPES = (type(None), int, float, str, bytes)


def assert_alike(one: Any, other: Any, seen: dict[int, int], originals: set[int]) -> None:
    """Both are the same graph of objects: what is shared in one is shared in the other."""
    assert type(one) is type(other)
    if isinstance(one, ATOM_TYPES):
        assert one == other
        return
    if id(one) in seen:
        assert seen[id(one)] == id(other)
        return
    assert id(other) not in seen.values()
    assert id(one) not in originals or type(one) is tuple
    seen[id(one)] = id(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
        return
    ours, theirs = _parts(one), _parts(other)
    assert len(ours) == len(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert_alike(mine, its, seen, originals)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair] + [getattr(value, "label", None)]
    if isinstance(value, Holder):
        return [value.value]
    return list(value)


def _objects(value: Any, found: dict[int, Any]) -> set[int]:
    if not isinstance(value, ATOM_TYPES) and id(value) not in found:
        found[id(value)] = value
        for part in [] if isinstance(value, torch.Tensor) else _parts(value):
            _objects(part, found)
    return set(found)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_containers_are_as_deepcopy_makes_them(state: dict[str, Any]) -> None:
    buffers = SnapshotBuffers()
    expected = copy.deepcopy(state)
    for _ in range(2):
        with buffers.stage(state) as taken:
            assert_alike(dict(taken.state_dict), expected, {}, _objects(state, {}))
            taken.state_dict.items()


class Replacing:
    """Replaces entries of the dict that holds it when it is copied, as a cache does that reads itself anew."""

    def __init__(self, holder: dict[str, Any]) -> None:
        self.holder = holder

    def __deepcopy__(self, memo: object) -> str:
        self.holder["before"] = {"value": 3}
        self.holder["after"] = {"value": 4}
        return "copied"


def _replaced() -> dict[str, Any]:
    holder: dict[str, Any] = {"before": {"value": 1}, "replacing": None, "after": {"value": 2}}
    holder["replacing"] = Replacing(holder)
    return {"holder": holder}


def test_a_dict_that_goes_while_the_state_is_copied_is_taken_for_no_other() -> None:
    for _ in range(3):
        with SnapshotBuffers().stage(_replaced()) as taken:
            assert dict(taken.state_dict) == copy.deepcopy(_replaced())
