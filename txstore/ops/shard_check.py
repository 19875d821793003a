"""One shard against its documents: block checksums, the file's checksum, its header. No I/O.

The caller reads ranges in ascending order and feeds them in; memory is one window and the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from txstore.checksum import BLOCK_BYTES, combine, crc32c
from txstore.errors import FormatError
from txstore.index import Index, ObjectRecord
from txstore.manifest import ShardRef
from txstore.ops.report import Kind
from txstore.shards.header import LENGTH_BYTES, Header, header_bytes, parse_header
from txstore.shards.layout import SAFETENSORS_DTYPES
from txstore.shards.names import header_name, unescape

WINDOW_BYTES = 8 * BLOCK_BYTES
"""Most bytes that are read at once."""

MOST_FINDINGS = 20
"""Runs of damaged blocks that are named one by one; a file of noise would fill the memory otherwise."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the shard at hand."""

    kind: Kind
    what: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What the index says of one array in a file; `start` and `length` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    length: int


def expected_entries(index: Index) -> list[dict[str, Expected]]:
    """For each file of an index, the arrays that its header must name, and no others.

    Raises:
        FormatError: A name cannot be unescaped.
    """
    files: list[dict[str, Expected]] = [{} for _ in index.files]
    for item in index.items:
        name = header_name(unescape(item.name, "") if index.escaped else item.name)
        if isinstance(item, ObjectRecord):
            if item.file < len(files):
                files[item.file][name] = Expected("U8", (item.length,), (0,), item.start, item.length)
            continue
        for chunk in item.chunks:
            dtype, shape, offsets = SAFETENSORS_DTYPES.get(item.dtype), chunk.sizes, chunk.offsets
            if chunk.encoding:
                dtype, shape, offsets = "U8", (chunk.length,), (0,)
            elif dtype is None:
                dtype, shape, offsets = "U8", (*shape, item.itemsize), (*offsets, 0)
            if chunk.file < len(files):
                files[chunk.file][name] = Expected(dtype, shape, offsets, chunk.start, chunk.length)
    return files


class ShardCheck:
    """Checks one shard while its bytes pass by.

    Args:
        shard: What the manifest says.
        blocks: Block checksums of the index, or None if there is no index to believe.
        expected: Arrays that the header must name, or None if that is not known.
    """

    def __init__(self, shard: ShardRef, blocks: bytes | None, expected: dict[str, Expected] | None) -> None:
        self.shard = shard
        self.blocks = blocks
        self.block_count = -(-shard.size // BLOCK_BYTES)
        self._expected = expected
        self._damaged: list[int] = []
        self._crc = 0
        self._header = bytearray()

    def ranges(self, chosen: Sequence[int] | None) -> list[tuple[int, int]]:
        """Byte ranges to read, each at most a window: of the chosen blocks, or of all if None."""
        size = self.shard.size
        step, starts = BLOCK_BYTES, [block * BLOCK_BYTES for block in chosen or ()]
        if chosen is None:
            step, starts = WINDOW_BYTES, list(range(0, size, WINDOW_BYTES))
        return [(start, min(start + step, size)) for start in starts]

    def feed(self, start: int, data: memoryview) -> int:
        """Take the bytes from `start`, on a block boundary; returns how many blocks were compared."""
        first = start // BLOCK_BYTES
        count = -(-data.nbytes // BLOCK_BYTES)
        for number in range(count):
            block = data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            value = crc32c(block)
            self._crc = combine(self._crc, value, block.nbytes)
            if self.blocks is not None and value != struct.unpack_from("<I", self.blocks, 4 * (first + number))[0]:
                self._damaged.append(first + number)
        self._keep_header(start, data)
        return count if self.blocks is not None else 0

    def _keep_header(self, start: int, data: memoryview) -> None:
        """Copy the header as it passes: it is checked as read with the rest, never read a second time."""
        if start != len(self._header):
            return
        wanted = LENGTH_BYTES
        try:
            wanted += header_bytes((self._header if start else data)[:LENGTH_BYTES], self.shard.size)
        except FormatError:
            pass  # `parse_header` says it again at the end
        self._header += data[: max(0, wanted - start)]

    def findings(self, *, whole: bool) -> Iterator[Finding]:
        """What was found; `whole` says that every byte of the file was fed in."""
        runs = list(_runs(self._damaged))
        for first, last in runs[:MOST_FINDINGS]:
            name = f"block {first}" if first == last else f"blocks {first} to {last}"
            start, stop = first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, self.shard.size)
            yield Finding("checksum", f"{name} (bytes {start} to {stop}) of {self.block_count} fail their CRC32C")
        if len(runs) > MOST_FINDINGS:
            rest = sum(last - first + 1 for first, last in runs[MOST_FINDINGS:])
            yield Finding("checksum", f"{rest} more blocks fail their CRC32C")
        if not whole:
            return
        differs = not runs and self._crc != self.shard.crc32c
        if differs:
            against = "the manifest" if self.blocks is None else "the manifest, though its blocks match the index"
            yield Finding("checksum", f"the file's CRC32C differs from {against}")
        # A header whose bytes are damaged says nothing about its writer: the checksum has named it.
        if not (differs or (self._damaged and self._damaged[0] * BLOCK_BYTES < len(self._header))):
            yield from self._header_findings()

    def _header_findings(self) -> Iterator[Finding]:
        try:
            header = parse_header(self._header, file_size=self.shard.size)
        except FormatError as error:
            yield Finding("header", error.message)
            return
        if self._expected is not None:
            found = list(_disagreements(header, self._expected))
            for what in found[:MOST_FINDINGS]:
                yield Finding("header", what)
            if len(found) > MOST_FINDINGS:
                yield Finding("header", f"{len(found) - MOST_FINDINGS} more arrays disagree with the index")


def _disagreements(header: Header, expected: dict[str, Expected]) -> Iterator[str]:
    offsets = _saved_offsets(header)
    for name in sorted(header.entries.keys() | expected.keys()):
        entry, want = header.entries.get(name), expected.get(name)
        if entry is None or want is None:
            yield f"{name!r} is in the {'index' if entry is None else 'header'} only"
            continue
        where = (header.data_start + entry.start, entry.stop - entry.start)
        if (entry.dtype, entry.shape, *where) != (want.dtype, want.shape, want.start, want.length):
            yield f"{name!r} has another dtype, shape or place in the header than in the index"
        elif offsets.get(name) != want.offsets:
            yield f"{name!r} has other saved_offsets in the header than in the index"


def _saved_offsets(header: Header) -> dict[str, tuple[int, ...] | None]:
    """What stock PyTorch would take for each chunk's place in its tensor."""
    try:
        sharding: object = json.loads(header.metadata.get("DCP_SHARDING_INFO", ""))
    except (ValueError, RecursionError):
        sharding = None
    if not isinstance(sharding, dict):
        return {}
    return {name: _offsets_of(info) for name, info in sharding.items()}


def _offsets_of(info: object) -> tuple[int, ...] | None:
    offsets = info.get("saved_offsets") if isinstance(info, dict) else None
    return tuple(offsets) if isinstance(offsets, list) else None


def _runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs of neighbours: first and last of each."""
    run: tuple[int, int] | None = None
    for number in numbers:
        if run is not None and number == run[1] + 1:
            run = (run[0], number)
            continue
        if run is not None:
            yield run
        run = (number, number)
    if run is not None:
        yield run
