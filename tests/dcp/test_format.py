"""The shard format, read by everybody but us; damage found wherever it is read; and only needed blocks read."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import FaultyStore
from states import bits, of_dtype, same
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader
from workers import Pool, Rank

from txstore.catalog import newest
from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import CheckpointNotFound, CheckpointRetired, FormatError, IntegrityError, TxStoreError
from txstore.keys import retired_key
from txstore.registry import open_store
from txstore.store import BytesSource

MIB = 1 << 20
PLAIN = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "uint16"]
PLAIN += ["uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex64"]


def tensors() -> dict[str, torch.Tensor]:
    found = {f"of.{name}": of_dtype(getattr(torch, name), (5, 6)) for name in PLAIN}
    found["scalar"] = torch.tensor(2.5)
    found["empty"] = torch.empty(0, 3)
    found["transposed"] = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000).t()
    return found


def save(state: dict[str, Any], root: str, name: str = "step-1", **options: Any) -> None:
    dcp.save(state, checkpoint_id=name, storage_writer=StorageWriter(root, **options), no_dist=True)


def attempt(root: str, name: str = "step-1") -> Path:
    """The folder of the only attempt of a checkpoint."""
    (found,) = Path(root.removeprefix("file://"), "data", name).iterdir()
    return found


def shards(root: str, name: str = "step-1") -> list[Path]:
    return sorted(attempt(root, name).glob("*.safetensors"))


def crc32c_slow(data: bytes) -> int:
    """RFC 3720's CRC32C, bit by bit over a table made here."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1000])
def test_safetensors_reads_the_shards(shard_bytes: int, root: str) -> None:
    import safetensors
    from safetensors.torch import load_file

    save(tensors(), root, shard_bytes=shard_bytes)
    found: dict[str, torch.Tensor] = {}
    for path in shards(root):
        loaded = load_file(path)
        assert not found.keys() & loaded.keys()
        found |= loaded
        with safetensors.safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in loaded:
                assert bits(file.get_tensor(name)) == bits(loaded[name])
    same(dict(sorted(found.items())), {name: item.contiguous() for name, item in sorted(tensors().items())})


def test_objects_and_strange_dtypes_are_bytes_in_the_shards(root: str) -> None:
    from safetensors.torch import load_file

    values = {"c": of_dtype(torch.complex128, (2, 3)), "e": of_dtype(torch.float8_e8m0fnu, (4,))}
    save({**values, "o": {"x": 1}}, root)
    (path,) = shards(root)
    loaded = load_file(path)
    assert loaded["c"].dtype == torch.uint8
    assert loaded["c"].shape == (2, 3, 16)
    assert bits(loaded["c"]) == bits(values["c"])
    assert bits(loaded["e"]) == bits(values["e"])
    assert torch.load(_bytes_io(loaded["o.x"]), weights_only=True) == 1


def _bytes_io(tensor: torch.Tensor) -> Any:
    import io

    return io.BytesIO(tensor.numpy().tobytes())


def sharded_save(me: Rank, root: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(70, dtype=torch.float32).reshape(10, 7)
    state = {
        "rows": distribute_tensor(whole, me.mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole, me.mesh, [Shard(1)], src_data_rank=None),
        "plain": whole.to(torch.bfloat16),
    }
    writer = StorageWriter(root, shard_bytes=100)
    dcp.save(state, checkpoint_id="step-1", storage_writer=writer, process_group=me.group)


def hugging_face_load(me: Rank, folder: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(70, dtype=torch.float32).reshape(10, 7)
    state = {
        "rows": distribute_tensor(torch.zeros(10, 7), me.mesh, [Shard(1)], src_data_rank=None),
        "columns": distribute_tensor(torch.zeros(10, 7), me.mesh, [Shard(0)], src_data_rank=None),
        "plain": torch.zeros(10, 7, dtype=torch.bfloat16),
    }
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder), process_group=me.group)
    assert torch.equal(state["rows"].full_tensor(), whole)
    assert torch.equal(state["columns"].full_tensor(), whole)
    assert torch.equal(state["plain"], whole.to(torch.bfloat16))


def test_stock_hugging_face_reader_reshards_an_attempt(pool: Pool, root: str) -> None:
    pool.run(3, sharded_save, root)
    pool.run(2, hugging_face_load, str(attempt(root)))
    pool.run(1, hugging_face_load, str(attempt(root)))


