"""`dcp.save`, `dcp.load` and `dcp.async_save` with a store on S3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import same
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from workers import Pool, Rank

from txstore.catalog import newest
from txstore.dcp import StorageReader, StorageWriter
from txstore.registry import open_store

WAIT_S = 60


@pytest.fixture
def place(s3_bucket: Any) -> tuple[str, dict[str, Any]]:
    return f"s3://{s3_bucket.name}/{s3_bucket.new_prefix()}", {**s3_bucket.options, "part_bytes": 5 << 20}


def state(number: int) -> dict[str, Any]:
    return {
        "large": torch.arange(number, number + (3 << 20), dtype=torch.int32),
        "half": torch.full((5, 7), number, dtype=torch.bfloat16),
        "objects": [number, {"x": {number}}],
        "n": number,
    }


def blank() -> dict[str, Any]:
    return {
        "large": torch.zeros(3 << 20, dtype=torch.int32),
        "half": torch.zeros(5, 7, dtype=torch.bfloat16),
        "objects": [None, {"x": None}],
        "n": None,
    }


def test_a_state_comes_back_bit_for_bit(place: tuple[str, dict[str, Any]]) -> None:
    url, options = place
    for number in (1, 2):
        writer = StorageWriter(url, **options)
        dcp.save(state(number), checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
    for name, number in (("step-1", 1), (None, 2)):
        target = blank()
        dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(url, **options), no_dist=True)
        same(target, state(number))


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
            checkpointer = AsyncCheckpointerType[mode]
            future = dcp.async_save(
                built,
                checkpoint_id=name,
                storage_writer=writer,
                process_group=me.group,
                async_checkpointer_type=checkpointer,
            )
            (future.upload_completion if isinstance(future, AsyncSaveResponse) else future).result(WAIT_S)
        target = build(0.0)
        dcp.load(target, storage_reader=StorageReader(url, **options), process_group=me.group)
        assert torch.equal(target["d"].full_tensor(), torch.full((7, 300_000), step))
        assert target["list"] == [step]
        assert float(target[f"own{me.rank}"][0]) == step


@pytest.mark.parametrize("mode", ["SYNC", "THREAD", "PROCESS"])
def test_ranks_save_and_load_together(pool: Pool, place: tuple[str, dict[str, Any]], mode: str) -> None:
    url, options = place
    pool.run(2, on_ranks, url, options, mode, deadline_s=120)
    with open_store(url, **options) as store:
        assert newest(store).checkpoint == "step-2"
