"""Saves on N ranks, loads on M: values against what a plain computation says, and stock DCP where it can be asked."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import bits
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from workers import Pool, Rank

from txstore.dcp import StorageReader, StorageWriter, StrictLoadPlanner

NAME = "step-1"


def value(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int64) * 31 % 8191).to(dtype).reshape(shape)


SHARDED = {
    "rows": ((8, 6), 0),
    "columns": ((5, 12), 1),
    "uneven": ((6, 2), 0),
    "fewer-than-ranks": ((2, 3), 0),
    "one-row": ((1, 7), 0),
    "one": ((1,), 0),
    "prime": ((4099,), 0),
    "4096": ((4096, 3), 0),
    "columns-uneven": ((3, 7), 1),
    "empty": ((0, 4), 0),
    "large": ((1027, 1031), 1),
    "middle": ((3, 10, 5), 1),
}


def build(me: Rank, fill: bool) -> dict[str, Any]:
    """DTensors of every kind, replicated tensors, and objects. Blank if not `fill`."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return value(shape, dtype) if fill else torch.full(shape, 99).to(dtype)

    state: dict[str, Any] = {
        name: distribute_tensor(whole(shape), me.mesh, [Shard(dim)], src_data_rank=None)
        for name, (shape, dim) in SHARDED.items()
    }
    state["replicated"] = distribute_tensor(whole((4, 4), torch.bfloat16), me.mesh, [Replicate()], src_data_rank=None)
    state["half"] = distribute_tensor(whole((9, 4), torch.float16), me.mesh, [Shard(0)], src_data_rank=None)
    state["plain"] = whole((3, 3), torch.int16)
    state["scalar"] = whole((), torch.float64)
    state["object"] = {"step": 7, "names": ["a", None]} if fill else {"step": 0, "names": None}
    state[f"rank{me.rank}" if fill else "rank0"] = whole((2,)) + me.rank * fill
    return state


