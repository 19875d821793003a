"""Model parameters and buffers: saved by reference, loaded into the live model.

Parameters are equal on all ranks or sharded, so DCP keeps one copy of each. Plain buffers may differ by rank
(running statistics under FSDP2, token counts), and DCP would keep an arbitrary rank's: rank 0's is saved as
``model.<fqn>``, those of the others as ``buffers.rank-<r>.<fqn>``. Buffers outside state dicts are in `temporary`.

Modes (`train`, `eval`) are saved while a model trains, and restored: a module that was frozen in the middle of a run
stays so. So it is with parameters that training has frozen since the `TrainState` was made, or thawed; those that the
code makes in another way are refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from txstore.compat.differences import Difference, accept_step
from txstore.dcp.tensors import dtype_name
from txstore.errors import UnsupportedValue
from txstore.train.names import Models
from txstore.train.piece import TIED, TRAINED, Loaded, PieceState, Place, SavedKeys, Targets
from txstore.train.shared_memory import SharedMemory, tied
from txstore.train.temporary import LATE, PREFIX, SavedBuffers, TemporaryBuffers, others

log = logging.getLogger(__name__)

_OF_A_RANK = re.compile(r"buffers\.rank-([0-9]+)\.")
_EXTRA = "_extra_state"

PARAMETERS = "names of parameters"
"""Under which it is told that the ranks hold different parts of a model, as pipeline stages do."""

_SHOWN = 5

_LAZY = "has no shape yet, and no resume can load into it"
_LAZY_STEP = "give lazy modules their shapes by one forward pass before the TrainState is made"


class ModelPiece:
    """The piece of state that holds all models.

    Attributes:
        temporary: Their buffers that no state dict holds.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self.temporary = TemporaryBuffers(models)
        lazy = [fqn for fqn, value in models.state_dict().items() if _has_no_shape(value)]
        if lazy:
            log.warning("%r %s: %s", lazy[0], _LAZY, _LAZY_STEP)
        self._made = {fqn: _kind(value) for fqn, value in models.state_dict().items()}  # shards are in their places now
        self._trained_as_made = self._trained()
        self._memory = SharedMemory(models)
        self._tied_as_made = tied(models)  # or a save is refused

    def capture(self, place: Place) -> PieceState:
        """References to all tensors; extra state of modules by value; which parameters are trained, and how.

        Raises:
            UnsupportedValue: The model saves other tensors than when the `TrainState` was made, or one is not exact, or
                some share memory that did not, or do not any more.
        """
        tensors, extra = self._saved(place)
        named = {_OF_A_RANK.sub("", key.removeprefix("model.")): tensor for key, tensor in tensors.items()}
        self._refuse_other_names({*named, *extra})
        self._refuse_other_kinds(named)
        self._memory.refuse_other(self.temporary.as_made)
        return PieceState(
            shared={
                "extra": extra,
                "trained": self._trained(),
                "moved": self._moved(),
                TIED: self._tied_as_made,
            },
            replicated={PARAMETERS: list(self._models.parameters())},
            own={**self.temporary.told(), "modes": self._models.modes()},
            tensors={**tensors, **self.temporary.keyed(place)},
        )

    def _refuse_other_names(self, now: set[str]) -> None:
        """Refuse now what the next start would refuse: it builds the model as this one was built."""
        late, gone = sorted(now - self._made.keys()), sorted(self._made.keys() - now)
        if late or gone:
            told = [f"{what} {names[:_SHOWN]}" for what, names in (("now also has", late), ("lacks", gone)) if names]
            raise UnsupportedValue(
                f"the model was built otherwise when the TrainState was made: its state dict {', and '.join(told)}",
                key=(late or gone)[0],
                next_step="make the model whole in __init__, or by one forward pass before the TrainState is made; "
                "a buffer that is only a cache may be persistent=False, and be made at any time",
            )

    def _refuse_other_kinds(self, now: Mapping[str, torch.Tensor]) -> None:
        """As above: a resume loads into tensors of the shapes and dtypes that the code makes."""
        for fqn, tensor in now.items():
            was, kind = self._made[fqn], _kind(tensor)
            if was and was != kind:
                raise UnsupportedValue(
                    f"{fqn!r} was {was} when the TrainState was made, and is {kind}: the next start could not load it",
                    key=fqn,
                    next_step="convert the model, and give it its shapes by __init__ or one forward pass, before the "
                    "TrainState is made; a buffer whose shape changes may be persistent=False, and is saved as it is",
                )

    def _saved(self, place: Place) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What the modules save themselves: tensors by key, and extra state."""
        tensors, extra = {}, {}
        buffers = self._models.buffer_names()
        for fqn, value in self._models.state_dict().items():
            if _has_no_shape(value):
                raise UnsupportedValue(f"{fqn!r} {_LAZY}", key=fqn, next_step=_LAZY_STEP)
            if not isinstance(value, torch.Tensor) or fqn.rpartition(".")[2] == _EXTRA:
                extra[fqn] = value
            else:
                tensors[self._key(fqn, value, place, buffers)] = value
        return tensors, extra

    def table(self) -> dict[str, torch.Tensor]:
        """The tensors of the models as rank 0 saves them, by key."""
        return self._saved(Place(0, 1))[0]

    def _key(self, fqn: str, value: torch.Tensor, place: Place, buffers: set[str]) -> str:
        if fqn in buffers and place.rank and not isinstance(value, DTensor):
            return f"buffers.rank-{place.rank}.{fqn}"
        return f"model.{fqn}"

    def _trained(self) -> dict[str, bool]:
        return {fqn: parameter.requires_grad for fqn, parameter in self._models.parameters().items()}

    def _moved(self) -> list[str]:
        """The parameters that training has frozen or thawed."""
        return sorted(fqn for fqn, trained in self._trained().items() if trained != self._trained_as_made.get(fqn))

    def _to_be_moved(self, loaded: Loaded) -> dict[str, bool]:
        """Those that it had, and that stand here as the code makes them, which is as it did."""
        trained, here = loaded.shared["trained"], self._trained()
        moved = [fqn for fqn in loaded.shared.get("moved", ()) if fqn in here]  # earlier checkpoints do not tell
        return {fqn: trained[fqn] for fqn in moved if here[fqn] != trained[fqn] != self._trained_as_made.get(fqn)}

    def targets(self, saved: SavedKeys, place: Place) -> Targets:
        """The live tensors. After a change of the world size every rank takes rank 0's buffers."""
        as_saved = place if place.world_size == saved.world_size else Place(0, saved.world_size)
        (tensors, _), problems = self._saved(as_saved), []
        for key, live in tensors.items():
            found = saved.tensors.get(key)
            if found is None:
                problems.append(f"{key!r} was not saved")
            else:
                problems += fits(key, live, found)
        theirs = frozenset(key for key in saved.tensors if _OF_A_RANK.match(key)) - tensors.keys()
        tensors |= self.temporary.targets(saved, as_saved)
        left = self.temporary.left_behind(saved) if saved.plan.keys else frozenset()
        return Targets(tensors, theirs | others(saved, as_saved) | left, tuple(problems))

    def problems(self, loaded: Loaded) -> list[str]:
        """Other modules have extra state."""
        saved, extra = loaded.shared, self._saved(loaded.place)[1]
        problems = self.temporary.problems(self._buffers(loaded))
        differing = sorted(
            name for name in saved["extra"].keys() ^ extra.keys() if not loaded.plan.covers(f"model.{name}")
        )
        if differing:
            problems.append(
                f"other modules have extra state than when it was saved: {differing[:_SHOWN]}: build the model of "
                "the same classes, with the same settings, or cover them by the keys of a migration"
            )
        return problems

    def differences(self, loaded: Loaded) -> list[Difference]:
        """Parameters that are trained on one side only; buffers made otherwise, or left behind; other modes."""
        found = [*self._frozen(loaded), *self._tied(loaded), *self.temporary.differences(self._buffers(loaded))]
        now = self._models.modes()
        for model in sorted(now.keys() | loaded.own["modes"].keys()):
            was, value = (_mode(modes.get(model)) for modes in (loaded.own["modes"], now))
            if was != value:
                found.append(Difference("state", f"{model or 'model'} mode", was, value, verdict="noted"))
        for fqn, is_trained in sorted(self._to_be_moved(loaded).items()):
            was, value = ("trained", "frozen") if is_trained else ("frozen", "trained")
            found.append(Difference("state", f"parameter {fqn}", was, value, verdict="noted"))
        if not loaded.same_world and self._has_plain_buffers():
            ranks = f"one for each of {loaded.saved_world_size} ranks"
            found.append(Difference("state", "model buffers", ranks, "rank 0's, on every rank", verdict="noted"))
        return found

    def _frozen(self, loaded: Loaded) -> list[Difference]:
        trained, saved, found = self._trained(), loaded.shared["trained"], []
        both = (saved.keys() & trained.keys()) - self._to_be_moved(loaded).keys()
        for was in (True, False):
            # Parameters that only one side has are judged by their keys, and may be a migration's.
            names = sorted(fqn for fqn in both if trained[fqn] != saved[fqn] == was)
            if names:
                shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
                sides = ("trained", "frozen") if was else ("frozen", "trained")
                step = f"call requires_grad_({was}) on them before resume(); {accept_step(TRAINED)}, at every start"
                what = f"parameters {shown}"
                found.append(Difference("state", what, *sides, change_class=3, accept_as=TRAINED, next_step=step))
        return found

    def _tied(self, loaded: Loaded) -> list[Difference]:
        """Two names of one tensor that were two tensors, of which a load would leave one; or the other way round."""
        now, plan = self._tied_as_made, loaded.plan
        saved, here = loaded.shared.get(TIED, now), self._models.tensors()  # earlier checkpoints do not tell
        found = []
        for name in sorted(saved.keys() | now.keys()):
            one, other = saved.get(name), now.get(name)
            names = {name} | {one, other} - {None}
            covered = any(plan.covers(f"model.{each}") or each in plan.parameters for each in names)
            if one != other and names <= here.keys() and not covered:
                was, value = (f"the tensor of {first}" if first else "a tensor of its own" for first in (one, other))
                step = f"share it in __init__, or not, as when it was saved; {accept_step(TIED)}"
                found.append(Difference("parameter", name, was, value, change_class=3, accept_as=TIED, next_step=step))
        return found

    def _buffers(self, loaded: Loaded) -> SavedBuffers:
        """What was told of buffers outside state dicts, without those that went with a migration."""
        saved = SavedBuffers.of(loaded.own)
        return self.temporary.without(saved, loaded.plan) if loaded.plan.keys else saved

    def _has_plain_buffers(self) -> bool:
        return any(not isinstance(buffer, DTensor) for buffer in self._models.saved_buffers())

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Tell FSDP2 and others about the tensors that were loaded in place, and give modules their extra state."""
        here = self._saved(loaded.place)[1] if loaded.plan.keys else loaded.shared["extra"]
        for fqn, value in loaded.shared["extra"].items():
            if fqn not in here:
                continue  # of a module that went with a migration
            self._models.module_of(fqn).set_extra_state(value)
        as_saved = loaded.place if loaded.same_world else Place(0, loaded.saved_world_size)
        temporary = self.temporary.restore(loaded.tensors, self._buffers(loaded), as_saved)
        modes = {model: paths for model, paths in loaded.own["modes"].items() if model in self._models.modules}
        self._models.set_modes(modes)
        parameters = self._models.parameters()
        for fqn, is_trained in self._to_be_moved(loaded).items():
            parameters[fqn].requires_grad_(is_trained)
        count = sum(key.startswith(("model.", "buffers.", PREFIX, LATE)) for key in loaded.tensors)
        return {
            "tensors": count,
            "extra_states": len(loaded.shared["extra"]),
            "temporary_buffers": temporary,
            "modes_of_models": len(modes),
        }


def _mode(evaluated: Collection[str] | None) -> str:
    """As people say it; None is a model that is evaluated at the moment."""
    if evaluated is None:
        return "evaluation, so modes are left as they are"
    frozen = ", ".join(sorted(evaluated)[:_SHOWN]) + (", ..." if len(evaluated) > _SHOWN else "")
    return f"training, but evaluation for {frozen}" if frozen else "training"


def _has_no_shape(value: object) -> bool:
    return isinstance(value, torch.Tensor) and is_lazy(value)


def _kind(value: object) -> str:
    """Dtype and shape of a tensor; "" for what is none, or has no shape yet."""
    if not isinstance(value, torch.Tensor) or _has_no_shape(value):
        return ""
    return f"{dtype_name(value.dtype)} {list(value.shape)}"


def fits(key: str, target: torch.Tensor, saved: TensorStorageMetadata) -> list[str]:
    """How a target differs from what was saved."""
    problems = []
    if tuple(target.shape) != tuple(saved.size):
        problems.append(f"{key!r} has shape {tuple(target.shape)}, {tuple(saved.size)} was saved")
    if target.dtype != saved.properties.dtype:
        problems.append(f"{key!r} is {target.dtype}, {saved.properties.dtype} was saved")
    return problems
