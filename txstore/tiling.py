"""Whether boxes cover a tensor exactly once. Pure numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

SPLIT_AXES_MAX = 12
"""Most dimensions along which one tensor may be cut into chunks; a device mesh has fewer."""


def covers(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes (corner, extents), none of them empty and all inside, cover the tensor exactly once.

    Volumes alone would pass an overlap that pays for a hole. A box is determined by its corners modulo 2 (apply the
    difference in each dimension), so if all corners but the tensor's own cancel in pairs, every element is covered an
    odd number of times; and once on average, by the volumes. Linear in the number of boxes.
    """
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    split = [axis for axis, extent in enumerate(shape) if any(sizes[axis] != extent for _, sizes in boxes)]
    if len(split) > SPLIT_AXES_MAX:
        return False
    corners = set(product(*((0, shape[axis]) for axis in split))) if boxes else set()
    for offsets, sizes in boxes:
        corners ^= set(product(*((offsets[axis], offsets[axis] + sizes[axis]) for axis in split)))
    return not corners
