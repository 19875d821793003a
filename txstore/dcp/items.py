"""From planned items to shard files on one rank: resolve, lay out, write."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from txstore.dcp.metadata import Placed
from txstore.dcp.objects import is_safe
from txstore.dcp.tensors import TensorSource, check_storable, dtype_name, dtype_name_of_layout, is_plain, serialise
from txstore.errors import PlanMismatch, UnsupportedValue
from txstore.shards.layout import Extent, ShardSource, pack, payload_extent, tensor_extent
from txstore.shards.names import header_name
from txstore.side_by_side import side_by_side
from txstore.store import BytesSource, Store
from txstore.transaction import Shard, Ticket, write_shard

log = logging.getLogger(__name__)

SPLIT_BYTES = 32 << 20
"""Files are not made smaller than this to have one for each thread."""


@dataclass(frozen=True, slots=True)
class Laid:
    """The files of one rank, and for each planned item its extent and encoding."""

    files: list[ShardSource]
    items: list[tuple[WriteItem, Extent, int]]


def refuse_early(items: Sequence[WriteItem]) -> None:
    """Refuse tensors whose plan shows that they cannot be stored.

    Raises:
        UnsupportedValue: A layout other than strided.
    """
    for item in items:
        if item.tensor_data is not None and item.tensor_data.properties.layout != torch.strided:
            raise UnsupportedValue(
                f"{item.index.fqn!r} is a tensor of layout {dtype_name_of_layout(item.tensor_data.properties.layout)}",
                key=item.index.fqn,
                next_step="convert it to a dense tensor before saving",
            )


def lay_out(items: Sequence[WriteItem], planner: SavePlanner, shard_bytes: int, threads: int) -> Laid:
    """Decide where every item of this rank goes. Tensors are looked at, not kept; objects are serialised.

    Raises:
        UnsupportedValue: A value that cannot be stored exactly.
        PlanMismatch: A tensor is not what its plan says.
    """
    laid = [_extent(item, planner) for item in items]
    files = pack((extent for extent, _ in laid), _file_bytes(laid, shard_bytes, threads))
    return Laid(files, [(item, extent, encoding) for item, (extent, encoding) in zip(items, laid, strict=True)])


def _file_bytes(laid: Sequence[tuple[Extent, int]], shard_bytes: int, threads: int) -> int:
    """The size of a file: a state that would fill less than one for each thread is shared out among them."""
    total = sum(extent.source.size for extent, _ in laid)
    return min(shard_bytes, max(SPLIT_BYTES, -(-total // threads)))


def _extent(item: WriteItem, planner: SavePlanner) -> tuple[Extent, int]:
    name = header_name(item.index.fqn)
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise PlanMismatch(f"{item.index.fqn!r} was planned as bytes", key=item.index.fqn)
        _warn_if_unsafe(item.index.fqn, data.getvalue())
        return payload_extent(name, BytesSource(data.getvalue())), 0
    if not isinstance(data, torch.Tensor):
        raise PlanMismatch(f"{item.index.fqn!r} was planned as a tensor", key=item.index.fqn)
    check_storable(data, item.index.fqn)
    _check_planned(item, data)
    if not is_plain(data):
        payload = serialise(data)
        _warn_if_unsafe(item.index.fqn, payload)
        return payload_extent(name, BytesSource(payload)), 1
    source = TensorSource(_resolver(planner, item), data.numel() * data.element_size())
    return tensor_extent(
        name,
        source,
        dtype=dtype_name(data.dtype),
        itemsize=data.element_size(),
        shape=tuple(data.shape),
        offsets=tuple(item.tensor_data.chunk.offsets) if item.tensor_data else (),
    ), 0


def _resolver(planner: SavePlanner, item: WriteItem) -> Callable[[], torch.Tensor]:
    def resolve() -> torch.Tensor:
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            raise PlanMismatch(f"{item.index.fqn!r} was planned as a tensor", key=item.index.fqn)
        return data

    return resolve


def _check_planned(item: WriteItem, tensor: torch.Tensor) -> None:
    planned = item.tensor_data
    if planned is None or tensor.dtype != planned.properties.dtype or tensor.shape != planned.chunk.sizes:
        wanted = f"{planned.properties.dtype}{tuple(planned.chunk.sizes)}" if planned else "nothing"
        raise PlanMismatch(
            f"{item.index.fqn!r} is {tensor.dtype}{tuple(tensor.shape)}, its plan says {wanted}",
            key=item.index.fqn,
            next_step="a planner that transforms tensors must change their planned properties too",
        )


def _warn_if_unsafe(fqn: str, payload: bytes) -> None:
    if not is_safe(payload):
        log.warning(
            "%r is an object outside torch's weights_only allow-list: loading it will need "
            "torch.serialization.add_safe_globals or StorageReader(..., trust_objects=True)",
            fqn,
        )


def write_files(store: Store, ticket: Ticket, rank: int, laid: Laid, *, threads: int) -> list[WriteResult]:
    """Write a rank's files, some at once; the first error of any thread is raised after all have stopped."""

    def write(number: int) -> Shard:
        file = laid.files[number]
        shard = write_shard(store, ticket, rank, number, file)
        for extent in file.extents:
            if isinstance(extent.source, TensorSource):
                extent.source.release()
        return shard

    shards = side_by_side(write, range(len(laid.files)), at_once=threads)
    at = {
        id(extent): (shard, start)
        for shard, file in zip(shards, laid.files, strict=True)
        for extent, start in zip(file.extents, file.starts, strict=True)
    }
    results = []
    for item, extent, encoding in laid.items:
        shard, start = at[id(extent)]
        length = extent.source.size
        results.append(WriteResult(item.index, length, Placed(shard, start, length, encoding)))
    return results
