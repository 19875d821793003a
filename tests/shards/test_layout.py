"""Where tensors lie in a file, as far as a reader pays for it: no block and no request for a neighbour's sake."""

from __future__ import annotations

import pytest

from txstore.checksum import BLOCK_BYTES
from txstore.shards import layout
from txstore.shards.layout import HEADER_ALIGN_BYTES, Extent, pack, tensor_extent
from txstore.shards.reading import Wanted, plan_reads
from txstore.store import BytesSource


class Zeros(BytesSource):
    """A source of which only the size is asked."""

    def __init__(self, size: int) -> None:
        super().__init__(b"")
        self.size = size


def extent(name: str, count: int, dtype: str = "float32") -> Extent:
    width = {"float32": 4, "bfloat16": 2}[dtype]
    return tensor_extent(name, Zeros(count * width), dtype=dtype, itemsize=width, shape=(count,), offsets=(0,))


def blocks_of(file: layout.ShardSource, names: set[str]) -> int:
    """Bytes of the reads that bring these extents."""
    wanted = [
        Wanted(0, start, start + one.source.size, memoryview(bytearray(one.source.size)))
        for one, start in zip(file.extents, file.starts, strict=True)
        if one.name in names
    ]
    return sum(job.stop - job.start for job in plan_reads(wanted, [file.size]))


def test_whole_blocks_are_read_in_one_request_each_with_small_tensors_between_them():
    state = [extent(f"{number}.{kind}", 1 << 20 if kind == "weight" else 77) for number in range(20) for kind in KINDS]
    (file,) = pack(state)
    for one, start in zip(file.extents, file.starts, strict=True):
        if one.name.endswith("weight"):
            stop = start + one.source.size
            assert len(plan_reads([Wanted(0, start, stop, memoryview(bytearray(4 << 20)))], [file.size])) == 1
    assert blocks_of(file, {one.name for one in state}) == file.size - BLOCK_BYTES, "the header is not read"


KINDS = ("norm", "weight", "step")


def test_a_small_file_is_not_padded_to_a_block():
    (file,) = pack([extent("w", 1 << 18), extent("n", 3)])
    assert file.starts[0] <= 2 * HEADER_ALIGN_BYTES


@pytest.mark.parametrize("count", [1, 256])
def test_what_every_rank_needs_of_each_tensor_lies_together(count):
    """An optimizer's step counts: one between each two tensors made every rank read every block."""
    state = [extent(f"{number}.{kind}", count if kind == "step" else 70_000) for number in range(60) for kind in KINDS]
    (file,) = pack(state)
    assert blocks_of(file, {one.name for one in state if one.name.endswith("step")}) <= 2 * BLOCK_BYTES


def test_the_model_is_one_run_beside_its_optimizer():
    """Parameters of two bytes, moments of four: a load without the optimizer reads at most a block too many."""
    state = [extent(f"model.{number}", 200_000, "bfloat16") for number in range(40)]
    state += [extent(f"optim.{number}", 200_000) for number in range(40)]
    (file,) = pack(state)
    names = {one.name for one in state if one.name.startswith("model")}
    needed = sum(one.source.size for one in state if one.name in names)
    assert blocks_of(file, names) < needed + BLOCK_BYTES