def gathered(me: Rank, state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    return {name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in state.items()}


def save_all(me: Rank, root: str, shard_bytes: int) -> list[str]:
    writer = StorageWriter(root, shard_bytes=shard_bytes)
    metadata = dcp.save(build(me, True), checkpoint_id=NAME, storage_writer=writer, process_group=me.group)
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == f"{root}/{NAME}"
    return sorted(metadata.state_dict_metadata)


def load_all(me: Rank, root: str) -> None:
    state = build(me, False)
    dcp.load(state, storage_reader=StorageReader(root, strict=False), process_group=me.group)
    for name, item in gathered(me, state).items():
        if name == "object":
            assert item == {"step": 7, "names": ["a", None]}
        else:
            known = SHARDED.get(name, (tuple(item.shape),))[0]
            assert bits(item) == bits(value(known, item.dtype)), name


@pytest.mark.parametrize("savers", [1, 2, 3, 4])
def test_saved_on_n_loaded_on_m(savers: int, pool: Pool, root: str) -> None:
    names = pool.run(savers, save_all, root, 64 << 10)
    assert all(found == names[0] for found in names)
    assert {f"rank{rank}" for rank in range(savers)} <= set(names[0])
    for loaders in (1, 2, 3, 4):
        pool.run(loaders, load_all, root)


def grid_save(me: Rank, root: str, stock: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, placements in GRID(Shard, Replicate).items():
        state = {name: distribute_tensor(value((7, 9)), me.grid, placements, src_data_rank=None)}
        dcp.save(state, checkpoint_id=f"{name}-1", storage_writer=StorageWriter(root))
        dcp.save(state, checkpoint_id=f"{stock}/{name}")


def GRID(shard: Any, replicate: Any) -> dict[str, Any]:
    return {
        "rows-columns": [shard(0), shard(1)],
        "rows-replicated": [shard(0), replicate()],
        "replicated-columns": [replicate(), shard(1)],
        "both-rows": [shard(0), shard(0)],
        "all": [replicate(), replicate()],
    }


def grid_load(me: Rank, root: str, stock: str) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name in GRID(Shard, Replicate):
        for placements in GRID(Shard, Replicate).values():
            ours, theirs = (
                {name: distribute_tensor(torch.zeros(7, 9), me.grid, placements, src_data_rank=None)} for _ in range(2)
            )
            dcp.load(ours, checkpoint_id=f"{name}-1", storage_reader=StorageReader(root))
            dcp.load(theirs, checkpoint_id=f"{stock}/{name}")
            assert bits(ours[name].to_local()) == bits(theirs[name].to_local())
            assert bits(ours[name].full_tensor()) == bits(value((7, 9)))


def test_two_dimensional_meshes(pool: Pool, root: str, tmp_path: Path) -> None:
    pool.run(4, grid_save, root, str(tmp_path / "stock"))
    pool.run(4, grid_load, root, str(tmp_path / "stock"))


def model_and_optimizer(me: Rank, steps: int, seed: int) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))
    for layer in model:
        fully_shard(layer, mesh=me.mesh)
    fully_shard(model, mesh=me.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 5), 1.0 + step)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def fsdp_save(me: Rank, root: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = model_and_optimizer(me, 3, 0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(state, checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)
    return whole_state(model, optimizer)


def whole_state(model: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    tensors = {f"model.{name}": bits(item) for name, item in model_state.items()}
    for name, slots in optimizer_state["state"].items():
        tensors |= {f"{name}.{slot}": bits(item) for slot, item in slots.items()}
    return tensors


def fsdp_load(me: Rank, root: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = model_and_optimizer(me, 1, 5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=StorageReader(root), process_group=me.group)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole_state(model, optimizer)


@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (4, 1), (3, 2)])
def test_fsdp2_with_adamw(savers: int, loaders: int, pool: Pool, root: str) -> None:
    saved = pool.run(savers, fsdp_save, root)[0]
    loaded = pool.run(loaders, fsdp_load, root)[0]
    assert saved.keys() == loaded.keys()
    assert len(saved) > 15
    assert saved == loaded


def sharded_tensor(me: Rank, fill: bool) -> Any:
    """A ShardedTensor of 4 shards a rank: the chunks of a rank are not neighbours."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    whole = value((4 * me.world, 6))
    shards = [
        Shard(
            whole[row : row + 1].clone() if fill else torch.zeros(1, 6),
            ShardMetadata(shard_offsets=[row, 0], shard_sizes=[1, 6], placement=f"rank:{me.rank}/cpu"),
        )
        for row in range(me.rank, 4 * me.world, me.world)
    ]
    return init_from_local_shards(shards, 4 * me.world, 6, process_group=me.group)


def sharded_round_trip(me: Rank, root: str) -> None:
    dcp.save(
        {"emb": sharded_tensor(me, True)},
        checkpoint_id=NAME,
        storage_writer=StorageWriter(root),
        process_group=me.group,
    )
    target = sharded_tensor(me, False)
    dcp.load({"emb": target}, storage_reader=StorageReader(root), process_group=me.group)
    for shard in target.local_shards():
        row = shard.metadata.shard_offsets[0]
        assert torch.equal(shard.tensor, value((4 * me.world, 6))[row : row + 1])


def dense_load(me: Rank, root: str, rows: int) -> None:
    target = {"emb": torch.zeros(rows, 6)}
    dcp.load(target, storage_reader=StorageReader(root), process_group=me.group)
    assert torch.equal(target["emb"], value((rows, 6)))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sharded_tensors_with_several_shards_a_rank(world: int, pool: Pool, root: str) -> None:
    pool.run(world, sharded_round_trip, root)
    pool.run(2, dense_load, root, 4 * world)


class Tiles(torch.Tensor):
    """A tensor that says itself which tiles of it this rank holds (DCP's checkpointable protocol)."""

    tiles: list[tuple[int, int]]

    @staticmethod
    def make(whole: torch.Tensor, tiles: list[tuple[int, int]]) -> Tiles:
        made = whole.as_subclass(Tiles)
        made.tiles = tiles
        return made

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(tile), torch.Size((2, 2))) for tile in self.tiles]

    def __create_write_items__(self, fqn: str, item: Any) -> list[WriteItem]:
        plain = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, plain, self.shape),
            )
            for chunk in self.chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        row, column = index.offset or (0, 0)
        return self.as_subclass(torch.Tensor)[row : row + 2, column : column + 2]


