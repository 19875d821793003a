"""Reading a safetensors header: eight bytes of length, then JSON. Pure, bounded, and believing nothing.

Headers come from storage, so every number is checked before it is used: the length against a limit and
the file, the JSON against the format's grammar, and the byte ranges against each other, since entries that
overlap or leave holes would let two readers of one file see different data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from txstore.checksum import Buffer
from txstore.errors import FormatError

LENGTH_BYTES = 8
"""The header's length, a little-endian unsigned integer, comes first."""

HEADER_MAX_BYTES = 100_000_000
"""The limit of the safetensors library: a longer header is refused there, so it is refused here."""

METADATA_NAME = "__metadata__"

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
}
"""Bits per element of every dtype that the format names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One array: dtype by the format's name, shape, and its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header.

    Attributes:
        entries: Arrays by name, in the order of the file.
        metadata: The ``__metadata__`` strings.
        data_start: Offset in bytes at which the data begins.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int


def header_bytes(prefix: Buffer, file_size: int, key: str = "") -> int:
    """Length of the JSON text, from the first eight bytes of a file of `file_size` bytes.

    Raises:
        FormatError: The file is too short, or the length exceeds the file or `HEADER_MAX_BYTES`.
    """
    if len(prefix) < LENGTH_BYTES or file_size < LENGTH_BYTES:
        raise FormatError(f"a shard of {file_size} bytes is too short for a header", key=key)
    length = int.from_bytes(bytes(prefix[:LENGTH_BYTES]), "little")
    if length > HEADER_MAX_BYTES:
        raise FormatError(f"a header of {length} bytes exceeds the limit of {HEADER_MAX_BYTES}", key=key)
    if LENGTH_BYTES + length > file_size:
        raise FormatError(f"a header of {length} bytes exceeds the file of {file_size}", key=key)
    return length


def parse_header(data: Buffer, *, file_size: int, key: str = "") -> Header:
    """Parse and check a header.

    Args:
        data: The file from its beginning, at least up to the end of the header.
        file_size: Size of the whole file in bytes: the arrays must fill it exactly.
        key: The file's key, for the error.

    Raises:
        FormatError: Anything at all is not as the format says.
    """
    length = header_bytes(data, file_size, key)
    text = bytes(data[LENGTH_BYTES : LENGTH_BYTES + length])
    if len(text) != length:
        raise FormatError(f"only {len(text)} of {length} header bytes were given", key=key)
    if not text.startswith(b"{"):
        raise FormatError("the header does not begin with a brace", key=key)
    try:
        items: object = json.loads(text.decode("utf-8"), object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"malformed header: {error}", key=key) from error
    if not isinstance(items, _Pairs):
        raise FormatError("the header is not a JSON object", key=key)
    metadata: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    # Duplicate names are refused, not resolved: readers differ in which one they take.
    for name, value in _unique(items, "the header", key).items():
        if name == METADATA_NAME:
            metadata = _metadata(value, key)
        else:
            entries[name] = _entry(name, value, key)
    _check_tiling(entries, file_size - LENGTH_BYTES - length, key)
    return Header(entries, metadata, LENGTH_BYTES + length)


class _Pairs(list[tuple[str, object]]):
    """A JSON object with its duplicates still visible."""


def _unique(pairs: _Pairs, where: str, key: str) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError(f"{where} has a name twice", key=key)
    return found


def _metadata(value: object, key: str) -> dict[str, str]:
    if not isinstance(value, _Pairs):
        raise FormatError(f"{METADATA_NAME} is not an object", key=key)
    found = _unique(value, METADATA_NAME, key)
    if not all(isinstance(text, str) for text in found.values()):
        raise FormatError(f"{METADATA_NAME} holds something that is not a string", key=key)
    return cast("dict[str, str]", found)


def _entry(name: str, value: object, key: str) -> Entry:
    what = f"the entry of {name[:200]!r}"
    if not isinstance(value, _Pairs):
        raise FormatError(f"{what} is not an object", key=key)
    fields = _unique(value, what, key)
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{what} has other fields than dtype, shape and data_offsets", key=key)
    dtype = fields["dtype"]
    shape = _naturals(fields["shape"], what, key)
    offsets = _naturals(fields["data_offsets"], what, key)
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(f"{what} has an unknown dtype", key=key)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{what} has impossible offsets", key=key)
    start, stop = offsets
    if math.prod(shape) * DTYPE_BITS[dtype] != 8 * (stop - start):
        raise FormatError(f"{what} has {stop - start} bytes, which dtype and shape do not give", key=key)
    return Entry(dtype, shape, start, stop)


def _naturals(value: object, what: str, key: str) -> tuple[int, ...]:
    # bool is an int in Python, and 2**63 is where other readers overflow; 64 dimensions are torch's limit.
    if (
        not isinstance(value, list)
        or isinstance(value, _Pairs)
        or len(value) > 64
        or not all(type(number) is int and 0 <= number < 1 << 63 for number in value)
    ):
        raise FormatError(f"{what} has a shape or offsets that are not natural numbers", key=key)
    return tuple(cast("Sequence[int]", value))


def _check_tiling(entries: Mapping[str, Entry], data_bytes: int, key: str) -> None:
    """Every byte after the header belongs to exactly one array."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            problem = "overlaps another array" if entry.start < end else "leaves a hole before it"
            raise FormatError(f"the entry of {name[:200]!r} {problem}", key=key)
        end = entry.stop
    if end != data_bytes:
        raise FormatError(f"the arrays take {end} bytes, {data_bytes} follow the header", key=key)
