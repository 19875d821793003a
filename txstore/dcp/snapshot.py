"""`SnapshotBuffers`: a copy of a state dict that training cannot change, in one reused set of host buffers.

A set holds one snapshot. Its buffers are written again only when the save of that snapshot has ended on
this rank (`txstore.dcp.staged` says how that is known); until then the next `stage` waits.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from txstore.dcp.copies import Copies
from txstore.dcp.host_memory import Arrangement, HostMemory, copy_regions, footprint
from txstore.dcp.leaves import Cloned, Form, Layout, Leaf, Path, Plain, lay_out, name_of
from txstore.dcp.one_at_a_time import one_at_a_time
from txstore.dcp.staged import GiveBack, Staged
from txstore.errors import SnapshotInUse, SnapshotTooLarge, TransactionStateError, UnsupportedValue, describe

log = logging.getLogger(__name__)

TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a state, and the right to its buffers. A context manager: leaving it releases them.

    Attributes:
        state_dict: The copy, on the CPU. Read it only until the release.
        nbytes: Bytes of tensors in it, each region counted once.
        waited_s: How long `stage` waited for the buffers before it copied.
    """

    state_dict: Staged
    nbytes: int
    waited_s: float
    _give_back: GiveBack

    def release(self) -> None:
        """The save of this snapshot has ended, well or not: its buffers may be written again. Any number of times."""
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SnapshotBuffers:
    """One set of host buffers for snapshots of one rank's state. Safe to use from several threads.

    The first snapshot allocates. From the second on one of the same layout costs one copy into warm memory,
    and one of another layout allocates only what changed. Where there is an accelerator the memory is pinned.

    Args:
        max_bytes: Most that a snapshot may take on this rank; None for no limit.
        timeout_s: How long `stage` waits for buffers that are in use.
    """

    def __init__(self, *, max_bytes: int | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.inside: set[int] = set()
        self._memory = HostMemory()
        self._ahead: Copies | None = None
        # One token: who holds it may write into the buffers.
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._free.put(None)

    @property
    def in_use(self) -> bool:
        """Whether a snapshot holds the buffers."""
        return self._free.empty()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held, whether a snapshot uses them or not."""
        return self._memory.nbytes

    def check(self, state_dict: Mapping[str, Any]) -> int:
        """What `stage` would refuse, without a copy; returns `estimate_bytes`.

        Raises:
            UnsupportedValue: A tensor that cannot be copied exactly.
            SnapshotTooLarge: More than `max_bytes`.
        """
        return self._check(lay_out(state_dict))

    def _check(self, layout: Layout) -> int:
        needed = _bytes_of(layout)
        if self.max_bytes is not None and needed > self.max_bytes:
            raise _too_large(needed, f"{self.max_bytes} are allowed")
        return needed

    @one_at_a_time
    def stage(self, state_dict: Mapping[str, Any], *, save_ends_with_thread: bool = False) -> Snapshot:
        """Copy a state; on return the original may change. Waits first while the previous snapshot is in use.

        Tensors in mappings, lists and tuples go into the buffers; everything else is deep-copied. Tensors
        that show the same memory in the same way share their copy.

        Args:
            state_dict: The state, at a boundary between training steps.
            save_ends_with_thread: Set by `StorageWriter` for `dcp.async_save` (see the module).

        Raises:
            UnsupportedValue: A tensor or object that cannot be copied exactly. Tensors are refused before any copy.
            SnapshotTooLarge: More than `max_bytes`, or more than the machine can give.
            SnapshotInUse: The previous snapshot was not released within `timeout_s`.
            TransactionStateError: This thread is inside `stage` already: a signal handler that saves.
        """
        layout = lay_out(state_dict)
        needed = self._check(layout)
        waited_s = self._wait()
        give_back = GiveBack(self._free)
        try:
            copies = self._copies(layout, needed)
            copies.lease.hold(give_back)
            state = _copied(state_dict, layout, copies)
        except BaseException:
            give_back()
            raise
        ahead = functools.partial(self._make_ahead, copies.arrangement, copies.forms)
        staged = Staged(state, lease=copies.lease, on_read=ahead, save_ends_with_thread=save_ends_with_thread)
        return Snapshot(staged, needed, waited_s, give_back)

    def close(self) -> None:
        """Let go of the memory; a snapshot in use keeps its own until its end. The set stays usable."""
        self._memory = HostMemory()
        self._ahead = None

    def _wait(self) -> float:
        began = time.monotonic()
        try:
            self._free.get_nowait()
            return 0.0
        except queue.Empty:
            pass
        try:
            self._free.get(timeout=self.timeout_s)
        except queue.Empty:
            raise SnapshotInUse(
                f"the previous snapshot is still in use after {self.timeout_s} s",
                next_step="its save is slow or stuck, or its state dict is kept: save less often, or wait longer",
            ) from None
        waited_s = time.monotonic() - began
        log.info("the snapshot waited %.3f s for the previous save", waited_s)
        return waited_s

    def _copies(self, layout: Layout, needed: int) -> Copies:
        """Tensors for the regions of a layout: those that were made ahead, if they fit."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fit(self._memory.arrangement, layout.regions):
            return ahead
        del ahead
        try:
            arrangement = self._memory.arrange([region.nbytes for region in layout.regions])
        except (RuntimeError, MemoryError) as error:
            raise _too_large(needed, f"no memory: {describe(error)}") from error
        return Copies(arrangement, [region.form for region in layout.regions])

    def _make_ahead(self, arrangement: Arrangement, forms: Sequence[Form]) -> None:
        """Make the tensors of the next snapshot, in the thread of the save, while this one is in use."""
        self._ahead = Copies(arrangement, forms)
        if self._memory.arrangement is not arrangement:  # closed meanwhile: it would keep the memory
            self._ahead = None


def estimate_bytes(state_dict: Mapping[str, Any]) -> int:
    """Bytes of host memory that a snapshot of a state takes on this rank, without making one.

    Python objects are not counted. Pinned memory may take up to twice as much: torch rounds it up.

    Raises:
        UnsupportedValue: A tensor that cannot be copied exactly.
    """
    return _bytes_of(lay_out(state_dict))


def _bytes_of(layout: Layout) -> int:
    return footprint(region.nbytes for region in layout.regions) + layout.cloned_bytes


def _too_large(needed: int, why: str) -> SnapshotTooLarge:
    return SnapshotTooLarge(
        f"a snapshot of this state takes {needed} bytes on this rank; {why}; {_available()} bytes are free here",
        next_step="shard the state over more ranks, raise the limit, or save with dcp.save, which needs no copy",
    )


def _available() -> int:
    """Bytes that the machine could still give."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
            return kib << 10
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
def _copied(state_dict: Mapping[str, Any], layout: Layout, copies: Copies) -> dict[str, Any]:
    # First the bytes: a container that clones what it is given, or an object that computes from its tensors when
    # it is rebuilt, would otherwise read what the snapshot before this one left there.
    copy_regions(copies.tensors, layout.regions)
    return _rebuilt(state_dict, layout, copies)


def _rebuilt(state_dict: Mapping[str, Any], layout: Layout, copies: Copies) -> dict[str, Any]:
    """The state again, its tensors showing the copies, everything else deep-copied.

    Raises:
        UnsupportedValue: A value, or a tensor's class, that cannot be copied.
    """
    memo: dict[int, Any] = {}
    state = {}
    at: Path = None
    try:
        for at, tensor, leaf in layout.leaves:  # noqa: B007 - told below
            memo[id(tensor)] = _build(leaf, copies)
        for key, value in state_dict.items():
            at = (None, key)
            state[key] = _copy_value(value, memo)
    except TransactionStateError:  # a signal's, not the value's
        raise
    except Exception as error:
        name = name_of(at)
        raise UnsupportedValue(f"{name!r} cannot be copied: {describe(error)}", key=name) from error
    return state


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy`, which asks more of a plain dict, entry by entry, than its tensors cost."""
    if type(value) is not dict:
        return copy.deepcopy(value, memo)
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = {}
        # As deepcopy does: a dict that goes while the rest is copied leaves its id to the next one.
        memo.setdefault(id(memo), []).append(value)
        for key, entry in value.items():
            copied = memo.get(id(entry))
            made[key if type(key) is str else copy.deepcopy(key, memo)] = (
                _copy_value(entry, memo) if copied is None else copied
            )
    return made


def _build(leaf: Leaf, copies: Copies) -> torch.Tensor:
    """The tensor of a snapshot that stands for a leaf."""
    if isinstance(leaf, Cloned):
        return leaf.clone()
    if isinstance(leaf, Plain):
        return _build_plain(leaf, copies)
    inner = leaf.fixed | {name: _build(part, copies) for name, part in leaf.inner.items()}
    wrapper = leaf.wrapper
    rebuilt: torch.Tensor = type(wrapper).__tensor_unflatten__(inner, leaf.context, wrapper.size(), wrapper.stride())
    return rebuilt


def _build_plain(leaf: Plain, copies: Copies) -> torch.Tensor:
    source = leaf.source
    if leaf.region is None:
        made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cpu")
    else:
        made = copies.take(leaf.region)
    if leaf.subclass is not None:
        made = made.as_subclass(type(leaf.subclass))
        vars(made).update(copy.deepcopy(vars(leaf.subclass)))
    return made.requires_grad_(leaf.requires_grad) if leaf.requires_grad else made
