"""Optimizers: moments, steps and settings by the names of the parameters, exactly as they stand.

Read from `optimizer.state` and `param_groups` themselves. `get_optimizer_state_dict` would take a step with a
learning rate of 0 for an optimizer that has none yet, leave out the state of frozen parameters on the way back,
and refuse a parameter that has no state. What was saved is what is restored, absent state included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from txstore.compat.differences import Difference
from txstore.compat.layouts import OptimizerLayout, compare_layouts
from txstore.compat.load_plan import LoadPlan
from txstore.errors import ConfigError, StateMismatch, TxStoreError, UnsupportedValue
from txstore.train.built import class_of, compare_built, in_groups
from txstore.train.group_settings import followed, made_settings, saved_settings, tell_changed
from txstore.train.moments import homeless, largest, placeless, sharded, taken, target
from txstore.train.names import Models
from txstore.train.own_ways import own_way
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets, anew
from txstore.train.python_state import flatten, unflatten
from txstore.train.schedule import moved_names, set_group

_NOTHING = OptimizerLayout("", ())


def optimizers_in(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer, several, or several by name. The names are not kept: each is called by its place.

    Raises:
        ConfigError: Something else, or one twice: its state would lie under two keys, and be restored twice.
    """
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    if isinstance(given, Mapping):
        given = given.values()
    several: list[torch.optim.Optimizer] = []
    for one in given if isinstance(given, Iterable) else [given]:
        if not isinstance(one, torch.optim.Optimizer):
            raise ConfigError(
                f"a {type(one).__name__} is no optimizer",
                next_step="pass a torch.optim.Optimizer, or several; leave optimizers out if there is none",
            )
        if any(one is other for other in several):
            raise ConfigError(f"one {type(one).__name__} is given twice", next_step="pass each optimizer once")
        several.append(one)
    return several


