"""The facts that a resume is validated by: captured with the state, compared with the live objects after the restore.

They are read from the objects themselves on both sides: a piece that was left out, or restored into the wrong
object, shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from txstore.compat.differences import Difference
from txstore.train.history import History
from txstore.train.names import Models
from txstore.train.piece import FRESHABLE, TRAINED, Loaded, PieceState, Place, SavedKeys, Targets, fresh_of
from txstore.train.progress import TrainProgress
from txstore.train.proof import Check, Start
from txstore.train.python_state import flatten
from txstore.train.sample import layout, sample
from txstore.train.stateful import scheduler_state
from txstore.train.temporary import TemporaryBuffers


class Facts:
    """Reads what a resume is validated by from live objects.

    Args:
        models: The models.
        progress: The counters.
        optimizers: All optimizers.
        schedulers: Learning rate schedulers.
        scalers: The GradScaler, if there is one.
        data: Data loaders and samplers by name.
        temporary: Buffers that no state dict holds.
        streams: Reads the random streams; None if they are not saved.
    """

    def __init__(
        self,
        models: Models,
        progress: TrainProgress,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        schedulers: Sequence[Any] = (),
        scalers: Sequence[Any] = (),
        data: Mapping[str, Any] | None = None,
        temporary: TemporaryBuffers | None = None,
        streams: Callable[[], Any] | None = None,
    ) -> None:
        self._models = models
        self._progress = progress
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._scalers = scalers
        self._data = data or {}
        self._temporary = temporary
        self._streams = streams

    @property
    def step(self) -> int:
        """The global step."""
        return self._progress.global_step

    def shared(self) -> dict[str, Any]:
        """Facts that are equal on all ranks."""
        groups = [optimizer.param_groups for optimizer in self._optimizers]
        return {
            "global step": self._progress.global_step,
            "epoch": self._progress.epoch,
            "consumed samples": self._progress.consumed_samples,
            "micro step": self._progress.micro_step,
            "learning rates": [[float(group["lr"]) for group in one if "lr" in group] for one in groups],
            "param groups": [len(one) for one in groups],
            "settings of param groups": [[_settings(group) for group in one] for one in groups],
            "schedulers": [_digest(scheduler_state(scheduler)) for scheduler in self._schedulers],
            "loss scale": [float(scaler.get_scale()) for scaler in self._scalers],
            "scalers": [_digest(scaler.state_dict()) for scaler in self._scalers],
        }

    def own(self) -> dict[str, Any]:
        """Facts of this rank."""
        parameters = list(self._models.parameters().values())
        tensors = [*_sharded(parameters), *self._models.saved_buffers()]
        moments = [list(_tensors(optimizer.state)) for optimizer in self._optimizers]
        gradients = [one.grad for one in parameters if one.grad is not None] if self._progress.micro_step else []
        return {
            "layout": layout(tensors),
            "trained parameters": sum(parameter.requires_grad for parameter in parameters),
            "shards and buffers": sample(tensors),
            "buffers outside state dicts": self._changed_buffers(),
            "modules in evaluation mode": self._models.modes(),
            "moment tensors": [len(one) for one in moments],
            "shards of moments": [sample(_sharded(one)) for one in moments],
            "gradients": [len(gradients), sample(gradients)],
            "random streams": None if self._streams is None else _digest(self._streams()),
            "next batch": {name: _next_batch(item) for name, item in self._data.items()},
        }

    def epoch_batches(self) -> int | None:
        """How many batches the shortest data has, by its length; None if none tells."""
        lengths = [batches for item in self._data.values() if (batches := _length(item)) is not None]
        return min(lengths, default=None)

    def _changed_buffers(self) -> dict[str, str]:
        changed = self._temporary.changed() if self._temporary else {}
        return {fqn: "none" if tensor is None else sample([tensor]) for fqn, tensor in changed.items()}

    def replicated(self) -> dict[str, Any]:
        """Samples of what every rank has whole. DCP saves one rank's of each: replicas that differ would be mixed."""
        parameters = _whole(self._models.parameters().values())
        moments = [_whole(_tensors(optimizer.state)) for optimizer in self._optimizers]
        return {
            "replicated parameters": layout(parameters),
            "parameters": sample(parameters),
            "moments": [sample(one) for one in moments],
        }


def _sharded(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if isinstance(tensor, DTensor)]


def _whole(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if not isinstance(tensor, DTensor)]


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: _digest(value) for name, value in group.items() if name != "params"}


