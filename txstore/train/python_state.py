"""Plain Python state as msgpack: exactly, or an error at save time that names the path.

A state dict of a scheduler or a data loader is a tree of plain values. It is encoded so that every type comes
back as itself (True is not 1, a tuple is not a list), and never by pickle: decoding runs no code. Tensors are
lifted out and travel beside the bytes, under their path.

Aliases are saved as copies: two paths to one list come back as two equal lists. Cycles are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from txstore.errors import UnsupportedValue
from txstore.train.lifted import LiftedTensor, describe, is_plain_class
from txstore.train.python_types import BARE, CONTAINERS, LEAVES, MAX_DEPTH, malformed

_TENSOR = "tensor"


def flatten(value: Any, path: str = "") -> tuple[bytes, dict[str, torch.Tensor]]:
    """A value as msgpack, and the tensors in it by path, such as ``schedulers[0].lr_lambdas[1]``.

    Args:
        value: A tree of plain values, numpy scalars and arrays, and tensors.
        path: Where the tree hangs, for messages and for the tensors' paths.

    Raises:
        UnsupportedValue: Something in it would not come back as it is, or it contains itself.
    """
    lifted: dict[str, torch.Tensor] = {}
    tree = _Flattener(lifted).encode(value, path)
    return msgspec.msgpack.encode(tree), lifted


def unflatten(data: bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Inverse of `flatten`. The tensors that are given become part of the value; none is copied.

    Raises:
        FormatError: The bytes are not what `flatten` makes, or `tensors` are not those that it lifted.
    """
    wanted = dict(tensors)

    def place(record: LiftedTensor) -> torch.Tensor:
        found = wanted.pop(record.path, None)
        if found is None:
            raise malformed(f"no tensor is given for {record.path!r}, or it is named twice")
        if tuple(found.shape) != record.shape or found.dtype != record.dtype:
            raise malformed(
                f"{record.path!r} is {found.dtype}{tuple(found.shape)}, {record.dtype}{record.shape} was saved"
            )
        return record.dress(found)

    value = _decode(_tree(data), place, 0)
    if wanted:
        raise malformed(f"tensors that the value does not hold: {sorted(wanted)[:5]}")
    return value


def lifted_tensors(data: bytes) -> dict[str, LiftedTensor]:
    """What was lifted out of a value, by path, without the tensors.

    Raises:
        FormatError: The bytes are not what `flatten` makes.
    """
    found: dict[str, LiftedTensor] = {}

    def note(record: LiftedTensor) -> torch.Tensor:
        if record.path in found:
            raise malformed(f"{record.path!r} is named twice")
        found[record.path] = record
        return torch.empty(0, device="cpu")

    _decode(_tree(data), note, 0)
    return found


class _Flattener:
    """One walk over a tree."""

    def __init__(self, lifted: dict[str, torch.Tensor]) -> None:
        self._lifted = lifted
        self._above: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        leaf = LEAVES.by_type.get(kind)
        if leaf is not None:
            return leaf.encode(value, path)
        if isinstance(value, torch.Tensor) and is_plain_class(value):
            return self._lift(value, path)
        container = CONTAINERS.by_type.get(kind)
        if container is None:
            raise _refused(value, path)
        if id(value) in self._above:
            raise UnsupportedValue(f"{path!r} contains itself", key=path, next_step="save a value without cycles")
        if len(self._above) == MAX_DEPTH:
            raise UnsupportedValue(f"{path!r} is nested deeper than {MAX_DEPTH} levels", key=path)
        self._above.add(id(value))
        try:
            return container.encode(value, path, self)
        finally:
            self._above.discard(id(value))

    def key(self, value: Any, path: str) -> Any:
        """A key of a dict or an element of a set: it must be hashable, so it cannot hold a tensor."""
        before = len(self._lifted)
        encoded = self.encode(value, path)
        if len(self._lifted) != before:
            raise UnsupportedValue(f"{path!r} has a tensor for a key", key=path)
        return encoded

    def _lift(self, tensor: torch.Tensor, path: str) -> Any:
        if path in self._lifted:
            raise UnsupportedValue(f"two tensors share the path {path!r}", key=path)
        self._lifted[path] = tensor.detach()
        return [_TENSOR, *describe(tensor, path).packed()]


def _refused(value: Any, path: str) -> UnsupportedValue:
    if isinstance(value, torch.Tensor):
        what, hint = (
            f"a tensor of class {type(value).__name__}",
            "save a plain tensor, or give it to the model as a buffer",
        )
    elif callable(getattr(value, "state_dict", None)):
        what, hint = f"a {type(value).__name__}", "pass its state_dict()"
    else:
        what, hint = (
            f"a {type(value).__module__}.{type(value).__qualname__}",
            "turn it into plain values, such as a dict",
        )
    return UnsupportedValue(
        f"{path or 'the value'!r} is {what}, which cannot be saved exactly", key=path, next_step=hint
    )


def _tree(data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise malformed(str(error)) from error


def _decode(tree: Any, place: Callable[[LiftedTensor], torch.Tensor], depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise malformed("nested too deeply")
    if type(tree) is not list:
        if type(tree) in BARE:
            return tree
        raise malformed(f"a bare {type(tree).__name__}")
    if not tree or type(tree[0]) is not str:
        raise malformed("a value without a type")
    name, *fields = tree
    if name == _TENSOR:
        return place(LiftedTensor.unpacked(fields))
    container = CONTAINERS.by_name.get(name)
    if container is not None:
        return container.decode(fields, lambda item: _decode(item, place, depth + 1))
    leaf = LEAVES.by_name.get(name)
    if leaf is None:
        raise malformed(f"unknown type {name!r}")
    return leaf.decode(fields)
