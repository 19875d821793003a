"""The index: where every tensor chunk and object of a checkpoint lies, and the checksum of every block.

It may hold a million chunks, so it is msgpack and an object of its own, apart from the small manifest. A tensor
whose chunks are the cells of a grid, as sharding makes them, is written in columns (`GridRecord`): they are decoded and
checked without an object for each chunk (ADR 0009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from txstore.checksum import BLOCK_BYTES
from txstore.columns import column, pick
from txstore.errors import FormatError
from txstore.grid import cells, count_of, find_cell, is_grid, lengths_of, within
from txstore.manifest import VERSION, Manifest, Natural, Text, check_ref, decode_document
from txstore.tiling import covers

GRID_VERSION = 2
"""Version of an index that holds a `GridRecord`; without one it is of version 1, which older releases read."""

Extents = Annotated[tuple[Natural, ...], Meta(max_length=64)]
"""Offsets or sizes, one a dimension; torch knows at most 64 dimensions."""

_MSGPACK = msgspec.msgpack.Encoder()


class FileRecord(Struct, array_like=True, frozen=True, gc=False):
    """A shard file in the index: its key, its size and the CRC32C of each block, little-endian."""

    key: str
    size: Natural
    blocks: bytes


class ChunkRecord(Struct, array_like=True, frozen=True, gc=False):
    """Where one chunk of a tensor lies.

    `start` and `length` are bytes of file number `file`. Encoding 0 is the row-major memory of the
    values; 1 is a ``torch.save`` payload, for tensors that are more than their memory (quantized ones,
    wrapper subclasses).
    """

    offsets: Extents
    sizes: Extents
    file: Natural
    start: Natural
    length: Natural
    encoding: Literal[0, 1] = 0


class SavedTensor(Struct, array_like=True, frozen=True, gc=False):
    """What the index says of any tensor: dtype by torch's name, bytes per element, global shape."""

    name: str
    dtype: Text
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    shape: Extents
    requires_grad: bool
    pin_memory: bool
    memory_format: Text


class TensorRecord(SavedTensor, array_like=True, frozen=True, tag="t", gc=False):
    """A tensor whose chunks are listed one by one."""

    chunks: tuple[ChunkRecord, ...]

    def by_corner(self) -> dict[tuple[int, ...], ChunkRecord]:
        """The chunks by their offsets; of two with the same (uneven sharding) the one that is not empty."""
        return {chunk.offsets: chunk for chunk in sorted(self.chunks, key=lambda chunk: 0 not in chunk.sizes)}


class GridRecord(SavedTensor, array_like=True, frozen=True, tag="g", gc=False):
    """A tensor whose chunks are the cells of a grid, each stored as row-major memory; in columns.

    Attributes:
        bounds: For each dimension where its cells begin, ascending from 0, and the extent.
        files: The number of each cell's file, 4 bytes little-endian; cells in row-major order.
        starts: The byte of that file where it begins, 8 bytes little-endian.
    """

    bounds: Annotated[tuple[tuple[Natural, ...], ...], Meta(max_length=64)]
    files: bytes
    starts: bytes

    @property
    def chunks(self) -> tuple[ChunkRecord, ...]:
        """All cells, one by one; made anew each time."""
        places = zip(
            cells(self.bounds),
            column("I", self.files),
            column("Q", self.starts),
            lengths_of(self.bounds, self.itemsize),
            strict=True,
        )
        return tuple(ChunkRecord(*cell, file, start, length) for cell, file, start, length in places)

    def chunk_at(self, offsets: tuple[int, ...]) -> ChunkRecord | None:
        """The chunk with this corner, without a look at the others."""
        found = find_cell(self.bounds, offsets)
        if found is None:
            return None
        number, sizes = found
        file, start = pick("I", self.files, number), pick("Q", self.starts, number)
        return ChunkRecord(offsets, sizes, file, start, math.prod(sizes) * self.itemsize)


class ObjectRecord(Struct, array_like=True, frozen=True, tag="o", gc=False):
    """A value that is not a tensor, as the planner serialised it."""

    name: str
    file: Natural
    start: Natural
    length: Natural


