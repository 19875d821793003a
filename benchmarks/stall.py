"""How long `dcp.async_save` holds up training, stock staging and txstore in turn: ``python -m benchmarks stall``.

The stall is the time until the call returns. The save before has ended by then, and its files are gone, so no
write is in it. Before each call comes the work of a training step, as in training: without it torch's threads are
asleep in some calls and awake in others, and a copy takes between one and three times as long (ADR 0015). Each
contender is a process of its own, as it is in training: memory that one of them gives back to malloc would be warm for
the next one, by chance. They take turns, a save each.

The limit is a plain ``target.copy_(source)`` into memory that was written before. ``async_save`` without any copy shows
what DCP's own call costs; where the two together are over the target, little is left to do. The
first save, which allocates, is told apart. Ratios are of medians of one run: absolute times are noise on a shared
machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from txstore.dcp import StorageReader, StorageWriter

State = dict[str, dict[str, torch.Tensor]]  # nested, as trainers have it: DCP logs every key of the top level
Save = Callable[[State, Path], Future[Any] | None]

OURS, STOCK, LIMIT = "txstore", "stock: DefaultStager", "limit: warm copy_"
NO_COPY = "async_save without a copy"
MAX_OF_STOCK, MAX_OF_LIMIT = 1 / 3, 1.3


def make_state(mib: int, tensor_mib: int) -> State:
    """Large tensors of one size, and a hundred small ones as norms and step counters are."""
    large = {f"layer.{i}": torch.randn(tensor_mib << 18) for i in range(max(1, mib // tensor_mib))}
    return {"model": large, "optimizer": {f"norm.{i}": torch.randn(1024) for i in range(100)}}


def tensors(state: State) -> list[torch.Tensor]:
    """All of them, in order."""
    return [tensor for part in state.values() for tensor in part.values()]


class NoCopy(DefaultStager):
    """Stages nothing: what is left is DCP's own call."""

    def stage(self, state_dict: Any, **_: Any) -> Any:
        """The state itself."""
        return state_dict


def stager(kind: type[DefaultStager] = DefaultStager, *, shared: bool = False) -> DefaultStager:
    """DCP's own. Pinned and non-blocking copies need an accelerator and are refused, or ignored, without one."""
    return kind(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=shared, use_async_staging=False, use_non_blocking_copy=False
        )
    )


def training_step(weights: torch.Tensor) -> None:
    """Some 40 ms of work in which torch's threads and caches are used as training uses them."""
    for _ in range(3):
        weights.copy_((weights @ weights).clamp_(-1, 1))


def stock(kept: DefaultStager | None = None) -> Save:
    """`dcp.async_save` to files through DCP's stager; a kept one reuses its memory, and may write over a save."""

    def save(state: State, folder: Path) -> Future[Any]:
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        return dcp.async_save(state, storage_writer=writer, async_stager=kept or stager())

    return save


def writer_as_stager(state: State, folder: Path) -> Future[Any]:
    """What `dcp.async_save` does with DCP's own writer and nothing else said."""
    return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))


class Ours:
    """`dcp.async_save` through one writer of ours."""

    writer: StorageWriter | None = None

    def __call__(self, state: State, folder: Path) -> Future[Any]:
        """One save."""
        self.writer = self.writer or StorageWriter(folder, overwrite=True)
        return dcp.async_save(state, storage_writer=self.writer, checkpoint_id="step-1")


class WarmCopy:
    """The limit."""

    targets: tuple[torch.Tensor, ...] = ()

    def __call__(self, state: State, folder: Path) -> None:  # noqa: ARG002 - the signature of all
        """One copy."""
        self.targets = self.targets or tuple(torch.randn_like(tensor) for tensor in tensors(state))
        for target, source in zip(self.targets, tensors(state), strict=True):
            target.copy_(source)


CONTENDERS: dict[str, Callable[[], Save]] = {
    STOCK: stock,
    "stock: FileSystemWriter itself": lambda: writer_as_stager,
    "stock: one DefaultStager kept": lambda: stock(stager()),
    "stock: the same, shared memory": lambda: stock(stager(shared=True)),
    OURS: Ours,
    NO_COPY: lambda: stock(stager(NoCopy)),
    LIMIT: WarmCopy,
}


class Contender:
    """One of them, in a process of its own."""

    here: ClassVar[Contender]

    def __init__(self, name: str, mib: int, tensor_mib: int, folder: Path) -> None:
        warnings.simplefilter("ignore")
        Contender.here = self
        self.save = CONTENDERS[name]()
        self.state = make_state(mib, tensor_mib)
        self.folder = folder
        self.weights = torch.randn(1024, 1024)
        if name == OURS:
            check(self.state, folder / "check")


