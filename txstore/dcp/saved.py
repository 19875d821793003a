"""What an index says, as DCP asks for it: each chunk is made when somebody asks for its tensor, not before.

DCP's `Metadata` is an object for every chunk of every tensor, on every rank. A million of them are seconds and hundreds
of megabytes; a rank plans for the tensors of its own state, and reads the chunks of its own plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from txstore.grid import cells, cells_near
from txstore.index import ChunkRecord, GridRecord, Index, ObjectRecord, TensorRecord

Record = TensorRecord | GridRecord | ObjectRecord


class LazyTensorMetadata(TensorStorageMetadata):
    """The metadata of one tensor; `chunks` is made when it is first asked for. Pickled as what it stands for."""

    def __init__(self, properties: TensorProperties, record: TensorRecord | GridRecord) -> None:
        self.properties = properties
        self.size = torch.Size(record.shape)
        self._record = record

    def __getattr__(self, name: str) -> Any:
        if name != "chunks":
            raise AttributeError(name)
        record = self._record
        self.chunks = _chunks_of(
            cells(record.bounds)
            if isinstance(record, GridRecord)
            else ((chunk.offsets, chunk.sizes) for chunk in record.chunks)
        )
        return self.chunks

    def near(self, local: Sequence[ChunkStorageMetadata]) -> TensorStorageMetadata:
        """The same, with no more chunks than those that meet a part of `local`; a planner looks at every one."""
        if not isinstance(self._record, GridRecord) or any(len(part.sizes) != len(self.size) for part in local):
            return self
        boxes = (box for part in local for box in cells_near(self._record.bounds, part.offsets, part.sizes))
        return TensorStorageMetadata(self.properties, self.size, _chunks_of(dict.fromkeys(boxes)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStorageMetadata):
            return NotImplemented
        mine = self.properties, self.size, self.chunks
        return mine == (other.properties, other.size, other.chunks)

    __hash__ = TensorStorageMetadata.__hash__  # none

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorStorageMetadata, (self.properties, self.size, self.chunks)


def _chunks_of(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[ChunkStorageMetadata]:
    known: dict[tuple[int, ...], torch.Size] = {}  # most chunks have the same sizes
    found = []
    for offsets, sizes in boxes:
        size = known.get(sizes)
        if size is None:
            size = known[sizes] = torch.Size(sizes)
        found.append(ChunkStorageMetadata(torch.Size(offsets), size))
    return found


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the reader finds one item; the values of `Metadata.storage_data`."""

    item: Record
    where: ChunkRecord | ObjectRecord


class StoredItems(Mapping[MetadataIndex, Stored]):
    """All items of a checkpoint by their `MetadataIndex`, looked up in the records of the index.

    An empty chunk may share its corner with a real one (uneven sharding); the real one counts.

    Args:
        items: The records, by the names of the state.
    """

    def __init__(self, items: Mapping[str, Record]) -> None:
        self._items = items
        self._listed: dict[str, dict[tuple[int, ...], ChunkRecord]] = {}

    def __getitem__(self, at: MetadataIndex) -> Stored:
        item = self._items[at.fqn]
        where: ChunkRecord | ObjectRecord | None = None
        if isinstance(item, ObjectRecord):
            where = item if at.offset is None else None
        elif at.offset is None:
            pass
        elif isinstance(item, GridRecord):
            where = item.chunk_at(tuple(at.offset))
        else:
            if (listed := self._listed.get(at.fqn)) is None:
                listed = self._listed[at.fqn] = item.by_corner()
            where = listed.get(tuple(at.offset))
        if where is None:
            raise KeyError(at)
        return Stored(item, where)

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn, item in self._items.items():
            if isinstance(item, ObjectRecord):
                yield MetadataIndex(fqn)
            else:
                for corner in dict.fromkeys(chunk.offsets for chunk in item.chunks):
                    yield MetadataIndex(fqn, corner)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Location(NamedTuple):
    """Where one item lies, as the save's returned metadata tells it."""

    key: str
    start: int
    length: int


class Locations(Mapping[MetadataIndex, Location]):
    """Where all items of a save lie. DCP sends it to every rank: it holds columns, not an object for each chunk."""

    def __init__(self, index: Index, names: Sequence[str]) -> None:
        self._keys = tuple(file.key for file in index.files)
        self._stored = StoredItems(dict(zip(names, index.items, strict=True)))

    def __getitem__(self, at: MetadataIndex) -> Location:
        where = self._stored[at].where
        return Location(self._keys[where.file], where.start, where.length)

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)