def tiles_for_others(me: Rank, root: str) -> None:
    """Several chunks of one tensor on a rank: each file holds a name once, so others find all of them."""
    from test_distributed import Tiles, value

    corners = [(row, column) for row in (0, 2, 4) for column in (0, 2, 4)]
    state = {"t": Tiles.make(value((6, 6)), corners)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=StorageWriter(root), process_group=me.group)
    target = {"t": torch.zeros(6, 6)}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(attempt(root))), process_group=me.group)
    assert torch.equal(target["t"], value((6, 6)))


def test_stock_reader_finds_several_chunks_of_a_rank(pool: Pool, root: str) -> None:
    pool.run(1, tiles_for_others, root)


def test_headers_are_padded_and_aligned(root: str) -> None:
    save(tensors(), root, shard_bytes=1000)
    for path in shards(root):
        data = path.read_bytes()
        length = struct.unpack_from("<Q", data)[0]
        assert (8 + length) % 4096 == 0
        header = json.loads(data[8 : 8 + length])
        sharding = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        assert sharding.keys() == header.keys()
        end = 0
        for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
            assert entry["data_offsets"][0] == end
            end = entry["data_offsets"][1]
        assert 8 + length + end == len(data)


def test_block_checksums_by_a_reference_from_scratch(root: str) -> None:
    save({"t": torch.arange(300_000, dtype=torch.float32), "s": torch.tensor(1.0)}, root)
    folder = attempt(root)
    index = msgspec.msgpack.decode((folder / "index.msgpack").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert index["block_bytes"] == MIB
    (record,) = index["files"]
    key, size, blocks = record
    data = (Path(root.removeprefix("file://")) / key).read_bytes()
    assert size == len(data) > MIB
    known = [crc32c_slow(data[at : at + MIB]) for at in range(0, size, MIB)]
    assert list(struct.unpack(f"<{len(known)}I", blocks)) == known
    assert manifest["shards"][0]["crc32c"] == crc32c_slow(data)


# --- what a read costs -------------------------------------------------------------------------------------------


def counted_load(target: dict[str, Any], root: str) -> FaultyStore:
    """Load and return the store, which then knows what was read of the shards."""
    store = FaultyStore(root)
    dcp.load(target, storage_reader=StorageReader(store, strict=False), no_dist=True)
    store.reads = [read for read in store.reads if read[0].endswith(".safetensors")]
    return store


def row_slice(rows: slice, whole: tuple[int, int], dtype: torch.dtype) -> Any:
    """A ShardedTensor-like target that asks for some rows of a matrix only."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    class Part(torch.Tensor):
        def size(self, dim: int | None = None) -> Any:
            return torch.Size(whole) if dim is None else whole[dim]

        def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
            sizes = torch.Size((rows.stop - rows.start, whole[1]))
            return [ChunkStorageMetadata(torch.Size((rows.start, 0)), sizes)]

        def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    return torch.zeros((rows.stop - rows.start, whole[1]), dtype=dtype).as_subclass(Part)


def test_a_slice_reads_its_blocks_only(root: str) -> None:
    whole = torch.arange(16 * MIB // 4, dtype=torch.int32).reshape(1024, 4096)
    save({"w": whole, "other": torch.ones(4 * MIB)}, root)
    target = row_slice(slice(300, 310), (1024, 4096), torch.int32)
    store = counted_load({"w": target}, root)
    assert torch.equal(target.as_subclass(torch.Tensor), whole[300:310])
    assert 160 << 10 <= store.bytes_read <= 2 * MIB
    assert all(start % MIB == 0 for _, start, _ in store.reads)


def test_columns_share_their_blocks(root: str) -> None:
    """Columns of narrow rows: nearly every byte lies in a needed block, and each block is read once."""
    whole = torch.arange(4 * MIB, dtype=torch.int32).reshape(-1, 64)
    save({"w": whole}, root)
    size = shards(root)[0].stat().st_size
    target = torch.zeros(len(whole), 128, dtype=torch.int32)[:, 3:67]
    store = counted_load({"w": target}, root)
    assert torch.equal(target, whole)
    assert store.bytes_read <= 1.2 * size


def test_small_tensors_share_reads(root: str) -> None:
    state = {f"t{number}": torch.full((100,), float(number)) for number in range(500)}
    save(state, root)
    target = {name: torch.zeros(100) for name in state}
    store = counted_load(target, root)
    same(target, state)
    assert len(store.reads) == 1
    assert store.bytes_read == shards(root)[0].stat().st_size


def test_large_tensors_are_read_straight_into_place(root: str) -> None:
    """Each byte once, in large reads; only the blocks at the ends go through scratch."""
    whole = torch.arange(40 * MIB // 4, dtype=torch.int32)
    save({"w": whole}, root)
    target = {"w": torch.zeros_like(whole)}
    store = counted_load(target, root)
    assert torch.equal(target["w"], whole)
    assert store.bytes_read == shards(root)[0].stat().st_size
    assert len(store.reads) <= 1 + 40 // 8 + 1


def test_objects_cost_no_second_read_of_the_tensors(root: str) -> None:
    state = {"w": torch.arange(4 * MIB, dtype=torch.int32), "o": {"deep": [1, "x"]}, "n": 3}
    save(state, root)
    target = {"w": torch.zeros(4 * MIB, dtype=torch.int32), "o": {"deep": None}, "n": None}
    store = counted_load(target, root)
    same(target, state)
    assert store.bytes_read <= shards(root)[0].stat().st_size + 2 * MIB


# --- damage ------------------------------------------------------------------------------------------------------


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def damaged_state() -> dict[str, Any]:
    return {
        "a": torch.arange(700_000, dtype=torch.float32),
        "b": torch.arange(700_000, dtype=torch.int32),
        "small": torch.arange(10),
        "o": {"x": [1, 2]},
    }


def blank() -> dict[str, Any]:
    return {
        "a": torch.zeros(700_000),
        "b": torch.zeros(700_000, dtype=torch.int32),
        "small": torch.zeros(10, dtype=torch.int64),
        "o": {"x": None},
    }


def refusal(root: str, **options: Any) -> TxStoreError:
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(), storage_reader=StorageReader(root, **options), no_dist=True)
    (error,) = (wrapped[0] for wrapped in caught.value.failures.values())
    assert isinstance(error, TxStoreError), error
    return error


@pytest.fixture
def stored(root: str) -> str:
    save(damaged_state(), root, shard_bytes=3_000_000)
    assert len(shards(root)) >= 2
    return root


def _data_start(path: Path) -> int:
    return 8 + struct.unpack_from("<Q", path.read_bytes())[0]


SHARD_DAMAGE: dict[str, Callable[[Path], None]] = {
    "first-data-byte": lambda path: flip(path, _data_start(path)),
    "first-block": lambda path: flip(path, 500_000, 7),
    "second-block": lambda path: flip(path, MIB + 17, 3),
    "last-byte": lambda path: flip(path, path.stat().st_size - 1, 7),
    "header": lambda path: flip(path, 20),
    "header-length": lambda path: flip(path, 0),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "truncated-to-blocks": lambda path: path.write_bytes(path.read_bytes()[:MIB]),
    "emptied": lambda path: path.write_bytes(b""),
    "zeroed-tail": lambda path: path.write_bytes(path.read_bytes()[:-4096] + bytes(4096)),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", SHARD_DAMAGE)
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_shard_is_named(damage: str, number: int, stored: str) -> None:
    path = shards(stored)[number]
    SHARD_DAMAGE[damage](path)
    error = refusal(stored)
    assert isinstance(error, IntegrityError)
    assert error.key.endswith(path.name)
    assert error.rank == 0


def test_a_longer_shard_is_not_believed_beyond_its_end(stored: str) -> None:
    path = shards(stored)[0]
    path.write_bytes(path.read_bytes() + b"more")
    target = blank()
    dcp.load(target, storage_reader=StorageReader(stored), no_dist=True)
    same(target, damaged_state())


def test_swapped_shards_of_equal_size(root: str) -> None:
    save({"a": torch.zeros(1000), "b": torch.ones(1000)}, root, shard_bytes=1000)
    one, two = shards(root)
    assert one.stat().st_size == two.stat().st_size
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": torch.zeros(1000), "b": torch.zeros(1000)}, storage_reader=StorageReader(root), no_dist=True)
    assert isinstance(caught.value.failures[0][0], IntegrityError)


def test_damage_that_is_not_read_does_not_matter(stored: str) -> None:
    """A load of one tensor is not refused for another one's damage: only what is read is verified."""
    paths = shards(stored)
    with_small = next(path for path in paths if b'"small"' in path.read_bytes()[:4096])
    for path in paths:
        if path != with_small:
            flip(path, MIB + 5)
    target = {"small": torch.zeros(10, dtype=torch.int64)}
    dcp.load(target, storage_reader=StorageReader(stored, strict=False), no_dist=True)
    assert torch.equal(target["small"], torch.arange(10))


@pytest.mark.parametrize("name", ["index.msgpack", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove", "foreign"])
def test_damaged_documents(name: str, damage: str, stored: str) -> None:
    path = attempt(stored) / name
    data = path.read_bytes()
    if damage == "flip":
        flip(path, len(data) // 2, 2)
    elif damage == "truncate":
        path.write_bytes(data[:-1])
    elif damage == "extend":
        path.write_bytes(data + b" ")
    elif damage == "remove":
        path.unlink()
    else:
        save(damaged_state(), stored, "step-0")
        shutil.copy(attempt(stored, "step-0") / name, path)
    error = refusal(stored)
    assert isinstance(error, IntegrityError)
    assert error.key.endswith(name)


def test_every_bit_of_a_decision_matters(root: str) -> None:
    """Each flipped bit is refused, or leaves the meaning of the record alone (spelling of free text)."""
    save({"a": torch.zeros(3)}, root)
    path = Path(root.removeprefix("file://")) / "commits/step-1.0.json"
    known = path.read_bytes()
    store = open_store(root)
    meaning = newest(store)
    for bit in range(0, 8 * len(known), 3):
        flip(path, bit // 8, bit % 8)
        try:
            found = newest(store)
        except TxStoreError:
            pass
        else:
            assert found.manifest is not None
            same_content = (found.kind, found.checkpoint, found.slot, found.step)
            assert same_content == (meaning.kind, meaning.checkpoint, meaning.slot, meaning.step)
            refused = None
            try:
                dcp.load({"a": torch.ones(3)}, storage_reader=StorageReader(root), no_dist=True)
            except CheckpointException as error:
                refused = error.failures[0][0]
            assert refused is None or isinstance(refused, (IntegrityError, FormatError))
        path.write_bytes(known)
    assert newest(store) == meaning


def test_retired_meanwhile(stored: str) -> None:
    store = open_store(stored)
    reader = StorageReader(stored)
    reader.read_metadata()
    store.put(retired_key("step-1", 0), BytesSource(b"{}"))
    shutil.rmtree(attempt(stored))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(), storage_reader=StorageReader(stored), checkpoint_id="step-1", no_dist=True)
    assert isinstance(caught.value.failures[0][0], CheckpointRetired)
    assert isinstance(refusal(stored), CheckpointNotFound)


def test_retired_between_index_and_blocks(root: str) -> None:
    save({"a": torch.ones(10)}, root)

    class Retiring(dcp.DefaultLoadPlanner):
        """The tombstone and the removal come after the index was read and before the first block is."""

        def finish_plan(self, new_plan: Any) -> Any:
            open_store(root).put(retired_key("step-1", 0), BytesSource(b"{}"))
            shutil.rmtree(attempt(root))
            return super().finish_plan(new_plan)

    with pytest.raises(CheckpointException) as caught:
        dcp.load({"a": torch.zeros(10)}, storage_reader=StorageReader(root), planner=Retiring(), no_dist=True)
    assert isinstance(caught.value.failures[0][0], CheckpointRetired)


def test_an_empty_store_says_so(root: str) -> None:
    assert isinstance(refusal(root), CheckpointNotFound)


@pytest.mark.parametrize("view", ["whole", "transposed", "with holes"])
def test_every_bit_of_a_bool_is_kept(view: str, root: str) -> None:
    """A bool may be any byte but zero: torch's own copies, which views with holes need, make 1 of it."""
    raw = torch.tensor([[0, 2, 255, 1], [1, 7, 0, 9]], dtype=torch.uint8)
    seen = {"whole": raw, "transposed": raw.t(), "with holes": raw[:, ::2]}[view]
    dcp.save({"t": seen.view(torch.bool)}, storage_writer=StorageWriter(root), checkpoint_id="step-1", no_dist=True)
    target = {"t": torch.zeros(seen.shape, dtype=torch.bool)}
    dcp.load(target, storage_reader=StorageReader(root), checkpoint_id="step-1", no_dist=True)
    assert torch.equal(target["t"].view(torch.uint8), seen)
