"""The facts that a resume is validated by: captured with the state, compared with the live objects after the restore.

They are read from the objects themselves on both sides: a piece that was left out, or restored into the wrong
object, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from txstore.train.history import History
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets
from txstore.train.progress import TrainProgress
from txstore.train.proof import Check


class Facts:
    """Reads what a resume is validated by from live objects.

    Args:
        progress: The counters.
        optimizers: All optimizers.
        scalers: The GradScaler, if there is one.
        data: Data loaders and samplers by name.
    """

    def __init__(
        self,
        progress: TrainProgress,
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[Any],
        data: Mapping[str, Any],
    ) -> None:
        self._progress = progress
        self._optimizers = optimizers
        self._scalers = scalers
        self._data = data

    def shared(self) -> dict[str, Any]:
        """Facts that are equal on all ranks."""
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        return {
            "global step": self._progress.global_step,
            "consumed samples": self._progress.consumed_samples,
            "micro step": self._progress.micro_step,
            "learning rates": [[float(group["lr"]) for group in one if "lr" in group] for one in groups],
            "param groups": [len(one) for one in groups],
            "loss scale": [float(scaler.get_scale()) for scaler in self._scalers],
        }

    def own(self) -> dict[str, Any]:
        """Facts of this rank."""
        return {
            "moment tensors": [
                sum(isinstance(value, torch.Tensor) for state in optimizer.state.values() for value in state.values())
                for optimizer in self._optimizers
            ],
            "next batch": {name: _next_batch(item) for name, item in self._data.items()},
        }


def _next_batch(item: Any) -> str | None:
    """The id of the batch that comes next, from data that can tell: it has a method ``next_batch_id``."""
    tell: Callable[[], object] | None = getattr(item, "next_batch_id", None)
    return None if tell is None else str(tell())


class ProofPiece:
    """The piece of state that holds the facts and the history. Restored last, when everything else is in place."""

    def __init__(self, facts: Facts, history: History) -> None:
        self._facts = facts
        self._history = history
        self._saved: tuple[dict[str, Any], dict[str, Any] | None] | None = None

    def capture(self, place: Place) -> PieceState:  # noqa: ARG002 - the signature of a piece
        """The facts now, and the window of records."""
        return PieceState(
            shared={"facts": self._facts.shared(), "history": self._history.state_dict()}, own=self._facts.own()
        )

    def targets(self, saved: SavedKeys, place: Place) -> Targets:  # noqa: ARG002 - the signature of a piece
        """None: facts are plain data."""
        return Targets()

    def problems(self, loaded: Loaded) -> list[str]:
        """A history that is none."""
        try:
            History().load_state_dict(loaded.shared["history"])
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it
            return [f"the saved history is malformed: {error}"]
        return []

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """The history; the facts are kept for `checks`."""
        self._history.load_state_dict(loaded.shared["history"])
        self._saved = (loaded.shared["facts"], loaded.own if loaded.same_world else None)
        return {"records": len(self._history)}

    @property
    def expected_batch(self) -> str | None:
        """The id of the first batch after the resume, if this rank's data could tell it at the save."""
        own = self._saved[1] if self._saved else None
        known = [batch for batch in (own or {}).get("next batch", {}).values() if batch is not None]
        return known[0] if len(known) == 1 else None

    def checks(self, fresh: Collection[str] = ()) -> list[Check]:
        """Compare the saved facts with those of the live objects; facts of pieces that were left fresh are unknown."""
        if self._saved is None:
            return [Check("facts", ok=None, detail="nothing was restored")]
        shared, own = self._saved
        found = [*_compare(shared, self._facts.shared())]
        if own is None:
            found.append(Check("facts of this rank", ok=None, detail="another number of ranks saved"))
        else:
            found += _compare(own, self._facts.own())
        skipped = {fact for fact, piece in _FACTS_OF.items() if piece in fresh}
        return [Check(check.name, ok=None, detail="left fresh") if check.name in skipped else check for check in found]


_FACTS_OF = {
    "learning rates": "optimizer",
    "param groups": "optimizer",
    "moment tensors": "optimizer",
    "loss scale": "scaler",
    "next batch": "data",
}
"""The piece of state that each fact is about; the others are about what is always restored."""


def _told(value: list[Any] | dict[str, Any]) -> bool:
    return any(one is not None for one in (value.values() if isinstance(value, dict) else value))


def _compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Check]:
    checks = []
    for name in sorted(saved.keys() | now.keys()):
        was, value = saved.get(name), now.get(name)
        same = name in saved and name in now and was == value
        if same and isinstance(value, list | dict) and not _told(value):
            if value:
                checks.append(Check(name, ok=None, detail="this data cannot tell"))
            continue  # no scaler, no data: nothing to compare is nothing that holds
        checks.append(Check(name, ok=same, detail=f"{value}" if same else f"{value}, {was} was saved"))
    return checks
