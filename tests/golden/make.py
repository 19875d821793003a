"""Makes a golden store: ``python tests/golden/make.py tests/golden/v2``. Run once for each format version, never again.

The files are kept, not remade: they stand for the checkpoints that users have on their disks. Version 1 was made by one
rank. Version 2 is spread over prefixes, and made by two ranks, so that sharded tensors are grids in the index.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from txstore import open_store
from txstore.catalog import find
from txstore.dcp import StorageWriter
from txstore.manifest import Description, Progress
from txstore.root import ensure_store
from txstore.sweep import retire
from txstore.transaction import begin

RANKS, SPREAD = 2, 3


def state(seed: int = 0) -> dict[str, object]:
    """One of everything that the format tells apart; a function of `seed`."""
    whole = torch.arange(12) + seed
    return {
        "model": {"weight": whole.float().reshape(3, 4), "half": whole.bfloat16(), "mask": whole % 2 == 0},
        "complex": torch.complex(whole.double(), -whole.double()),
        "scalar": torch.tensor(7 + seed),
        "empty": torch.zeros(0, 5),
        "object": {"lr": 0.5, "names": ["a", "b"], "seed": seed},
        "__metadata__": torch.ones(1),
        'naïve/名 \n"': torch.full((2,), float(seed)),
    }


def sharded(seed: int) -> dict[str, object]:
    """`state`, with its matrix sharded over the ranks: one of them has fewer rows."""
    whole = state(seed)
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, value in whole["model"].items():
        whole["model"][name] = distribute_tensor(value, mesh, [Shard(0)])
    return whole


def make(rank: int, folder: Path) -> None:
    """Every kind of decision, and a name that is no valid Unicode."""
    host = mock.Mock(return_value="golden:1")  # not the name of anybody's machine
    with mock.patch("txstore.transaction.default_writer", host), mock.patch("txstore.slot_walk.default_writer", host):
        url = f"file://{folder.resolve()}"
        store = open_store(url)
        dist.init_process_group("gloo", init_method=f"file://{folder.resolve()}.group", rank=rank, world_size=RANKS)
        if rank == 0:
            ensure_store(store, spread=SPREAD)
        dist.barrier()
        description = Description(Progress(3, 1, 2, 96), {"dp": 1}, {"config": "c0ffee"})

        def save(name: str, value: dict[str, object], **options: object) -> None:
            writer = StorageWriter(url, description=description, **options)
            dcp.save(value, checkpoint_id=name, storage_writer=writer)

        save("step-1", sharded(1))
        save("step-2", sharded(2))
        save("step-2", sharded(22), overwrite=True)
        if rank == 0:
            begin(store, "step-3", world_size=1, writer="golden:1").abort()
        save("surrogate-4", {"\ud800name": torch.ones(2), "plain": torch.zeros(2)})
        save("step-5", sharded(5))
        if rank == 0:
            retire(store, find(store, "step-1"), reason="golden")
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(make, (Path(sys.argv[1]),), RANKS)
