"""A digest of one element of each tensor: cheap, and it shows whether tensors are the saved ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from txstore.dcp.tensors import as_bytes, is_plain


def sample(tensors: Iterable[torch.Tensor]) -> str:
    """Digest of the middle element of this rank's part of each tensor, bit for bit.

    One copy from each device, whatever the number of tensors. A tensor with no plain memory here adds nothing.
    """
    found: defaultdict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        local = _local(tensor)
        if _has_memory(local):
            found[local.device].append(_middle(local))
    digest = hashlib.sha256()
    for device in sorted(found, key=str):
        digest.update(as_bytes(torch.cat(found[device]).cpu()))
    return digest.hexdigest()[:16]


def layout(tensors: Iterable[torch.Tensor]) -> str:
    """Digest of which part of each tensor this rank has: samples of different parts cannot be compared."""
    parts = []
    for tensor in tensors:
        where = ""
        if isinstance(tensor, DTensor):
            where = f"{tensor.placements} {tensor.device_mesh.shape} {tensor.device_mesh.get_coordinate()}"
        parts.append(f"{tuple(tensor.shape)} {tuple(_local(tensor).shape)} {where}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach()
    return tensor.detach()


def _has_memory(tensor: torch.Tensor) -> bool:
    return (
        tensor.numel() > 0
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and is_plain(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    # The first element may be one that training never touches, such as a padding token's.
    at = sum(size // 2 * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((1,), (1,), int(tensor.storage_offset()) + at).view(torch.uint8)
