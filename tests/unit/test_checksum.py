"""CRC32C against its published vectors and against itself; the one checksum pass of a save."""

import os
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore.checksum import BLOCK_BYTES, combine, combine_blocks, crc32c
from txstore.errors import PlanMismatch
from txstore.memory import MemoryStore
from txstore.store import BytesSource, ChecksummedSource, Source


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_published_vectors_of_rfc_3720(data, expected):
    assert crc32c(data) == expected


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_pieces_combine_to_the_whole(first, second):
    assert combine(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


@given(st.binary(max_size=2000), st.integers(1, 97))
def test_blocks_combine_to_the_whole(data, block_bytes):
    blocks = [crc32c(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
    assert combine_blocks(blocks, len(data), block_bytes) == crc32c(data)


def test_lengths_beyond_32_bits_combine():
    zeros = bytes(1 << 16)
    crc = crc32c(zeros)
    for _ in range(17):  # doubling by combination alone: 8 GiB of zeros
        crc = combine(crc, crc, 1 << (16 + _))
    assert crc == combine(combine(0, crc32c(b""), 0), crc, 1 << 33)
    direct = combine_blocks([crc32c(bytes(1 << 20))] * 64, 64 << 20)
    assert direct == crc32c(bytes(64 << 20))


def test_block_checksums_that_end_early_are_an_error():
    with pytest.raises(ValueError, match="end 5 bytes before"):
        combine_blocks([crc32c(b"abc")], 8, 3)


SIZES = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 17]


@pytest.mark.parametrize("size", SIZES)
def test_a_source_that_was_read_in_any_order_has_the_checksum_of_its_bytes(size):
    data = random.Random(size).randbytes(size)
    source = ChecksummedSource(BytesSource(data))
    starts = list(range(0, size, BLOCK_BYTES))
    random.Random(1).shuffle(starts)
    for start in starts:
        stop = min(start + BLOCK_BYTES, size)
        assert bytes(source.read(start, stop)) == data[start:stop]
    assert source.crc32c(0, size) == crc32c(data)
    assert combine_blocks(source.blocks, size) == crc32c(data)


def test_blocks_that_were_never_read_are_an_error():
    source = ChecksummedSource(BytesSource(bytes(2 * BLOCK_BYTES)), "x")
    source.read(0, BLOCK_BYTES)
    with pytest.raises(ValueError, match="1 blocks of 'x' were never read"):
        _ = source.blocks
    with pytest.raises(ValueError, match="has not been read"):
        source.crc32c(0, 2 * BLOCK_BYTES)


@pytest.mark.parametrize(("start", "stop"), [(1, BLOCK_BYTES), (0, 5), (BLOCK_BYTES, 2 * BLOCK_BYTES - 1)])
def test_reads_off_the_block_grid_are_an_error(start, stop):
    with pytest.raises(ValueError, match="not aligned"):
        ChecksummedSource(BytesSource(bytes(2 * BLOCK_BYTES))).read(start, stop)


class ShortSource(Source):
    size = 10

    def read(self, start, stop):
        return bytes(stop - start - 1)

    def crc32c(self, start, stop):
        return 0


def test_a_source_that_gives_too_few_bytes_is_an_error():
    with pytest.raises(ValueError):
        ChecksummedSource(ShortSource()).read(0, 10)


class PlantedCollision(Exception):
    pass


def test_bytes_that_change_between_two_reads_are_refused():
    data = bytearray(BLOCK_BYTES + 1)
    source = ChecksummedSource(BytesSource(data), "shard")
    source.read(0, BLOCK_BYTES + 1)
    source.read(0, BLOCK_BYTES + 1)
    data[BLOCK_BYTES] = 1
    with pytest.raises(PlanMismatch) as caught:
        source.read(0, BLOCK_BYTES + 1)
    assert caught.value.key == "shard"
    assert "dcp.async_save" in str(caught.value)


class InPieces(BytesSource):
    """Its bytes lie in pieces that end anywhere."""

    def __init__(self, data, ends):
        super().__init__(data)
        self._ends = ends

    def pieces(self, start, stop):
        cuts = [start, *(end for end in self._ends if start < end < stop), stop]
        return [self.read(low, high) for low, high in pairwise(cuts)]


@pytest.mark.parametrize("ends", [(), (1,), (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 5), (2 * BLOCK_BYTES,)])
def test_pieces_have_the_checksums_of_the_blocks_that_they_make_up(ends):
    data = os.urandom(3 * BLOCK_BYTES + 7)
    source = ChecksummedSource(InPieces(data, ends))
    for start, stop in ((BLOCK_BYTES, 3 * BLOCK_BYTES), (0, BLOCK_BYTES), (3 * BLOCK_BYTES, len(data))):
        assert b"".join(source.pieces(start, stop)) == data[start:stop]
    assert source.blocks == tuple(crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
    assert source.crc32c(0, len(data)) == crc32c(data)


def test_pieces_that_change_after_they_were_sent_are_refused():
    data = bytearray(2 * BLOCK_BYTES)
    source = ChecksummedSource(InPieces(data, (5, BLOCK_BYTES + 5)), "shard")
    source.pieces(0, 2 * BLOCK_BYTES)
    data[BLOCK_BYTES + 5] = 1
    with pytest.raises(PlanMismatch):
        source.blocks  # noqa: B018 - it looks


def test_nothing_is_stored_when_the_bytes_change_during_a_retry():
    data = bytearray(b"before")
    source = ChecksummedSource(BytesSource(data), "shard")
    store = MemoryStore()
    store.put("first", source)
    data[:] = b"after!"
    with pytest.raises(PlanMismatch):
        store.put("second", source)
    assert [info.key for info in store.list("")] == ["first"]
