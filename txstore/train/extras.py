"""The user's own objects: what one of them gives under two names is one tensor again when it takes its state back."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from txstore.errors import UnsupportedValue
from txstore.train.names import Models
from txstore.train.python_state import flatten, unflatten
from txstore.train.stateful import Scoped, StatefulPiece
from txstore.train.temporary import TemporaryBuffers

log = logging.getLogger(__name__)


class ExtrasPiece(StatefulPiece):
    """The piece of state that holds the user's own objects."""

    def __init__(self, extras: Mapping[str, Scoped]) -> None:
        super().__init__("extra", extras, verify=False)
        modules = {name: one.item for name, one in extras.items() if isinstance(one.item, nn.Module)}
        self._temporary = {name: TemporaryBuffers(Models(module)) for name, module in modules.items()}
        self._empty: set[str] = set()

    def more(self, name: str, state: Any) -> dict[str, Any]:
        """Which tensors of the state are one, by path: an object that keeps what it is given would hold two.

        Raises:
            UnsupportedValue: A module has changed a buffer that its state dict leaves out.
        """
        self._refuse_left_out(name)
        self._tell_empty(name, state)
        first: dict[tuple[Any, ...], str] = {}
        same = {}
        try:
            tensors = flatten(state)[1]
        except UnsupportedValue:
            return {}  # all state is flattened after this one, and is refused there with its whole path
        for path, tensor in tensors.items():
            memory = _memory(tensor)
            if memory is not None and first.setdefault(memory, path) != path:
                same[path] = first[memory]
        return {**super().more(name, state), **({"same": same} if same else {})}

    def _refuse_left_out(self, name: str) -> None:
        moved = self._temporary[name].moved() if name in self._temporary else []
        if moved:
            raise UnsupportedValue(
                f"extra {name!r} changes its buffer {moved[0]!r}, which its state_dict leaves out (persistent=False)",
                key=f"{name}.{moved[0]}",
                next_step=f"give it as a model, which saves such buffers: TrainState({{'net': net, {name!r}: module}})",
            )

    def _tell_empty(self, name: str, state: Any) -> None:
        is_empty = state is None or (isinstance(state, Mapping | list | tuple) and not state)
        if is_empty and name not in self._empty:
            self._empty.add(name)
            log.warning(
                "extra %r: its state_dict is empty, so nothing of it is saved. If it has a state, let state_dict tell "
                "it (a metric of torchmetrics: metric.persistent(True))",
                name,
            )

    def give(self, name: str, saved: Mapping[str, Any]) -> None:
        """Give one object its state."""
        same: Mapping[str, str] = saved.get("same", {})
        if same:
            data, tensors = flatten(saved["state"])
            one = {path: tensors[same.get(path, path)] for path in tensors}
            saved = {**saved, "state": unflatten(data, one)}
        super().give(name, saved)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """The same for two tensors that are one piece of memory, seen in the same way; None without memory."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.numel() or not local.untyped_storage().data_ptr():
        return None
    placed = tensor.placements if isinstance(tensor, DTensor) else ()
    return local.device, local.data_ptr(), local.shape, local.stride(), local.dtype, tensor.shape, placed
