"""A checkpoint small enough for fault tests, saved and loaded through the core alone (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

from txstore import transaction
from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.columns import column_bytes
from txstore.decisions import gone, read_index, read_manifest
from txstore.errors import IntegrityError, NotFoundError
from txstore.index import ChunkRecord, FileRecord, Index, TensorRecord
from txstore.manifest import Decision
from txstore.store import BytesSource, Store
from txstore.transaction import Shard, Visibility

AT_ONCE = Visibility(wait_s=0, poll_s=0, sleep=lambda _s: None, clock=lambda: 0.0)
"""Look once: what is missing is missing."""


def index_of(shards: Sequence[Shard]) -> Index:
    """An index with one tensor of bytes for each shard, called ``0``, ``1``, ..."""
    files = tuple(FileRecord(shard.key, shard.size, column_bytes("I", shard.blocks)) for shard in shards)
    items = tuple(
        TensorRecord(
            name=str(number),
            dtype="uint8",
            itemsize=1,
            shape=(shard.size,),
            requires_grad=False,
            pin_memory=False,
            memory_format="contiguous",
            chunks=(ChunkRecord((0,), (shard.size,), number, 0, shard.size),),
        )
        for number, shard in enumerate(shards)
    )
    return Index(files=files, items=items)


def save(
    store: Store, checkpoint: str, values: Sequence[bytes], *, overwrite: bool = False, writer: str = "test"
) -> Decision:
    """Save one shard a rank, as a coordinator and its ranks do. Errors are those of the transaction."""
    attempt = transaction.begin(store, checkpoint, world_size=len(values), overwrite=overwrite, writer=writer)
    shards = [
        transaction.write_shard(store, attempt.ticket, rank, 0, BytesSource(value)) for rank, value in enumerate(values)
    ]
    return attempt.commit(shards, index_of(shards), visibility=AT_ONCE)


def load(store: Store, decision: Decision) -> list[bytes]:
    """Every shard of a commit, its blocks verified.

    Raises:
        CheckpointRetired, IntegrityError, FormatError: As for any reader.
    """
    values: list[bytes] = []
    for file in read_index(store, decision, read_manifest(store, decision)).files:
        try:
            value = store.read(file.key)
        except NotFoundError as error:
            raise gone(store, decision, file.key) from error
        blocks = (crc32c(value[start : start + BLOCK_BYTES]) for start in range(0, len(value), BLOCK_BYTES))
        if len(value) != file.size or b"".join(block.to_bytes(4, "little") for block in blocks) != file.blocks:
            raise IntegrityError("the shard is not what was committed", key=file.key)
        values.append(value)
    return values


def contents(store: Store) -> dict[str, bytes]:
    """Everything in the store."""
    return {info.key: store.read(info.key) for info in list(store.list(""))}
