"""Unfinished gradients, for a save inside an accumulation window.

Without them the window would begin again after a resume, and the trajectory move. Gradients of plain parameters
(one process, DDP under ``no_sync``) are not reduced yet and differ by rank; those of FSDP2 are reduced and sharded.
At ``micro_step`` 0 their values are spent, and only which there are is saved: see `spent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from txstore.compat.differences import Difference
from txstore.errors import UnsupportedValue
from txstore.train.names import Models
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets, anew
from txstore.train.progress import TrainProgress
from txstore.train.spent import is_spent, keeping_zeros, spent_kind, zeros_of

_AT_STEP_0 = "save when progress.micro_step is 0"


class GradientsPiece:
    """The piece of state that holds unfinished gradients."""

    def __init__(self, models: Models, progress: TrainProgress, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._models = models
        self._progress = progress
        self._optimizers = optimizers

    def capture(self, place: Place) -> PieceState:
        """References to all gradients, and which parameters have none; at ``micro_step`` 0 only which have one.

        Raises:
            UnsupportedValue: FSDP2 holds gradients that it has not reduced, or a gradient is sparse or pending.
        """
        if self._progress.micro_step == 0:
            return PieceState(own=self._spent())
        for module in self._models.modules.values():
            _refuse_unreduced(module)
        tensors, kinds = {}, {}
        for fqn, parameter in self._models.parameters().items():
            gradient = parameter.grad
            if gradient is None:
                kinds[fqn] = "none"
            else:
                _refuse_inexact(fqn, parameter, gradient)
                kinds[fqn] = "sharded" if isinstance(gradient, DTensor) else "own"
                tensors[_key(fqn, kinds[fqn], place)] = gradient
        if not tensors:
            raise UnsupportedValue(
                f"micro_step is {self._progress.micro_step}, and no parameter has a gradient",
                key="gradients",
                next_step="count micro_step after backward, and set it to 0 after the optimizer's step",
            )
        return PieceState(own=kinds, tensors=tensors)

    def _spent(self) -> dict[str, str]:
        found = {}
        for fqn, parameter in keeping_zeros(self._models.parameters(), self._optimizers):
            if parameter.grad is not None:
                found[fqn] = spent_kind(parameter, parameter.grad)
                if not found[fqn]:
                    raise UnsupportedValue(
                        f"the gradient of {fqn!r} is {_placed(parameter.grad)}, and is still there after the step",
                        key=f"gradients.{fqn}",
                        next_step="call zero_grad() after the optimizer's step, before the save",
                    )
        return found

    def targets(self, saved: SavedKeys, place: Place) -> Targets:
        """New tensors beside the parameters."""
        tensors = {}
        for fqn, parameter in self._models.parameters().items():
            for kind in ("own", "sharded"):
                key = _key(fqn, kind, place)
                found = saved.tensors.get(key)
                if found is not None and parameter.shape == found.size:
                    tensors[key] = torch.empty_like(parameter, dtype=found.properties.dtype, requires_grad=False)
        others = frozenset(key for key in saved.tensors if key.startswith("gradients.rank-")) - tensors.keys()
        return Targets(tensors, others)

    def problems(self, loaded: Loaded) -> list[str]:
        """A window that other ranks, or another model, had begun."""
        kinds: Mapping[str, str] | None = loaded.own
        # Spent gradients of parameters that are no more, or of other ranks, are nothing that could be missing.
        if not kinds or all(is_spent(kind) for kind in kinds.values()):
            return []
        if loaded.plan.changes_keys:
            # Those of a layer that is new are missing, and those of a value that a migration made are another value's.
            began = "an accumulation window had begun, and a migration changes the model under its gradients"
            return [f"{began} ({anew('gradients')})"]
        if not loaded.same_world:
            counts = (
                f"{loaded.saved_world_size} ranks had begun an accumulation window, there are {loaded.place.world_size}"
            )
            return [f"{counts}: resume with as many, or from a save at micro_step 0"]
        parameters = self._models.parameters()
        problems = [f"the gradient of {fqn!r} was not saved" for fqn in parameters if fqn not in kinds]
        for fqn, kind in kinds.items():
            if fqn not in parameters:
                problems.append(f"a gradient of {fqn!r} was saved, and there is no such parameter")
            elif loaded.is_complete and kind != "none" and _key(fqn, kind, loaded.place) not in loaded.tensors:
                problems.append(f"the gradient of {fqn!r} was not loaded")
            elif kind != "none" and isinstance(parameters[fqn], DTensor) != (kind == "sharded"):
                problems.append(f"{fqn!r} is sharded on one side only ({anew('gradients')})")
        return problems

    def differences(self, loaded: Loaded) -> list[Difference]:  # noqa: ARG002 - the signature of a piece
        """None that may be meant."""
        return []

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Set every gradient as it was saved: absent ones are None, spent ones zero."""
        kinds: Mapping[str, str] = loaded.own or {}  # earlier checkpoints tell nothing of spent ones
        for fqn, parameter in self._models.parameters().items():
            kind = kinds.get(fqn, "none")
            if is_spent(kind):
                parameter.grad = zeros_of(kind, parameter)
            else:
                parameter.grad = None if kind == "none" else loaded.tensors[_key(fqn, kind, loaded.place)]
        zeros = sum(is_spent(kind) for kind in kinds.values())
        return {"gradients": sum(kind != "none" for kind in kinds.values()) - zeros, "zeros": zeros}

    def begin_anew(self) -> Mapping[str, Any]:
        """Leave a window that was restored behind: else its next step would be made of the rest of it alone."""
        lost, self._progress.micro_step = self._progress.micro_step, 0
        for parameter in self._models.parameters().values() if lost else ():
            parameter.grad = None
        return {"passes left behind": lost}


