"""What `TrainState` asks of each piece of training state, and what it hands to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from txstore.compat.differences import Difference
from txstore.compat.load_plan import LoadPlan

OnWorldSizeChange = Literal["error", "reseed"]

NO_PLAN = LoadPlan()

FRESHABLE = frozenset({"optimizer", "scheduler", "scaler", "gradients", "extras", "data", "rng", "progress"})
"""Pieces of state that a resume may leave as they are: without a model it would be no resume.

``progress`` is the counters, and the window of recorded steps, which is told by them.
"""

LABELS = {
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "scaler": "scaler",
    "extra": "extras",
    "data": "data",
    "rng": "rng",
}
"""What one object of a piece is called, as in ``extra:ema``, by the name of its piece: it may be left fresh alone.

An optimizer is called by its place among ``optimizers=``, as in ``optimizer:1``.
"""


TRAINED = "trained"
"""What ``accept=`` calls parameters that are frozen where they were trained, or the other way round."""

TIED = "tied"
"""What ``accept=`` calls two names of one tensor where there were two tensors, or the other way round."""


def is_freshable(name: str) -> bool:
    """Whether a resume may leave this as it is: a piece, or one object of a piece, such as ``extra:ema``."""
    label, colon, one = name.partition(":")
    if label == "optimizer" and colon:
        return one.isdecimal()
    return label in LABELS and bool(one) if colon else name in FRESHABLE


def hint(piece: str) -> str:
    """How to begin a piece anew, in brackets; "" for one that cannot be."""
    return f" ({anew(piece)})" if is_freshable(piece) else ""


def fresh_of(fresh: Collection[str], piece: str) -> frozenset[str]:
    """The objects of a piece that are left fresh one by one."""
    named = (name.partition(":") for name in fresh)
    return frozenset(one for label, _, one in named if one and LABELS.get(label) == piece)


def keys_of(fresh: Collection[str]) -> tuple[str, ...]:
    """How the keys of what is left fresh begin, of a piece and of an object that has keys of its own."""
    return tuple(f"{name.replace(':', '.')}." for name in fresh)


def anew(*names: str) -> str:
    """The next step for state that only one side has."""
    return f"if that is meant: fresh={{{', '.join(map(repr, names))}}}"


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, and how many there are."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class PieceState:
    """One piece of state at one instant.

    Attributes:
        shared: Plain state that is equal on all ranks, or None if there is none.
        replicated: More of `shared`, of which the ranks' difference is told under these names and not the piece's.
        own: Plain state of this rank, or None.
        tensors: Tensors under keys of the checkpoint: references, for the snapshot to copy.
    """

    shared: Any = None
    replicated: Mapping[str, Any] = field(default_factory=dict)
    own: Any = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedKeys:
    """What the metadata tells before a byte is loaded.

    Attributes:
        tensors: Shape, dtype and chunks of every saved tensor, by key.
        world_size: How many ranks saved.
        plan: What migrations do.
    """

    tensors: Mapping[str, TensorStorageMetadata]
    world_size: int
    plan: LoadPlan = NO_PLAN


@dataclass(frozen=True, slots=True)
class Targets:
    """What a piece asks of a load.

    Attributes:
        tensors: Where to load to, by key: live tensors, or new ones.
        others: Saved keys that are of other ranks.
        problems: What does not fit, a sentence each.
    """

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    others: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded for one piece.

    Attributes:
        shared: As captured.
        own: As captured on this rank; after a change of the world size, as captured on rank 0.
        tensors: All loaded tensors, by key.
        is_complete: Whether all tensors are loaded, and not only those of the Python state.
        place: This rank.
        saved_world_size: How many ranks saved.
        on_world_size_change: The caller's choice for what is each rank's own.
        fresh: Objects of the piece, by name, that are not restored, on purpose: today's stay as they are, and what
            only the checkpoint has is left there.
        plan: What migrations do.
        begun: The optimizers, by place, that are restored while their schedulers begin anew.
    """

    shared: Any
    own: Any
    tensors: Mapping[str, torch.Tensor]
    is_complete: bool
    place: Place
    saved_world_size: int
    on_world_size_change: OnWorldSizeChange
    fresh: frozenset[str] = frozenset()
    plan: LoadPlan = NO_PLAN
    begun: Collection[int] = ()

    @property
    def same_world(self) -> bool:
        """Whether as many ranks load as saved."""
        return self.place.world_size == self.saved_world_size


class Piece(Protocol):
    """One piece of training state.

    A piece is looked at in this order: `differences` and `problems` when the Python state is loaded, `targets`
    before the load of all tensors, `problems` again after it, `restore` when no piece of any kind has a problem.
    `restore` returns what it restored, for the report.
    """

    def capture(self, place: Place) -> PieceState:
        """The state now: plain values by value, tensors by reference."""

    def targets(self, saved: SavedKeys, place: Place) -> Targets:
        """Where the piece's own tensors are to be loaded to."""

    def problems(self, loaded: Loaded) -> list[str]:
        """What does not fit; changes nothing."""

    def differences(self, loaded: Loaded) -> list[Difference]:
        """What differs, and may be meant: for the judgement. Changes nothing, and looks at no tensor."""

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Put the state back; returns what was restored, in names and counts."""
