"""States to save, built the same way every time, and bit-for-bit comparison."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable
from typing import Any

import torch

QUANTIZED = {torch.quint8: 3, torch.qint8: 3, torch.qint32: 0}
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class MarkedParameter(torch.nn.Parameter):
    """A subclass such as libraries define to carry attributes."""


class MarkedBuffer(torch.nn.Buffer):
    """The same for buffers."""


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...] = (3, 4), *, seed: int = 1) -> torch.Tensor:
    """A tensor of any dtype whose bits are all over the place; NaN payloads and subnormals included."""
    if dtype in QUANTIZED:
        values = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape) * seed
        return torch.quantize_per_tensor(values, 0.1, QUANTIZED[dtype], dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count, dtype=torch.int64) * 89 + 7 * seed).to(torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def blank(value: Any) -> Any:
    """A target of the same kind that holds something else."""
    if isinstance(value, torch.Tensor):
        if value.is_quantized:
            return torch.quantize_per_tensor(
                torch.zeros(value.shape), value.q_scale(), value.q_zero_point(), value.dtype
            )
        return (
            torch.zeros(value.numel() * value.dtype.itemsize, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        )
    return None


def _views() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    unaligned = torch.arange(41, dtype=torch.uint8)[1:41].clone()
    wide = torch.arange(3 << 20, dtype=torch.int32).reshape(3, 1 << 20)
    return {
        "0-dim": torch.tensor(3.25),
        "0-dim-int": torch.tensor(-7),
        "empty": torch.empty(0),
        "empty-rows": torch.empty(3, 0),
        "empty-columns": torch.empty(0, 5, dtype=torch.int64),
        "one": torch.tensor([1.5]),
        "strided": base[:, ::2, 1:3],
        "transposed": base.transpose(0, 2),
        "channels-last": image.to(memory_format=torch.channels_last),
        "channels-last-3d": image.reshape(2, 3, 4, 5, 1).to(memory_format=torch.channels_last_3d),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "expanded-scalar": torch.tensor(4.0).expand(3, 3),
        "flipped": base.flip(0, 2),
        "conjugate": torch.complex(base, base + 1).conj(),
        "negative": torch.complex(base, base + 1).conj().imag,
        "conjugate-transposed": torch.complex(base, -base).mH,
        "in-bigger-storage": torch.arange(100.0)[40:50],
        "unaligned": unaligned[3:11].clone(),
        "requires-grad": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.clone()),
        "frozen-parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
        "parameter-subclass": MarkedParameter(base.clone()),
        "buffer": torch.nn.Buffer(base.clone()),
        "buffer-subclass": MarkedBuffer(base.clone()),
        "large": wide,
        "large-transposed": wide.t(),
        "large-column": wide[:, 17:99],
        "special-floats": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }


def _objects() -> dict[str, Any]:
    return {
        "none": None,
        "bool": True,
        "int": -(1 << 70),
        "float": float("-inf"),
        "text": "naïve \U0001f600 \n \x00",
        "bytes": b"\x00\xff" * 9,
        "list": [1, [2.5, None], "three"],
        "tuple": (1, ("a", True)),
        "set": {1, 2, 3},
        "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "nested": {"a": {"b": [1, {"c": (2, None)}]}, "empty": {}, "empty-list": []},
        "long-text": "x" * 3_000_000,
    }


NAMES = {
    "dots": "layers.0.weight",
    "slashes": "../../etc/passwd",
    "empty": "",
    "spaces": "  a b ",
    "quotes": "\"'`\\",
    "newline": "a\nb\tc",
    "nul": "a\0b",
    "emoji": "w\U0001f600",
    "surrogate": "bad\ud800name",
    "escape": "\\ud800 and \\x41",
    "metadata": "__metadata__",
    "metadata-value": "__metadata__.value",
    "long": "n" * 5000,
    "json": '{"a": [0]}',
    "percent": "%2e%2e%00",
}

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"view-{name}": lambda name=name: {"t": _views()[name]} for name in _views()},
    **{f"object-{name}": lambda name=name: {"o": _objects()[name]} for name in _objects()},
    **{
        f"key-{kind}": lambda name=name: {name: torch.arange(5.0), "deep": {name: {name: [torch.ones(2), name]}}}
        for kind, name in NAMES.items()
    },
}


def everything() -> dict[str, Any]:
    """One state with all of it."""
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "views": _views(),
        "objects": _objects(),
        "keys": {name: torch.tensor([number]) for number, name in enumerate(NAMES.values())},
        "tied": {"embedding": weight, "head": weight},
    }


def target_of(state: Any) -> Any:
    """The same structure with blank leaves; containers that DCP keeps as one object become None."""
    if isinstance(state, torch.Tensor):
        return blank(state)
    if type(state) is dict and state:
        return {key: target_of(value) for key, value in state.items()}
    if isinstance(state, (dict, list, tuple)) and _flattens(state):
        return type(state)(
            {key: target_of(value) for key, value in state.items()}
            if isinstance(state, dict)
            else [target_of(value) for value in state]
        )
    return type(state)() if isinstance(state, (dict, list, set)) else None


def _flattens(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) or _flattens(item) for item in value)


def bits(tensor: torch.Tensor) -> bytes:
    """The logical value, row by row, and what the numbers mean."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr().numpy().tobytes() + repr((tensor.q_scale(), tensor.q_zero_point())).encode()
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def same(one: Any, other: Any, at: str = "state") -> None:
    """Assert equality: type, dtype, shape and bits of tensors; type and value of everything else."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), at
        assert (one.dtype, one.shape) == (other.dtype, other.shape), at
        assert bits(one) == bits(other), at
        return
    assert type(one) is type(other), f"{at}: {type(one)} {type(other)}"
    if isinstance(one, dict):
        assert list(one) == list(other), at
        for key in one:
            same(one[key], other[key], f"{at}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), at
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{at}[{number}]")
    else:
        assert one == other, at


def payload(value: Any) -> bytes:
    """``torch.save`` of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
