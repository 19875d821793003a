"""State where no state dict looks: a module in a list, an average in an object beside the model, an optimizer in one.

What hides and stands still, such as a frozen teacher that shall not be registered, is made again by the code.
What hides and is trained would begin anew at a resume, and nothing would tell. So it is refused, by its name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from txstore.errors import ConfigError, UnsupportedValue
from txstore.train.attributes import LOOKS, Answers, is_own
from txstore.train.names import Models
from txstore.train.own_ways import has_own_state_dict
from txstore.train.sample import sample

_DEEPEST = 4
"""A list in an object in a list of a module."""
_MOST_LOOKED_AT = 10_000
"""So many things are looked at behind the attributes of one module, near ones first: it may hold a whole data set."""
_LISTS = (list, tuple, set, frozenset, deque)
_REGISTERED = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps what it finds itself, and hooks."""
_STATE = frozenset({"state", "param_groups", "defaults"})
_Thing = nn.Module | torch.optim.Optimizer


def _leads(kind: type) -> bool:
    """Whether something may be found in, or behind, a value of this class."""
    return issubclass(kind, (nn.Module, torch.optim.Optimizer, dict, *_LISTS)) or is_own(kind)


_may_lead = Answers(_leads)


def _reached(held: Iterable[tuple[str, Any]], seen: set[int]) -> Iterator[tuple[str, _Thing]]:
    """Modules and optimizers among values, in their lists and dicts, and behind objects of the training's own classes.

    Args:
        held: Values by path.
        seen: What is not to be looked at, by identity; grows.
    """
    left = _MOST_LOOKED_AT
    near = deque((path, value, _DEEPEST) for path, value in held if _may_lead[type(value)])
    while near and left:
        path, value, depth = near.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _Thing):
            yield path, value
        elif depth:
            for name, one in islice(_parts(value), left):
                left -= 1
                if _may_lead[type(one)]:
                    near.append((f"{path}.{name}", one, depth - 1))


def _parts(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _LISTS):
        return enumerate(value)
    return () if isinstance(value, type) else list(getattr(value, "__dict__", {}).items())


def _refuse_inner_optimizers(given: Sequence[torch.optim.Optimizer], extras: Collection[object]) -> None:
    """Refuse an optimizer that steps with another one, whose state is in neither's state dict.

    Raises:
        ConfigError: Names it, and says how to give it.
    """
    outer = [*given, *(one for one in extras if isinstance(one, torch.optim.Optimizer) and not has_own_state_dict(one))]
    states = {id(one.state) for one in outer}
    extra = {id(thing) for _, thing in _reached((("", one) for one in extras), set())}
    for one in outer:
        held = ((name, value) for name, value in vars(one).items() if name not in _STATE)
        for path, inner in _reached(held, {id(known) for known in outer} | extra):
            if isinstance(inner, torch.optim.Optimizer) and id(inner.state) not in states:
                raise ConfigError(
                    f"{type(one).__name__} keeps a {type(inner).__name__} in its attribute {path!r}, whose moments "
                    "would not be saved",
                    next_step=f"give that one, too, in optimizers=: optimizer.{path}",
                )


