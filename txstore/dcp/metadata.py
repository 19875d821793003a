"""DCP's `Metadata` and txstore's `Index`, each built from the other, without pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from txstore.columns import column_bytes
from txstore.dcp.saved import LazyTensorMetadata, Record, StoredItems
from txstore.dcp.tensors import dtype_name, dtype_of
from txstore.errors import FormatError, PlanMismatch, UnsupportedValue
from txstore.grid import Grid, arrange, lengths_of
from txstore.index import ChunkRecord, FileRecord, GridRecord, Index, ObjectRecord, TensorRecord, version_of
from txstore.shards.names import escape, unescape
from txstore.transaction import Shard

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


@dataclass(frozen=True, slots=True)
class Placed:
    """What a rank reports of one item in `WriteResult.storage_data`: shard, byte range and encoding.

    The items of one file share one `Shard` object, so pickle sends it once.
    """

    shard: Shard
    start: int
    length: int
    encoding: int


Corner = tuple[int, ...] | None
"""The offsets of a chunk; None for an object."""

Placements = Mapping[str, Mapping[Corner, Placed]]
"""Where each item went: by name, then by corner. Not by `MetadataIndex`: a million of them cost seconds to hash."""


def build_index(metadata: Metadata, placed: Placements) -> tuple[Index, list[Shard]]:
    """The index of a save, and its shards in the index's order.

    Args:
        metadata: The global metadata from the planner.
        placed: Where each chunk and object went; must hold exactly those of `metadata`.

    Raises:
        PlanMismatch: An item of the metadata has no result, or a result no item.
        UnsupportedValue: The planner keeps data that is not plain.
    """
    distinct = {id(at.shard): at.shard for places in placed.values() for at in places.values()}
    shards = list({shard.key: shard for shard in sorted(distinct.values(), key=lambda shard: shard.key)}.values())
    number = {shard.key: index for index, shard in enumerate(shards)}
    escaped = not _encodable(metadata)
    items: list[Record] = []
    for fqn, stored in metadata.state_dict_metadata.items():
        name = escape(fqn) if escaped else fqn
        places = placed.get(fqn, {})
        if isinstance(stored, TensorStorageMetadata):
            corners: Sequence[Corner] = [chunk.offsets for chunk in stored.chunks]
        else:
            corners = [None]
        found = _places_of(fqn, corners, places)
        if isinstance(stored, TensorStorageMetadata):
            items.append(_tensor_record(name, stored, found, number))
        else:
            items.append(ObjectRecord(name, number[found[0].shard.key], found[0].start, found[0].length))
    for fqn in placed.keys() - metadata.state_dict_metadata.keys():
        raise _foreign(fqn)
    paths, planner = _encode_planner_data(metadata.planner_data, escaped=escaped)
    files = tuple(FileRecord(shard.key, shard.size, column_bytes("I", shard.blocks)) for shard in shards)
    version = version_of(items)
    index = Index(version=version, escaped=escaped, files=files, items=tuple(items), paths=paths, planner=planner)
    return index, shards


def _places_of(fqn: str, corners: Sequence[Corner], places: Mapping[Corner, Placed]) -> list[Placed]:
    """The place of each chunk, in order; every place must be of some chunk."""
    try:
        found = [places[corner] for corner in corners]
    except KeyError as error:
        raise PlanMismatch(f"no rank reported {fqn!r} at {error.args[0]}", key=fqn) from None
    if len(places) != len(corners) and places.keys() - set(corners):
        raise _foreign(fqn)
    return found


def _foreign(fqn: str) -> PlanMismatch:
    return PlanMismatch(f"a result for {fqn!r} that the plan does not know", key=fqn)


def _tensor_record(
    name: str, stored: TensorStorageMetadata, places: Sequence[Placed], number: Mapping[str, int]
) -> TensorRecord | GridRecord:
    properties = stored.properties
    known = (
        name,
        dtype_name(properties.dtype),
        properties.dtype.itemsize,
        tuple(stored.size),
        properties.requires_grad,
        properties.pin_memory,
        str(properties.memory_format).removeprefix("torch."),
    )
    files = [number[at.shard.key] for at in places]
    if (grid := _grid_of(stored, places)) is not None:
        return GridRecord(
            *known,
            bounds=grid.bounds,
            files=column_bytes("I", map(files.__getitem__, grid.order)),
            starts=column_bytes("Q", [places[box].start for box in grid.order]),
        )
    chunks = (
        ChunkRecord(tuple(chunk.offsets), tuple(chunk.sizes), file, at.start, at.length, 1 if at.encoding else 0)
        for chunk, file, at in zip(stored.chunks, files, places, strict=True)
    )
    return TensorRecord(*known, chunks=tuple(chunks))


def _grid_of(stored: TensorStorageMetadata, places: Sequence[Placed]) -> Grid | None:
    """The grid of a tensor's chunks, if all are row-major memory. One chunk needs none: it is smaller as it is."""
    if len(places) < 2 or any(at.encoding for at in places):
        return None
    chunks = stored.chunks
    grid = arrange(tuple(stored.size), [chunk.offsets for chunk in chunks], [chunk.sizes for chunk in chunks])
    if grid is None:
        return None
    # A grid has no lengths of its own: a report of another one must reach the check that refuses it.
    same = lengths_of(grid.bounds, stored.properties.dtype.itemsize) == [places[box].length for box in grid.order]
    return grid if same else None


