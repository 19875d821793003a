"""Where an optimizer's tensors lie: one of its parameter's shape lies as that does today, however it lay when saved.

A run that was saved under DDP may go on under FSDP2, and the other way round: a plain moment beside a sharded parameter
would load, and the optimizer's first step would fail.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from txstore.errors import StateMismatch
from txstore.train.lifted import LiftedTensor, placements_of
from txstore.train.python_state import flatten, lifted_tensors, unflatten


def target(
    live: torch.Tensor | None, parameter: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    """Where to load a tensor to: the live one if it fits, else a new one, sharded like its parameter."""
    if live is not None and live.shape == shape and live.dtype == dtype:
        return live
    if parameter is not None and parameter.shape == shape and len(shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # A step, or a factored moment: small, so every rank loads all of it and cuts out its part.
    return torch.empty(shape, dtype=dtype, device="cpu")


def taken(
    data: bytes, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor | None, *, was_sharded: bool = False
) -> dict[str, torch.Tensor]:
    """The loaded tensors of one parameter's state, as its optimizer is to have them.

    Args:
        data: The state without its tensors.
        tensors: All loaded ones.
        parameter: Whose state it is; None for an optimizer's own.
        was_sharded: Whether the parameter was a `DTensor` when it was saved.

    Raises:
        StateMismatch: One was not loaded, or cannot be placed.
    """
    found = {}
    for path, lifted in lifted_tensors(data).items():
        if path not in tensors:
            raise StateMismatch(f"{path!r} was not loaded", key=path)
        found[path] = _placed(tensors[path], lifted, parameter, was_sharded=was_sharded)
    return found


def homeless(data: bytes, parameter: torch.Tensor, *, was_sharded: bool) -> list[str]:
    """The tensors of one parameter's state that cannot be placed beside it as it is today."""
    found = []
    for path, lifted in lifted_tensors(data).items():
        try:
            _placements(lifted, parameter, was_sharded=was_sharded)
        except StateMismatch:
            found.append(path)
    return found


def placeless(data: bytes) -> bytes:
    """The state without its tensors, the same wherever they lie."""
    blank = {
        path: torch.empty((), dtype=one.dtype, device="cpu").expand(one.shape)
        for path, one in lifted_tensors(data).items()
    }
    return flatten(unflatten(data, blank))[0]


def sharded(parts: Collection[Sequence[Any]], recorded: Collection[str] | None) -> frozenset[str]:
    """The parameters that were a `DTensor` when they were saved.

    Args:
        parts: The state of each without its tensors, by name.
        recorded: As `capture` noted it; None of a checkpoint from before it did: then what a moment tells.
    """
    if recorded is not None:
        return frozenset(recorded)
    return frozenset(
        fqn for fqn, part in parts if any(one.placements is not None for one in lifted_tensors(part).values())
    )


def _placed(
    tensor: torch.Tensor, lifted: LiftedTensor, parameter: torch.Tensor | None, *, was_sharded: bool
) -> torch.Tensor:
    """A loaded tensor on the device, and in the parts, in which the optimizer is to have it."""
    if parameter is None and isinstance(tensor, DTensor) and lifted.placements is not None:
        return tensor
    where = _placements(lifted, parameter, was_sharded=was_sharded)
    if where is None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole if lifted.on_cpu or parameter is None else whole.to(parameter.device)
    if isinstance(tensor, DTensor):
        return tensor
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, where, src_data_rank=None)


def _placements(
    lifted: LiftedTensor, parameter: torch.Tensor | None, *, was_sharded: bool
) -> tuple[Placement, ...] | None:
    """How a tensor is to be placed on its parameter's mesh; None for a plain one."""
    if parameter is None and lifted.placements is not None:
        raise StateMismatch(f"{lifted.path!r} was sharded, and belongs to no parameter", key=lifted.path)
    if not isinstance(parameter, DTensor):
        return None
    if lifted.placements is None and was_sharded:
        return None  # plain beside a sharded parameter: so the optimizer keeps it
    shape = tuple(parameter.shape)
    # Of a parameter without dimensions a step has the shape, too: a plain tensor there may be either.
    if lifted.shape == shape and (shape or lifted.placements is not None):
        return tuple(parameter.placements)
    if lifted.placements is None and shape and not lifted.shape:
        return None
    if lifted.placements is not None and len(lifted.placements) == parameter.device_mesh.ndim:
        return tuple(placements_of(lifted))
    raise StateMismatch(
        f"{lifted.path!r} is no moment of its parameter's shape, and that was sharded in another way when it was saved",
        key=lifted.path,
    )


def largest(part: bytes) -> int:
    """Numbers in the largest tensor of a parameter's state."""
    return max((math.prod(one.shape) for one in lifted_tensors(part).values()), default=0)