class Index(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``index.msgpack``: where every tensor chunk and object lies.

    Attributes:
        version: 2 if some item is a `GridRecord`, else 1.
        escaped: Names and paths are ``unicode_escape``d, since one of them holds a lone surrogate.
        files: The shard files, in the manifest's order.
        items: All state, in the planner's order.
        paths: The planner's map from flat names to nested paths, if it keeps one.
        planner: Other plain planner data.
    """

    version: int = VERSION
    block_bytes: int = BLOCK_BYTES
    escaped: bool = False
    files: tuple[FileRecord, ...]
    items: tuple[TensorRecord | GridRecord | ObjectRecord, ...]
    paths: dict[str, tuple[str | int, ...]] | None = None
    planner: msgspec.Raw = msgspec.Raw(b"\xc0")


def version_of(items: Iterable[TensorRecord | GridRecord | ObjectRecord]) -> int:
    """The version of an index of these items: the lowest that can say them."""
    return GRID_VERSION if any(isinstance(item, GridRecord) for item in items) else VERSION


def encode_index(index: Index) -> bytes:
    """Msgpack of an index."""
    return _MSGPACK.encode(index)


def decode_index(data: bytes, manifest: Manifest) -> Index:
    """Decode an index and check every number in it against the manifest.

    Raises:
        IntegrityError: The bytes are not those that were committed.
        FormatError: Malformed or inconsistent.
    """
    return parse_index(check_ref(manifest.index, data), manifest)


def parse_index(data: bytes, manifest: Manifest) -> Index:
    """As `decode_index`, of bytes that are known to have the digest of the manifest.

    Raises:
        FormatError: Malformed or inconsistent.
    """
    key = manifest.index.key
    index = decode_document(Index, data, key, packed=True, versions=(VERSION, GRID_VERSION))
    if index.block_bytes != BLOCK_BYTES:
        raise FormatError(f"blocks of {index.block_bytes} bytes, this release knows {BLOCK_BYTES}", key=key)
    if [(file.key, file.size) for file in index.files] != [(shard.key, shard.size) for shard in manifest.shards]:
        raise FormatError("index and manifest name different shards", key=key)
    for file in index.files:
        if len(file.blocks) != 4 * -(-file.size // BLOCK_BYTES):
            raise FormatError(f"wrong number of block checksums for {file.key}", key=key)
    check_index(index, key)
    return index


def check_index(index: Index, key: str) -> None:
    """Check the items of an index: bounds, lengths, coverage and unique names.

    Raises:
        FormatError: Some number is impossible. A chunk set that does not tile its tensor would be
            loaded as uninitialised memory, so it is refused at save and at load.
    """
    if index.version != version_of(index.items):
        raise FormatError(f"an index of version {index.version} with items of another", key=key)
    seen: set[str] = set()
    sizes = [file.size for file in index.files]
    for item in index.items:
        if item.name in seen:
            raise FormatError(f"{item.name!r} is listed twice", key=key)
        seen.add(item.name)
        if isinstance(item, ObjectRecord):
            _check_range(sizes, item, item.name, key)
        elif isinstance(item, GridRecord):
            _check_grid(item, sizes, key)
        else:
            _check_listed(item, sizes, key)


def _check_grid(item: GridRecord, sizes: list[int], key: str) -> None:
    """Cells of a grid cover it exactly once, whatever their number: only its bounds and the columns can be wrong."""
    if not is_grid(item.bounds, item.shape):
        raise FormatError(f"the chunks of {item.name!r} do not cover it exactly once", key=key)
    count = count_of(item.bounds)
    if (len(item.files), len(item.starts)) != (4 * count, 8 * count):
        raise FormatError(f"{item.name!r} has {count} chunks, and places for another number of them", key=key)
    lengths = lengths_of(item.bounds, item.itemsize)
    if not within(column("I", item.files), column("Q", item.starts), lengths, sizes):
        raise FormatError(f"{item.name!r} lies outside its shard", key=key)


def _check_listed(item: TensorRecord, sizes: list[int], key: str) -> None:
    for chunk in item.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(item.shape) or any(
            offset + size > extent for offset, size, extent in zip(chunk.offsets, chunk.sizes, item.shape, strict=True)
        ):
            raise FormatError(f"a chunk of {item.name!r} lies outside its tensor", key=key)
        if chunk.encoding == 0 and chunk.length != math.prod(chunk.sizes) * item.itemsize:
            raise FormatError(f"a chunk of {item.name!r} has the wrong length", key=key)
        _check_range(sizes, chunk, item.name, key)
    if not covers(item.shape, [(chunk.offsets, chunk.sizes) for chunk in item.chunks if 0 not in chunk.sizes]):
        raise FormatError(f"the chunks of {item.name!r} do not cover it exactly once", key=key)


def _check_range(sizes: list[int], where: ChunkRecord | ObjectRecord, name: str, key: str) -> None:
    if where.length and (where.file >= len(sizes) or where.start + where.length > sizes[where.file]):
        raise FormatError(f"{name!r} lies outside its shard", key=key)
