"""CRC32C of 1 MiB blocks, their combination without reading the bytes again, and file digests.

CRC32C is the Castagnoli polynomial (RFC 3720, appendix B.4). Combination multiplies by x^(8n)
modulo that polynomial over GF(2), in the bit-reflected form, as zlib's ``crc32_combine`` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from crc32c import crc32c as _crc32c

Buffer = bytes | bytearray | memoryview

BLOCK_BYTES = 1 << 20
"""Size of a checksum block in bytes: the unit that a ranged read verifies."""

_POLY = 0x82F63B78


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C of a buffer, continuing from `value`. No copy is made; the GIL is released for large buffers."""
    return int(_crc32c(data, value))


def sha256_hex(data: Buffer) -> str:
    """SHA-256 of a document, as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC32C polynomial, bit-reflected."""
    product = 0
    mask = 1 << 31
    while mask:
        if a & mask:
            product ^= b
        mask >>= 1
        b = (b >> 1) ^ _POLY if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """x^(8 * nbytes) modulo the polynomial."""
    power = 1 << 31  # x^0
    square = 1 << 30  # x^1
    bits = 8 * nbytes
    while bits:
        if bits & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        bits >>= 1
    return power


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC32C of two adjacent pieces from their own CRCs; `second_bytes` is the length of the second."""
    return _multiply(_shift(second_bytes), first) ^ second


def combine_blocks(blocks: Iterable[int], total_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """CRC32C of `total_bytes` from the CRCs of its blocks, all `block_bytes` long but the last."""
    crc, left = 0, total_bytes
    for block in blocks:
        size = min(block_bytes, left)
        crc = combine(crc, block, size)
        left -= size
    if left:
        raise ValueError(f"block checksums end {left} bytes before the data does")
    return crc
