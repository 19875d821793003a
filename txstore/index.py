"""The index: where every tensor chunk and object of a checkpoint lies, and the checksum of every block.

It may hold a million chunks, so it is msgpack and an object of its own, apart from the small manifest.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from txstore.checksum import BLOCK_BYTES
from txstore.errors import FormatError
from txstore.manifest import VERSION, Manifest, Natural, Text, check_ref, decode_document

SPLIT_AXES_MAX = 12
"""Most dimensions along which one tensor may be cut into chunks; a device mesh has fewer."""

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


class TensorRecord(Struct, array_like=True, frozen=True, tag="t", gc=False):
    """A tensor: dtype by torch's name, bytes per element, global shape and its chunks."""

    name: str
    dtype: Text
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    shape: Extents
    requires_grad: bool
    pin_memory: bool
    memory_format: Text
    chunks: tuple[ChunkRecord, ...]


class ObjectRecord(Struct, array_like=True, frozen=True, tag="o", gc=False):
    """A value that is not a tensor, as the planner serialised it."""

    name: str
    file: Natural
    start: Natural
    length: Natural


class Index(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``index.msgpack``: where every tensor chunk and object lies.

    Attributes:
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
    items: tuple[TensorRecord | ObjectRecord, ...]
    paths: dict[str, tuple[str | int, ...]] | None = None
    planner: msgspec.Raw = msgspec.Raw(b"\xc0")


def encode_index(index: Index) -> bytes:
    """Msgpack of an index."""
    return _MSGPACK.encode(index)


def decode_index(data: bytes, manifest: Manifest) -> Index:
    """Decode an index and check every number in it against the manifest.

    Raises:
        IntegrityError: The bytes are not those that were committed.
        FormatError: Malformed or inconsistent.
    """
    key = manifest.index.key
    index = decode_document(Index, check_ref(manifest.index, data), key, packed=True)
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
    seen: set[str] = set()
    for item in index.items:
        if item.name in seen:
            raise FormatError(f"{item.name!r} is listed twice", key=key)
        seen.add(item.name)
        if isinstance(item, ObjectRecord):
            _check_range(index, item, item.name, key)
            continue
        for chunk in item.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(item.shape) or any(
                offset + size > extent
                for offset, size, extent in zip(chunk.offsets, chunk.sizes, item.shape, strict=True)
            ):
                raise FormatError(f"a chunk of {item.name!r} lies outside its tensor", key=key)
            if chunk.encoding == 0 and chunk.length != math.prod(chunk.sizes) * item.itemsize:
                raise FormatError(f"a chunk of {item.name!r} has the wrong length", key=key)
            _check_range(index, chunk, item.name, key)
        if not _tile(item.shape, [chunk for chunk in item.chunks if 0 not in chunk.sizes]):
            raise FormatError(f"the chunks of {item.name!r} do not cover it exactly once", key=key)


def _tile(shape: tuple[int, ...], chunks: list[ChunkRecord]) -> bool:
    """Whether the chunks, which are not empty and lie inside, cover the tensor exactly once.

    Volumes alone would pass an overlap that pays for a hole. A box is determined by its corners modulo 2 (apply the
    difference in each dimension), so if all corners but the tensor's own cancel in pairs, every element is covered an
    odd number of times; and once on average, by the volumes. Linear in the number of chunks.
    """
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    split = [axis for axis, extent in enumerate(shape) if any(chunk.sizes[axis] != extent for chunk in chunks)]
    if len(split) > SPLIT_AXES_MAX:
        return False
    corners = set(product(*((0, shape[axis]) for axis in split))) if chunks else set()
    for chunk in chunks:
        corners ^= set(product(*((chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for axis in split)))
    return not corners


def _check_range(index: Index, where: ChunkRecord | ObjectRecord, name: str, key: str) -> None:
    if where.length and (where.file >= len(index.files) or where.start + where.length > index.files[where.file].size):
        raise FormatError(f"{name!r} lies outside its shard", key=key)
