"""The states that are saved: their tensors, and bytes that are a function of the place in the global tensor.

So every rank of any world size can make its part, and knows what a load must bring. Needs torch and nothing else: the
peers' environment imports it too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

LAYERS = 80
"""Of the Llama-like mix, as the 70B model has: with AdamW's state that is nearly three thousand tensors."""

_FEW_LAYERS, _SMALL_MIB = 4, 32

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20


@dataclass(frozen=True)
class Spec:
    """One tensor: where it lies in the state, its global shape and dtype."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def large(mib: int) -> list[Spec]:
    """A few large float32 tensors, 64 MiB each, or a quarter of the state if that is less."""
    each = min(64, max(1, mib // 4))
    return [Spec(("model", f"block.{i}.weight"), (each << 6, 4096), torch.float32) for i in range(mib // each)]


def llama(mib: int) -> list[Spec]:
    """Parameters in bfloat16, AdamW's two moments in float32 and its step: thousands of tensors, most of them small."""
    layers = LAYERS if mib >= _SMALL_MIB else _FEW_LAYERS
    # A layer holds 4 h*h (attention) + 3 h*3.5h (MLP) elements, ten bytes each with both moments.
    hidden = max(8, int(((mib << 20) / (layers * 14.5 * 10)) ** 0.5) // 2 * 2)
    wide = hidden * 7 // 2
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (4 * hidden, hidden),
        "norm": (hidden,),
        "head": (4 * hidden, hidden),
    }
    for layer in range(layers):
        at = f"layers.{layer}."
        shapes |= {f"{at}attention.{name}": (hidden, hidden) for name in ("q", "k", "v", "o")}
        shapes |= {f"{at}mlp.{name}": (wide, hidden) for name in ("gate", "up")}
        shapes |= {f"{at}mlp.down": (hidden, wide), f"{at}norm.1": (hidden,), f"{at}norm.2": (hidden,)}
    specs = [Spec(("model", name), shape, torch.bfloat16) for name, shape in shapes.items()]
    for name, shape in shapes.items():
        specs += [Spec(("optim", name, moment), shape, torch.float32) for moment in ("exp_avg", "exp_avg_sq")]
        specs.append(Spec(("optim", name, "step"), (), torch.float32))
    return specs


KINDS = {"large": large, "llama": llama}


def build(kind: str, mib: int, rank: int = 0, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """This rank's state. With a mesh all but the scalars are sharded over it along their first dimension."""
    state: dict[str, Any] = {}
    for seed, spec in enumerate(KINDS[kind](mib)):
        inner = state
        for name in spec.path[:-1]:
            inner = inner.setdefault(name, {})
        inner[spec.path[-1]] = _make(spec, seed, rank, mesh)
    return state


def _make(spec: Spec, seed: int, rank: int, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None or not spec.shape:
        whole = torch.empty(spec.shape, dtype=spec.dtype)
        _fill(whole, seed, 0)
        return whole
    rows = -(-spec.shape[0] // mesh.size())
    first = min(rank * rows, spec.shape[0])
    local = torch.empty((min(rows, spec.shape[0] - first), *spec.shape[1:]), dtype=spec.dtype)
    row = local[0].numel() if local.numel() else 0
    _fill(local, seed, first * row)
    stride = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(spec.shape), stride=stride)


def _fill(tensor: torch.Tensor, seed: int, offset: int) -> None:
    """Every element from its number in the global tensor: bytes that neither compress nor repeat."""
    integers = tensor.view(_INTEGERS[tensor.element_size()]).view(-1)
    for start in range(0, integers.numel(), _PIECE):
        stop = min(start + _PIECE, integers.numel())
        numbers = torch.arange(offset + start + 1, offset + stop + 1) * 2654435761 + seed * 97
        integers[start:stop] = numbers ^ (numbers >> 15)


def tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The local tensors of a state, in order."""
    for value in state.values():
        if isinstance(value, dict):
            yield from tensors(value)
        else:
            yield value.to_local() if isinstance(value, DTensor) else value


def buffers(state: dict[str, Any]) -> list[memoryview]:
    """The memory of the local tensors."""
    return [memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors(state) if t.numel()]


def nbytes(state: dict[str, Any]) -> int:
    """Bytes of the local tensors."""
    return sum(tensor.nbytes for tensor in tensors(state))


def digests(state: dict[str, Any]) -> list[int]:
    """A CRC of each local tensor."""
    return [zlib.crc32(buffer) for buffer in buffers(state)]


def wipe(state: dict[str, Any]) -> None:
    """Zero what a load is to bring: a loader that does nothing must not pass."""
    for tensor in tensors(state):
        tensor.zero_()
