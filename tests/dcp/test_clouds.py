"""`dcp.save`, `dcp.load` and `dcp.async_save` on a store of each cloud backend, on its real server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import same
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from workers import Pool, Rank

from tests.servers.fixtures import Place
from txstore.catalog import entries
from txstore.dcp import StorageReader, StorageWriter
from txstore.ops.verify import verify_store
from txstore.registry import open_store

WAIT_S = 60


def state(number: int) -> dict[str, Any]:
    return {
        "large": torch.arange(number, number + (3 << 20), dtype=torch.int32),
        "half": torch.full((5, 7), number, dtype=torch.bfloat16),
        "strided": torch.full((20, 30), float(number)).t(),
        "empty": torch.empty(0, 3),
        "objects": [number, {"x": {number}}],
        "n": number,
    }


def blank() -> dict[str, Any]:
    tensors = {name: torch.zeros_like(value) for name, value in state(0).items() if isinstance(value, torch.Tensor)}
    return {**tensors, "objects": [None, {"x": None}], "n": None}


def round_trip(url: str, options: dict[str, Any]) -> None:
    for number in (1, 2):
        writer = StorageWriter(url, shard_bytes=5 << 20, **options)
        dcp.save(state(number), checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
    for name, number in (("step-1", 1), (None, 2)):
        target = blank()
        dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(url, **options), no_dist=True)
        same(target, state(number))


def test_a_state_comes_back_bit_for_bit(place: Place) -> None:
    round_trip(place.url, place.options)


def test_a_state_comes_back_from_the_memory_of_fsspec(memory_root: str) -> None:
    round_trip(f"memory://{memory_root}", {})


def on_ranks(me: Rank, url: str, options: dict[str, Any], mode: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    def build(number: float) -> dict[str, Any]:
        whole = torch.full((7, 300_000), number)
        return {
            "d": distribute_tensor(whole, me.mesh, [Shard(0)], src_data_rank=None),
            f"own{me.rank}": torch.full((5,), number),
            "list": [number],
        }

    writer = StorageWriter(url, **options)
    for step in (1.0, 2.0):
        built, name = build(step), f"step-{step:.0f}"
        if mode == "SYNC":
            dcp.save(built, checkpoint_id=name, storage_writer=writer, process_group=me.group)
        else:
            future = dcp.async_save(
                built,
                checkpoint_id=name,
                storage_writer=writer,
                process_group=me.group,
                async_checkpointer_type=AsyncCheckpointerType[mode],
            )
            built["d"].to_local().fill_(99)  # the snapshot must have been taken
            built[f"own{me.rank}"].fill_(99)
            (future.upload_completion if isinstance(future, AsyncSaveResponse) else future).result(WAIT_S)
        target = build(0.0)
        dcp.load(target, storage_reader=StorageReader(url, **options), process_group=me.group)
        assert torch.equal(target["d"].full_tensor(), torch.full((7, 300_000), step))
        assert target["list"] == [step]
        assert float(target[f"own{me.rank}"][0]) == step


@pytest.mark.parametrize("mode", ["SYNC", "THREAD", "PROCESS"])
def test_ranks_save_and_load_together(pool: Pool, place: Place, mode: str) -> None:
    pool.run(2, on_ranks, place.url, place.options, mode, deadline_s=120)
    with open_store(place.url, **place.options) as store:
        assert [entry.state for entry in entries(store)] == ["committed", "committed"]
        assert verify_store(store).state == "sound"
