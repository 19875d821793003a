"""The tensors of a state dict, and the memory that a copy of them needs: what a snapshot copies, and what it refuses.

Nothing here copies anything. Every refusal comes from here, so that a state that cannot be copied is
refused before the first byte of it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from msgspec import Struct
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from txstore.dcp.tensors import NUMBERS, check_storable, is_wrapper
from txstore.errors import UnsupportedValue, describe

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
_VALUES = frozenset((int, float, bool, str, bytes, type(None)))

Path: TypeAlias = "tuple[Path, object] | None"
"""Keys from the state dict down to a tensor, the last one first: names are made where they are told only."""

# Structs where there is one for each tensor: named tuples take three times as long to make, data classes ten times.


class Form(Struct, frozen=True, gc=False):
    """What a tensor on given memory looks like."""

    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Region(Struct, frozen=True, gc=False):
    """Memory that is copied once, however many tensors of the state show it.

    Attributes:
        source: A tensor without gradient, of no subclass, on any device.
        form: Of the copy. Its strides are the source's if its elements lie side by side, else row-major.
        dense: Whether they do, so that the copy is one run of bytes.
        nbytes: Size of the copy.
    """

    source: torch.Tensor
    form: Form
    dense: bool
    nbytes: int


class Plain(Struct, frozen=True, gc=False):
    """A tensor that is its memory: a view of region number `region`, or None if it holds nothing.

    Attributes:
        subclass: The tensor, if its class is one of its own: DCP may ask the class how to save it.
    """

    source: torch.Tensor
    requires_grad: bool
    region: int | None
    subclass: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A wrapper, such as a DTensor, made again around copies of the tensors that it wraps.

    Attributes:
        fixed: What it holds beside tensors, and never changes: a device mesh.
    """

    wrapper: Any
    context: Any
    inner: dict[str, Leaf]
    fixed: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cloned:
    """A tensor that is more than its memory (quantized), or several (ShardedTensor): copied by its own method."""

    tensor: torch.Tensor
    nbytes: int

    def clone(self) -> torch.Tensor:
        """A copy on the CPU."""
        if isinstance(self.tensor, ShardedTensor):
            return _clone_sharded(self.tensor)
        return self.tensor.detach().cpu().clone()


Leaf: TypeAlias = Plain | Wrapped | Cloned


