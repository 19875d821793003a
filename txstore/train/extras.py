"""The user's own objects: what one of them gives under two names is one tensor again when it takes its state back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from txstore.errors import UnsupportedValue
from txstore.train.python_state import flatten, unflatten
from txstore.train.stateful import Scoped, StatefulPiece


class ExtrasPiece(StatefulPiece):
    """The piece of state that holds the user's own objects."""

    def __init__(self, extras: Mapping[str, Scoped]) -> None:
        super().__init__("extra", extras, verify=False)

    def more(self, name: str, state: Any) -> dict[str, Any]:
        """Which tensors of the state are one, by path: an object that keeps what it is given would hold two."""
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
