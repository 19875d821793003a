"""Columns: many numbers as the bytes of a document, without an object for each."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable


def column(kind: str, data: bytes) -> array[int]:
    """Numbers from little-endian bytes: ``I`` of 4 bytes, ``Q`` of 8."""
    numbers = array(kind)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def column_bytes(kind: str, numbers: Iterable[int]) -> bytes:
    """Inverse of `column`."""
    packed = array(kind, numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def pick(kind: str, data: bytes, number: int) -> int:
    """One number of a column."""
    found: int = struct.unpack_from(f"<{kind}", data, number * struct.calcsize(f"<{kind}"))[0]
    return found
