"""A large object goes up as blocks, in parallel, and appears with the block list: whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from txstore.checksum import BLOCK_BYTES, Buffer
from txstore.errors import ConfigError
from txstore.store import Source

BLOCKS_MAX = 50_000
"""Most blocks of one blob."""
BLOCK_BYTES_MAX = 4000 << 20
"""Largest block."""


def part_bytes_for(total: int, wanted: int) -> int:
    """Bytes of each block of an object: `wanted`, or more if there would be too many.

    Raises:
        ConfigError: The object is larger than any blob can be.
    """
    least = -(-total // BLOCKS_MAX)
    part = max(wanted, -(-least // BLOCK_BYTES) * BLOCK_BYTES)
    if part > BLOCK_BYTES_MAX:
        raise ConfigError(f"an object of {total} bytes is larger than a blob can be", next_step="write smaller shards")
    return part


def content_md5(data: Sequence[Buffer]) -> str:
    """MD5 as the service wants it in a header, to check what it has received."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in data:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode("ascii")


def new_block_ids(count: int) -> list[str]:
    """Block ids that no other attempt uses, all of the same length.

    Two writers of one key could otherwise mix their blocks in one object.
    """
    attempt = os.urandom(14)
    return [base64.b64encode(attempt + number.to_bytes(4, "big")).decode("ascii") for number in range(count)]


def block_list(ids: list[str]) -> bytes:
    """The document that makes an object of the blocks."""
    listed = "".join(f"<Latest>{one}</Latest>" for one in ids)
    return f'<?xml version="1.0" encoding="utf-8"?><BlockList>{listed}</BlockList>'.encode("ascii")


def read_part(source: Source, start: int, stop: int) -> Sequence[Buffer]:
    """Bytes of a source.

    Raises:
        ValueError: It gave another number of them: sent as they are, the object would silently be another.
    """
    data = source.pieces(start, stop)
    if (count := sum(memoryview(piece).nbytes for piece in data)) != stop - start:
        raise ValueError(f"the source gave {count} bytes for {start}:{stop}")
    return data


def upload_parts(
    source: Source, part_bytes: int, ids: list[str], *, workers: int, stage: Callable[[str, Sequence[Buffer]], None]
) -> None:
    """Read every part of `source` and `stage` it; at most `workers` parts are in memory.

    Raises:
        Exception: The first error of the source or of `stage`; no part is begun after it.
    """
    stop = threading.Event()

    def part(number: int) -> None:
        if stop.is_set():
            return
        start = number * part_bytes
        try:
            stage(ids[number], read_part(source, start, min(start + part_bytes, source.size)))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(min(workers, len(ids)), thread_name_prefix="txstore-azure") as pool:
        running = [pool.submit(part, number) for number in range(len(ids))]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            raise
    for one in running:
        one.result()
