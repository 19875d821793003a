"""Grids of chunks in columns: what is said of a million of them is computed in bulk, never one by one in Python.

A grid is given by its bounds: for each dimension where its cells begin, ascending, and the extent at the end. A bound
that is repeated makes an empty cell, as a rank has that got nothing of an unevenly sharded tensor. Cells are in
row-major order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, product
from operator import add, gt, le
from typing import NamedTuple

Bounds = tuple[tuple[int, ...], ...]


def is_grid(bounds: Bounds, shape: tuple[int, ...]) -> bool:
    """Whether the cells of these bounds cover a tensor of this shape exactly once."""
    return len(bounds) == len(shape) and all(
        len(axis) > 1 and axis[0] == 0 and axis[-1] == extent and all(map(le, axis, islice(axis, 1, None)))
        for axis, extent in zip(bounds, shape, strict=True)
    )


def count_of(bounds: Bounds) -> int:
    """How many cells there are."""
    count = 1
    for axis in bounds:
        count *= len(axis) - 1
    return count


def spans(axis: tuple[int, ...]) -> list[int]:
    """The extents of the cells along one dimension."""
    return [stop - start for start, stop in pairwise(axis)]


def lengths_of(bounds: Bounds, itemsize: int) -> list[int]:
    """Bytes of each cell."""
    split = []
    for axis in bounds:
        if len(axis) == 2:  # as most are: a factor of all, and no pass over them
            itemsize *= axis[1] - axis[0]
        else:
            split.append(spans(axis))
    lengths = [itemsize]
    for here in split:
        lengths = [length * span for length in lengths for span in here]
    return lengths


def cells(bounds: Bounds) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of each cell."""
    return zip(product(*(axis[:-1] for axis in bounds)), product(*map(spans, bounds)), strict=True)


def find_cell(bounds: Bounds, offsets: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Number and sizes of the cell with this corner: of several, the one that is not empty."""
    if len(offsets) != len(bounds):
        return None
    number, sizes = 0, []
    for axis, offset in zip(bounds, offsets, strict=True):
        at = bisect_right(axis, offset, 0, len(axis) - 1) - 1
        if at < 0 or axis[at] != offset:
            return None
        number = number * (len(axis) - 1) + at
        sizes.append(axis[at + 1] - offset)
    return number, tuple(sizes)


def cells_near(
    bounds: Bounds, offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the cells that share an element with a box of as many dimensions."""
    found = []
    for axis, offset, size in zip(bounds, offsets, sizes, strict=True):
        low = max(0, bisect_right(axis, offset) - 1)
        high = min(len(axis) - 1, bisect_left(axis, offset + size))
        found.append((axis[low:high], [axis[at + 1] - axis[at] for at in range(low, high)]))
    return zip(product(*(corners for corners, _ in found)), product(*(spans for _, spans in found)), strict=True)


def within(files: Iterable[int], starts: Iterable[int], lengths: Iterable[int], sizes: Sequence[int]) -> bool:
    """Whether each range lies inside its file; `sizes` are those of the files."""
    try:
        return not any(map(gt, map(add, starts, lengths), map(sizes.__getitem__, files)))
    except IndexError:
        return False


def arrange(shape: tuple[int, ...], offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]) -> Grid | None:
    """The grid that boxes make, or None if they make none.

    Args:
        shape: Of the tensor.
        offsets: Corner of each box, in any order.
        sizes: Extents of each box.
    """
    bounds: list[tuple[int, ...]] = []
    numbers = [0] * len(offsets)
    for extent, corners, extents in zip(shape, zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True):
        pairs = list(zip(corners, extents, strict=True))
        distinct = sorted(set(pairs))
        axis = (*(corner for corner, _ in distinct), extent)
        if [size for _, size in distinct] != spans(axis):
            return None
        bounds.append(axis)
        if len(distinct) > 1:
            at = {pair: number for number, pair in enumerate(distinct)}
            numbers = [number * len(distinct) + at[pair] for number, pair in zip(numbers, pairs, strict=True)]
    found = tuple(bounds)
    if not is_grid(found, shape) or len(numbers) != count_of(found):
        return None
    order = [-1] * len(numbers)
    for box, number in enumerate(numbers):
        order[number] = box
    return None if -1 in order else Grid(found, order)


class Grid(NamedTuple):
    """Bounds, and for each cell the number of its box."""

    bounds: Bounds
    order: list[int]
