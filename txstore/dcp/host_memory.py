"""Host memory for snapshots: blocks that are kept and given again, and the fastest copy into them.

Measured on two cores with 512 MiB, in GiB/s: into fresh memory 3; into warm memory `Tensor.copy_` 9, on two threads 14;
``memcpy`` (`numpy.copyto`) 15, since from some 100 MiB on it writes past the caches, on two threads 23. That holds
only if the target begins on a page: one that lies 64 bytes further in its page than the source made it 3.6.
Huge pages gave nothing more when warm, and made the first copy four times slower.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from txstore.dcp.leaves import Region
from txstore.dcp.tensors import NUMBERS, as_numbers

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """Host memory for some regions.

    Attributes:
        blocks: All of it.
        places: For each region the number of its block, and the offset in it, in bytes.
    """

    blocks: list[torch.Tensor]
    places: list[tuple[int, int]]


PAGE_BYTES = 4096
SMALL_BYTES = 1 << 20
"""Below this, regions share one block: thousands of scalars must not cost thousands of allocations."""
ALIGN_BYTES = 64
THREAD_BYTES = 16 << 20
"""Least that is worth a thread, which takes up to a millisecond to begin. Pieces are as large as can be: `memcpy` takes
the fast way for large ones only."""
MAX_THREADS = 4


def footprint(sizes: Iterable[int]) -> int:
    """Bytes of the blocks that regions of these sizes need."""
    large, small = 0, 0
    for size in sizes:  # `_up` written out: a call for each tensor is part of the stall
        if size < SMALL_BYTES:
            small += size + -size % ALIGN_BYTES
        else:
            large += size + -size % PAGE_BYTES
    return large + _up(small, PAGE_BYTES)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class HostMemory:
    """Blocks of host memory, pinned where there is an accelerator."""

    def __init__(self) -> None:
        self.arrangement = Arrangement([], [])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(block.nbytes for block in self.arrangement.blocks)

    def arrange(self, sizes: Sequence[int]) -> Arrangement:
        """The blocks for regions of these sizes, and where in them each lies.

        Blocks that fit are used again; others are let go before new ones are made.

        Raises:
            RuntimeError: The machine has no memory left.
        """
        wanted: list[int] = []
        places: list[tuple[int, int]] = []
        arena = sum(size >= SMALL_BYTES for size in sizes)  # the block after those of the large ones
        arena_bytes = 0
        for size in sizes:
            if size >= SMALL_BYTES:
                places.append((len(wanted), 0))
                wanted.append(_up(size, PAGE_BYTES))
            else:
                places.append((arena, arena_bytes))
                arena_bytes += _up(size, ALIGN_BYTES)
        if arena_bytes:
            wanted.append(_up(arena_bytes, PAGE_BYTES))
        self.arrangement = Arrangement(self._take(wanted), places)
        return self.arrangement

    def _take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        spare: dict[int, list[torch.Tensor]] = {}
        for block in reversed(self.arrangement.blocks):  # popped from the end: as in the list when all are taken
            spare.setdefault(block.nbytes, []).append(block)
        self.arrangement = Arrangement([], [])
        found = [spare[size].pop() if spare.get(size) else None for size in sizes]
        spare.clear()
        return [_block(size) if block is None else block for size, block in zip(sizes, found, strict=True)]


def _block(nbytes: int) -> torch.Tensor:
    """Memory that begins on a page."""
    if torch.accelerator.is_available():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            log.warning("no pinned memory for a snapshot of %d bytes, so its copy is slower: %s", nbytes, error)
    raw = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
    start = -raw.data_ptr() % PAGE_BYTES
    return raw[start : start + nbytes]


def copy_regions(targets: Sequence[torch.Tensor], regions: Sequence[Region]) -> None:
    """Copy regions into host memory, each into a tensor of its form.

    On return every byte has arrived.
    """
    devices = set()
    runs = []
    rest = []
    # Torch's threads wait for their next work by spinning, and threads of ours would share their cores (ADR 0015).
    own_threads = torch.get_num_threads() == 1
    try:
        for target, region in zip(targets, regions, strict=True):
            source = region.source
            if not source.is_cpu:
                devices.add(source.device)
                # Pinned memory only: into other memory the copy would block at once, and all others behind it.
                target.copy_(source, non_blocking=target.is_pinned())
            elif own_threads and region.nbytes >= SMALL_BYTES and _is_run(region):
                runs.append((_run(target), _run(source)))
            elif region.form.dtype in NUMBERS or source.is_neg():
                rest.append((target, source))
            else:
                rest.append((as_numbers(target), as_numbers(source)))
        _copy_on_cpu(runs, rest)
    finally:
        _wait_for_devices(devices)  # also after an error: the memory is free then, and nothing may still arrive in it


def _is_run(region: Region) -> bool:
    return region.dense and not (region.source.is_conj() or region.source.is_neg())


def _copy_on_cpu(runs: list[tuple[Bytes, Bytes]], rest: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy whole tensors with torch, and runs of bytes with threads of our own."""
    total = sum(out.nbytes for _, out in runs)
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), max(1, total // THREAD_BYTES))
    pieces = _pieces(runs, max(total // threads, THREAD_BYTES))
    helpers = min(threads, pieces.qsize()) - 1
    with ThreadPoolExecutor(helpers, thread_name_prefix="txstore-snapshot") if helpers > 0 else nullcontext() as pool:
        drained = [pool.submit(_drain, pieces) for _ in range(helpers)] if pool else []
        if rest:
            targets, sources = zip(*rest, strict=True)
            _copy_tensors(targets, sources)
        _drain(pieces)
        for one in drained:
            one.result()


def _copy_tensors(targets: tuple[torch.Tensor, ...], sources: tuple[torch.Tensor, ...]) -> None:
    try:
        torch._foreach_copy_(targets, sources)
    except NotImplementedError:  # a source has a tangent, of forward-mode differentiation
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.detach())


def _pieces(runs: list[tuple[Bytes, Bytes]], piece_bytes: int) -> queue.SimpleQueue[tuple[Bytes, Bytes]]:
    pieces: queue.SimpleQueue[tuple[Bytes, Bytes]] = queue.SimpleQueue()
    for into, out in runs:
        for start in range(0, len(out), piece_bytes):
            pieces.put((into[start : start + piece_bytes], out[start : start + piece_bytes]))
    return pieces


def _run(tensor: torch.Tensor) -> Bytes:
    """The memory of a dense CPU tensor, whatever the order of its dimensions."""
    flat: Bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return flat


def _drain(runs: queue.SimpleQueue[tuple[Bytes, Bytes]]) -> None:
    with suppress(queue.Empty):
        while True:
            into, out = runs.get_nowait()
            np.copyto(into, out)  # without the GIL


def _wait_for_devices(devices: Iterable[torch.device]) -> None:
    # The return of a non-blocking copy says nothing: the event behind it on its stream does.
    events = []
    for device in devices:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        events.append(event)
    for event in events:
        event.synchronize()
