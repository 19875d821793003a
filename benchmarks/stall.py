"""How long `dcp.async_save` holds up training, stock staging and txstore in turn: ``python -m benchmarks stall``.

The stall is the time until the call returns. The save before has ended by then, and its files are gone, so no
write is in it. Before each call comes the work of a training step, as in training: without it torch's threads are
asleep in some calls and awake in others, and a copy takes between one and three times as long (ADR 0015). The limit
is a plain ``target.copy_(source)`` into memory that was written before. ``async_save`` without any copy shows what
DCP's own call costs, which no stager can save. The first save, which allocates, is told apart. Ratios are of medians
of one run: absolute times are noise on a shared machine.
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
from concurrent.futures import Future
from pathlib import Path
from typing import Any

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


def variants(state: State) -> dict[str, Save]:
    """Everything that is compared; a reused stager keeps its memory, and may write over a save in flight."""
    kept, kept_shared = stager(), stager(shared=True)
    written: list[StorageWriter] = []
    warm = [torch.randn_like(tensor) for tensor in tensors(state)]

    def stock(one: DefaultStager | None) -> Save:
        def save(state: State, folder: Path) -> Future[Any]:
            writer = dcp.FileSystemWriter(folder, sync_files=False)
            return dcp.async_save(state, storage_writer=writer, async_stager=one or stager())

        return save

    def writer_as_stager(state: State, folder: Path) -> Future[Any]:
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False))

    def ours(state: State, folder: Path) -> Future[Any]:
        if not written:
            written.append(StorageWriter(folder, overwrite=True))
        return dcp.async_save(state, storage_writer=written[0], checkpoint_id="step-1")

    def plain(state: State, folder: Path) -> None:  # noqa: ARG001 - the signature of all
        for target, source in zip(warm, tensors(state), strict=True):
            target.copy_(source)

    return {
        STOCK: stock(None),
        "stock: FileSystemWriter itself": writer_as_stager,
        "stock: one DefaultStager kept": stock(kept),
        "stock: the same, shared memory": stock(kept_shared),
        OURS: ours,
        NO_COPY: stock(stager(NoCopy)),
        LIMIT: plain,
    }


def measure(state: State, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each stall; the first of each list is that of a first save."""
    saves = variants(state)
    weights = torch.randn(1024, 1024)
    stalls: dict[str, list[float]] = {name: [] for name in saves}
    names = list(saves)
    for number in range(rounds + 2):
        # In turn: what one gives back, gigabytes of pages, the machine is still busy with when the next one is called.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            training_step(weights)
            seconds = stall(saves[name], state, folder / str(names.index(name)))
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
        raise SystemExit("loaded values differ")


def summary(mib: int, nbytes: int, stalls: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, their ratios to ours, and whether the target is met."""
    later = {name: statistics.median(seconds[1:]) for name, seconds in stalls.items()}
    of_stock, of_limit = later[OURS] / later[STOCK], later[OURS] / later[LIMIT]
    return {
        "mib": mib,
        "bytes": nbytes,
        "first_s": {name: seconds[0] for name, seconds in stalls.items()},
        "median_s": later,
        "of_stock": of_stock,
        "of_limit": of_limit,
        "of_call_and_limit": later[OURS] / (later[NO_COPY] + later[LIMIT]),
        "met": of_stock <= MAX_OF_STOCK or of_limit <= MAX_OF_LIMIT,
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
            rate = result["bytes"] / seconds / 2**30
            relative = seconds / result["median_s"][OURS]
            cells = f"{result['first_s'][name] * 1e3:.1f}", f"{seconds * 1e3:.2f}", f"{rate:.1f}", f"{relative:.2f}"
            table.add_row(str(result["mib"]), name, *cells, end_section=name == LIMIT)
    console = Console()
    console.print(table)
    for result in results:
        verdict = "met" if result["met"] else "MISSED"
        console.print(
            f"{result['mib']} MiB: {result['of_stock']:.2f} of stock (target {MAX_OF_STOCK:.2f}), "
            f"{result['of_limit']:.2f} of a warm copy (target {MAX_OF_LIMIT}): {verdict}; "
            f"{result['of_call_and_limit']:.2f} of DCP's own call and a warm copy"
        )


def main(arguments: Sequence[str]) -> None:
    """Run the rounds and print table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks stall", description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[16, 64, 256, 1024], help="sizes of the state")
    parser.add_argument("--tensor-mib", type=int, default=16, help="size of a large tensor")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--folder", default="/dev/shm", help="where the saves go: best into memory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    results = []
    for mib in options.mib:
        state = make_state(mib, options.tensor_mib)
        folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="txstore-stall-"))
        try:
            check(state, folder / "check")
            shutil.rmtree(folder / "check")
            results.append(summary(mib, sum(t.nbytes for t in tensors(state)), measure(state, options.rounds, folder)))
        finally:
            shutil.rmtree(folder)
    if options.json:
        print(json.dumps({"rounds": options.rounds, "torch": torch.__version__, "results": results}, indent=1))
    else:
        show(results, options.rounds)