class HiddenState:
    """What attributes of models lead to, and neither the models, nor optimizers, nor extras save.

    All modules are looked at when this is made and at the first saves, for training stands still; later those that
    something hides in. A look at that is one copy from each device.

    Args:
        models: The models that are saved.
        optimizers: The optimizers that are saved.
        extras: The user's own objects; what they lead to, they answer for.

    Raises:
        ConfigError: An optimizer steps with another one that is not given.
    """

    def __init__(self, models: Models, optimizers: Sequence[torch.optim.Optimizer], extras: Collection[object]) -> None:
        self._models = models
        self._optimizers = optimizers
        self._extras = extras
        _refuse_inner_optimizers(optimizers, extras)
        self._looks = LOOKS
        self._holders: dict[str, nn.Module] = {}
        self._marks = {path: _mark(tensors) for path, (_, tensors) in self._found().items()}

    def refuse_moved(self) -> None:
        """Refuse what is not what it was when it was seen first.

        Raises:
            UnsupportedValue: Names it, and says how to give it.
        """
        if not self._looks and not self._holders:
            return
        found = self._found()
        self._looks = max(0, self._looks - 1)
        for path, (thing, tensors) in found.items():
            mark = _mark(tensors)
            if self._marks.setdefault(path, mark) != mark:
                raise UnsupportedValue(
                    f"training changes {path}, a {type(thing).__name__} that no state_dict holds: a resume would begin "
                    "it anew",
                    key=path,
                    next_step=_next_step(thing),
                )

    def _found(self) -> dict[str, tuple[_Thing, list[torch.Tensor]]]:
        """What hides, and its tensors that nobody saves."""
        holders = self._models.named_modules() if self._looks else iter(self._holders.items())
        seen: set[int] = set()
        candidates = []
        for prefix, module in holders:
            seen.add(id(module))
            held = (
                (f"{prefix}.{name}" if prefix else name, value)
                for name, value in vars(module).items()
                if name not in _REGISTERED
            )
            candidates += [(prefix, module, path, thing) for path, thing in _reached(held, seen)]
        return self._unsaved(candidates) if candidates else {}

    def _unsaved(
        self, candidates: list[tuple[str, nn.Module, str, _Thing]]
    ) -> dict[str, tuple[_Thing, list[torch.Tensor]]]:
        theirs = [thing for _, thing in _reached((("", one) for one in self._extras), set())]
        saved = {id(tensor) for tensor in self._models.tensors().values()}
        saved |= {id(tensor) for thing in theirs if isinstance(thing, nn.Module) for tensor in _tensors(thing)}
        states = {id(one.state) for one in (*self._optimizers, *theirs) if isinstance(one, torch.optim.Optimizer)}
        found = {}
        for prefix, module, path, thing in candidates:
            if isinstance(thing, torch.optim.Optimizer) and id(thing.state) in states:
                continue
            tensors = [one for one in _tensors(thing) if id(one) not in saved]
            if tensors or isinstance(thing, torch.optim.Optimizer):
                found[path] = thing, tensors
                self._holders[prefix] = module
        return found


def _tensors(thing: _Thing) -> list[torch.Tensor]:
    if isinstance(thing, nn.Module):
        # A lazy one has no shape yet; and what a frozen one makes anew, such as a rotary table, is a cache.
        caches = set() if any(one.requires_grad for one in thing.parameters()) else _not_persistent(thing)
        found = (*thing.parameters(), *thing.buffers())
        return [one for one in found if not is_lazy(one) and id(one) not in caches]
    return [one for state in thing.state.values() for one in state.values() if isinstance(one, torch.Tensor)]


def _not_persistent(module: nn.Module) -> set[int]:
    names = ((one, name) for one in module.modules() for name in one._non_persistent_buffers_set)  # noqa: SLF001
    return {id(one._buffers.get(name)) for one, name in names}  # noqa: SLF001 - torch tells in no other way


def _mark(tensors: list[torch.Tensor]) -> object:
    """What tells tensors from what they were. Not by identity or place: a frozen module may be moved to its device."""
    versions = [0 if one.is_inference() else one._version for one in tensors]  # noqa: SLF001 - counts writes
    # `tensor.data.lerp_` is not counted.
    return versions, [(one.shape, one.dtype) for one in tensors], sample(tensors)


def _next_step(thing: _Thing) -> str:
    if isinstance(thing, torch.optim.Optimizer):
        return "pass it in optimizers="
    return (
        "register it (assign it to an attribute, or use nn.ModuleList), or give it as a model of its own, "
        "TrainState({'net': net, 'average': average}, ...), or, if it is equal on all ranks, in extras"
    )
