"""Save and load of one state, stock DCP and txstore in turn, on the same disk: ``python -m benchmarks posix DIR``.

Prints a median and ratios. Absolute times are noise on a shared machine; ratios of one run are not.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from txstore.dcp import StorageReader, StorageWriter

State = dict[str, torch.Tensor]


def make_state(mib: int) -> State:
    """A few large tensors and many small ones, `mib` MiB in all."""
    large = {f"layer.{i}": torch.randn(32 << 18) for i in range(max(1, mib // 32))}
    return large | {f"norm.{i}": torch.randn(1024) for i in range(500)}


def stock(folder: Path) -> tuple[Callable[[State], object], Callable[[State], object]]:
    """DCP's own pair, files synced as ours are."""
    writer, reader = dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder)
    return lambda s: dcp.save(s, storage_writer=writer), lambda s: dcp.load(s, storage_reader=reader)


def ours(folder: Path) -> tuple[Callable[[State], object], Callable[[State], object]]:
    """The txstore pair: committed, verified."""
    writer, reader = StorageWriter(folder / "store"), StorageReader(folder / "store")
    return (
        lambda s: dcp.save(s, storage_writer=writer, checkpoint_id="step-1"),
        lambda s: dcp.load(s, storage_reader=reader),
    )


def timed(call: Callable[[State], object], state: State) -> tuple[float, float]:
    """Seconds on the wall and of this process's CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    call(state)
    return time.perf_counter() - wall, time.process_time() - cpu


def main(arguments: Sequence[str]) -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks posix", description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    state = make_state(options.mib)
    gib = sum(tensor.nbytes for tensor in state.values()) / 2**30
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for name, pair in (("stock", stock), ("txstore", ours)):
            folder = Path(tempfile.mkdtemp(dir=options.folder))
            try:
                save, load = pair(folder)
                target = {key: torch.zeros_like(value) for key, value in state.items()}
                seen.setdefault((name, "save"), []).append(timed(save, state))
                seen.setdefault((name, "load"), []).append(timed(load, target))
                if not all(torch.equal(target[key], value) for key, value in state.items()):
                    raise SystemExit(f"{name}: loaded values differ")
            finally:
                shutil.rmtree(folder)
    print(f"torch {torch.__version__}, {gib:.2f} GiB, {options.rounds} rounds, {options.folder}")
    for what in ("save", "load"):
        rate = {name: gib / statistics.median(wall for wall, _ in seen[name, what]) for name in ("stock", "txstore")}
        cpu = {name: statistics.median(cpu for _, cpu in seen[name, what]) / gib for name in ("stock", "txstore")}
        print(
            f"{what}: stock {rate['stock']:.2f} GiB/s, {cpu['stock']:.2f} CPU-s/GiB; "
            f"txstore {rate['txstore']:.2f} GiB/s, {cpu['txstore']:.2f} CPU-s/GiB; "
            f"ratio {rate['txstore'] / rate['stock']:.2f}"
        )