def build_metadata(index: Index, key: str) -> Metadata:
    """DCP's metadata from an index; `storage_data` maps each `MetadataIndex` to `Stored`.

    Chunks are made for the tensors that somebody asks about: a rank plans for a part of them, and a million objects are
    seconds and hundreds of megabytes.

    Raises:
        FormatError: A dtype or memory format that this torch does not know.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    items: dict[str, Record] = {}
    for item in index.items:
        fqn = unescape(item.name, key) if index.escaped else item.name
        items[fqn] = item
        state[fqn] = (
            BytesStorageMetadata()
            if isinstance(item, ObjectRecord)
            else LazyTensorMetadata(_properties(item, key), item)
        )
    return Metadata(
        state_dict_metadata=state, planner_data=_decode_planner_data(index, key), storage_data=StoredItems(items)
    )


def _properties(item: TensorRecord | GridRecord, key: str) -> TensorProperties:
    memory_format = _MEMORY_FORMATS.get(item.memory_format)
    if memory_format is None:
        raise FormatError(f"unknown memory format {item.memory_format!r}", key=key)
    dtype = dtype_of(item.dtype, key)
    if dtype.itemsize != item.itemsize:
        raise FormatError(f"{item.dtype} has {dtype.itemsize} bytes here, {item.itemsize} in the index", key=key)
    return TensorProperties(
        dtype=dtype,
        requires_grad=item.requires_grad,
        memory_format=memory_format,
        pin_memory=item.pin_memory,
    )


def _encodable(metadata: Metadata) -> bool:
    """Whether all names are valid Unicode; a lone surrogate, legal in a Python str, is not."""
    paths = metadata.planner_data.values() if isinstance(metadata.planner_data, dict) else ()
    parts = (part for path in paths if isinstance(path, tuple) for part in path if isinstance(part, str))
    try:
        for text in chain(metadata.state_dict_metadata, parts):
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_planner_data(data: Any, *, escaped: bool) -> tuple[dict[str, tuple[str | int, ...]] | None, msgspec.Raw]:
    nothing = msgspec.Raw(b"\xc0")
    if data is None:
        return None, nothing
    if isinstance(data, dict) and all(_is_path(name, path) for name, path in data.items()):
        if not escaped:
            return data, nothing
        return {escape(name): tuple(_escape_part(part) for part in path) for name, path in data.items()}, nothing
    try:
        packed = msgspec.msgpack.encode(data)
        same = msgspec.msgpack.decode(packed) == data
    except (TypeError, ValueError, RecursionError, msgspec.DecodeError):
        same = False
    if not same:
        raise UnsupportedValue(
            f"planner data of type {type(data).__name__} is not plain data",
            next_step="keep None, a map of flat names to paths, or msgpack types in Metadata.planner_data",
        )
    return None, msgspec.Raw(packed)


def _is_path(name: Any, path: Any) -> bool:
    return isinstance(name, str) and isinstance(path, tuple) and all(type(part) in {str, int} for part in path)


def _escape_part(part: str | int) -> str | int:
    return escape(part) if isinstance(part, str) else part


def _decode_planner_data(index: Index, key: str) -> Any:
    if index.paths is None:
        try:
            return msgspec.msgpack.decode(index.planner)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FormatError(f"malformed planner data: {error}", key=key) from error
    if not index.escaped:
        return index.paths
    return {
        unescape(name, key): tuple(unescape(part, key) if isinstance(part, str) else part for part in path)
        for name, path in index.paths.items()
    }
