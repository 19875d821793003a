"""Who holds a snapshot, and how its end is known: what `SnapshotBuffers` hands out.

A snapshot has ended, the first counts,

- when who writes it says so (`Snapshot.release`);
- when no tensor anywhere shows its memory any more: torch keeps the memory through objects that hold a
  `Lease`, and drops them with the last tensor, whoever held it;
- when the thread that saved it has ended. A failed save leaves its tensors in the frames of a traceback, for as
  long as somebody keeps the future. This counts for `dcp.async_save` only, whose threads save one state each.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, ItemsView, Mapping
from typing import Any

import torch

from txstore.errors import TxStoreError

_HEAD_START_S = 0.005
"""`async_save` starts its thread before it returns. The two would fight for the GIL, 5 ms a turn: training first."""


class GiveBack:
    """Gives the right to a set of buffers back, once, however often it is called."""

    def __init__(self, free: queue.SimpleQueue[None]) -> None:
        self._free = free
        self._once = [None]

    def __call__(self) -> None:
        """Give it back."""
        try:
            self._once.pop()
        except IndexError:
            return
        # A SimpleQueue: this runs as a finalizer, in any thread, also in one that is inside the queue.
        self._free.put(None)

    @property
    def done(self) -> bool:
        """Whether it has."""
        return not self._once


class Lease:
    """The hold on a set of buffers: ends with the last tensor that shows a snapshot's memory."""

    __slots__ = ("__weakref__", "give_back")

    give_back: GiveBack
    """Of the snapshot that has the buffers."""

    def hold(self, give_back: GiveBack) -> None:
        """From now on a snapshot has the buffers: what is called when it ends. Tensors made ahead hold nothing."""
        self.give_back = give_back
        weakref.finalize(self, give_back).atexit = False


class _Tenure:
    """Lives in a thread's locals, so it dies with the thread."""

    def __init__(self, give_back: GiveBack) -> None:
        self.give_back = give_back
        weakref.finalize(self, give_back).atexit = False


class _Reader(threading.local):
    """What this thread has read of `dcp.async_save`'s states."""

    refusal: TxStoreError | None = None

    def __init__(self) -> None:
        self.tenures: list[_Tenure] = []


_reader = _Reader()


class Staged(dict[str, Any]):
    """A staged state dict. `dcp.save` reads its items in the thread, or process, that saves it.

    Args:
        state: The copy.
        lease: Held as long as this is.
        on_read: Called when the state is first read, by the save.
        refusal: Why there is no copy: raised where all ranks hear of it.
        save_ends_with_thread: Whether the buffers are free when the thread that reads this has ended.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        lease: Lease | None = None,
        on_read: Callable[[], None] | None = None,
        refusal: TxStoreError | None = None,
        save_ends_with_thread: bool = False,
    ) -> None:
        super().__init__(state)
        self._lease = lease
        self._on_read = on_read
        self._refusal = refusal
        self._save_ends_with_thread = save_ends_with_thread

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As of any dict."""
        if self._note_reader():
            time.sleep(_HEAD_START_S)
        self._tell_read()
        _reader.refusal = self._refusal
        return super().items()

    def _tell_read(self) -> None:
        on_read, self._on_read = self._on_read, None
        if on_read is not None:
            on_read()

    def _note_reader(self) -> bool:
        """Bind the end of this thread to the buffers; returns whether it is the thread of a save."""
        if self._lease is None or not self._save_ends_with_thread:
            return False
        _reader.tenures = [tenure for tenure in _reader.tenures if not tenure.give_back.done]
        if all(tenure.give_back is not self._lease.give_back for tenure in _reader.tenures):
            _reader.tenures.append(_Tenure(self._lease.give_back))
        return True

    def __reduce__(self) -> tuple[object, ...]:
        # PROCESS mode: torch sends a copy of the memory to the process that saves.
        self._note_reader()
        self._tell_read()
        return _received, (dict(self), self._refusal)


def _received(state: dict[str, Any], refusal: TxStoreError | None) -> Staged:
    return Staged(state, refusal=refusal)


def refused(error: TxStoreError) -> Staged:
    """A state that no writer accepts, which carries an error to where all ranks hear of it.

    Raised where it happened, in the training thread of one rank, it would leave the other ranks waiting
    for that rank's part of the save.
    """
    # Without its frames, which hold the state: the future that carries this may be kept for long.
    error.__cause__ = error.__context__ = None
    error = error.with_traceback(None)
    return Staged({error.key or "snapshot": torch.empty((), device="meta")}, refusal=error)


def take_refusal() -> TxStoreError | None:
    """The error that the state brought which this thread read last; None the second time."""
    refusal, _reader.refusal = _reader.refusal, None
    return refusal