def _key(fqn: str, kind: str, place: Place) -> str:
    return f"gradients.{fqn}" if kind == "sharded" else f"gradients.rank-{place.rank}.{fqn}"


def _placed(gradient: torch.Tensor) -> str:
    placed = f" placed as {gradient.placements}" if isinstance(gradient, DTensor) else ""
    return f"a {gradient.layout} tensor{placed}"


def _refuse_inexact(fqn: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """Refuse a gradient that could not be loaded back as it is."""
    if gradient.layout != torch.strided:
        what = "is sparse"
    elif isinstance(gradient, DTensor) and (
        not isinstance(parameter, DTensor) or gradient.placements != parameter.placements
    ):
        what = f"is placed as {gradient.placements}, which its parameter is not"
    elif isinstance(parameter, DTensor) and not isinstance(gradient, DTensor):
        what = "is not sharded as its parameter is"
    else:
        return
    raise UnsupportedValue(f"the gradient of {fqn!r} {what}", key=f"gradients.{fqn}", next_step=_AT_STEP_0)


def _refuse_unreduced(module: nn.Module) -> None:
    """Refuse what FSDP2 keeps to itself under ``set_requires_gradient_sync(False)``: no parameter's `grad` has it."""
    for held, what in _unreduced(module):
        if held is not None:
            raise UnsupportedValue(
                f"FSDP2 holds {what} that are not in any parameter's grad",
                key="gradients",
                next_step=f"{_AT_STEP_0}, or leave gradient synchronisation on",
            )


def _unreduced(module: nn.Module) -> Iterator[tuple[object, str]]:
    # No public name leads to them. A torch that renames them raises here, so that nothing is left out silently.
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                yield group._partial_reduce_output, "gradients that are not reduced over all replicas"  # noqa: SLF001
                for parameter in group.fsdp_params:
                    yield parameter.unsharded_accumulated_grad, "gradients that are not reduced"
                    gathered = getattr(parameter, "_unsharded_param", None)
                    yield getattr(gathered, "grad", None), "gradients that are not reduced"
