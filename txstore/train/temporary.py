"""Buffers that no state dict holds (``persistent=False``): those that training has changed are saved, others compared.

Such a buffer is mostly a table that the code computes and could compute again, often a large one. It is not saved as
long as it is what it was when the `TrainState` was made: a resume only asks whether today's code makes the same one.
One that has changed since is state like any other: a queue, counters, a cache that has grown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from txstore.compat.differences import Difference, accept_step
from txstore.dcp.tensors import as_bytes, dtype_name, is_plain
from txstore.errors import StateMismatch
from txstore.train.lifted import check_exact
from txstore.train.names import Models
from txstore.train.piece import Place, SavedKeys
from txstore.train.sample import sample

PREFIX = "temporary."
_OF_A_RANK = re.compile(r"temporary\.rank-[0-9]+\.")
ACCEPT = "buffers"
"""What ``accept=`` calls all buffers that today's code makes in another way: there may be one in each layer."""

NONE = "none"
"""Recorded for a buffer that is None."""

_HASHED_BYTES = 1 << 20
"""Smaller ones are digested at every save, larger ones again when torch has seen a change."""


class TemporaryBuffers:
    """The buffers of all models that no state dict holds.

    Args:
        models: Their models, as the code has made them.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[str, tuple[object, str]] = {}
        self._made = {fqn: self._digest(fqn, tensor) for fqn, tensor in self._tensors().items()}
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

    def targets(self, saved: SavedKeys, place: Place) -> dict[str, torch.Tensor]:
        """The live buffer for each saved one, or a new one of the saved shape."""
        tensors = {}
        for fqn, live in self._tensors().items():
            for key in (f"{PREFIX}{fqn}", f"{PREFIX}rank-{place.rank}.{fqn}"):
                found = saved.tensors.get(key)
                if found is None:
                    continue
                fits = live is not None and live.shape == found.size and live.dtype == found.properties.dtype
                if live is not None and fits and live.device.type != "meta":
                    tensors[key] = live
                else:
                    owner = self._models.temporary_buffers()[fqn][0]
                    tensors[key] = torch.empty(found.size, dtype=found.properties.dtype, device=_device(owner, live))
        return tensors

    def differences(self, made: Mapping[str, str], changed: Collection[str]) -> list[Difference]:
        """Buffers that today's code makes in another way than the code that saved.

        Args:
            made: As `as_made` told at the save.
            changed: Names of those that were saved.
        """
        step = f"undo the change of the code that makes it; {accept_step(ACCEPT)}, for all such buffers"
        tensors = self._tensors()
        found = []
        for fqn in sorted((made.keys() | tensors.keys()) - set(changed)):
            was = made.get(fqn)
            now = (self._digest(fqn, tensors[fqn]) or "sharded, or without data") if fqn in tensors else None
            if was != now:
                name = f"buffer {fqn}"
                found.append(Difference("state", name, was, now, change_class=3, accept_as=ACCEPT, next_step=step))
        return found

    def problems(self, changed: Collection[str]) -> list[str]:
        """Saved buffers that have no place here."""
        unknown = sorted(set(changed) - set(self._tensors()))
        return [f"buffer {fqn!r} was saved, and there is none here" for fqn in unknown]

    def restore(self, tensors: Mapping[str, torch.Tensor], changed: Mapping[str, bool], place: Place) -> int:
        """Put the loaded ones in place; returns how many.

        Args:
            tensors: All loaded tensors, by key.
            changed: Those that were saved, by name; whether there is a tensor, or it was None.
            place: Whose they are.

        Raises:
            StateMismatch: One was not loaded.
        """
        owners = self._models.temporary_buffers()
        for fqn, is_tensor in changed.items():
            found = tensors.get(f"{PREFIX}rank-{place.rank}.{fqn}", tensors.get(f"{PREFIX}{fqn}"))
            if is_tensor != (found is not None):
                raise StateMismatch(f"buffer {fqn!r} was not loaded", key=fqn)
            owner, name = owners[fqn]
            owner._buffers[name] = found  # noqa: SLF001 - as an attribute, None would be refused
        # From now on they are training's, even if they happen to be what the code makes.
        self._changed |= changed.keys()
        return len(changed)


def keyed(changed: Mapping[str, torch.Tensor | None], place: Place) -> dict[str, torch.Tensor]:
    """Changed buffers under the keys of this rank: they may differ by rank.

    Raises:
        UnsupportedValue: One cannot be saved exactly.
    """
    found = {}
    for fqn, tensor in changed.items():
        if tensor is not None:
            check_exact(tensor, fqn)
            found[f"{PREFIX}{fqn}" if isinstance(tensor, DTensor) else f"{PREFIX}rank-{place.rank}.{fqn}"] = tensor
    return found


def others(saved: SavedKeys, place: Place) -> frozenset[str]:
    """Saved keys of other ranks' buffers."""
    mine = f"{PREFIX}rank-{place.rank}."
    return frozenset(key for key in saved.tensors if _OF_A_RANK.match(key) and not key.startswith(mine))


def _version(tensor: torch.Tensor) -> object:
    """Changes when torch changes the tensor in place."""
    return object() if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other name for it


def _device(owner: nn.Module, live: torch.Tensor | None) -> torch.device:
    """Where a new buffer belongs."""
    near = [live] if live is not None else [*owner.parameters(), *owner.buffers()]
    return next((one.device for one in near if one.device.type != "meta"), torch.device("cpu"))
