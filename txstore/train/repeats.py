"""A save that would only repeat the last one: the loop saved its last step, and the `save` at its end comes on top.

Such a save is no error and no second checkpoint: it is the one that stands, or is on its way. But only if that is
proved, on all ranks: the same checkpointer took it, it has not failed, no counter has moved, and every byte of the
state is what was copied then. The copy lies in the buffers until the next save of this checkpointer is staged, so the
proof costs one comparison with memory, and nothing at all for a save of another step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from txstore.dcp.leaves import Leaf, Plain, Wrapped, lay_out
from txstore.decisions import read_decision
from txstore.errors import AlreadyCommitted, SaveError
from txstore.manifest import Decision
from txstore.root import KnownStore
from txstore.store import Store
from txstore.train.captured import Captured
from txstore.train.deadline import within
from txstore.train.exchange import Exchange, raise_first, typed
from txstore.train.ledger import Ledger
from txstore.train.python_blobs import SHARED, own_key, unpack
from txstore.train.python_state import flatten
from txstore.train.request import Request, SaveHandle
from txstore.train.saves import UNMOVED
from txstore.train.state import TrainState

log = logging.getLogger(__name__)

_LIFTED = re.compile(r"python\.(?:shared|rank-[0-9]+)[.\[]([a-z]+)")
"""A tensor in Python state, by the piece that holds it."""


@dataclass(frozen=True, slots=True)
class _Kept:
    request: Request
    digests: Mapping[str, str]


class Repeats:
    """Knows the last save of one checkpointer.

    Args:
        store: The store.
        state: What is saved.
        exchange: The ranks' exchange on the training thread.
        ledger: Tells how the last save ended, on all ranks alike.
        limit_s: How long the coordinator may look at the store, in seconds.
    """

    def __init__(self, store: Store, state: TrainState, exchange: Exchange, ledger: Ledger, limit_s: float) -> None:
        self._store = store
        self._state = state
        self._exchange = exchange
        self._ledger = ledger
        self._limit_s = limit_s
        self._kept: _Kept | None = None

    def keep(self, request: Request, captured: Captured) -> None:
        """A save was staged. Its copy is read until `forget`."""
        self._kept = _Kept(request, captured.shared_digests)

    def forget(self) -> None:
        """The copy is about to be written over, or the state to be restored."""
        self._kept = None

    def find(self, checkpoint: str) -> SaveHandle | None:
        """The last save, if this one would repeat it; None if this one is to be made. Collective.

        Raises:
            AlreadyCommitted: The last save has this name and these counters, and the state has changed since.
            StoreReplaced, FormatError: The last save has committed, and its decision is gone, or damaged.
            UnsupportedValue, SaveError: The state cannot be read, on some rank.
            TxStoreError: An earlier save failed.
        """
        kept = self._kept
        if kept is None or kept.request.handle.checkpoint != checkpoint:
            return None  # the same on all ranks, since all of them take the same saves
        self._ledger.meet(checkpoint)
        on_its_way = self._ledger.holds(kept.request)
        if not on_its_way and kept.request.error is not None:
            self._kept = None
            return None
        phase = "comparison with the last save"
        found, error = typed(lambda: self._changed(kept), phase, self._exchange.rank, SaveError)
        outcomes = self._exchange.gather(phase, (error, found))
        raise_first(one for one, _ in outcomes)
        changed = {rank: names for rank, (_, names) in enumerate(outcomes) if names is not None}
        if len(changed) < len(outcomes):
            return None  # a counter has moved: it is another recovery point
        _refuse(kept.request.handle, changed, on_its_way=on_its_way)
        if not on_its_way:
            self._exchange.decide("the last save", lambda: self._still_there(kept.request.handle.committed.result()))
        log.info("%s is not saved again: nothing has changed since", checkpoint)
        return kept.request.handle

    def _changed(self, kept: _Kept) -> list[str] | None:
        """Pieces that differ from the last save; None if a counter does. On one rank, whatever the others find."""
        rank, world_size = self._exchange.rank, self._exchange.world_size
        now = self._state.capture(rank, world_size)
        if now.progress != kept.request.description.progress:
            return None
        shared = now.shared_digests
        names = {name for name in shared.keys() | kept.digests if shared.get(name) != kept.digests.get(name)}
        names |= _differing(now.state, kept.request.snapshot.state_dict, own_key(rank))
        if now.progress.micro_step == 0:
            names -= {"gradients"}  # they were spent: a loop that clears them after its save changes nothing
        if "history" in names:
            names -= {"history", SHARED}  # a loop may save, and then record; a digest covers all else in that blob
        # What is noted of the state, for the proof, follows from the state.
        return sorted(names & (self._state.pieces.keys() - {"proof"}) or names)

    def _still_there(self, decision: Decision) -> None:
        def look() -> None:
            read_decision(self._store, decision.checkpoint, decision.slot)
            known = KnownStore()
            known.see(decision=decision)
            known.check(self._store)

        within(self._limit_s, self._store, "the look for the last save", look)


def _refuse(handle: SaveHandle, changed: Mapping[int, list[str]], *, on_its_way: bool) -> None:
    first = next((rank for rank, names in changed.items() if names), None)
    if first is None:
        return
    names = sorted({name for each in changed.values() for name in each})
    raise AlreadyCommitted(
        f"{handle.checkpoint} {'is on its way' if on_its_way else 'is committed'}: this run saved it, and since then "
        f"{', '.join(names)} changed, while progress.global_step is still {handle.step}",
        key=handle.checkpoint,
        rank=first,
        next_step=UNMOVED,
    )


def _differing(now: Mapping[str, Any], copy: Mapping[str, Any], own: str) -> set[str]:
    """The pieces whose tensors differ, bit for bit; a tensor that cannot be compared counts as one that does."""
    keys = {key for key in now.keys() | copy.keys() if not (key in now and key in copy and _same(now[key], copy[key]))}
    names = {_piece_of(key) for key in keys}
    if own in keys:
        mine, theirs = unpack(own, now)["pieces"], unpack(own, copy)["pieces"]
        found = {name for name in mine if name not in theirs or flatten(mine[name])[0] != flatten(theirs[name])[0]}
        names = names - {own} | (found or {own})
    return names


def _piece_of(key: str) -> str:
    lifted = _LIFTED.match(key)
    if lifted:
        return lifted[1]
    return "model" if key.startswith("buffers.") else key if key.startswith("python.") else key.partition(".")[0]


def _same(live: torch.Tensor, copy: torch.Tensor) -> bool:
    ours, theirs = lay_out({"": live}), lay_out({"": copy})
    return _same_leaf(ours.leaves[0][2], theirs.leaves[0][2])


def _same_leaf(ours: Leaf, theirs: Leaf) -> bool:
    if isinstance(ours, Plain) and isinstance(theirs, Plain):
        return ours.requires_grad == theirs.requires_grad and _same_bytes(ours.source, theirs.source)
    if isinstance(ours, Wrapped) and isinstance(theirs, Wrapped):
        return (
            type(ours.wrapper) is type(theirs.wrapper)
            and ours.inner.keys() == theirs.inner.keys()
            and (not isinstance(ours.wrapper, DTensor) or ours.wrapper.placements == theirs.wrapper.placements)
            and all(_same_leaf(part, theirs.inner[name]) for name, part in ours.inner.items())
        )
    return False


@torch.no_grad()
def _same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit: a NaN is equal to itself, and zero is not equal to minus zero."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(_bytes(ours), _bytes(theirs))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    # Not reshape: a tensor of one element is contiguous whatever its stride says, and would keep it.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
