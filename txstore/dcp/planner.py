"""`StrictLoadPlanner`: everything that does not fit, in one typed error, before a byte is read.

DCP's default planner stops at the first missing key or wrong size and lets `copy_` cast dtypes silently. A
strict reader refuses casts, missing and unread keys whatever the planner is; this planner adds the shapes,
lists all differences at once, and says what each missing key was probably meant to be. Of a large checkpoint it makes
the chunks that this rank's state meets, and no others.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor

from txstore.dcp.saved import LazyTensorMetadata
from txstore.errors import StateMismatch

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_SHOWN = 10


class StrictLoadPlanner(DefaultLoadPlanner):
    """Pass as ``planner=`` to ``dcp.load``.

    Raises (from the load):
        StateMismatch: Lists missing keys with near misses (``_orig_mod.``, ``module.``), shapes and dtypes.
    """

    def create_local_plan(self) -> LoadPlan:
        """Compare the target with the saved state, then plan as DCP does."""
        saved = self.metadata.state_dict_metadata if self.metadata else {}
        problems: list[tuple[str, str]] = []
        bare = {_WRAPPERS.sub("", name): name for name in saved}
        for name, value in self.state_dict.items():
            found = saved.get(name)
            if found is None:
                near = bare.get(_WRAPPERS.sub("", name))
                meant = f" (the checkpoint has {near!r})" if near else ""
                problems.append((name, f"{name!r} is not in the checkpoint{meant}"))
            elif isinstance(value, torch.Tensor) != isinstance(found, TensorStorageMetadata):
                problems.append((name, f"{name!r} is a tensor on one side and an object on the other"))
            elif isinstance(found, TensorStorageMetadata):
                problems += ((name, text) for text in _differences(name, value, found))
        if problems:
            shown = "; ".join(text for _, text in problems[:_SHOWN])
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise StateMismatch(f"the state does not fit the checkpoint: {shown}{more}", key=problems[0][0])
        whole = self.metadata
        try:
            self.metadata = None if whole is None else _narrowed(whole, self.state_dict)
            return super().create_local_plan()
        finally:
            self.metadata = whole


def _narrowed(metadata: Metadata, state: Mapping[str, Any]) -> Metadata:
    """The metadata with the chunks that this rank's state meets: DCP looks at every chunk of every tensor."""
    saved = copy.copy(metadata.state_dict_metadata)  # of its own class: a strict reader's refuses missing keys
    for name, value in state.items():
        found = metadata.state_dict_metadata.get(name)
        if not isinstance(found, LazyTensorMetadata) or not isinstance(value, torch.Tensor):
            continue
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            continue  # this rank holds nothing of it, and DCP does not ask
        saved[name] = found.near(_create_chunk_list(value))
    return dataclasses.replace(metadata, state_dict_metadata=saved)


def _differences(name: str, value: torch.Tensor, found: TensorStorageMetadata) -> Iterable[str]:
    # A local shard of torch 2.14's CheckpointableTensor protocol says itself what it is a part of.
    shape = tuple(getattr(value, "global_shape", value.size()))
    if shape != tuple(found.size):
        yield f"{name!r} has shape {shape}, {tuple(found.size)} was saved"
    if value.dtype != found.properties.dtype:
        yield f"{name!r} is {value.dtype}, {found.properties.dtype} was saved"
