"""A load through migrations: the checkpoint as today's state sees it, and what makes today's values of it.

Migrations speak of keys of models. What follows a parameter elsewhere, such as an optimizer's moments, is left
fresh by name (`ResumeOptions.fresh`) or stays as it was.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from txstore.compat.key_tables import KeyTable, TensorFact
from txstore.compat.load_plan import LoadPlan
from txstore.errors import StateMismatch


class MigratedLoad:
    """One load through a plan; without migrations it changes nothing.

    Args:
        metadata: Of the checkpoint.
        plan: What migrations do to its keys.
        today: Dtype and shape of today's tensors that the plan speaks of.

    Attributes:
        metadata: The checkpoint as today's state sees it: today's keys, dtypes and shapes.
    """

    def __init__(self, metadata: Metadata, plan: LoadPlan, today: KeyTable) -> None:
        self._saved = metadata.state_dict_metadata
        self._plan = plan
        seen = {key: found for key, found in self._saved.items() if key not in plan.dropped}
        moved = {key: seen.pop(source) for key, source in plan.renamed.items()}
        seen |= moved
        for key in (*plan.fresh, *plan.transforms):
            properties = TensorProperties(dtype=getattr(torch, today[key].dtype))
            seen[key] = TensorStorageMetadata(properties, torch.Size(today[key].shape), [])
        self.metadata = Metadata(seen, metadata.planner_data, metadata.storage_data, metadata.storage_meta)
        self._whole: dict[str, torch.Tensor] = {}

    def sources(self, target: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What to hand to ``dcp.load``: by saved key, the tensor to load into."""
        wanted: dict[str, torch.Tensor] = {}
        for key, tensor in target.items():
            source = self._plan.source(key)
            if source is None:
                continue
            if key in self._plan.transforms:
                found = self._saved[source]
                assert isinstance(found, TensorStorageMetadata)
                self._whole[key] = torch.empty(found.size, dtype=found.properties.dtype, device="cpu")
                wanted[source] = self._whole[key]
            else:
                wanted[source] = tensor
        return wanted

    @torch.no_grad()
    def finish(self, target: dict[str, torch.Tensor]) -> None:
        """Make the transformed values, after the load, and put them into the target.

        Raises:
            StateMismatch: A transform made something of another dtype or shape than today's state has.
        """
        for key, saved in self._whole.items():
            live = target[key]
            fresh = live.full_tensor() if isinstance(live, DTensor) else live
            made = self._plan.transforms[key](saved, fresh)
            if not isinstance(made, torch.Tensor) or made.shape != fresh.shape or made.dtype != fresh.dtype:
                found = f"{made.dtype} {list(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
                raise StateMismatch(
                    f"the migration of {key!r} made {found}, the state has {fresh.dtype} {list(fresh.shape)}", key=key
                )
            if isinstance(live, DTensor):
                made = distribute_tensor(made.to(live.device), live.device_mesh, live.placements, src_data_rank=None)
            live.copy_(made)


def saved_table(metadata: Metadata) -> KeyTable:
    """Dtype and shape of the saved tensors that are judged by table; the other pieces of state compare their own."""
    return {
        key: TensorFact(str(found.properties.dtype), tuple(found.size))
        for key, found in metadata.state_dict_metadata.items()
        if key.startswith("model.") and isinstance(found, TensorStorageMetadata)
    }


def unknown_after(plan: LoadPlan) -> set[str]:
    """What migrations leave unknown of the saved facts, as `TrainState.validate` calls it."""
    unknown = {"model": plan.changes_keys, "moments": bool(plan.parameters), "migration": bool(plan.keys)}
    return {name for name, is_so in unknown.items() if is_so}
