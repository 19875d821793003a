"""Plain attributes of modules and optimizers, such as a counter that `forward` moves: no state dict holds them.

Whether the next step depends on one nobody can tell: a cache is made again, a counter is not. So they are neither
saved nor refused, but told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch

from txstore.train.names import Models
from txstore.train.rng import Generator

log = logging.getLogger(__name__)

_NOT_OURS = ("torch.", "lightning.", "lightning_fabric.", "pytorch_lightning.", "builtins.", "typing.", "abc.")
_MOST_TOLD = 8
_ANY = object()
_KEPT = frozenset({"training", "state", "param_groups", "defaults"})
"""Attributes of modules and optimizers that are saved, or made by the code."""
_PLAIN = (bool, int, float, complex, str, type(None))


class PlainAttributes:
    """What the attributes of all modules and optimizers were when this was made.

    Looked at are public attributes of the training's own classes: plain values, and tensors that belong to no graph.
    """

    def __init__(self, models: Models, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._models = models
        self._optimizers = optimizers
        self._before = self._found()
        self._told = False

    def tell(self) -> None:
        """Warn, once, of attributes that are not what they were."""
        if self._told:
            return
        moved = [name for name, value in self._found().items() if self._before.get(name, self) != value]
        if moved:
            self._told = True
            more = f" and {len(moved) - _MOST_TOLD} more" if len(moved) > _MOST_TOLD else ""
            log.warning(
                "not saved: training changes %s%s. If the next step depends on such an attribute, make it a buffer, or "
                "give its module get_extra_state and set_extra_state, or put it into the optimizer's state; a resume "
                "starts with what the constructor sets",
                ", ".join(moved[:_MOST_TOLD]),
                more,
            )

    def _objects(self) -> Iterator[tuple[str, object]]:
        yield from self._models.named_modules()
        for at, optimizer in enumerate(self._optimizers):
            yield f"optimizer.{at}", optimizer

    def _found(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for prefix, one in self._objects():
            is_own = _is_own(type(one))
            for name, value in vars(one).items():
                # A generator that came or went is another than the one that is saved, whoever keeps it.
                if isinstance(value, Generator) or (is_own and name not in _KEPT and not name.startswith("_")):
                    mark = _mark(value)
                    if mark is not _ANY:
                        found[f"{prefix}.{name}" if prefix else name] = mark
        return found


def _is_own(kind: type) -> bool:
    """Whether a class, or one that it is derived from, is the training's own. FSDP2 derives one from each class."""
    return any(not f"{one.__module__}.".startswith(_NOT_OURS) for one in kind.__mro__)


def _mark(value: object) -> object:
    """What tells a value from another: itself, a tensor's identity and version, or `_ANY` if it is not looked at."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return _ANY if value.grad_fn is not None else (id(value), value._version)  # noqa: SLF001 - counts writes
    return id(value) if isinstance(value, Generator) else _ANY
