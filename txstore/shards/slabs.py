"""Which bytes of a stored chunk a sub-box needs: slabs, each one covering range of the file.

Pure arithmetic over row-major layouts; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from txstore.checksum import BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of a wanted box, and the byte range of the chunk that covers it.

    Attributes:
        start: First byte, relative to the chunk.
        stop: One past the last byte.
        lower: Lower corner of the part, relative to the box.
        lengths: Extents of the part.
    """

    start: int
    stop: int
    lower: tuple[int, ...]
    lengths: tuple[int, ...]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def is_contiguous(shape: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Whether a box of `lengths` is one run of bytes in a row-major array of `shape`."""
    partial = False
    for extent, length in zip(reversed(shape), reversed(lengths), strict=True):
        if partial and length != 1:
            return False
        partial = partial or length != extent
    return True


def cut(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    itemsize: int,
    window_bytes: int,
) -> Iterator[Slab]:
    """Cut the box at `offsets` of `lengths` into slabs of at most about `window_bytes`.

    Neighbouring rows share a slab unless a whole block lies between them: a gap below a block is read
    anyway, since blocks are verified whole; a larger one is skipped.
    """
    if 0 in lengths:
        return
    strides = [stride * itemsize for stride in strides_of(shape)]

    def covering(lower: tuple[int, ...], extents: tuple[int, ...]) -> tuple[int, int]:
        start = sum((o + low) * s for o, low, s in zip(offsets, lower, strides, strict=True))
        return start, start + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + itemsize

    def split(lower: tuple[int, ...], extents: tuple[int, ...], dim: int) -> Iterator[Slab]:
        start, stop = covering(lower, extents)
        while dim < len(extents) and extents[dim] == 1:
            dim += 1
        if dim == len(extents):
            yield Slab(start, stop, lower, extents)
            return
        row_start, row_stop = covering(lower, (*extents[:dim], 1, *extents[dim + 1 :]))
        gap = strides[dim] - (row_stop - row_start)
        if stop - start <= window_bytes and gap < BLOCK_BYTES:
            yield Slab(start, stop, lower, extents)
            return
        rows = 1 if gap >= BLOCK_BYTES else max(1, window_bytes // strides[dim])
        for first in range(0, extents[dim], rows):
            count = min(rows, extents[dim] - first)
            part = (*lower[:dim], lower[dim] + first, *lower[dim + 1 :])
            size = (*extents[:dim], count, *extents[dim + 1 :])
            if count == 1:
                yield from split(part, size, dim + 1)
            else:
                yield Slab(*covering(part, size), part, size)

    yield from split((0,) * len(lengths), lengths, 0)
