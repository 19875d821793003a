"""Small committed checkpoints without torch: for tests of what reads a store."""

from __future__ import annotations

import random
from collections.abc import Callable

from txstore.columns import column_bytes
from txstore.index import ChunkRecord, FileRecord, Index, ObjectRecord, TensorRecord
from txstore.manifest import Decision, Description
from txstore.shards.layout import Extent, ShardSource, payload_extent, tensor_extent
from txstore.shards.names import header_name
from txstore.store import BytesSource, Store
from txstore.transaction import Shard, Visibility, begin, write_shard

ROW_BYTES = 1024
"""Bytes of one row of the sample's ``weight``, 256 numbers of ``float32``."""


def commit_sample(
    store: Store,
    checkpoint: str,
    *,
    rows: int = 4,
    ranks: int = 2,
    payload: bytes = b"payload",
    names: tuple[str, str] = ("model.weight", "extra"),
    description: Description | None = None,
    writer: str = "sample:1",
    overwrite: bool = False,
    visibility: Visibility | None = None,
    tamper: Callable[[Extent], Extent] = lambda extent: extent,
) -> Decision:
    """Commit a checkpoint of one sharded tensor, a 16-bit scalar and an object.

    Args:
        store: Any store.
        checkpoint: Its name; the bytes follow from it.
        rows: Rows of `ROW_BYTES` bytes that each rank holds of the tensor.
        ranks: Ranks, each with one shard.
        payload: The object's bytes, stored by rank 0.
        names: Names of the tensor and of the object.
        description: For the manifest.
        writer: For the records.
        overwrite: Commit again what stands.
        visibility: As for `Transaction.commit`.
        tamper: Applied to each extent as it is laid out, but not to the index: a writer with a bug.
    """
    transaction = begin(store, checkpoint, world_size=ranks, overwrite=overwrite, writer=writer)
    noise = random.Random(checkpoint)  # noqa: S311 - reproducible bytes, not a secret
    tensor, thing = names
    shards: list[Shard] = []
    chunks: list[ChunkRecord] = []
    small: list[TensorRecord | ObjectRecord] = []
    for rank in range(ranks):
        data = BytesSource(noise.randbytes(rows * ROW_BYTES))
        corner = (rank * rows, 0)
        extents = [
            tensor_extent(header_name(tensor), data, dtype="float32", itemsize=4, shape=(rows, 256), offsets=corner)
        ]
        if rank == 0:
            scale = BytesSource(b"\x00\x3c")
            extents.append(tensor_extent("scale", scale, dtype="float16", itemsize=2, shape=(), offsets=()))
            extents.append(payload_extent(header_name(thing), BytesSource(payload)))
        source = ShardSource([tamper(extent) for extent in extents])
        shards.append(write_shard(store, transaction.ticket, rank, 0, source))
        for start, extent in zip(source.starts, source.extents, strict=True):
            if extent.name == "scale":
                one = ChunkRecord((), (), rank, start, 2)
                small.append(TensorRecord("scale", "float16", 2, (), False, False, "contiguous_format", (one,)))  # noqa: FBT003 - a record
            elif extent.name == header_name(thing):
                small.append(ObjectRecord(thing, rank, start, len(payload)))
            else:
                chunks.append(ChunkRecord(corner, (rows, 256), rank, start, rows * ROW_BYTES))
    weight = TensorRecord(tensor, "float32", 4, (ranks * rows, 256), True, False, "contiguous_format", tuple(chunks))  # noqa: FBT003 - a record
    files = tuple(FileRecord(shard.key, shard.size, column_bytes("I", shard.blocks)) for shard in shards)
    index = Index(files=files, items=(weight, *small))
    software = {"txstore": "test"}
    return transaction.commit(shards, index, software=software, description=description, visibility=visibility)
