"""Model parameters and buffers: saved by reference, loaded into the live model.

Parameters are equal on all ranks or sharded, so DCP keeps one copy of each. Plain buffers may differ by rank
(running statistics under FSDP2, token counts), and DCP would keep an arbitrary rank's: rank 0's is saved as
``model.<fqn>``, those of the others as ``buffers.rank-<r>.<fqn>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from txstore.train.names import Models
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets

_OF_A_RANK = re.compile(r"buffers\.rank-([0-9]+)\.")
_EXTRA = "_extra_state"


class ModelPiece:
    """The piece of state that holds all models."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def capture(self, place: Place) -> PieceState:
        """References to all tensors; extra state of modules by value; which parameters are trained."""
        tensors, extra = {}, {}
        buffers = self._models.buffer_names()
        for fqn, value in self._models.state_dict().items():
            if not isinstance(value, torch.Tensor) or fqn.rpartition(".")[2] == _EXTRA:
                extra[fqn] = value
            else:
                tensors[self._key(fqn, value, place, buffers)] = value
        return PieceState(shared={"extra": extra, "trained": self._trained()}, tensors=tensors)

    def _key(self, fqn: str, value: torch.Tensor, place: Place, buffers: set[str]) -> str:
        if fqn in buffers and place.rank and not isinstance(value, DTensor):
            return f"buffers.rank-{place.rank}.{fqn}"
        return f"model.{fqn}"

    def _trained(self) -> dict[str, bool]:
        return {fqn: parameter.requires_grad for fqn, parameter in self._models.parameters().items()}

    def targets(self, saved: SavedKeys, place: Place) -> Targets:
        """The live tensors. After a change of the world size every rank takes rank 0's buffers."""
        as_saved = place if place.world_size == saved.world_size else Place(0, saved.world_size)
        tensors, problems = dict(self.capture(as_saved).tensors), []
        for key, live in tensors.items():
            found = saved.tensors.get(key)
            if found is None:
                problems.append(f"{key!r} was not saved")
            else:
                problems += fits(key, live, found)
        others = frozenset(key for key in saved.tensors if _OF_A_RANK.match(key)) - tensors.keys()
        return Targets(tensors, others, tuple(problems))

    def problems(self, loaded: Loaded) -> list[str]:
        """Other parameters are trained than were, or other modules have extra state."""
        saved, now = loaded.shared, self.capture(loaded.place).shared
        problems = []
        # Parameters that only one side has are judged by their keys, and may be a migration's.
        both = saved["trained"].keys() & now["trained"].keys()
        differing = sorted(fqn for fqn in both if saved["trained"][fqn] != now["trained"][fqn])
        if differing:
            problems.append(f"other parameters require gradients than when it was saved: {differing[:5]}")
        if saved["extra"].keys() != now["extra"].keys():
            differing = sorted(saved["extra"].keys() ^ now["extra"].keys())
            problems.append(f"other modules have extra state than when it was saved: {differing[:5]}")
        return problems

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Tell FSDP2 and others about the tensors that were loaded in place, and give modules their extra state."""
        for fqn, value in loaded.shared["extra"].items():
            self._models.module_of(fqn).set_extra_state(value)
        count = sum(key.startswith(("model.", "buffers.")) for key in loaded.tensors)
        return {"tensors": count, "extra_states": len(loaded.shared["extra"])}


def fits(key: str, target: torch.Tensor, saved: TensorStorageMetadata) -> list[str]:
    """How a target differs from what was saved."""
    problems = []
    if tuple(target.shape) != tuple(saved.size):
        problems.append(f"{key!r} has shape {tuple(target.shape)}, {tuple(saved.size)} was saved")
    if target.dtype != saved.properties.dtype:
        problems.append(f"{key!r} is {target.dtype}, {saved.properties.dtype} was saved")
    return problems