class OptimizerPiece:
    """The piece of state that holds all optimizers.

    Raises:
        ConfigError: An optimizer keeps its state in its own way, by a state_dict or by hooks, or holds a parameter that
            no model has.
    """

    def __init__(self, optimizers: list[torch.optim.Optimizer], models: Models) -> None:
        self._optimizers = optimizers
        self._models = models
        self._refuse_own_ways()
        self._last_seen = self._of_set = self._as_they_are()
        # Now, before a scheduler or a resume moves anything.
        self._set = [[made_settings(group) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def _refuse_own_ways(self) -> None:
        """What a state_dict of an optimizer's own, or a hook of one, adds to the state or makes of it, is not seen."""
        for optimizer in self._optimizers:
            way = own_way(optimizer)
            if way:
                raise ConfigError(
                    f"{type(optimizer).__name__} has {way} of its own",
                    next_step="pass it in extras, if its state_dict is plain and equal on all ranks",
                )

    def layouts(self) -> list[OptimizerLayout]:
        """Class and ordered names of the parameters of each optimizer: what a resume must have alike."""
        now = self._as_they_are()
        if now != self._of_set:
            each = zip(self._of_set, self._set, now, (one.param_groups for one in self._optimizers), strict=True)
            self._set = [followed(*one) for one in each]
            self._of_set = now
        return now

    def _as_they_are(self) -> list[OptimizerLayout]:
        names = self._names()
        found = []
        for optimizer in self._optimizers:
            groups = (tuple(_name(one, names) for one in group["params"]) for group in optimizer.param_groups)
            found.append(OptimizerLayout(class_of(optimizer), tuple(groups)))
        return found

    def _sharded(self) -> set[str]:
        return {fqn for fqn, one in self._models.parameters().items() if isinstance(one, DTensor)}

    def _names(self) -> dict[int, str]:
        return {id(parameter): fqn for fqn, parameter in self._models.parameters().items()}

    def capture(self, place: Place) -> PieceState:  # noqa: ARG002 - the signature of a piece
        """Settings and the structure of the state by value, tensors by reference.

        Raises:
            ConfigError: A hook was registered since.
        """
        self._refuse_own_ways()
        layouts = self.layouts()
        tell_changed(self._last_seen, layouts)
        self._last_seen = layouts
        shared: list[dict[str, Any]] = []
        tensors: dict[str, torch.Tensor] = {}
        for at, (optimizer, layout) in enumerate(zip(self._optimizers, layouts, strict=True)):
            data, lifted = self._flat(at, optimizer)
            groups = [list(group) for group in layout.groups]
            entry = {"class": layout.kind, "groups": groups, "state": data, "settings": self._set[at]}
            shared.append({**entry, "sharded": sorted(self._sharded() & {fqn for group in groups for fqn in group})})
            tensors |= lifted
        return PieceState(shared=shared, tensors=tensors)

    def _flat(self, at: int, optimizer: torch.optim.Optimizer) -> tuple[bytes, dict[str, torch.Tensor]]:
        """One optimizer as bytes and tensors under their keys."""
        names, root = self._names(), f"optimizer.{at}"
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        data, tensors = flatten({"groups": groups, "own": _own_state(optimizer)}, root)
        parts = []
        for parameter, state in _parameter_states(optimizer):
            fqn = _name(parameter, names)
            part, lifted = flatten(dict(state), f"{root}.state.{fqn}")
            parts.append([fqn, part])
            tensors |= lifted
        return flatten([data, parts])[0], tensors

    def targets(self, saved: SavedKeys, place: Place) -> Targets:  # noqa: ARG002 - the signature of a piece
        """A tensor for each saved one: the live one if it fits, else a new one, sharded like its parameter."""
        parameters = self._models.parameters()
        left: set[str] = set()
        live: dict[str, torch.Tensor] = {}
        for at, optimizer in enumerate(self._optimizers):
            live |= self._flat(at, optimizer)[1]
        left_behind = [saved.plan.parameters - kept for kept in self._kept(saved.plan)]
        tensors = {}
        for key, found in saved.tensors.items():
            if key.startswith(tuple(f"optimizer.{at}." for at in range(len(self._optimizers)))):
                fqn = _parameter_of(key, parameters)
                if key.split(".")[2] == "state":
                    if _parameter_of(key, left_behind[int(key.split(".")[1])]) is not None:
                        left.add(key)
                        continue
                    if fqn is None:
                        continue  # of a parameter of another pipeline stage; the ranks compare what they ask for
                tensors[key] = target(live.get(key), parameters.get(fqn or ""), found.size, found.properties.dtype)
        return Targets(tensors, frozenset(left))

    def _kept(self, plan: LoadPlan) -> list[frozenset[str]]:
        """For each optimizer, the parameters whose saved state is restored, if there is any."""
        return [frozenset(fqn for group in one.groups for fqn in group) - plan.anew for one in self.layouts()]

    def problems(self, loaded: Loaded) -> list[str]:
        """Another optimizer, or other parameters in its groups, or state that the checkpoint does not hold."""
        covered = loaded.plan.parameters.__contains__
        sides = ([one.without(covered) for one in side] for side in self.compared(loaded))
        problems = [str(one) for one in compare_layouts(*sides)]
        numbers = {*map(str, range(max(len(loaded.shared), len(self._optimizers))))}
        nowhere = sorted(loaded.fresh - numbers)
        problems += [f"optimizer {name!r} is named in fresh, and neither side has it" for name in nowhere]
        problems += [] if problems else [*self._of_several(loaded), *self._homeless(loaded)]
        kept = self._kept(loaded.plan)
        for at, entry in _restored(loaded).items():
            if loaded.is_complete and not problems:
                try:
                    self._unflat(entry, loaded.tensors, kept[at])
                except TxStoreError as error:
                    problems.append(str(error))
        return problems

    def compared(self, loaded: Loaded) -> tuple[list[OptimizerLayout], list[OptimizerLayout]]:
        """The layouts in a checkpoint, and today's; an optimizer that is left fresh is an empty one on both sides."""
        sides = saved_layouts(loaded), self.layouts()
        for number in filter(str.isdecimal, loaded.fresh):
            if int(number) < max(map(len, sides)):
                for side in sides:
                    side[int(number) : int(number) + 1] = [_NOTHING]
        return sides

    def _anew(self, at: int) -> str:
        return anew("optimizer" if len(self._optimizers) == 1 else f"optimizer:{at}")

    def _homeless(self, loaded: Loaded) -> list[str]:
        """State that cannot be placed beside parameters that are sharded in another way today."""
        parameters, problems = self._models.parameters(), []
        kept = self._kept(loaded.plan)
        for at, entry in _restored(loaded).items():
            parts = _parts(entry["state"])
            were = sharded(parts, entry.get("sharded"))
            left = [
                path
                for fqn, part in parts
                if fqn in kept[at]
                for path in homeless(part, parameters[fqn], was_sharded=fqn in were)
            ]
            if left:
                problems.append(
                    f"optimizer {at} keeps tensors of another shape than their parameters ({len(left)}, such as "
                    f"{left[0]!r}), and these were sharded in another way when they were saved ({self._anew(at)})"
                )
        return problems

    def _of_several(self, loaded: Loaded) -> list[str]:
        """State that lies under one parameter and may be of others too, as LBFGS has it, when those have changed."""
        parameters, problems = self._models.parameters(), []
        layouts, kept = list(zip(*self.compared(loaded), strict=True)), self._kept(loaded.plan)
        for at, entry in _restored(loaded).items():
            names = [{fqn for group in side.groups for fqn in group} for side in layouts[at]]
            if names[0] == names[1] and not loaded.plan.anew & names[1]:
                continue
            problems += [
                f"{entry['class']} keeps more numbers under {fqn!r} than it has, perhaps of parameters that a "
                f"migration changes ({self._anew(at)})"
                for fqn, part in _parts(entry["state"])
                if fqn in kept[at] and largest(part) > max(parameters[fqn].numel(), 1)
            ]
        return problems

    def differences(self, loaded: Loaded) -> list[Difference]:
        """Settings that the code chooses otherwise, and which of the two is in force."""
        of_code = {at: moved_names(loaded.shared[at]) for at in loaded.begun if at < len(loaded.shared)}
        return self._told(
            (at, entry["settings"], of_code.get(at)) for at, entry in _restored(loaded).items() if at < len(self._set)
        )

    def following(self, entries: Sequence[Mapping[str, Any]], places: Collection[int]) -> list[Difference]:
        """The same for optimizers that begin anew under a scheduler that is restored: what goes with that is saved."""
        return self._told((at, _with_scheduler(entries[at]), None) for at in places if at < len(entries))

    def follow(self, entries: Sequence[Mapping[str, Any]], places: Collection[int]) -> None:
        """Record of such optimizers what is in force, for the next save to tell, and the next resume to compare."""
        for at in places:
            pairs = zip(self._set[at], _with_scheduler(entries[at]), strict=True)
            self._set[at] = [{**ours, **saved} for ours, saved in pairs]

    def _told(
        self, saved: Iterable[tuple[int, Sequence[Mapping[str, str]], Sequence[Collection[str]] | None]]
    ) -> list[Difference]:
        """One line for all groups that agree, of the settings of optimizers, with names of which the code's win."""
        found: dict[Difference, list[int]] = {}
        self.layouts()  # settings of groups that came since
        for at, groups, of_code in saved:
            for number, (theirs, ours) in enumerate(zip(groups, self._set[at], strict=False)):
                for one in compare_built(f"optimizer {at}", theirs, ours, of_code[number] if of_code else ()):
                    found.setdefault(one, []).append(number)
        return [in_groups(one, numbers) for one, numbers in found.items()]

    def _unflat(
        self, entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], kept: Collection[str]
    ) -> tuple[list[dict[str, Any]], dict[Any, Any], dict[str, dict[str, Any]]]:
        """Settings by group, state that belongs to no parameter, and state by parameter."""
        common, parts = unflatten(entry["state"], {})
        parameters = self._models.parameters()
        found = unflatten(common, taken(common, tensors, None))
        were = sharded(parts, entry.get("sharded"))
        states = {
            fqn: unflatten(part, taken(part, tensors, parameters[fqn], was_sharded=fqn in were))
            for fqn, part in parts
            if fqn in kept
        }
        return found["groups"], found["own"], states

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Settings and state, absent state included. What a migration begins anew stays as the code made it.

        Raises:
            StateMismatch: An optimizer does not hold afterwards what was saved.
        """
        parameters = self._models.parameters()
        moments = groups = 0
        kept: list[str] = []
        names = self._kept(loaded.plan)
        self._last_seen = self.layouts()
        for at, entry in _restored(loaded).items():
            optimizer = self._optimizers[at]
            settings, own, states = self._unflat(entry, loaded.tensors, names[at])
            begun = self._begun(optimizer, saved_layouts(loaded)[at], loaded.plan)
            optimizer.state.clear()
            optimizer.state.update(own)
            for fqn, state in states.items():
                optimizer.state[parameters[fqn]] = state
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                kept += [f"optimizer {at}: {name}" for name in set_group(group, values, optimizer.defaults)]
            now, saved = (_values(state, states) for state in (self._flat(at, optimizer)[0], entry["state"]))
            optimizer.state.update(begun)
            if not kept and now != saved:
                raise StateMismatch(f"optimizer {at} does not take the saved state", key=f"optimizer.{at}")
            of_code = moved_names(entry) if at in loaded.begun else [()] * len(settings)
            triples = zip(saved_settings(entry), self._set[at], of_code, strict=True)
            self._set[at] = [{**theirs, **_only(ours, mine)} for theirs, ours, mine in triples]
            groups += len(settings)
            moments += sum(isinstance(value, torch.Tensor) for state in states.values() for value in state.values())
        return {"param_groups": groups, "moment_tensors": moments, "settings_not_saved": kept}

    def _begun(self, optimizer: torch.optim.Optimizer, before: OptimizerLayout, plan: LoadPlan) -> dict[Any, Any]:
        """State of parameters that begin anew: what the optimizer made for them itself, as Adagrad does."""
        known = {fqn for group in before.groups for fqn in group} - plan.anew
        names = self._names()
        return {
            one: state for one, state in _parameter_states(optimizer) if _name(one, names) in plan.parameters - known
        }


def with_moments(loaded: Loaded) -> dict[str, str]:
    """By key, the parameters of which a checkpoint's optimizers have state that would be restored."""
    return {f"model.{fqn}": fqn for entry in _restored(loaded).values() for fqn, _ in _parts(entry["state"])}


def _restored(loaded: Loaded) -> dict[int, Mapping[str, Any]]:
    """The saved optimizers that are not left fresh, by their place."""
    return {at: entry for at, entry in enumerate(loaded.shared) if str(at) not in loaded.fresh}


def _parts(data: bytes) -> list[list[Any]]:
    """Names of parameters, and the state of each as bytes."""
    parts: list[list[Any]] = unflatten(data, {})[1]
    return parts


def _values(data: bytes, parameters: Collection[str]) -> tuple[bytes, list[tuple[str, bytes]]]:
    """One optimizer as bytes, wherever its tensors lie, but for the state of other parameters."""
    common, parts = unflatten(data, {})
    return common, [(fqn, placeless(part)) for fqn, part in parts if fqn in parameters]


def saved_layouts(loaded: Loaded) -> list[OptimizerLayout]:
    """The layouts in a checkpoint."""
    return [OptimizerLayout(entry["class"], tuple(map(tuple, entry["groups"]))) for entry in loaded.shared]


def _with_scheduler(entry: Mapping[str, Any]) -> list[dict[str, str]]:
    """By group, the saved settings that go with a scheduler."""
    return [_only(settings, names) for settings, names in zip(saved_settings(entry), moved_names(entry), strict=True)]


def _only(settings: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: text for name, text in settings.items() if name in names}


def _name(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    name = names.get(id(parameter))
    if name is None:
        raise ConfigError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that no model has",
            next_step="pass all models, and make the optimizer after the model was wrapped",
        )
    return name


def _own_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """State that belongs to no parameter."""
    state: Mapping[Any, Any] = optimizer.state
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def _parameter_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, Mapping[str, Any]]]:
    for key, state in optimizer.state.items():
        if isinstance(key, torch.Tensor):
            if not isinstance(state, dict):
                raise UnsupportedValue(f"{class_of(optimizer)} keeps a {type(state).__name__} for a parameter")
            yield key, state


def _parameter_of(key: str, parameters: Collection[str]) -> str | None:
    """The parameter whose state a key holds. No parameter's name continues another's after a dot."""
    parts = key.split(".")[3:]
    for end in range(1, len(parts)):
        fqn = ".".join(parts[:end])
        if fqn in parameters:
            return fqn
    return None
