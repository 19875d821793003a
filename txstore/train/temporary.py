"""Buffers that no state dict holds (``persistent=False``): those that training has changed are saved, others compared.

Such a buffer is mostly a table that the code computes and could compute again, often a large one. It is not saved as
long as it is what it was when the `TrainState` was made: a resume only asks whether today's code makes the same one.
One that has changed since is state like any other: a queue, counters, a cache that has grown. One that `forward` made
later is made again at a resume, and one that training deleted is deleted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from txstore.compat.differences import Difference, accept_step
from txstore.compat.load_plan import LoadPlan
from txstore.dcp.tensors import as_bytes, dtype_name, is_plain
from txstore.errors import ConfigError, StateMismatch, UnsupportedValue
from txstore.train.lifted import check_exact
from txstore.train.names import Models
from txstore.train.piece import Place, SavedKeys
from txstore.train.sample import sample

PREFIX = "temporary."
LATE = "late."
"""Of a buffer that the code had not made when the `TrainState` was made: the key tells it before a byte is loaded."""
_OF_A_RANK = re.compile(r"(?:temporary|late)\.rank-[0-9]+\.")
_OF_A_BUFFER = re.compile(r"(?:temporary|late)\.(?:rank-[0-9]+\.)?(.+)")
ACCEPT = "buffers"
"""What ``accept=`` calls all buffers that today's code makes in another way: there may be one in each layer."""

NONE = "none"
"""Recorded for a buffer that is None."""

_HASHED_BYTES = 1 << 20
"""Smaller ones are digested at every save, larger ones again when torch has seen a change."""


@dataclass(frozen=True, slots=True)
class SavedBuffers:
    """What a checkpoint tells of these buffers beside their tensors.

    Attributes:
        made: Digests of those that were as the code makes them.
        changed: Those that were saved; whether there is a tensor, or it was None.
        late: Those of them that the code had not made yet, and the kind of their device ("" without a tensor).
        gone: Those that the code had made, and training had deleted.
    """

    made: Mapping[str, str]
    changed: Mapping[str, bool]
    late: Mapping[str, str]
    gone: Collection[str]

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> SavedBuffers:
        """As `TemporaryBuffers.told` told it; earlier checkpoints know neither late nor deleted ones."""
        return cls(own["made"], own["changed"], own.get("late", {}), own.get("gone", ()))


