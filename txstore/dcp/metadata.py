"""DCP's `Metadata` and txstore's `Index`, each built from the other, without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from txstore.dcp.tensors import dtype_name, dtype_of
from txstore.errors import FormatError, PlanMismatch, UnsupportedValue
from txstore.index import ChunkRecord, FileRecord, Index, ObjectRecord, TensorRecord
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


class Location(NamedTuple):
    """Where one item lies, as the save's returned metadata tells it."""

    key: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the reader finds one item; the values of `Metadata.storage_data`."""

    item: TensorRecord | ObjectRecord
    where: ChunkRecord | ObjectRecord


def build_index(metadata: Metadata, placed: Mapping[MetadataIndex, Placed]) -> tuple[Index, list[Shard]]:
    """The index of a save, and its shards in the index's order.

    Args:
        metadata: The global metadata from the planner.
        placed: Where each chunk and object went; must hold exactly those of `metadata`.

    Raises:
        PlanMismatch: An item of the metadata has no result.
        UnsupportedValue: The planner keeps data that is not plain.
    """
    shards = sorted({id(p.shard): p.shard for p in placed.values()}.values(), key=lambda shard: shard.key)
    shards = list({shard.key: shard for shard in shards}.values())
    number = {shard.key: index for index, shard in enumerate(shards)}
    escaped = not _encodable(metadata)
    items: list[TensorRecord | ObjectRecord] = []
    for fqn, stored in metadata.state_dict_metadata.items():
        name = escape(fqn) if escaped else fqn
        if isinstance(stored, TensorStorageMetadata):
            items.append(_tensor_record(fqn, name, stored, placed, number))
        else:
            at = _lookup(placed, MetadataIndex(fqn))
            items.append(ObjectRecord(name, number[at.shard.key], at.start, at.length))
    paths, planner = _encode_planner_data(metadata.planner_data, escaped=escaped)
    files = tuple(
        FileRecord(shard.key, shard.size, b"".join(block.to_bytes(4, "little") for block in shard.blocks))
        for shard in shards
    )
    return Index(escaped=escaped, files=files, items=tuple(items), paths=paths, planner=planner), shards


def _lookup(placed: Mapping[MetadataIndex, Placed], index: MetadataIndex) -> Placed:
    at = placed.get(index)
    if at is None:
        raise PlanMismatch(f"no rank reported {index.fqn!r} at {index.offset}", key=index.fqn)
    return at


def _tensor_record(
    fqn: str,
    name: str,
    stored: TensorStorageMetadata,
    placed: Mapping[MetadataIndex, Placed],
    number: Mapping[str, int],
) -> TensorRecord:
    chunks = []
    for chunk in stored.chunks:
        at = _lookup(placed, MetadataIndex(fqn, chunk.offsets))
        chunks.append(
            ChunkRecord(
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                number[at.shard.key],
                at.start,
                at.length,
                1 if at.encoding else 0,
            )
        )
    properties = stored.properties
    return TensorRecord(
        name=name,
        dtype=dtype_name(properties.dtype),
        itemsize=properties.dtype.itemsize,
        shape=tuple(stored.size),
        requires_grad=properties.requires_grad,
        pin_memory=properties.pin_memory,
        memory_format=str(properties.memory_format).removeprefix("torch."),
        chunks=tuple(chunks),
    )


def build_metadata(index: Index, key: str) -> Metadata:
    """DCP's metadata from an index; `storage_data` maps each `MetadataIndex` to `Stored`.

    Raises:
        FormatError: A dtype or memory format that this torch does not know.
    """
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    where: dict[MetadataIndex, Stored] = {}
    for item in index.items:
        fqn = unescape(item.name, key) if index.escaped else item.name
        if isinstance(item, ObjectRecord):
            state[fqn] = BytesStorageMetadata()
            where[MetadataIndex(fqn)] = Stored(item, item)
            continue
        chunks = []
        for chunk in item.chunks:
            offsets = torch.Size(chunk.offsets)
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk.sizes)))
            at = MetadataIndex(fqn, offsets)
            # An empty chunk may share its offset with a real one (uneven sharding); the real one counts.
            if at not in where or 0 not in chunk.sizes:
                where[at] = Stored(item, chunk)
        state[fqn] = TensorStorageMetadata(_properties(item, key), torch.Size(item.shape), chunks)
    return Metadata(state_dict_metadata=state, planner_data=_decode_planner_data(index, key), storage_data=where)


def _properties(item: TensorRecord, key: str) -> TensorProperties:
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


def all_indices(metadata: Metadata) -> Iterable[MetadataIndex]:
    """Every chunk and object that a complete save must have written."""
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            for chunk in stored.chunks:
                yield MetadataIndex(fqn, chunk.offsets)
        else:
            yield MetadataIndex(fqn)