def _tensors(state: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    for key, values in state.items():
        if isinstance(key, torch.Tensor):
            yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _digest(value: Any) -> str:
    data, lifted = flatten(value)
    return hashlib.sha256(data).hexdigest()[:16] + (f" {sample(lifted.values())}" if lifted else "")


def _next_batch(item: Any) -> str | None:
    """The id of the batch that comes next, from data that can tell: it has a method ``next_batch_id``."""
    tell: Callable[[], object] | None = getattr(item, "next_batch_id", None)
    return None if tell is None else str(tell())


def _length(item: Any) -> int | None:
    try:
        return len(item)
    except Exception:  # noqa: BLE001 - data that iterates has none, and says so in any way
        return None


class ProofPiece:
    """The piece of state that holds the facts and the history. Restored last, when everything else is in place."""

    def __init__(self, facts: Facts, history: History) -> None:
        self._facts = facts
        self._history = history
        self._saved: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        self._saved_history = ""

    def capture(self, place: Place) -> PieceState:  # noqa: ARG002 - the signature of a piece
        """The facts now, and the window of records."""
        return PieceState(
            shared={"facts": self._facts.shared()},
            replicated={**self._facts.replicated(), "history": self._history.state_dict()},
            own=self._facts.own(),
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

    def differences(self, loaded: Loaded) -> list[Difference]:  # noqa: ARG002 - the signature of a piece
        """None that may be meant."""
        return []

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """The history; the facts are kept for `checks`."""
        self._saved_history = _digest(loaded.shared["history"])
        self._history.load_state_dict(loaded.shared["history"])
        self._saved = (loaded.shared, loaded.own if loaded.same_world else None)
        return {"records": len(self._history)}

    @property
    def start(self) -> Start:
        """Where training goes on after the restore, by what this rank's data could tell at the save."""
        own = self._saved[1] if self._saved else None
        known = [batch for batch in (own or {}).get("next batch", {}).values() if batch is not None]
        # As the counters stand: they are the saved ones, or begin anew.
        return Start(self._facts.step, known[0] if len(known) == 1 else None, self._facts.epoch_batches())

    def checks(self, fresh: Collection[str] = ()) -> list[Check]:
        """Compare the saved facts with those of the live objects; facts of pieces in `fresh` are unknown."""
        if self._saved is None:
            return [Check("facts", ok=None, detail="nothing was restored")]
        saved, own = self._saved
        found = _compare(saved["facts"], self._facts.shared())
        now = self._facts.replicated()
        found += _of_this_layout(_compare({name: saved[name] for name in now}, now))
        is_whole = _digest(self._history.state_dict()) == self._saved_history
        found.append(Check("history", ok=is_whole, detail=f"{len(self._history)} records"))
        if own is not None:
            found += _of_this_layout(_compare(own, self._facts.own()))
        else:
            found.append(Check("facts of this rank", ok=None, detail="another number of ranks saved"))
        skipped = {
            fact
            for fact, pieces in _FACTS_OF.items()
            if any(piece in fresh or fresh_of(fresh, piece) for piece in pieces.split())
        }
        return [
            Check(check.name, ok=None, detail="left fresh, or migrated") if check.name in skipped else check
            for check in found
        ]


_FACTS_OF = {
    "global step": "progress",
    "epoch": "progress",
    "consumed samples": "progress",
    "history": "progress",
    "parameters": "model",
    "trained parameters": f"model optimizer migration {TRAINED}",
    "shards and buffers": "model",
    "buffers outside state dicts": "model",
    "modules in evaluation mode": "model",
    "learning rates": "optimizer scheduler",
    "param groups": "optimizer",
    "settings of param groups": "optimizer scheduler",
    "moment tensors": "optimizer moments",
    "moments": "optimizer moments",
    "shards of moments": "optimizer moments",
    "schedulers": "scheduler",
    "loss scale": "scaler",
    "scalers": "scaler",
    "gradients": "gradients",
    "micro step": "gradients progress",
    "random streams": "rng",
    "next batch": "data",
}
"""The pieces of state that each fact is about, by a space; the others are about what is always restored. ``moments``
are those that a migration leaves behind or begins anew, ``migration`` is any: one that ties weights changes no key."""


def way_on(failed: Iterable[str]) -> str:
    """What to do when facts do not hold, by their names."""
    pieces = {
        piece for name in failed for piece in _FACTS_OF.get(name, "").split() if piece in FRESHABLE - {"progress"}
    }
    fresh = "{" + ", ".join(map(repr, sorted(pieces))) + "}"
    step = "do not train, and end this process: the state is not what was saved. Build it as it was when it was saved"
    return f"{step}, or begin this anew, on purpose: fresh={fresh}" if pieces else step


_OF_A_LAYOUT = {
    "layout",
    "replicated parameters",
    "parameters",
    "moments",
    "shards and buffers",
    "buffers outside state dicts",
    "moment tensors",
    "shards of moments",
    "gradients",
}


def _of_this_layout(checks: list[Check]) -> list[Check]:
    """Where this rank has other parts of the tensors than it had, its samples say nothing."""
    if all(check.ok for check in checks if check.name in {"layout", "replicated parameters"}):
        return checks
    unknown = "this rank has other parts of the tensors than it had"
    return [Check(check.name, ok=None, detail=unknown) if check.name in _OF_A_LAYOUT else check for check in checks]


def _told(value: list[Any] | dict[str, Any]) -> bool:
    return any(one is not None for one in (value.values() if isinstance(value, dict) else value))


def _compare(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Check]:
    checks = []
    for name in sorted(saved.keys() | now.keys()):
        was, value = saved.get(name), now.get(name)
        same = name in saved and name in now and _holds(was, value)
        if same and isinstance(value, list | dict) and not _told(value):
            if value:
                checks.append(Check(name, ok=None, detail="this data cannot tell"))
            continue  # no scaler, no data: nothing to compare is nothing that holds
        checks.append(Check(name, ok=same, detail=f"{value}" if same else f"{value}, {was} was saved"))
    return checks


def _holds(saved: Any, now: Any) -> bool:
    """Whether a fact still holds. A setting that a later torch has added was not saved, and contradicts nothing."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        return all(name in now and _holds(value, now[name]) for name, value in saved.items())
    if isinstance(saved, list) and isinstance(now, list):
        return len(saved) == len(now) and all(_holds(*pair) for pair in zip(saved, now, strict=True))
    return bool(saved == now)