def in_turn() -> float:
    """In the process of a contender: seconds of the stall of its next save."""
    one = Contender.here
    training_step(one.weights)
    return stall(one.save, one.state, one.folder)


def measure(mib: int, tensor_mib: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each stall; the first of each list is that of a first save."""
    stalls: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(
                ProcessPoolExecutor(
                    1, get_context("spawn"), initializer=Contender, initargs=(name, mib, tensor_mib, folder / str(at))
                )
            )
            for at, name in enumerate(CONTENDERS)
        }
        for number in range(rounds + 2):
            for name, pool in pools.items():
                seconds = pool.submit(in_turn).result()
                if number != 1:  # the second save is warm but for the caches of the code
                    stalls[name].append(seconds)
    return stalls


def stall(save: Save, state: State, folder: Path) -> float:
    """One save: seconds until it returns. Comes back when it has ended."""
    began = time.perf_counter()
    future = save(state, folder)
    seconds = time.perf_counter() - began
    if future is not None:
        future.result()
    for written in folder.rglob("*.[sd][ai][fs][et]*"):  # the shards: tmpfs would fill up
        written.unlink()
    return seconds


def check(state: State, folder: Path) -> None:
    """What our stager copied is what was there."""
    dcp.async_save(state, storage_writer=StorageWriter(folder), checkpoint_id="step-1").result()
    target = {name: {key: torch.zeros_like(value) for key, value in part.items()} for name, part in state.items()}
    dcp.load(target, storage_reader=StorageReader(folder))
    if not all(torch.equal(one, other) for one, other in zip(tensors(target), tensors(state), strict=True)):
        raise AssertionError("loaded values differ")
    shutil.rmtree(folder)


def summary(mib: int, stalls: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, their ratios to ours, and whether the target is met."""
    later = {name: statistics.median(seconds[1:]) for name, seconds in stalls.items()}
    of_stock, of_limit = later[OURS] / later[STOCK], later[OURS] / later[LIMIT]
    target = max(later[STOCK] * MAX_OF_STOCK, later[LIMIT] * MAX_OF_LIMIT)
    return {
        "mib": mib,
        "first_s": {name: seconds[0] for name, seconds in stalls.items()},
        "median_s": later,
        "of_stock": of_stock,
        "of_limit": of_limit,
        "call_and_limit_s": later[NO_COPY] + later[LIMIT],
        "target_s": target,
        "met": later[OURS] <= target,
    }


def show(results: list[dict[str, Any]], rounds: int) -> None:
    """The table."""
    table = Table(
        title=f"stall of dcp.async_save, {rounds} rounds, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    for column in ("MiB", "staging", "first save, ms", "later, median ms", "GiB/s", "of txstore"):
        table.add_column(column, justify="left" if column == "staging" else "right")
    for result in results:
        for name, seconds in result["median_s"].items():
            rate = result["mib"] / seconds / 2**10
            relative = seconds / result["median_s"][OURS]
            cells = f"{result['first_s'][name] * 1e3:.1f}", f"{seconds * 1e3:.2f}", f"{rate:.1f}", f"{relative:.2f}"
            table.add_row(str(result["mib"]), name, *cells, end_section=name == LIMIT)
    console = Console()
    console.print(table)
    for result in results:
        verdict = "met" if result["met"] else "MISSED"
        target, together = result["target_s"] * 1e3, result["call_and_limit_s"] * 1e3
        console.print(
            f"{result['mib']} MiB: {result['of_stock']:.2f} of stock (target {MAX_OF_STOCK:.2f}), "
            f"{result['of_limit']:.2f} of a warm copy (target {MAX_OF_LIMIT}): {verdict}; "
            f"the target is {target:.1f} ms, a warm copy and DCP's own call take {together:.1f}"
        )


def main(arguments: Sequence[str]) -> None:
    """Run the rounds and print table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stall", description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 32, 64, 256, 1024], help="sizes of the state")
    parser.add_argument("--tensor-mib", type=int, default=16, help="size of a large tensor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", default="/dev/shm", help="where the saves go: best into memory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = []
    for mib in options.mib:
        folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="txstore-stall-"))
        try:
            results.append(summary(mib, measure(mib, options.tensor_mib, options.rounds, folder)))
        finally:
            shutil.rmtree(folder)
    if options.json:
        print(json.dumps({"rounds": options.rounds, "torch": torch.__version__, "results": results}, indent=1))
    else:
        show(results, options.rounds)