class TemporaryBuffers:
    """The buffers of all models that no state dict holds.

    Args:
        models: Their models, as the code has made them.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[str, tuple[object, str]] = {}
        self._made = {fqn: self._digest(fqn, tensor) for fqn, tensor in self._tensors().items()}
        self._modules = models.module_names()
        self._changed: set[str] = set()

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        return {fqn: owner._buffers.get(name) for fqn, (owner, name) in self._models.temporary_buffers().items()}  # noqa: SLF001 - `None` among them

    def _digest(self, fqn: str, tensor: torch.Tensor | None) -> str:
        """What a buffer holds; "" if only its value could tell: a part of a sharded one, or one without data yet."""
        if tensor is None:
            return NONE
        if isinstance(tensor, DTensor) or tensor.device.type == "meta" or not is_plain(tensor):
            return ""
        is_large = tensor.nbytes > _HASHED_BYTES
        stamp = (id(tensor), tensor.data_ptr(), _version(tensor), sample([tensor])) if is_large else None
        known = self._known.get(fqn)
        if is_large and known is not None and known[0] == stamp:
            return known[1]
        check_exact(tensor, fqn)
        whole = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(as_bytes(whole)).hexdigest()[:16]
        text = f"{dtype_name(tensor.dtype)} {list(tensor.shape)} sha256:{digest}"
        if is_large:
            self._known[fqn] = stamp, text
        return text

    def as_made(self) -> dict[str, str]:
        """Digests of the buffers that are what the code has made."""
        found = {}
        for fqn, tensor in self._tensors().items():
            digest = self._digest(fqn, tensor)
            if fqn not in self._changed and digest and digest == self._made.get(fqn):
                found[fqn] = digest
        return found

    def changed(self) -> dict[str, torch.Tensor | None]:
        """The buffers that are not; None for one that has become None."""
        made = self.as_made()
        return {fqn: tensor for fqn, tensor in self._tensors().items() if fqn not in made}

    def moved(self) -> list[str]:
        """Names of those that are known not to be what the code has made; of sharded ones nothing is known."""
        return sorted(fqn for fqn in self.changed() if self._made.get(fqn) != "")

    def keyed(self, place: Place) -> dict[str, torch.Tensor]:
        """Changed buffers under the keys of this rank: they may differ by rank.

        Raises:
            UnsupportedValue: One cannot be saved exactly, or could not be made again.
        """
        found = {}
        for fqn, tensor in self.changed().items():
            is_late = fqn not in self._made
            if is_late:
                self._refuse_homeless(fqn, tensor)
            if tensor is not None:
                check_exact(tensor, fqn)
                rank = "" if isinstance(tensor, DTensor) else f"rank-{place.rank}."
                found[f"{LATE if is_late else PREFIX}{rank}{fqn}"] = tensor
        return found

    def told(self) -> dict[str, Any]:
        """What a checkpoint tells of them beside their tensors, for `SavedBuffers`."""
        tensors = self._tensors()
        late = tensors.keys() - self._made.keys()
        return {
            "made": self.as_made(),
            "changed": {fqn: tensor is not None for fqn, tensor in self.changed().items()},
            "late": {fqn: "" if one is None else one.device.type for fqn, one in tensors.items() if fqn in late},
            "gone": sorted(self._made.keys() - tensors.keys()),
        }

    def _refuse_homeless(self, fqn: str, tensor: torch.Tensor | None) -> None:
        """Refuse a late buffer that a resume could not make: today's error, and not that of the next start."""
        step = "make it in the module's __init__, so that it is there before the TrainState is made"
        if fqn.rpartition(".")[0] not in self._modules:
            why = "belongs to a module that was not there when the TrainState was made"
        elif isinstance(tensor, DTensor):
            why = "is sharded, and was not there when the TrainState was made"
        else:
            return
        raise UnsupportedValue(f"buffer {fqn!r} {why}: a resume could not make it", key=fqn, next_step=step)

    def targets(self, saved: SavedKeys, place: Place) -> dict[str, torch.Tensor]:
        """The live buffer for each saved one, or a new one of the saved shape; also for those that only a save made."""
        tensors = {}
        here = self._models.temporary_buffers()
        mine = f"{LATE}rank-{place.rank}."
        late = {key: key.removeprefix(mine) for key in saved.tensors if key.startswith(mine)}
        names = {key: fqn for fqn in here for key in (f"{PREFIX}{fqn}", f"{PREFIX}rank-{place.rank}.{fqn}")}
        for key, fqn in {**names, **late}.items():
            found = saved.tensors.get(key)
            owner = here[fqn][0] if fqn in here else self._owner(fqn)
            if found is None or owner is None:
                continue
            live = owner._buffers.get(fqn.rpartition(".")[2]) if fqn in here else None  # noqa: SLF001 - None among them
            fits = live is not None and live.shape == found.size and live.dtype == found.properties.dtype
            if live is not None and fits and live.device.type != "meta":
                tensors[key] = live
            else:
                tensors[key] = torch.empty(found.size, dtype=found.properties.dtype, device=_device(owner, live))
        return tensors

    def differences(self, saved: SavedBuffers) -> list[Difference]:
        """Buffers that today's code makes in another way than the code that saved."""
        step = f"undo the change of the code that makes it; {accept_step(ACCEPT)}, for all such buffers"
        # One that this process made after its TrainState is not the code's, and goes at the restore.
        tensors = {fqn: tensor for fqn, tensor in self._tensors().items() if fqn in self._made or fqn in saved.made}
        found = []
        for fqn in sorted((saved.made.keys() | tensors.keys()) - {*saved.changed, *saved.gone}):
            was = saved.made.get(fqn)
            now = (self._digest(fqn, tensors[fqn]) or "sharded, or without data") if fqn in tensors else None
            if was != now:
                name = f"buffer {fqn}"
                found.append(Difference("state", name, was, now, change_class=3, accept_as=ACCEPT, next_step=step))
        return found

    def problems(self, saved: SavedBuffers) -> list[str]:
        """Saved buffers that have no place here."""
        problems = []
        for fqn in sorted(saved.changed.keys() - self._tensors().keys()):
            owner = self._owner(fqn)
            if fqn not in saved.late:
                problems.append(f"buffer {fqn!r} was saved, and there is none here: make it in __init__, as it was")
            elif owner is None:
                problems.append(f"buffer {fqn!r} was saved, and there is no module for it: build the model as it was")
            elif hasattr(owner, fqn.rpartition(".")[2]):
                problems.append(f"buffer {fqn!r} was saved, and is no buffer here: let the code make it one again")
        return problems

    def restore(self, tensors: Mapping[str, torch.Tensor], saved: SavedBuffers, place: Place) -> int:
        """Make, fill and delete buffers, until they are those that were saved; returns how many were filled.

        Args:
            tensors: All loaded tensors, by key.
            saved: What was told of them.
            place: Whose they are.

        Raises:
            StateMismatch: One was not loaded.
        """
        owners = self._models.temporary_buffers()
        for fqn in owners.keys() - saved.changed.keys() - saved.made.keys():
            if fqn in saved.gone or fqn not in self._made:
                delattr(*owners[fqn])
        for fqn, is_tensor in saved.changed.items():
            kinds = (f"{LATE}rank-{place.rank}.", f"{PREFIX}rank-{place.rank}.", PREFIX)
            found = next((tensors[key] for kind in kinds if (key := f"{kind}{fqn}") in tensors), None)
            if is_tensor != (found is not None):
                raise StateMismatch(f"buffer {fqn!r} was not loaded", key=fqn, next_step="build the model as it was")
            if fqn in owners:
                owner, name = owners[fqn]
                owner._buffers[name] = found  # noqa: SLF001 - as an attribute, None would be refused
            else:
                name = fqn.rpartition(".")[2]
                kept = found if found is None or found.device.type == saved.late[fqn] else found.to(saved.late[fqn])
                self._models.module_of(fqn).register_buffer(name, kept, persistent=False)
        # From now on they are training's, even if they happen to be what the code makes.
        self._changed |= saved.changed.keys()
        return len(saved.changed)

    def without(self, saved: SavedBuffers, plan: LoadPlan) -> SavedBuffers:
        """What was saved, but for buffers that went with their module, as a migration says."""
        gone = {fqn for fqn in (*saved.made, *saved.changed) if self._went(fqn, plan)}
        made = {fqn: value for fqn, value in saved.made.items() if fqn not in gone}
        changed = {fqn: value for fqn, value in saved.changed.items() if fqn not in gone}
        late = {fqn: value for fqn, value in saved.late.items() if fqn not in gone}
        return SavedBuffers(made, changed, late, saved.gone)

    def left_behind(self, saved: SavedKeys) -> frozenset[str]:
        """Keys of the buffers that `without` leaves out."""
        matched = ((key, _OF_A_BUFFER.fullmatch(key)) for key in saved.tensors)
        return frozenset(key for key, found in matched if found and self._went(found[1], saved.plan))

    def _went(self, fqn: str, plan: LoadPlan) -> bool:
        return self._owner(fqn) is None and plan.covers(f"model.{fqn}")

    def _owner(self, fqn: str) -> nn.Module | None:
        try:
            return self._models.module_of(fqn)
        except (ConfigError, KeyError, ValueError):
            return None


def others(saved: SavedKeys, place: Place) -> frozenset[str]:
    """Saved keys of other ranks' buffers."""
    mine = tuple(f"{kind}rank-{place.rank}." for kind in (PREFIX, LATE))
    return frozenset(key for key in saved.tensors if _OF_A_RANK.match(key) and not key.startswith(mine))


def _version(tensor: torch.Tensor) -> object:
    """Changes when torch changes the tensor in place."""
    return object() if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other name for it


def _device(owner: nn.Module, live: torch.Tensor | None) -> torch.device:
    """Where a new buffer belongs."""
    near = [live] if live is not None else [*owner.parameters(), *owner.buffers()]
    return next((one.device for one in near if one.device.type != "meta"), torch.device("cpu"))
