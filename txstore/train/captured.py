"""What `TrainState` hands out: a captured state, what a resume has restored, and what it found different."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from txstore import manifest
from txstore.compat.differences import Difference
from txstore.compat.layouts import OptimizerLayout
from txstore.errors import PlanMismatch, StateMismatch, UnsupportedValue
from txstore.train.history import StepRecord, refuse_unequal_records
from txstore.train.model_state import PARAMETERS
from txstore.train.piece import PieceState

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
        with_moments: By key, the parameters of which the checkpoint's optimizers have state.
    """

    differences: list[Difference] = field(default_factory=list)
    saved_layouts: list[OptimizerLayout] | None = None
    today_layouts: list[OptimizerLayout] | None = None
    with_moments: Mapping[str, str] = field(default_factory=dict)


_SHOWN = 10


def shared_of(piece: PieceState) -> Any:
    """What is saved once for all ranks."""
    return {**piece.shared, **piece.replicated} if piece.replicated else piece.shared


def add_tensors(state: dict[str, Any], more: Mapping[str, torch.Tensor], name: str) -> None:
    """Add tensors to a state dict.

    Raises:
        UnsupportedValue: Two have one name.
    """
    for key, tensor in more.items():
        if key in state:
            raise UnsupportedValue(f"{key!r} names two tensors, the second in {name!r}", key=key)
        state[key] = tensor


def refuse_unfit(problems: Sequence[str]) -> None:
    """Do nothing if there are no problems.

    Raises:
        StateMismatch: Lists them.
    """
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatch(
            f"the checkpoint does not fit: {'; '.join(problems[:_SHOWN])}{more}",
            next_step="build the state as it was when it was saved; a piece may begin anew, on purpose, by fresh=",
        )


def refuse_unequal(digests: Sequence[Mapping[str, str]], records: Callable[[], Sequence[Sequence[StepRecord]]]) -> None:
    """What is saved once for all ranks must be equal on all ranks (failure case E1).

    Args:
        digests: Of every rank.
        records: Gathers the history of every rank; called on all, where nothing else differs.
    """
    for rank, theirs in enumerate(digests):
        differing = sorted(name for name in digests[0].keys() | theirs if digests[0].get(name) != theirs.get(name))
        if differing == ["history"]:
            refuse_unequal_records(records())
        if differing:
            raise PlanMismatch(
                f"what is saved once for all ranks differs between rank 0 and rank {rank}: {', '.join(differing)}",
                key=differing[0],
                rank=rank,
                next_step=_STAGES if PARAMETERS in differing else _REPLICAS,
            )


def unaccounted(metadata: Metadata, accounts: Sequence[frozenset[str]]) -> list[str]:
    """Saved keys that no rank accounts for: to load without them would leave state behind.

    Args:
        metadata: Of the checkpoint.
        accounts: `TrainState.expected_keys` of every rank.
    """
    return sorted(metadata.state_dict_metadata.keys() - frozenset().union(*accounts))
