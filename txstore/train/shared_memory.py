"""Parameters and buffers that share memory: a resume keeps what the code shares, and can make nothing else shared.

Tensors are loaded into those that the code has made, so what shares memory there shares it afterwards. A buffer that
training has bound to the memory of another tensor would come back as a copy: it would stand still where it followed.
One that training has taken out of shared memory would come back in it, and the last of the two values would be in
both. Neither shows in any value at the save, so both are refused there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from txstore.errors import UnsupportedValue
from txstore.train.names import Models

_KINDS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where a tensor lies: from its first byte to the one after its last."""

    name: str
    tensor: torch.Tensor
    is_parameter: bool
    start: int
    stop: int

    def seen_from(self, first: _Extent) -> tuple[Any, ...]:
        """Which part of the same memory it is: another part is no longer what the code shares."""
        tensor = self.tensor
        return first.name, self.start - first.start, tuple(tensor.shape), tensor.stride(), tensor.dtype

    def shares(self, other: _Extent) -> bool:
        """Whether a byte belongs to both: the columns of one matrix overlap as extents only."""
        if self.start >= other.stop or other.start >= self.stop:
            return False
        if all(one.stop - one.start <= one.tensor.nbytes for one in (self, other)):
            return True
        begin = min(self.start, other.start)
        used = torch.zeros(max(self.stop, other.stop) - begin, dtype=torch.bool, device="cpu")
        _bytes_in(used, self, begin).fill_(1)
        return bool(_bytes_in(used, other, begin).any())


def _bytes_in(memory: torch.Tensor, extent: _Extent, begin: int) -> torch.Tensor:
    tensor, size = extent.tensor, extent.tensor.element_size()
    strides = (*(stride * size for stride in tensor.stride()), 1)
    return memory.as_strided((*tensor.shape, size), strides, extent.start - begin)


def tied(models: Models) -> dict[str, str]:
    """Names in state dicts whose tensor has an earlier name as well, with that name."""
    saved = models.state_dict().keys()
    named = [
        (name, tensor) for name, tensor in sorted(models.tensors().items(), key=lambda item: item[0]) if name in saved
    ]
    first: dict[int, str] = {}
    return {name: first[id(one)] for name, one in named if first.setdefault(id(one), name) != name}


class SharedMemory:
    """Which tensors of the models shared memory when this was made.

    Looked at are plain tensors and the local parts of sharded ones, by addresses: nothing is read from a device.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        # Parameters first: a buffer is told to share with them, and not they with it.
        tensors = sorted(models.tensors().items(), key=lambda item: not isinstance(item[1], torch.nn.Parameter))
        self._order = {name: at for at, (name, _) in enumerate(tensors)}
        self._starts = {one.name: one.start for one in self._extents()}
        self._made = {one.name: one.seen_from(group[0]) for group in self._groups() for one in group}

    def refuse_other(self, constant: Callable[[], Collection[str]]) -> None:
        """Refuse memory that is shared otherwise than when this was made.

        Args:
            constant: Tells the names of buffers that hold what the code has put there. A buffer may be bound to such a
                table, as rotary embeddings are to that of a short or a long context: a copy of it is as good.

        Raises:
            UnsupportedValue: Names both tensors, and says what to do.
        """
        still = set()
        for group in self._groups():
            for one in reversed(group):
                still.add(one.name)
                was = self._made.get(one.name)
                if was == one.seen_from(group[0]):
                    continue
                partner = next((other for other in group if other is not one and one.shares(other)), None)
                if partner is not None and not (was is None and self._is_table(constant, one, partner)):
                    how = "in another way than" if was else "and did not"
                    raise UnsupportedValue(
                        f"{one.name!r} shares memory with {partner.name!r}, {how} when the TrainState was made: a "
                        "resume could not make that again",
                        key=one.name,
                        next_step="share it in the module's __init__, or by one forward pass before the TrainState is "
                        "made; if it is meant to be a copy, clone() it",
                    )
        here = self._models.tensors()
        for name, (first, *_) in self._made.items():
            if name not in still and name != first and name in here and first in here:
                raise UnsupportedValue(
                    f"{name!r} shared memory with {first!r} when the TrainState was made, and does not any more: a "
                    "resume would load both into one memory",
                    key=name,
                    next_step="write into it in place, by copy_(), or make it a tensor of its own in __init__",
                )

    def _is_table(self, constant: Callable[[], Collection[str]], *pair: _Extent) -> bool:
        """Whether nothing writes into the memory of both, as an optimizer does into a parameter's."""
        if any(one.is_parameter for one in pair):
            return False
        unmoved = {one.name for one in pair if self._starts.get(one.name) == one.start}
        return not unmoved.isdisjoint(constant())

    def _groups(self) -> Iterator[list[_Extent]]:
        """Tensors whose extents overlap; what the code had made comes before what came later."""
        group: list[_Extent] = []
        device, stop = None, 0
        for one in sorted(self._extents(), key=lambda one: (str(one.tensor.device), one.start)):
            if one.tensor.device != device or one.start >= stop:
                yield from self._ordered(group)
                group, device, stop = [], one.tensor.device, one.stop
            group.append(one)
            stop = max(stop, one.stop)
        yield from self._ordered(group)

    def _ordered(self, group: list[_Extent]) -> Iterator[list[_Extent]]:
        if len(group) > 1:
            late = len(self._order)
            yield sorted(group, key=lambda one: (self._order.get(one.name, late), one.name))

    def _extents(self) -> Iterator[_Extent]:
        for name, tensor in self._models.tensors().items():
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local() is slow
            is_plain = type(local) in _KINDS and local.layout == torch.strided and local.numel()
            # 0 is memory that is not there: on the meta device, or given back by FSDP2.
            if is_plain and local.untyped_storage().data_ptr():
                last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
                start = local.data_ptr()
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                yield _Extent(name, local, is_parameter, start, start + (last + 1) * local.element_size())
