"""Key tables: the dtype and shape of every item of a state, saved and today's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from txstore.compat.differences import Difference


class _Tensor(Protocol):
    @property
    def dtype(self) -> object: ...

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class TensorFact:
    """What is compared of one item before a byte of it is loaded.

    Attributes:
        dtype: torch's name, such as ``bfloat16``; a leading ``torch.`` is dropped.
        shape: The global shape.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.dtype.removeprefix("torch."))
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @classmethod
    def of(cls, tensor: _Tensor) -> TensorFact:
        """The facts of anything with a `dtype` and a (global) `shape`, such as a DTensor."""
        return cls(str(tensor.dtype), tuple(tensor.shape))


KeyTable = Mapping[str, TensorFact]

_NEXT_STEP = "a migration that covers this key, or the code and config that saved it"


def compare_keys(saved: KeyTable, today: KeyTable) -> list[Difference]:
    """Every missing and every unexpected key, and every dtype and shape that differs."""
    found = [
        Difference("missing_key", name, None, str(today[name]), change_class=3, next_step=_NEXT_STEP)
        for name in today
        if name not in saved
    ]
    found += [
        Difference("unexpected_key", name, str(saved[name]), None, change_class=3, next_step=_NEXT_STEP)
        for name in saved
        if name not in today
    ]
    for name, fact in today.items():
        was = saved.get(name, fact)
        if was.dtype != fact.dtype:
            found.append(Difference("dtype", name, was.dtype, fact.dtype, change_class=3, next_step=_NEXT_STEP))
        if was.shape != fact.shape:
            shapes = str(list(was.shape)), str(list(fact.shape))
            found.append(Difference("shape", name, *shapes, change_class=3, next_step=_NEXT_STEP))
    return found