@dataclass(slots=True)
class Layout:
    """What a snapshot of a state consists of.

    Attributes:
        leaves: Each tensor of the state with its path and what becomes of it; one that occurs twice is here once.
        regions: What is copied into buffers.
        cloned_bytes: What is copied by tensors' own methods.
    """

    leaves: list[tuple[Path, torch.Tensor, Leaf]] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    cloned_bytes: int = 0
    _first: dict[int, int] = field(default_factory=dict)  # by address the first region there
    _next: dict[int, int] = field(default_factory=dict)  # by region the next one at its address

    def add(self, tensor: torch.Tensor, name: str) -> Leaf:
        """Lay out one tensor.

        Raises:
            UnsupportedValue: It cannot be copied exactly.
        """
        is_plain = type(tensor) in _PLAIN_CLASSES
        if not is_plain and isinstance(tensor, ShardedTensor):
            nbytes = sum(shard.tensor.nbytes for shard in tensor.local_shards())
            return self._cloned(tensor, nbytes)
        if tensor.is_nested and tensor.layout == torch.strided:
            raise UnsupportedValue(f"{name!r} is a nested tensor", key=name, next_step="save its parts instead")
        check_storable(tensor, name)
        subclass = None if is_plain else tensor
        if subclass is not None:
            if isinstance(tensor, AsyncCollectiveTensor):
                # Until then its memory is whatever was there before.
                return self.add(tensor.wait(), name)
            if is_wrapper(tensor):
                return self._wrapped(tensor, name)
        if tensor.is_quantized:
            return self._cloned(tensor, tensor.numel() * tensor.element_size())
        source = _memory_of(tensor) if subclass is not None or tensor.requires_grad else tensor
        region = self._region(source, source.data_ptr()) if source.numel() else None
        return Plain(source, tensor.requires_grad, region, subclass)

    def add_plain(self, tensor: torch.Tensor) -> Plain | None:
        """Lay out what nearly all are, with the fewest questions: plain memory, no gradient. None for any other."""
        if tensor.dtype not in NUMBERS or tensor.layout != torch.strided or tensor.requires_grad or tensor.is_nested:
            return None
        address = tensor.data_ptr()
        if not address:  # holds nothing, or is not there: `add` knows which
            return None
        return Plain(tensor, requires_grad=False, region=self._region(tensor, address))

    def _cloned(self, tensor: torch.Tensor, nbytes: int) -> Cloned:
        self.cloned_bytes += nbytes
        return Cloned(tensor, nbytes)

    def _wrapped(self, tensor: Any, name: str) -> Wrapped:
        names, context = tensor.__tensor_flatten__()
        parts = {part: getattr(tensor, part) for part in names}
        inner = {part: self.add(value, name) for part, value in parts.items() if isinstance(value, torch.Tensor)}
        fixed = {part: value for part, value in parts.items() if part not in inner}
        return Wrapped(tensor, context, inner, fixed)

    def _region(self, source: torch.Tensor, address: int) -> int:
        number = len(self.regions)
        other = self._first.setdefault(address, number)
        while other != number:
            if _is_same_view(source, self.regions[other].source):
                return other
            other = self._next.setdefault(other, number)
        shape, strides = source.shape, source.stride()
        dense = source.is_contiguous() or _side_by_side(shape, strides)
        form = Form(source.dtype, shape, strides if dense else _row_major(shape))
        self.regions.append(Region(source, form, dense, source.nbytes))
        return number


@torch.no_grad()
def lay_out(state_dict: Mapping[str, Any]) -> Layout:
    """All tensors that mappings, lists and tuples hold, at any depth.

    Raises:
        UnsupportedValue: A tensor that cannot be copied exactly; names its key and its class.
    """
    layout = Layout()
    _walk(state_dict, None, {}, layout)
    return layout


def name_of(path: Path) -> str:
    """``model.layers.0.weight``."""
    keys = []
    while path is not None:
        path, key = path
        keys.append(str(key))
    return ".".join(reversed(keys))


def _walk(container: object, path: Path, seen: dict[int, object], layout: Layout) -> None:
    entries: Iterable[tuple[object, object]]
    if isinstance(container, Mapping):
        entries = container.items()
    elif isinstance(container, (list, tuple)):
        entries = enumerate(container)
    else:
        return
    # Objects, not only ids: the id of an object that is gone may be another's.
    seen[id(container)] = container
    for key, entry in entries:
        if type(entry) in _VALUES or id(entry) in seen:  # a container may hold itself
            continue
        if isinstance(entry, torch.Tensor):
            seen[id(entry)] = entry
            _put(entry, (path, key), layout)
        else:
            _walk(entry, (path, key), seen, layout)


def _put(tensor: torch.Tensor, path: Path, layout: Layout) -> None:
    try:
        leaf = layout.add_plain(tensor) if type(tensor) is torch.Tensor else None
        layout.leaves.append((path, tensor, leaf or layout.add(tensor, name_of(path))))
    except UnsupportedValue:
        raise
    except Exception as error:
        name = name_of(path)
        raise UnsupportedValue(
            f"{name!r} is a {type(tensor).__name__} that cannot be copied: {describe(error)}", key=name
        ) from error


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without its class and its gradient."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - the only way to a subclass's plain memory
        return tensor.detach()


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors at one address show the same elements."""
    return (
        one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _side_by_side(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor's elements fill its memory, each once, without a hole: channels-last, transposed."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _clone_sharded(tensor: torch.Tensor) -> torch.Tensor:
    # `cpu` of a ShardedTensor that is there already gives the same object.
    moved: torch.Tensor = tensor.cpu()
    return copy.deepcopy(moved) if moved is tensor else moved