def tiles_round_trip(me: Rank, root: str) -> None:
    # A chessboard: each rank holds every n-th tile, none of them contiguous in memory.
    mine = [(row, column) for row in (0, 2, 4) for column in (0, 2, 4) if (row + column) // 2 % me.world == me.rank]
    whole = value((6, 6))
    state = {"t": Tiles.make(whole, mine)}
    dcp.save(state, checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)
    blank = torch.zeros(6, 6)
    dcp.load({"t": Tiles.make(blank, mine)}, storage_reader=StorageReader(root), process_group=me.group)
    known = torch.zeros(6, 6)
    for row, column in mine:
        known[row : row + 2, column : column + 2] = whole[row : row + 2, column : column + 2]
    assert torch.equal(blank, known)
    plain = {"t": torch.zeros(6, 6)}
    dcp.load(plain, storage_reader=StorageReader(root), process_group=me.group)
    assert torch.equal(plain["t"], whole)


@pytest.mark.parametrize("world", [1, 2])
def test_several_chunks_of_one_tensor_on_a_rank(world: int, pool: Pool, root: str) -> None:
    pool.run(world, tiles_round_trip, root)


def in_tail_group(me: Rank, root: str) -> None:
    if me.rank < 2:
        return
    import torch.distributed as dist

    state = {"shared": torch.arange(4.0), f"own{me.rank}": torch.tensor([me.rank])}
    dcp.save(state, checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.tail)
    target = {"shared": torch.zeros(4), f"own{me.rank}": torch.tensor([0])}
    dcp.load(target, storage_reader=StorageReader(root), process_group=me.tail)
    assert torch.equal(target["shared"], torch.arange(4.0))
    assert int(target[f"own{me.rank}"]) == me.rank
    assert dist.get_rank(me.tail) == me.rank - 2


def test_a_sub_group_whose_coordinator_is_not_rank_0(pool: Pool, root: str) -> None:
    pool.run(4, in_tail_group, root)


def alone(me: Rank, root: str) -> None:
    state = {"r": torch.tensor([me.rank])}
    dcp.save(state, checkpoint_id=f"rank{me.rank}-1", storage_writer=StorageWriter(root), no_dist=True)
    target = {"r": torch.tensor([-1])}
    dcp.load(target, checkpoint_id=f"rank{me.rank}-1", storage_reader=StorageReader(root), no_dist=True)
    assert int(target["r"]) == me.rank


def test_no_dist_inside_a_group(pool: Pool, root: str) -> None:
    pool.run(3, alone, root)


def test_no_group_at_all_then_a_group(pool: Pool, root: str) -> None:
    dcp.save({"emb": value((8, 6))}, checkpoint_id=NAME, storage_writer=StorageWriter(root), no_dist=True)
    pool.run(3, dense_load, root, 8)


def lopsided(me: Rank, root: str, owner: int) -> None:
    """One rank owns everything; the others, perhaps the coordinator, own nothing."""
    state = {"w": torch.arange(5.0), "o": [1]} if me.rank == owner else {}
    dcp.save(state, checkpoint_id=f"own{owner}-1", storage_writer=StorageWriter(root), process_group=me.group)
    target = {"w": torch.zeros(5), "o": None} if me.rank == owner else {}
    reader = StorageReader(root)
    dcp.load(target, checkpoint_id=f"own{owner}-1", storage_reader=reader, process_group=me.group)
    if me.rank == owner:
        assert torch.equal(target["w"], torch.arange(5.0))
        assert target["o"] == [1]


@pytest.mark.parametrize("owner", [0, 2])
def test_ranks_that_own_nothing(owner: int, pool: Pool, root: str) -> None:
    pool.run(3, lopsided, root, owner)
    assert len(list(Path(root.removeprefix("file://")).rglob("*.safetensors"))) == 1


def empty_state(me: Rank, root: str) -> None:
    dcp.save({}, checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)
    dcp.load({}, storage_reader=StorageReader(root), process_group=me.group)


def test_an_empty_state(pool: Pool, root: str) -> None:
    pool.run(2, empty_state, root)


def names(me: Rank, root: str) -> None:
    """By name, by URL, as a path, and the newest by step, not by text or time."""
    for step in (10, 9, 2):
        state = {"step": torch.tensor(step)}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=StorageWriter(root), process_group=me.group)
    reader = StorageReader(root)

    def load(**options: Any) -> int:
        target = {"step": torch.tensor(0)}
        dcp.load(target, storage_reader=reader, process_group=me.group, **options)
        return int(target["step"])

    plain = Path(root.removeprefix("file://"))
    assert load() == 10
    assert load(checkpoint_id="step-2") == 2
    assert load() == 10, "a name holds for one load"
    assert load(checkpoint_id=f"{root}/step-9") == 9
    assert load(checkpoint_id=f"{root}/step-9/") == 9
    assert load(checkpoint_id=plain / "step-2") == 2
    assert load(checkpoint_id=Path("step-9")) == 9
    assert load(checkpoint_id=os.fspath(plain / "step-10")) == 10
    assert reader.checkpoint_id == f"{root}/step-10"


