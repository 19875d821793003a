"""Objects with ``state_dict`` and ``load_state_dict``: schedulers, a scaler, data loaders, the user's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim import lr_scheduler

from txstore.compat.differences import Difference
from txstore.errors import ConfigError, StateMismatch, TxStoreError, describe
from txstore.train.built import class_of, compare_built, compare_facts, driven_by, parts_of, settings_of
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets, anew
from txstore.train.proof import Check
from txstore.train.python_state import flatten
from txstore.train.rng import Generator
from txstore.train.sample import sample
from txstore.train.schedule_functions import FUNCTIONS, Functions

log = logging.getLogger(__name__)


def _kind(item: object) -> str:
    return f"the class {item.__name__}" if isinstance(item, type) else f"a {type(item).__name__}"


def _next_step(label: str, item: object) -> str:
    if isinstance(item, type):
        return "make an object of it"
    if isinstance(item, Generator):
        return "pass it as generators={'name': generator}"
    if label == "data":
        return "use torchdata's StatefulDataLoader, or give a plain DataLoader an ElasticBatchSampler and pass that"
    return "wrap it in a class that has both"


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives its state as plain values and takes it back."""

    def state_dict(self) -> Any:
        """The state, by value."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state back."""


@dataclass(frozen=True, slots=True)
class Scoped:
    """An object, whether its state is equal on all ranks, and whether the caller vouches for its order."""

    item: Stateful
    is_shared: bool
    is_vouched_for: bool = False


def shared(item: Stateful) -> Scoped:
    """Mark an object whose state is equal on all ranks, such as a global cursor: their number may change."""
    return Scoped(item, is_shared=True)


def per_rank(item: Stateful) -> Scoped:
    """Mark an object of which each rank has a state of its own: it can be restored by as many ranks only."""
    return Scoped(item, is_shared=False)


def repeatable(loader: Stateful) -> Scoped:
    """Mark a loader of which you know that an epoch that is begun again comes in the same order: it is not asked.

    For a sampler, or a dataset that iterates, without a state, of which `TrainState` could not find that out. If it
    is not so, a resumed run goes on in another order, and nobody notices.
    """
    return Scoped(loader, is_shared=False, is_vouched_for=True)


def scoped(items: Any, label: str, *, is_shared: bool) -> dict[str, Scoped]:
    """One object, a sequence or a mapping of them, by name, each with its scope.

    Raises:
        ConfigError: One has no state_dict and load_state_dict.
    """
    if items is None:
        return {}
    if isinstance(items, Mapping):
        named = dict(items)
    elif isinstance(items, Sequence):
        named = {str(at): item for at, item in enumerate(items)}
    else:
        named = {"0": items}
    found = {}
    for name, item in named.items():
        if not isinstance(name, str):
            raise ConfigError(f"not a name of the {label} pieces: {name!r}", next_step="use a text")
        one = item if isinstance(item, Scoped) else Scoped(item, is_shared=is_shared)
        given: object = one.item
        if isinstance(given, type) or not isinstance(given, Stateful):
            raise ConfigError(
                f"{label} {name!r} is {_kind(given)} without state_dict and load_state_dict",
                next_step=_next_step(label, given),
            )
        found[name] = one
    return found


