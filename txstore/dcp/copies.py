"""The tensors of one snapshot: host memory that is shown as the regions of a state are, and the hold on it.

To make them takes longer than all else that a small tensor costs a snapshot, so those of the next one are made ahead,
in the thread that saves: a state has the same regions in each save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from txstore.dcp.host_memory import Arrangement
from txstore.dcp.leaves import Form, Region
from txstore.dcp.staged import Lease


class Copies:
    """A tensor for each region, on blocks of host memory.

    Args:
        arrangement: Where the memory of each is.
        forms: What each looks like.

    Attributes:
        lease: Ends with the last of them.
    """

    def __init__(self, arrangement: Arrangement, forms: Sequence[Form]) -> None:
        self.arrangement = arrangement
        self.forms = forms
        self.lease = Lease()
        memories = [_memory(block, self.lease) for block in arrangement.blocks]
        self.tensors = [
            _tensor(memories[block], start, form)
            for (block, start), form in zip(arrangement.places, forms, strict=True)
        ]
        self._taken: set[int] = set()

    def fit(self, arrangement: Arrangement, regions: Sequence[Region]) -> bool:
        """Whether they are copies of these regions on this memory."""
        return self.arrangement is arrangement and self.forms == [region.form for region in regions]

    def take(self, number: int) -> torch.Tensor:
        """A tensor on the memory of a region, which nobody else has."""
        tensor = self.tensors[number]
        if number in self._taken:
            return tensor.detach()
        self._taken.add(number)
        return tensor


def _memory(block: torch.Tensor, lease: Lease) -> npt.NDArray[np.uint8]:
    """A block as numpy and then torch take it: what they make of it keeps the block and the lease."""
    return np.asarray(_Exported(block, lease))


def _tensor(memory: npt.NDArray[np.uint8], start: int, form: Form) -> torch.Tensor:
    """A tensor on a part of the memory, which is a storage of its own.

    Of its own, because DCP pickles tensors in tuples with their whole storage, and because torch 2.13 dies of a
    segmentation fault when DTensors that share one are sent to the process of PROCESS mode.
    """
    # In place: a view would keep its base.
    flat = torch.frombuffer(memory, dtype=form.dtype, offset=start, count=form.count)
    return flat.as_strided_(form.shape, form.strides)


class _Exported:
    __slots__ = ("__array_interface__", "_block", "_lease")

    def __init__(self, block: torch.Tensor, lease: Lease) -> None:
        self._block = block
        self._lease = lease
        self.__array_interface__ = {
            "shape": (block.nbytes,),
            "typestr": "|u1",
            "data": (block.data_ptr(), False),
            "version": 3,
        }
