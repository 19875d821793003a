"""Targets of a load that show the same memory, such as tied weights: in the end each must hold what was saved for it.

Read into them as into any other, the value that comes last would stay, and nobody would hear of the others (ADR 0017).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from txstore.dcp.tensors import as_bytes, is_wrapper
from txstore.errors import StateMismatch, describe

_NEXT_STEP = "give each its own memory (clone()), or load the state that shares it as it was saved"

View: TypeAlias = "tuple[int, torch.Size, tuple[int, ...], torch.dtype]"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What one item of a load plan fills.

    Attributes:
        name: Of the tensor in the state; several items may fill parts of one.
        tensor: The part.
    """

    name: str
    tensor: torch.Tensor

    @property
    def view(self) -> View:
        """Two of the same view are the same elements in the same order."""
        one = self.tensor
        return one.data_ptr(), one.shape, one.stride(), one.dtype


@dataclass(frozen=True, slots=True, eq=False)
class _Apart:
    target: Target
    others: tuple[str, ...]
    is_filled: bool
    value: torch.Tensor


class SharedTargets:
    """Where to read each item of one rank's plan, if some of their targets share memory.

    Targets that are the same elements are read once into them, and apart for each further name, to be compared. All
    that overlap in another way are read apart, copied, and then compared.

    Args:
        targets: All of the plan.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        self._found: dict[Target, tuple[tuple[str, ...], bool]] = {}
        self._apart: list[_Apart] = []
        for cluster in _clusters(targets):
            names = tuple(dict.fromkeys(one.name for one in cluster))
            if len(names) == 1:
                self._found.update({one: (names, True) for one in cluster if _may_overlap(one.tensor)})
                continue
            views = {name: {one.view for one in cluster if one.name == name} for name in names}
            are_same = all(view == views[names[0]] for view in views.values())
            self._found.update({one: (names, not are_same) for one in cluster if not are_same or one.name != names[0]})

    def destination(self, target: Target) -> torch.Tensor:
        """The tensor to read into: the target itself, or one apart."""
        if target not in self._found:
            return target.tensor
        names, is_filled = self._found[target]
        value = torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="cpu")
        self._apart.append(_Apart(target, tuple(name for name in names if name != target.name), is_filled, value))
        return value

    def settle(self) -> None:
        """Once all has been read: fill what was read apart, and compare.

        Raises:
            StateMismatch: A target would not hold what was saved for it.
        """
        for one in self._apart:
            if one.is_filled:
                try:
                    one.target.tensor.copy_(one.value)
                except RuntimeError as error:  # torch refuses an expanded tensor
                    raise _mismatch(one, describe(error)) from error
        for one in self._apart:
            if not _same_bits(one.target.tensor, one.value):
                raise _mismatch(one, "other values were saved for them")


def _mismatch(one: _Apart, why: str) -> StateMismatch:
    name = one.target.name
    which = f"{name!r} and {', '.join(map(repr, one.others))}" if one.others else f"elements of {name!r}"
    return StateMismatch(f"{which} share memory in the target: {why}", key=name, next_step=_NEXT_STEP)


def _clusters(targets: Iterable[Target]) -> Iterator[list[Target]]:
    """Targets from whose first byte to whose last there are bytes of others."""
    placed = []
    for target in targets:
        tensor = target.tensor
        if tensor.numel() and not is_wrapper(tensor) and (start := tensor.data_ptr()):
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            placed.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), target))
    placed.sort(key=lambda one: one[:2])
    cluster: list[Target] = []
    where, end = "", 0
    for device, start, stop, target in placed:
        if cluster and (device, start < end) != (where, True):
            yield cluster
            cluster, end = [], 0
        cluster.append(target)
        where, end = device, max(end, stop)
    if cluster:
        yield cluster


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one: certain only if they are not."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    here = one.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return np.array_equal(np.frombuffer(as_bytes(here), np.uint8), np.frombuffer(as_bytes(other), np.uint8))