class StatefulPiece:
    """A piece of state made of such objects.

    Beside each state stands what the object is: `facts`, which must be the same at a resume, and `settings`, which the
    saved state overrides.

    Args:
        label: What they are, for messages.
        items: The objects by name.
        verify: Compare each object's state after the restore with the saved one, and refuse another. Off for objects
            that may rightly tell another state than they were given, such as a data loader before its first batch.

    Attributes:
        across_ranks: How an object is saved so that another number of ranks can load it.
        differing: Objects that told another state after the last restore than they were given.
    """

    across_ranks = "as many ranks as saved it; only what was marked shared() survives another number of them"

    def __init__(self, label: str, items: Mapping[str, Scoped], *, verify: bool) -> None:
        self._label = label
        self._items = dict(items)
        self._verify = verify
        self.differing: list[str] = []
        # Now, before a step or a resume moves anything; functions may read what training changes.
        self._facts = {name: self.facts(one.item) for name, one in self._items.items()}
        self._set = {name: self._settings_of(name) for name in self._items}

    def _settings_of(self, name: str) -> dict[str, str]:
        try:
            return self.settings(self._items[name].item)
        except TxStoreError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._label} {name!r} does not tell its state: {describe(error)}",
                next_step="its state_dict must work; a LambdaLR, for one, cannot save a builtin: wrap it in a lambda",
            ) from error

    def facts(self, item: Stateful) -> dict[str, str]:
        """What makes the state of an object mean what it means."""
        return {"class": class_of(item)}

    def facts_now(self, name: str) -> dict[str, str]:
        """The facts of one object at a save or a resume."""
        return self._facts[name]

    def settings(self, item: Stateful) -> dict[str, str]:  # noqa: ARG002 - for pieces that know some
        """What the code chose, and a restore overrides."""
        return {}

    def capture(self, place: Place) -> PieceState:  # noqa: ARG002 - the signature of a piece
        """The state of every object."""
        return PieceState(shared=self._states(is_shared=True), own=self._states(is_shared=False) or None)

    def _states(self, *, is_shared: bool) -> dict[str, Any]:
        return {
            name: {
                "state": state,
                "facts": self.facts_now(name),
                "settings": self._set[name],
                **self.more(name, state),
            }
            for name, one in self._items.items()
            if one.is_shared == is_shared
            for state in [self.state_of(name)]
        }

    def state_of(self, name: str) -> Any:
        """The state of one object."""
        return self._items[name].item.state_dict()

    def more(self, name: str, state: Any) -> dict[str, Any]:  # noqa: ARG002 - for pieces that have more
        """What else is saved of one object, beside its state, which is given."""
        return {}

    def targets(self, saved: SavedKeys, place: Place) -> Targets:  # noqa: ARG002 - the signature of a piece
        """None: tensors in state dicts are lifted with all Python state."""
        return Targets()

    def problems(self, loaded: Loaded) -> list[str]:
        """Objects that only one side has, or that belong to ranks that are no more."""
        own = {name: value for name, value in (loaded.own or {}).items() if name not in loaded.fresh}
        problems = []
        for name, one in self._restored(loaded).items():
            if name not in (loaded.shared if one.is_shared else own):
                elsewhere = name in (own if one.is_shared else loaded.shared)
                kind = "equal on all ranks" if one.is_shared else "of each rank"
                problems.append(f"{self._label} {name!r} was not saved" + (f" as {kind}" if elsewhere else ""))
                problems[-1] += f" ({anew(f'{self._label}:{name}')})"
        saved = {*loaded.shared, *(loaded.own or {})}
        for name in sorted(saved - self._items.keys() - loaded.fresh):
            hint = anew(f"{self._label}:{name}")
            problems.append(f"{self._label} {name!r} was saved, and there is none here ({hint})")
        nowhere = sorted(loaded.fresh - saved - self._items.keys())
        problems += [f"{self._label} {name!r} is named in fresh, and neither side has it" for name in nowhere]
        return problems

    def _restored(self, loaded: Loaded) -> dict[str, Scoped]:
        return {name: one for name, one in self._items.items() if name not in loaded.fresh}

    def differences(self, loaded: Loaded) -> list[Difference]:
        """Objects of another class, or under other facts; of ranks that are no more; settings that are overridden."""
        own = {} if loaded.same_world else loaded.own or {}
        found = [self._of_other_ranks(name, loaded) for name in sorted(own.keys() - loaded.fresh)]
        for name, one in self._restored(loaded).items():
            saved = self._saved(loaded, one).get(name)
            if saved is None or (name in own and not one.is_shared):
                continue
            what = f"{self._label} {name!r}"
            accept = partial(self.acceptable, name)
            found += compare_facts(what, saved["facts"], self.facts_now(name), f"{self._label}:{name}", accept)
            found += compare_built(what, saved["settings"], self._set[name])
        return found

    def _of_other_ranks(self, name: str, loaded: Loaded) -> Difference:
        step = f"{self.across_ranks}, or begin it anew: fresh={{{f'{self._label}:{name}'!r}}}"
        was, now = (f"one for each rank of {count}" for count in (loaded.saved_world_size, loaded.place.world_size))
        return Difference("state", f"{self._label} {name!r}", was, now, change_class=1, next_step=step)

    def acceptable(self, name: str, fact: str) -> str:
        """The name under which another value of a fact may be accepted; "" if the state would mean something else."""
        return f"{self._label}:{name}:{fact}" if fact == "class" else ""

    def _saved(self, loaded: Loaded, one: Scoped) -> Mapping[str, Any]:
        return (loaded.shared if one.is_shared else loaded.own) or {}

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Give every object its state.

        Raises:
            StateMismatch: An object tells another state afterwards.
        """
        self.differing = []
        restored = self._restored(loaded)
        for name, one in restored.items():
            saved = self._saved(loaded, one)[name]
            state = saved["state"]
            # Bytes first: an object may keep what it is given, or take it apart.
            before = _digest(state)
            try:
                self.give(name, saved)
            except TxStoreError:
                raise
            except Exception as error:
                step = f"build it as it was saved; {anew(f'{self._label}:{name}')}"
                raise StateMismatch(
                    f"{self._label} {name!r} refuses its state: {describe(error)}", key=name, next_step=step
                ) from error
            if _digest(self.state_of(name)) != before:
                if self._verify:
                    raise StateMismatch(f"{self._label} {name!r} does not take the saved state", key=name)
                self.differing.append(name)
            # They are what it holds now: the next save must tell of these, and the next resume of the code's again.
            self._set[name] = saved["settings"]
        return {"restored": sorted(restored)}

    def checks(self) -> list[Check]:
        """What could not be proved: an object that tells another state may be right, or may not have taken it."""
        return [
            Check(f"{self._label} {name}", ok=None, detail="tells another state than it was given")
            for name in self.differing
        ]

    def give(self, name: str, saved: Mapping[str, Any]) -> None:
        """Give one object its state."""
        self._items[name].item.load_state_dict(saved["state"])


class SchedulerPiece(StatefulPiece):
    """The piece of state that holds the schedulers.

    Args:
        schedulers: One or several.
        optimizers: All optimizers.
        saved: Objects whose state is saved with other pieces: functions of schedulers may read from them.

    Raises:
        UnsupportedValue: A function of one keeps a state that torch does not save.
    """

    def __init__(
        self, schedulers: Any, optimizers: Sequence[torch.optim.Optimizer] = (), saved: Sequence[object] = ()
    ) -> None:
        items = scoped(schedulers, "scheduler", is_shared=True)
        kept = [*saved, *optimizers]
        self._optimizers = optimizers
        self._functions = {id(one.item): Functions(name, one.item, kept) for name, one in items.items()}
        super().__init__("scheduler", items, verify=True)
        unproved = [
            f"scheduler {name!r} {function} {why}"
            for name, one in items.items()
            for function, why in self._functions[id(one.item)].unproved.items()
        ]
        if unproved:
            log.warning(
                "functions of schedulers that may do more than read are not asked for their values, so a resume "
                "compares only their names: %s",
                "; ".join(unproved),
            )

    def state_of(self, name: str) -> Any:
        """The state of one scheduler, and of those that it holds."""
        return scheduler_state(self._items[name].item)

    def give(self, name: str, saved: Mapping[str, Any]) -> None:
        """Give one scheduler its state, and those that it holds theirs."""
        held = _held(self._items[name].item.state_dict())
        for at, one in held.items():
            one.load_state_dict(saved["state"][at])
        super().give(name, {**saved, "state": {**saved["state"], **held}} if held else saved)

    def facts(self, item: Stateful) -> dict[str, str]:
        """Its class, those of the schedulers in it, the optimizer that it drives, and what its functions do."""
        return {**super().facts(item), **driven_by(item, self._optimizers), **self._functions[id(item)].facts}

    def capture(self, place: Place) -> PieceState:
        """The state of every scheduler.

        Raises:
            UnsupportedValue: A function of one has other values than when this was made.
        """
        for functions in self._functions.values():
            functions.refuse_moved()
        return super().capture(place)

    def acceptable(self, name: str, fact: str) -> str:
        """Its functions; there may be one for each group."""
        return "" if fact in {"class", "optimizer"} else f"scheduler:{name}:functions"

    def settings(self, item: Stateful) -> dict[str, str]:
        """Its settings as the code chose them."""
        return settings_of(item.state_dict())


def scheduler_state(scheduler: Stateful) -> Any:
    """The state of a scheduler, with that of those which its state dict holds as objects, as many a warm-up does."""
    state = _without_code(scheduler, scheduler.state_dict())
    held = _held(state)
    return {**state, **{at: one.state_dict() for at, one in held.items()}} if held else state


def _without_code(scheduler: Any, state: Any) -> Any:
    """Without what decorators hang on a function: torch takes it for state, as it does the attributes of an object."""
    if not isinstance(state, Mapping):
        return state
    changed: dict[str, Any] = {}
    functions, saved = getattr(scheduler, "lr_lambdas", None), state.get("lr_lambdas")
    if isinstance(functions, list) and isinstance(saved, list) and len(functions) == len(saved):
        changed["lr_lambdas"] = [_plain(one, entry) for one, entry in zip(functions, saved, strict=True)]
    parts, inner = parts_of(scheduler), state.get("_schedulers")
    if isinstance(inner, list) and len(inner) == len(parts):
        changed["_schedulers"] = [_without_code(one, entry) for one, entry in zip(parts, inner, strict=True)]
    return {**state, **changed} if changed else state


def _plain(function: object, entry: Any) -> Any:
    if not isinstance(function, FUNCTIONS) or not isinstance(entry, Mapping):
        return entry
    return {name: value for name, value in entry.items() if name[:2] != "__" and not callable(value)}


def _held(state: Any) -> dict[str, lr_scheduler.LRScheduler]:
    """Schedulers that a state dict holds as objects."""
    items = state.items() if isinstance(state, Mapping) else ()
    return {name: one for name, one in items if isinstance(one, lr_scheduler.LRScheduler)}


def _digest(state: Any) -> tuple[bytes, str]:
    data, lifted = flatten(state)
    return data, sample(lifted.values())
