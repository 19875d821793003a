"""The arithmetic of shard files against brute force, with small blocks so that every boundary is met. No torch."""

from __future__ import annotations

import itertools
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import crc32c
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from txstore.errors import IntegrityError
from txstore.index import FileRecord, Index
from txstore.manifest import Decision
from txstore.memory import MemoryStore
from txstore.shards import layout, reading, slabs
from txstore.shards.layout import HEADER_ALIGN_BYTES, SAFETENSORS_DTYPES, Extent, pack, payload_extent, tensor_extent
from txstore.shards.reading import BlockReader, Wanted, plan_reads
from txstore.shards.slabs import cut, is_contiguous, strides_of
from txstore.store import BytesSource

BLOCK = 16
WINDOW = 4 * BLOCK

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reading, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(reading, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(layout, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(layout, "ON_BLOCKS_BYTES", 3 * BLOCK)
    monkeypatch.setattr(layout, "TINY_BYTES", 3)


def pattern(size: int, salt: int = 0) -> bytes:
    return bytes((index * 131 + (index >> 8) * 17 + salt) & 0xFF for index in range(size))


@dataclass(frozen=True)
class Box:
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    offsets = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    lengths = tuple(draw(st.integers(0, extent - low)) for extent, low in zip(shape, offsets, strict=True))
    return Box(shape, offsets, lengths)


def elements(box: Box) -> dict[tuple[int, ...], int]:
    """Element number in the chunk, for each coordinate of the box: one by one."""
    found = {}
    for at in itertools.product(*(range(length) for length in box.lengths)):
        number = 0
        for extent, low, here in zip(box.shape, box.offsets, at, strict=True):
            number = number * extent + low + here
        found[at] = number
    return found


@quick
@given(boxes(), st.sampled_from([1, 2, 8, 16]), st.sampled_from([8, 24, 64, 1000]))
def test_cut_covers_a_box_once_and_reads_no_block_for_nothing(box: Box, itemsize: int, window: int) -> None:
    wanted = elements(box)
    seen: dict[tuple[int, ...], int] = {}
    strides = strides_of(box.shape)
    for slab in cut(box.shape, box.offsets, box.lengths, itemsize, window):
        assert (slab.stop - slab.start) % itemsize == 0
        assert slab.stop - slab.start <= max(window, itemsize)
        taken = set()
        for at in itertools.product(*(range(length) for length in slab.lengths)):
            inside = sum(here * stride for here, stride in zip(at, strides, strict=True))
            byte = slab.start + inside * itemsize
            assert slab.start <= byte < slab.stop
            place = tuple(low + here for low, here in zip(slab.lower, at, strict=True))
            assert place not in seen, "copied twice"
            seen[place] = byte // itemsize
            taken.add(byte)
        ordered = sorted(taken)
        assert ordered[0] == slab.start
        assert ordered[-1] + itemsize == slab.stop
        assert all(after - before - itemsize < BLOCK for before, after in itertools.pairwise(ordered))
    assert seen == wanted


@quick
@given(boxes())
def test_is_contiguous_means_one_run(box: Box) -> None:
    numbers = sorted(elements(box).values())
    if numbers:
        one_run = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        in_order = list(elements(box).values()) == numbers
        assert in_order
        assert is_contiguous(box.shape, box.lengths) <= one_run
        if one_run and all(extent > 1 for extent in box.shape):
            assert is_contiguous(box.shape, box.lengths)


@dataclass(frozen=True)
class Ask:
    file: int
    start: int
    stop: int
    into: bool


@st.composite
def asks(draw: st.DrawFn) -> tuple[list[int], list[Ask]]:
    sizes = draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
    found = []
    for _ in range(draw(st.integers(0, 8))):
        file = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(0, sizes[file] - 1))
        stop = draw(st.integers(start + 1, sizes[file]))
        found.append(Ask(file, start, stop, draw(st.booleans())))
    return sizes, found


def requests(found: list[Ask], got: dict[int, bytes]) -> tuple[list[Wanted], list[bytearray]]:
    buffers = [bytearray(ask.stop - ask.start) for ask in found]
    wanted = []
    for number, (ask, buffer) in enumerate(zip(found, buffers, strict=True)):
        if ask.into:
            wanted.append(Wanted(ask.file, ask.start, ask.stop, into=memoryview(buffer)))
        else:
            wanted.append(Wanted(ask.file, ask.start, ask.stop, deliver=_keep(got, number)))
    return wanted, buffers


def _keep(got: dict[int, bytes], number: int) -> Any:
    def deliver(view: memoryview) -> None:
        assert number not in got, "delivered twice"
        got[number] = bytes(view)

    return deliver


@quick
@given(asks())
def test_plan_reads_whole_needed_blocks_in_bounded_windows(asked: tuple[list[int], list[Ask]]) -> None:
    sizes, found = asked
    wanted, _ = requests(found, {})
    needed = {(ask.file, block) for ask in found for block in range(ask.start // BLOCK, -(-ask.stop // BLOCK))}
    read = []
    for job in plan_reads(wanted, sizes):
        assert job.start % BLOCK == 0
        assert job.stop % BLOCK == 0 or job.stop == sizes[job.file]
        assert job.start < job.stop <= sizes[job.file]
        largest = max((-(-part.stop // BLOCK) - part.start // BLOCK) * BLOCK for part in job.parts) if job.parts else 0
        assert job.stop - job.start <= max(WINDOW, largest)
        read += [(job.file, block) for block in range(job.start // BLOCK, -(-job.stop // BLOCK))]
    assert set(read) == needed
    alone = sorted((ask.file, ask.start, ask.stop) for ask in found)
    if all(a[0] != b[0] or a[2] // BLOCK < b[1] // BLOCK for a, b in itertools.pairwise(alone)):
        assert len(read) == len(needed), "a block that one request needs is read once"


def committed(store: MemoryStore, files: list[bytes]) -> tuple[Decision, Index]:
    records = []
    for number, data in enumerate(files):
        store.put(f"data/s-1/{number}", BytesSource(data))
        blocks = b"".join(struct.pack("<I", crc32c.crc32c(data[at : at + BLOCK])) for at in range(0, len(data), BLOCK))
        records.append(FileRecord(f"data/s-1/{number}", len(data), blocks))
    decision = Decision(
        kind="commit", checkpoint="s-1", slot=0, step=1, txn="0" * 32, writer="w", decided_at="now", manifest=None
    )
    return decision, Index(files=tuple(records), items=())


@quick
@given(asks(), st.integers(1, 3))
def test_what_is_read_is_what_was_written(asked: tuple[list[int], list[Ask]], workers: int) -> None:
    sizes, found = asked
    files = [pattern(size, number) for number, size in enumerate(sizes)]
    store = MemoryStore()
    decision, index = committed(store, files)
    got: dict[int, bytes] = {}
    wanted, buffers = requests(found, got)
    BlockReader(store, decision, index, workers=workers).read_all(wanted)
    for number, (ask, buffer) in enumerate(zip(found, buffers, strict=True)):
        assert (bytes(buffer) if ask.into else got[number]) == files[ask.file][ask.start : ask.stop]


@quick
@given(asks(), st.data())
def test_damage_is_refused_exactly_where_it_is_read(asked: tuple[list[int], list[Ask]], data: st.DataObject) -> None:
    sizes, found = asked
    files = [pattern(size, number) for number, size in enumerate(sizes)]
    store = MemoryStore()
    decision, index = committed(store, files)
    file = data.draw(st.integers(0, len(sizes) - 1))
    bit = data.draw(st.integers(0, 8 * sizes[file] - 1))
    damaged = bytearray(files[file])
    damaged[bit // 8] ^= 1 << bit % 8
    store.put(f"data/s-1/{file}", BytesSource(bytes(damaged)))
    block = bit // 8 // BLOCK
    hit = any(ask.file == file and ask.start // BLOCK <= block < -(-ask.stop // BLOCK) for ask in found)
    wanted, _ = requests(found, {})
    reader = BlockReader(store, decision, index, workers=2)
    if not hit:
        reader.read_all(wanted)
        return
    with pytest.raises(IntegrityError) as caught:
        reader.read_all(wanted)
    assert caught.value.key == f"data/s-1/{file}"
    assert f"block {block} " in str(caught.value)


@st.composite
def extents(draw: st.DrawFn) -> list[Extent]:
    names = draw(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=5, unique=True)
    )
    found = []
    for number in range(draw(st.integers(0, 12))):
        name = draw(st.sampled_from(names))
        if draw(st.booleans()):
            found.append(payload_extent(name, BytesSource(pattern(draw(st.integers(0, 40)), number))))
            continue
        dtype = draw(st.sampled_from([*SAFETENSORS_DTYPES, "complex128", "float8_e8m0fnu", "qint8"]))
        itemsize = ITEMSIZES.get(dtype, 1)
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        source = BytesSource(pattern(math.prod(shape) * itemsize, number))
        offsets = (0,) * len(shape)
        found.append(tensor_extent(name, source, dtype=dtype, itemsize=itemsize, shape=shape, offsets=offsets))
    return found


ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "complex64": 8,
    "complex128": 16,
}


@quick
@given(extents(), st.integers(1, 100), st.data())
def test_pack_makes_safetensors_files(found: list[Extent], target: int, data: st.DataObject) -> None:
    files = pack(found, target)
    packed = [extent for file in files for extent in file.extents]
    assert sorted(map(id, packed)) == sorted(map(id, found))
    for file in files:
        names = [extent.name for extent in file.extents]
        assert len(set(names)) == len(names)
        sizes = [extent.source.size for extent in file.extents]
        assert sum(sizes) <= target or sum(size > 0 for size in sizes) == 1
        whole = bytes(file.read(0, file.size))
        assert len(whole) == file.size
        length = struct.unpack_from("<Q", whole)[0]
        on_blocks = [
            start
            for extent, start in zip(file.extents, file.starts, strict=True)
            if extent.source.size and extent.source.size % BLOCK == 0
        ]
        if sum(extent.source.size for extent in file.extents if extent.source.size % BLOCK == 0) >= 3 * BLOCK:
            assert all(start % BLOCK == 0 for start in on_blocks)
        else:
            assert (8 + length) % HEADER_ALIGN_BYTES == 0
        header = json.loads(whole[8 : 8 + length])
        sharding = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        assert set(sharding) == set(names)
        # The library itself: it checks lengths, gaps and overlaps.
        parsed = {name: info for name, info in safetensors.deserialize(whole) if name != "__metadata__"}
        for extent, start in zip(file.extents, file.starts, strict=True):
            held = bytes(extent.source.read(0, extent.source.size)) if extent.source.size else b""
            assert whole[start : start + extent.source.size] == held
            assert start % extent.align_bytes == 0 or not extent.source.size
            if extent.name != "__metadata__":
                assert bytes(parsed[extent.name]["data"]) == held
                assert tuple(parsed[extent.name]["shape"]) == extent.shape
            assert len(sharding[extent.name]["saved_offsets"]) == len(extent.shape)
        low = data.draw(st.integers(0, file.size))
        high = data.draw(st.integers(low, file.size))
        assert bytes(file.read(low, high)) == whole[low:high]
        assert b"".join(file.pieces(low, high)) == whole[low:high]
        near = data.draw(st.sampled_from(file.starts))
        low, high = max(0, near - 3), min(file.size, near + 5)
        assert bytes(file.read(low, high)) == whole[low:high]
        assert b"".join(file.pieces(low, high)) == whole[low:high]


def test_headers_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers refuse a header above 100 MB; many tiny tensors or long names must not add up to one."""
    monkeypatch.setattr(layout, "HEADER_BYTES", 10_000)
    names = ["n" * 1000 + str(number) for number in range(20)] + [f"short{number}" for number in range(100)]
    files = pack(payload_extent(name, BytesSource(b"x")) for name in names)
    assert len(files) > 4
    for file in files:
        assert file.starts[0] <= 3 * 4096
    assert sum(len(file.extents) for file in files) == 120