def test_how_a_checkpoint_is_named(pool: Pool, root: str) -> None:
    pool.run(2, names, root)


def load_into_meta(me: Rank, root: str) -> None:
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)
    target = {"w": torch.empty(6, device="meta")}
    dcp.load(target, storage_reader=StorageReader(root), process_group=me.group)
    assert torch.equal(target["w"], torch.arange(6.0))


def test_meta_targets_are_made(pool: Pool, root: str) -> None:
    pool.run(2, load_into_meta, root)


def local_shards(me: Rank, root: str) -> None:
    """Plain local tensors that say which parts of a global one they are: torch 2.14's CheckpointableTensor."""
    rows = 3 * me.world

    def local(fill: bool) -> torch.Tensor:
        # Two shards in one padded buffer: rows r and r + world of the global tensor.
        whole = value((rows, 5))
        buffer = torch.full((4, 5), -1.0)
        if fill:
            buffer[0], buffer[2] = whole[me.rank], whole[me.rank + me.world]
        buffer.global_shape = (rows - me.world, 5)  # type: ignore[attr-defined]
        buffer.global_offsets = ((me.rank, 0), (me.rank + me.world, 0))  # type: ignore[attr-defined]
        buffer.local_offsets = ((0, 0), (2, 0))  # type: ignore[attr-defined]
        buffer.local_sizes = ((1, 5), (1, 5))  # type: ignore[attr-defined]
        return buffer

    dcp.save({"t": local(True)}, checkpoint_id=NAME, storage_writer=StorageWriter(root), process_group=me.group)
    for planner in (dcp.DefaultLoadPlanner(), StrictLoadPlanner()):
        target = local(False)
        dcp.load({"t": target}, storage_reader=StorageReader(root), planner=planner, process_group=me.group)
        assert torch.equal(target, local(True))
    plain = {"t": torch.zeros(2 * me.world, 5)}
    dcp.load(plain, storage_reader=StorageReader(root), process_group=me.group)
    assert torch.equal(plain["t"], value((rows, 5))[: 2 * me.world])


@pytest.mark.parametrize("world", [1, 3])
def test_checkpointable_tensors(world: int, pool: Pool, root: str) -> None:
    if find_spec("torch.distributed.checkpoint.protocol") is not None:  # torch 2.14 brought it
        pool.run(world, local_shards, root)
