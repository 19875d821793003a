"""Makes a golden store: ``python tests/golden/make.py tests/golden/v1``. Run once for each format version, never again.

The files are kept, not remade: they stand for the checkpoints that users have on their disks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from txstore import open_store
from txstore.catalog import find
from txstore.dcp import StorageWriter
from txstore.manifest import Description, Progress
from txstore.sweep import retire
from txstore.transaction import begin


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


def make(folder: Path) -> None:
    """Every kind of decision, and a name that is no valid Unicode."""
    url = f"file://{folder.resolve()}"
    store = open_store(url)
    description = Description(Progress(3, 1, 2, 96), {"dp": 1}, {"config": "c0ffee"})

    def save(name: str, value: dict[str, object], **options: object) -> None:
        writer = StorageWriter(url, description=description, **options)
        dcp.save(value, checkpoint_id=name, storage_writer=writer, no_dist=True)

    save("step-1", state(1))
    save("step-2", state(2))
    save("step-2", state(22), overwrite=True)
    begin(store, "step-3", world_size=1, writer="golden:1").abort()
    save("surrogate-4", {"\ud800name": torch.ones(2), "plain": torch.zeros(2)})
    save("step-5", state(5))
    retire(store, find(store, "step-1"), reason="golden")


if __name__ == "__main__":
    host = mock.Mock(return_value="golden:1")  # not the name of anybody's machine
    with mock.patch("txstore.transaction.default_writer", host), mock.patch("txstore.slot_walk.default_writer", host):
        make(Path(sys.argv[1]))
