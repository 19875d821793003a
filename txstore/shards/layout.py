"""How tensors lie in shard files: every shard is a plain safetensors file.

A file is an 8-byte little-endian header length, a JSON header padded with spaces so that the data
begins at a multiple of 4 KiB, and the tensors' row-major bytes without gaps (the safetensors format has
none). Where large tensors are whole checksum blocks, the data begins on a block, so that they lie on blocks and are
read without their neighbours. The header's metadata holds the ``DCP_SHARDING_INFO`` that PyTorch's own Hugging Face
reader understands, so a directory of shards loads without txstore.

What safetensors cannot say is kept in the index: dtypes it lacks are stored as ``U8`` with one more
dimension of the item's size, and values that are not tensors as ``U8`` vectors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from txstore.checksum import BLOCK_BYTES, Buffer, crc32c
from txstore.store import Source

HEADER_ALIGN_BYTES = 4096
ON_BLOCKS_BYTES = 64 << 20
"""A file with as many bytes in extents of whole blocks has its data begin on a block: at most 1.6 % more to write."""

TINY_BYTES = 1024
"""Extents up to this size, such as an optimizer's step counts, lie together, not one in each block."""

SHARD_BYTES = 512 << 20
"""Target size of a shard file: large enough to fill a wire, small enough to write several in parallel."""

HEADER_BYTES = 16 << 20
"""Most bytes of a header, about: readers refuse one above 100 MB, which many small tensors or long names reach."""

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""torch's name of a dtype -> safetensors' name, for those that stock readers of both know."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous run of bytes in a shard file: a tensor chunk or an object.

    Attributes:
        name: The state's flat name.
        dtype: safetensors dtype.
        shape: Shape under that dtype.
        offsets: Where the chunk lies in its global tensor, one number per dimension of `shape`.
        align_bytes: Natural alignment of the elements.
        source: The bytes; `source.size` is the extent's length.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    align_bytes: int
    source: Source


def tensor_extent(
    name: str, source: Source, *, dtype: str, itemsize: int, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> Extent:
    """The extent of a tensor chunk whose bytes are its row-major memory; `dtype` by torch's name."""
    known = SAFETENSORS_DTYPES.get(dtype)
    if known is None:
        return Extent(name, "U8", (*shape, itemsize), (*offsets, 0), itemsize, source)
    return Extent(name, known, shape, offsets, itemsize, source)


def payload_extent(name: str, source: Source) -> Extent:
    """The extent of a serialised value."""
    return Extent(name, "U8", (source.size,), (0,), 1, source)


class ShardSource(Source):
    """A whole shard file as a replayable source: header, then extents in order.

    Attributes:
        extents: The extents as laid out.
        starts: First byte of each extent in the file.
    """

    def __init__(self, extents: Iterable[Extent]) -> None:
        self.extents = tuple(sorted(extents, key=_order))
        header = _encode_header(self.extents)
        self.starts: list[int] = []
        self._pieces: list[tuple[int, int, Source | bytes]] = [(0, len(header), header)]
        end = len(header)
        for extent in self.extents:
            self.starts.append(end)
            if extent.source.size:
                self._pieces.append((end, end + extent.source.size, extent.source))
            end += extent.source.size
        self.size = end

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes of the file: a view of one extent where the range lies in one, else a small join."""
        first = self._find(start)
        begin, end, piece = self._pieces[first]
        if stop <= end:
            return _slice(piece, start - begin, stop - begin)
        return b"".join(self.pieces(start, stop))

    def pieces(self, start: int, stop: int) -> list[Buffer]:
        """Views of the extents that the range crosses, header included."""
        found = []
        for begin, end, piece in islice(self._pieces, self._find(start), None):
            low, high = max(begin, start), min(end, stop)
            if low >= high:
                break
            found.append(_slice(piece, low - begin, high - begin))
        return found

    def crc32c(self, start: int, stop: int) -> int:
        """Reads the range again; a save asks the `ChecksummedSource` around this one instead."""
        return crc32c(self.read(start, stop))

    def _find(self, position: int) -> int:
        low, high = 0, len(self._pieces) - 1
        while low < high:
            middle = (low + high) // 2
            if self._pieces[middle][1] <= position:
                low = middle + 1
            else:
                high = middle
        return low


def _slice(piece: Source | bytes, start: int, stop: int) -> Buffer:
    return memoryview(piece)[start:stop] if isinstance(piece, bytes) else piece.read(start, stop)


def _order(extent: Extent) -> tuple[bool, int, bool]:
    """Whole blocks first; then the widest elements, and of one width the tiny extents last.

    Without gaps, that keeps every tensor aligned for readers that map the file: whole blocks shift nothing.
    """
    return not _is_whole_blocks(extent), -extent.align_bytes, extent.source.size <= TINY_BYTES


def _is_whole_blocks(extent: Extent) -> bool:
    return extent.source.size > 0 and extent.source.size % BLOCK_BYTES == 0


def _encode_header(extents: Sequence[Extent]) -> bytes:
    sharding = {extent.name: {"saved_offsets": list(extent.offsets)} for extent in extents}
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps(sharding, separators=(",", ":")),
        }
    }
    end = 0
    for extent in extents:
        start, end = end, end + extent.source.size
        header[extent.name] = {"dtype": extent.dtype, "shape": list(extent.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    on_blocks = sum(extent.source.size for extent in extents if _is_whole_blocks(extent)) >= ON_BLOCKS_BYTES
    align = BLOCK_BYTES if on_blocks else HEADER_ALIGN_BYTES
    padded = -(-(8 + len(text)) // align) * align
    return struct.pack("<Q", padded - 8) + text.ljust(padded - 8)


def pack(extents: Iterable[Extent], target_bytes: int = SHARD_BYTES) -> list[ShardSource]:
    """Distribute extents over files, in order.

    A file takes extents up to `target_bytes` (a larger tensor has a file of its own), names and shapes up
    to `HEADER_BYTES`, and never two of one name: a safetensors file knows each name once, so several chunks
    of one tensor go to several files.
    """
    files: list[list[Extent]] = []
    sizes: list[int] = []
    headers: list[int] = []
    newest: dict[str, int] = {}  # name -> first file that may take it
    front = 0  # files before it are full
    for extent in extents:
        number = max(front, newest.get(extent.name, 0))
        described = _described_bytes(extent)
        while number < len(files) and (
            (sizes[number] and sizes[number] + extent.source.size > target_bytes)
            or headers[number] + described > HEADER_BYTES
        ):
            number += 1
        if number == len(files):
            files.append([])
            sizes.append(0)
            headers.append(0)
        files[number].append(extent)
        sizes[number] += extent.source.size
        headers[number] += described
        newest[extent.name] = number + 1
        while front < len(files) and (sizes[front] >= target_bytes or headers[front] >= HEADER_BYTES - described):
            front += 1
    return [ShardSource(file) for file in files]


def _described_bytes(extent: Extent) -> int:
    """About what an extent adds to a header: its name twice, escaped, and its numbers."""
    return 128 + 2 * len(json.dumps(extent.name)) + 40 * len(extent.shape)
