"""Python state in a checkpoint: msgpack in uint8 tensors, one for all ranks and one for each (ADR 0006)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from txstore.compat.load_plan import LoadPlan
from txstore.dcp.tensors import as_bytes
from txstore.errors import FormatError, StateMismatch
from txstore.train.model_state import fits
from txstore.train.piece import NO_PLAN, SavedKeys
from txstore.train.python_state import flatten, unflatten

SHARED = "python.shared"
VERSION = 1
_RANK = re.compile(r"python\.rank-(0|[1-9][0-9]*)\Z")
_DIGESTED_BYTES = 1 << 20


def own_key(rank: int) -> str:
    """The key of a rank's own Python state."""
    return f"python.rank-{rank}"


def pack(key: str, pieces: dict[str, Any], world_size: int) -> tuple[bytes, dict[str, torch.Tensor]]:
    """Python state of all pieces as bytes, and the tensors lifted out of it, by key."""
    data, lifted = flatten(pieces, key)
    return flatten({"version": VERSION, "world_size": world_size, "pieces": data})[0], lifted


def unpack(key: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Python state of all pieces by name under ``pieces``, and the ``world_size`` that saved it.

    Raises:
        StateMismatch: It was not loaded.
        FormatError: It is malformed, or of an unknown version.
    """
    found = loaded.get(key)
    if not isinstance(found, torch.Tensor):
        raise StateMismatch(f"{key!r} was not loaded", key=key)
    outer = unflatten(bytes(as_bytes(found.contiguous())), {})
    if not isinstance(outer, dict) or outer.get("version") != VERSION or not isinstance(outer.get("pieces"), bytes):
        raise FormatError("Python state of another version than this release knows", key=key)
    lifted = {name: tensor for name, tensor in loaded.items() if name.startswith((f"{key}.", f"{key}["))}
    pieces = unflatten(outer["pieces"], lifted)
    if not isinstance(pieces, dict) or type(outer.get("world_size")) is not int:
        raise FormatError("malformed Python state", key=key)
    return {"pieces": pieces, "world_size": outer["world_size"]}


def blob(data: bytes) -> torch.Tensor:
    """Bytes as a tensor, which DCP saves as it is."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def digest_of(value: Any) -> str:
    """SHA-256 of plain state and of the small tensors in it."""
    data, lifted = flatten(value)
    found = hashlib.sha256(data)
    for path, tensor in sorted(lifted.items()):
        # Not the weights of an EMA: their digest would cost more than the step.
        if not isinstance(tensor, DTensor) and tensor.numel() * tensor.element_size() <= _DIGESTED_BYTES:
            found.update(path.encode(errors="surrogatepass"))
            found.update(as_bytes(tensor.cpu().contiguous()))
    return found.hexdigest()


def saved_keys(metadata: Metadata, plan: LoadPlan = NO_PLAN) -> SavedKeys:
    """What the metadata says of the tensors of a `TrainState`, and what migrations do.

    Raises:
        FormatError: The checkpoint holds no `TrainState`.
    """
    tensors = {
        key: value for key, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }
    ranks = sorted(int(found[1]) for key in tensors if (found := _RANK.match(key)))
    if SHARED not in tensors or ranks != list(range(len(ranks))) or not ranks:
        raise FormatError("the checkpoint does not hold the state of a TrainState", key=SHARED)
    return SavedKeys(tensors, len(ranks), plan)


def like(live: torch.Tensor | None, saved: TensorStorageMetadata) -> torch.Tensor:
    """A tensor to load a saved one into: placed as the live one if it fits."""
    if live is not None and not fits("", live, saved):
        return torch.empty_like(live, requires_grad=False)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
