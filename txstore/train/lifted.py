"""What is known of a tensor that was lifted out of Python state, apart from its values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from txstore.dcp.tensors import dtype_name, dtype_of
from txstore.errors import UnsupportedValue
from txstore.train.python_types import extents, fields_of, malformed

_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor}


class LiftedTensor(NamedTuple):
    """A tensor's place in the tree.

    Attributes:
        path: Its path, the name under which it travels.
        dtype: Torch's dtype.
        shape: Global shape.
        on_cpu: Whether it lay on the CPU, as an optimizer's step does.
        requires_grad: Its flag.
        parameter: Whether it was an `nn.Parameter`.
        placements: Of a `DTensor`: for each mesh dimension the tensor dimension that it shards, or None where
            it is replicated. None for a plain tensor.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_cpu: bool
    requires_grad: bool
    parameter: bool
    placements: tuple[int | None, ...] | None

    def packed(self) -> list[Any]:
        """As msgpack fields."""
        placed = None if self.placements is None else list(self.placements)
        rest = [self.on_cpu, self.requires_grad, self.parameter, placed]
        return [self.path, dtype_name(self.dtype), list(self.shape), *rest]

    @classmethod
    def unpacked(cls, fields: list[Any]) -> LiftedTensor:
        """Inverse of `packed`.

        Raises:
            FormatError: Not such fields.
        """
        path, dtype, shape, on_cpu, requires_grad, parameter = fields_of(fields[:6], str, str, list, bool, bool, bool)
        placed = fields[6:]
        if len(placed) != 1 or not (placed[0] is None or type(placed[0]) is list):
            raise malformed("a tensor with other placements than a mesh has")
        if any(type(dim) is not int and dim is not None for dim in placed[0] or []):
            raise malformed("a placement that is none")
        placements = None if placed[0] is None else tuple(placed[0])
        return cls(path, dtype_of(dtype, path), extents(shape), on_cpu, requires_grad, parameter, placements)

    def dress(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as what it was: a parameter, or a plain tensor, with its flag."""
        if self.parameter:
            return torch.nn.Parameter(tensor, requires_grad=self.requires_grad)
        return tensor.requires_grad_(self.requires_grad)


def is_plain_class(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be lifted: one of a subclass would come back as its base."""
    return type(tensor) in _PLAIN


def check_exact(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor that would not come back as it is.

    Raises:
        UnsupportedValue: It is no plain memory, or a view whose flags would be lost; says what to save instead.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    problems = (
        (local.is_nested, "nested", "save its unbind(), a list of tensors"),
        (local.layout != torch.strided, f"of layout {str(local.layout).removeprefix('torch.')}", "save its to_dense()"),
        (local.is_quantized, "quantized", "save its int_repr(), scale and zero point"),
        (local.device.type == "meta", "on the meta device: it has no data", "give it data, or leave it out"),
        (local.layout == torch.strided and local.is_conj(), "a lazy conjugate", "save its resolve_conj()"),
        (local.layout == torch.strided and local.is_neg(), "a lazy negative", "save its resolve_neg()"),
    )
    for is_so, what, hint in problems:
        if is_so:
            raise UnsupportedValue(f"{path!r} is a tensor that is {what}", key=path, next_step=hint)


def describe(tensor: torch.Tensor, path: str) -> LiftedTensor:
    """What must be known of a tensor to give it its place again.

    Raises:
        UnsupportedValue: It would not come back as it is, or is a pending sum (a `Partial` placement), whose value
            no rank has.
    """
    check_exact(tensor, path)
    placements = None
    if isinstance(tensor, DTensor):
        placements = tuple(_dim(placement, path) for placement in tensor.placements)
    return LiftedTensor(
        path,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.device.type == "cpu",
        tensor.requires_grad,
        isinstance(tensor, torch.nn.Parameter),
        placements,
    )


def _dim(placement: Placement, path: str) -> int | None:
    if isinstance(placement, Replicate):
        return None
    if placement.is_shard():
        return int(getattr(placement, "dim"))  # noqa: B009 - strided shards have it too, under another class
    raise UnsupportedValue(f"{path!r} is placed as {placement}", key=path, next_step="redistribute it before saving")


def placements_of(lifted: LiftedTensor) -> list[Placement]:
    """The placements of a small `DTensor` on a mesh of as many dimensions."""
    return [Replicate() if dim is None else Shard(dim) for dim in lifted.placements or ()]
