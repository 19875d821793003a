"""Gradients at ``micro_step`` 0: their values are spent, but whether there are any is state.

An optimizer skips a parameter without a gradient, and moves one whose gradient is zero: by its momentum, by weight
decay. A loop with ``zero_grad(set_to_none=False)`` leaves zeros, for heads and experts that a step does not use. So
what is saved is which parameters have a gradient, and a resume gives those zeros. It costs no byte of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from txstore.dcp.tensors import dtype_name, dtype_of
from txstore.errors import FormatError

_ZEROS = "zeros"
_SPARSE = "sparse"
_PLACED = {Replicate(): "replicated", Partial(): "partial"}


def is_spent(kind: str) -> bool:
    """Whether a recorded kind of gradient is one of `spent_kind`."""
    return kind.startswith(f"{_ZEROS} ")


def spent_kind(parameter: nn.Parameter, gradient: torch.Tensor) -> str:
    """What to record of a spent gradient: dtype, and what it has otherwise than its parameter; "" for an unknown one.

    A sparse gradient takes no dense one, and zeros that are placed otherwise would be added up in another order.
    """
    found = f"{_ZEROS} {dtype_name(gradient.dtype)}"
    if isinstance(gradient, DTensor) != isinstance(parameter, DTensor):
        return ""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements == parameter.placements:
            return found
        placed = [_told(placement) for placement in gradient.placements]
        return f"{found} {','.join(placed)}" if all(placed) else ""
    if gradient.layout == torch.sparse_coo:
        return f"{found} {_SPARSE} {gradient.sparse_dim()}"
    return found if gradient.layout == torch.strided else ""


def zeros_of(kind: str, parameter: nn.Parameter) -> torch.Tensor:
    """The gradient of a recorded kind.

    Raises:
        FormatError: The kind is none of `spent_kind`.
    """
    dtype_text, _, rest = kind.removeprefix(f"{_ZEROS} ").partition(" ")
    dtype = dtype_of(dtype_text, "gradients")
    if rest.startswith(_SPARSE):
        dims, shape = int(rest.removeprefix(_SPARSE)), tuple(parameter.shape)
        indices = torch.empty((dims, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *shape[dims:]), dtype=dtype, device=parameter.device)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    names = rest.split(",") if rest else []
    # On a mesh of other dimensions the saved placement means nothing.
    if not isinstance(zeros, DTensor) or len(names) != zeros.device_mesh.ndim:
        return zeros
    placements = [_placement(name) for name in names]
    whole = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = zeros.redistribute(placements=whole).to_local()
    return DTensor.from_local(
        local, zeros.device_mesh, placements, run_check=False, shape=zeros.shape, stride=zeros.stride()
    )


def keeping_zeros(
    parameters: Mapping[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters whose gradient, if there is one, may still be there as zeros when the next step begins.

    One that is zero stays: a loop may clear in both ways. Of an optimizer which moved a parameter before that has no
    gradient now, others do not: its gradients are set to None. If such a loop saves between the step and
    ``zero_grad``, zeros would be left for parameters that the next step does not use.
    """
    cleared = {
        id(parameter)
        for optimizer in optimizers
        if any(one.requires_grad and one.grad is None and optimizer.state.get(one) for one in _of(optimizer))
        for parameter in _of(optimizer)
    }
    return (
        (fqn, parameter)
        for fqn, parameter in parameters.items()
        if id(parameter) not in cleared or (parameter.grad is not None and _is_zero(parameter.grad))
    )


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether all of it is known to be zero. A rank knows its part of a sharded one only, and all must say the same."""
    if isinstance(gradient, DTensor):
        return False
    values = gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
    return not bool(values.any())


def _of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _told(placement: Placement) -> str:
    return f"shard {placement.dim}" if type(placement) is Shard else _PLACED.get(placement, "")


def _placement(name: str) -> Placement:
    if name.startswith("shard "):
        return Shard(int(name.removeprefix("shard ")))
    found = next((placement for placement, told in _PLACED.items() if told == name), None)
    if found is None:
        raise FormatError(f"a gradient placed as {name!r}", key="gradients")
    return found
