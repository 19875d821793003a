"""Tensors as bytes: dtype names, what can be stored exactly, and a source that materialises piece by piece."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from txstore.checksum import Buffer, crc32c
from txstore.errors import FormatError, UnsupportedValue
from txstore.store import Source

PIECE_BYTES = 16 << 20
"""Most bytes that are copied at once when a tensor is not plain CPU memory already."""

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

NUMBERS = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    }
)
"""Dtypes whose every bit is part of the value, with a copy of their own in torch."""

_NUMBERS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, for a copy of their bits: torch's own makes 1 of a bool that is 2, and knows no int4."""
    if tensor.dtype in NUMBERS or tensor.is_neg():
        return tensor
    return tensor.view(_NUMBERS_OF_SIZE[tensor.dtype.itemsize])


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str, key: str) -> torch.dtype:
    """Inverse of `dtype_name`.

    Raises:
        FormatError: This torch has no such dtype.
    """
    found = _DTYPES.get(name)
    if found is None:
        raise FormatError(f"dtype {name!r} is unknown to torch {torch.__version__}", key=key)
    return found


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy; writable if the tensor is."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    # Not reshape: a tensor of one element is contiguous whatever its stride says, and would keep it.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its row-major memory: neither quantized nor a wrapper."""
    return not (tensor.is_quantized or is_wrapper(tensor))


def is_wrapper(tensor: object) -> bool:
    """Whether a tensor's memory is that of others, which it wraps, such as a DTensor."""
    # An object, for torch's TypeGuard tells mypy that a Tensor can be no wrapper.
    return is_traceable_wrapper_subclass(tensor)


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Refuse what cannot be stored exactly, before anything is uploaded.

    Raises:
        UnsupportedValue: Sparse, nested or meta tensors, and wrappers without memory of their own.
    """
    if type(tensor) is torch.Tensor and has_memory(tensor):
        return  # nearly all are so, and a state may have thousands
    problem = ""
    if tensor.layout != torch.strided:
        problem = f"a tensor of layout {dtype_name_of_layout(tensor.layout)}"
    elif tensor.is_meta:
        problem = "a meta tensor, which has no data"
    elif isinstance(tensor, FakeTensor) or (is_plain(tensor) and tensor.numel() and tensor.data_ptr() == 0):
        problem = f"a {type(tensor).__name__} without memory of its own"
    elif tensor.dtype in _QUANTIZED and not tensor.is_quantized and tensor.numel():
        # torch 2.13 dies of a segmentation fault when it looks for the scale.
        problem = f"memory that is shown as {dtype_name(tensor.dtype)}, without a scale"
    if problem:
        raise UnsupportedValue(
            f"{name!r} is {problem}", key=name, next_step="convert it to a dense tensor before saving"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor of torch's own class is dense memory of numbers that is there."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and (tensor.data_ptr() != 0 or not tensor.numel())
        and tensor.dtype in NUMBERS
    )


def dtype_name_of_layout(layout: torch.layout) -> str:
    """``sparse_coo`` for ``torch.sparse_coo``."""
    return str(layout).removeprefix("torch.")


def serialise(tensor: torch.Tensor) -> bytes:
    """``torch.save`` of a tensor that is more than its memory, on the CPU and without spare storage."""
    buffer = io.BytesIO()
    torch.save(tensor.detach().cpu().clone(), buffer)
    return buffer.getvalue()


class TensorSource(Source):
    """The row-major bytes of one tensor, resolved when first read.

    A contiguous CPU tensor is read in place. Anything else (a device tensor, a transposed view) is
    copied in row slices of at most about `PIECE_BYTES`, so that peak memory does not grow with it.

    Args:
        resolve: Gives the tensor; called once, and again after `release`.
        nbytes: Its size in bytes.
    """

    def __init__(self, resolve: Callable[[], torch.Tensor], nbytes: int) -> None:
        self.size = nbytes
        self._resolve = resolve
        self._tensor: torch.Tensor | None = None
        self._piece: tuple[int, int, memoryview] | None = None

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes of the tensor."""
        tensor = self._tensor
        if tensor is None:
            tensor = self._tensor = as_numbers(self._resolve().detach().resolve_conj().resolve_neg())
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return as_bytes(tensor)[start:stop]
        piece = self._piece
        if piece is None or not piece[0] <= start <= stop <= piece[1]:
            piece = self._piece = self._materialise(tensor, start, stop)
        return piece[2][start - piece[0] : stop - piece[0]]

    def _materialise(self, tensor: torch.Tensor, start: int, stop: int) -> tuple[int, int, memoryview]:
        if tensor.dim() == 0:
            return 0, self.size, as_bytes(tensor.cpu().contiguous())
        row_bytes = self.size // tensor.shape[0]
        first, last = start // row_bytes, math.ceil(max(stop, start + PIECE_BYTES) / row_bytes)
        rows = tensor[first:last].cpu().contiguous()
        return first * row_bytes, min(last, tensor.shape[0]) * row_bytes, as_bytes(rows)

    def crc32c(self, start: int, stop: int) -> int:
        """CRC32C of a range."""
        return crc32c(self.read(start, stop))

    def release(self) -> None:
        """Let go of the tensor and of copied pieces."""
        self._tensor = self._piece = None
