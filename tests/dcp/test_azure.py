"""`dcp.save`, `dcp.load` and `dcp.async_save` on an az:// store."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from workers import Pool, Rank

from tests.servers.azurite import Azurite
from txstore.catalog import entries
from txstore.dcp import StorageReader, StorageWriter
from txstore.ops.verify import verify_store
from txstore.registry import open_store

WAIT_S = 60


@pytest.fixture
def root(azure_prefix: str) -> str:
    return f"az://checkpoints/{azure_prefix}/ünï code"


@pytest.fixture
def options(azure_server: Azurite) -> dict[str, Any]:
    return {"connection_string": azure_server.connection_string, "part_bytes": 1 << 20}


def state(number: float) -> dict[str, Any]:
    return {
        "large": torch.arange(3 << 20, dtype=torch.float32) * number,
        "strided": torch.full((20, 30), number).t(),
        "empty": torch.empty(0, 3),
        "list": [number, {"x": number}],
    }


def on_ranks(me: Rank, root: str, options: dict[str, Any], mode: str | None) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    def build(number: float) -> dict[str, Any]:
        whole = torch.full((7, 300_000), number)
        return {
            "d": distribute_tensor(whole, me.mesh, [Shard(0)], src_data_rank=None),
            "w": torch.full((5,), number),
            f"own{me.rank}": torch.tensor([number]),
            "list": [number],
        }

    writer = StorageWriter(root, **options)
    if mode is None:
        dcp.save(build(1), checkpoint_id="step-1", storage_writer=writer, process_group=me.group)
    else:
        kind = AsyncCheckpointerType[mode]
        saved = build(1)
        future = dcp.async_save(
            saved, checkpoint_id="step-1", storage_writer=writer, process_group=me.group, async_checkpointer_type=kind
        )
        saved["d"].to_local().fill_(99)
        saved["w"].fill_(99)
        (future.upload_completion if isinstance(future, AsyncSaveResponse) else future).result(WAIT_S)
    target = build(0)
    reader = StorageReader(root, **options)
    dcp.load(target, checkpoint_id="step-1", storage_reader=reader, process_group=me.group)
    assert torch.equal(target["d"].full_tensor(), torch.full((7, 300_000), 1.0))
    assert torch.equal(target["w"], torch.ones(5))
    assert float(target[f"own{me.rank}"]) == 1
    assert target["list"] == [1]


@pytest.mark.parametrize("mode", [None, "THREAD", "PROCESS"])
def test_save_and_load_on_ranks(mode: str | None, pool: Pool, root: str, options: dict[str, Any]) -> None:
    pool.run(2, on_ranks, root, options, mode, deadline_s=100)
    with open_store(root, **options) as store:
        assert [entry.state for entry in entries(store)] == ["committed"]
        assert verify_store(store).state == "sound"


def test_save_and_load_without_ranks(root: str, options: dict[str, Any]) -> None:
    writer = StorageWriter(root, shard_bytes=5 << 20, **options)
    dcp.save(state(2.0), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    target = state(0.0)
    dcp.load(target, storage_reader=StorageReader(root, **options), no_dist=True)
    for name, value in state(2.0).items():
        assert torch.equal(target[name], value) if isinstance(value, torch.Tensor) else target[name] == value


def test_save_and_load_in_the_memory_of_fsspec(memory_root: str) -> None:
    writer = StorageWriter(f"memory://{memory_root}", shard_bytes=5 << 20)
    dcp.save(state(2.0), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    target = state(0.0)
    dcp.load(target, storage_reader=StorageReader(f"memory://{memory_root}"), no_dist=True)
    assert torch.equal(target["large"], state(2.0)["large"])
    assert target["list"] == [2.0, {"x": 2.0}]
