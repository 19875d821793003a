"""What `TrainState` hands out: a captured state, what a resume has restored, and what it found different."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txstore import manifest
from txstore.compat.differences import Difference
from txstore.compat.layouts import OptimizerLayout
from txstore.errors import PlanMismatch
from txstore.train.model_state import PARAMETERS

_REPLICAS = "make replicas equal; mark what each rank has for itself with per_rank; record equal values"
_STAGES = (
    "a TrainState needs the same parameters on every rank, whole or sharded, and the same optimizers over them; "
    "save pipeline stages by dcp.save with a StorageWriter, or as the torchtitan guide does"
)


@dataclass(frozen=True, slots=True)
class Captured:
    """The training state of one rank at one instant.

    Attributes:
        state: What to hand to ``dcp.save``. Tensors are references: copy them, or save, before training goes on.
            All other state has been copied.
        progress: For the manifest.
        parts: Names of the pieces inside.
        shared_digests: For each piece, SHA-256 of what this rank takes to be equal on all ranks. Rank 0's is saved,
            so compare the digests before a save.
    """

    state: dict[str, Any]
    progress: manifest.Progress
    parts: tuple[str, ...]
    shared_digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Applied:
    """What a resume has restored.

    Attributes:
        progress: Where training stands now.
        restored: For each piece, names and counts.
        saved_world_size: How many ranks saved.
    """

    progress: manifest.Progress
    restored: Mapping[str, Mapping[str, Any]]
    saved_world_size: int


@dataclass(frozen=True, slots=True)
class Compared:
    """What the Python state of a checkpoint shows before a tensor of its model is loaded.

    Attributes:
        differences: What the pieces of state find different.
        saved_layouts: Of the checkpoint's optimizers; None if they are left fresh.
        today_layouts: Of today's optimizers.
    """

    differences: list[Difference]
    saved_layouts: list[OptimizerLayout] | None
    today_layouts: list[OptimizerLayout] | None


def refuse_unequal(digests: Sequence[Mapping[str, str]]) -> None:
    """What is saved once for all ranks must be equal on all ranks (failure case E1)."""
    for rank, theirs in enumerate(digests):
        differing = sorted(name for name in digests[0].keys() | theirs if digests[0].get(name) != theirs.get(name))
        if differing:
            raise PlanMismatch(
                f"what is saved once for all ranks differs between rank 0 and rank {rank}: {', '.join(differing)}",
                key=differing[0],
                rank=rank,
                next_step=_STAGES if PARAMETERS in differing else _REPLICAS,
            )
