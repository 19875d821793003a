"""The settings of optimizers that schedulers move, such as the learning rate: they go with the scheduler.

Many schedulers compute the next rate from the one that stands in the optimizer (``CosineAnnealingLR`` among them). One
that is restored while its optimizer begins anew would go on from the code's first rate, and never come back to its
schedule; so would one that begins anew over the rate of an optimizer that is restored. So these settings are the saved
ones if a scheduler of the optimizer is restored, and stay as the code made them if all of its schedulers begin anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from txstore.train.built import as_text, optimizers_of
from txstore.train.group_settings import saved_settings
from txstore.train.piece import SavedKeys, anew, fresh_of
from txstore.train.python_state import lifted_tensors, unflatten

_OF_SCHEDULERS = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""What torch's schedulers keep in the groups of an optimizer. Of others, what has moved since the code set it."""

Settings = list[dict[str, Any]]


class Schedule:
    """Which schedulers move which optimizers, and what becomes of the settings that they move.

    Args:
        schedulers: Learning rate schedulers by name.
        optimizers: All optimizers.
    """

    def __init__(self, schedulers: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._schedulers = schedulers
        self._optimizers = optimizers

    def follows(self, fresh: Collection[str]) -> list[int]:
        """The optimizers that begin anew under a scheduler that is restored."""
        begun = self._fresh(fresh)
        return [at for at in range(len(self._optimizers)) if is_fresh(at, fresh) and self._of(at) - begun]

    def begins(self, fresh: Collection[str]) -> list[int]:
        """The optimizers that are restored, and whose schedulers all begin anew."""
        begun = self._fresh(fresh)
        kept = (at for at in range(len(self._optimizers)) if not is_fresh(at, fresh))
        return [at for at in kept if self._of(at) and not self._of(at) - begun]

    def _fresh(self, fresh: Collection[str]) -> frozenset[str]:
        return frozenset(self._schedulers) if "scheduler" in fresh else fresh_of(fresh, "scheduler")

    def _of(self, at: int) -> set[str]:
        """Names of the schedulers of an optimizer. One that does not tell may be any optimizer's."""
        found = set()
        for name, scheduler in self._schedulers.items():
            driven = {id(one) for one in optimizers_of(scheduler)}
            if id(self._optimizers[at]) in driven or not driven & {id(one) for one in self._optimizers}:
                found.add(name)
        return found

    def targets(self, saved: SavedKeys, fresh: Collection[str]) -> dict[str, torch.Tensor]:
        """Where to load settings that are tensors, of the optimizers that `follows` names."""
        roots = tuple(f"optimizer.{at}.groups" for at in self.follows(fresh))
        found = {key: one for key, one in saved.tensors.items() if roots and key.startswith(roots)}
        return {key: torch.empty(one.size, dtype=one.properties.dtype, device="cpu") for key, one in found.items()}

    def problems(self, entries: Sequence[Mapping[str, Any]], fresh: Collection[str]) -> list[str]:
        """Optimizers that begin anew and cannot take the settings which a restored scheduler moves."""
        problems = []
        for at in self.follows(fresh):
            groups = self._optimizers[at].param_groups
            named = {*fresh, *(f"scheduler:{name}" for name in self._of(at) - self._fresh(fresh))}
            both = anew(*sorted(named if len(self._optimizers) > 1 else {*fresh, "scheduler"}))
            if at >= len(entries) or len(entries[at]["groups"]) != len(groups):
                was = len(entries[at]["groups"]) if at < len(entries) else "no"
                problems.append(
                    f"optimizer {at} begins anew with {len(groups)} groups, {was} groups were saved, and the scheduler "
                    f"that is restored moves settings of each ({both})"
                )
                continue
            for group, values in zip(groups, _moved(entries[at], {}), strict=True):
                problems += [
                    f"optimizer {at} begins anew and has no setting {name!r}, which the scheduler that is restored "
                    f"moves ({both})"
                    for name in values
                    if name not in group and name not in _OF_SCHEDULERS
                ]
        return list(dict.fromkeys(problems))

    def now(self, entries: Sequence[Mapping[str, Any]], fresh: Collection[str]) -> dict[int, Settings]:
        """Before the restore, what schedulers move in the optimizers that `begins` names, as the code made it."""
        found: dict[int, Settings] = {}
        for at in self.begins(fresh):
            pairs = zip(self._optimizers[at].param_groups, moved_names(entries[at]), strict=True)
            found[at] = [{name: _copy(group[name]) for name in mine if name in group} for group, mine in pairs]
        return found

    def restore(
        self,
        entries: Sequence[Mapping[str, Any]],
        loaded: Mapping[str, torch.Tensor],
        fresh: Collection[str],
        made: Mapping[int, Settings],
    ) -> None:
        """Put the settings where they belong, after everything else is restored.

        Args:
            entries: The saved optimizers.
            loaded: All loaded tensors.
            fresh: What begins anew.
            made: What `now` returned.
        """
        wanted = {**made, **{at: _moved(entries[at], loaded) for at in self.follows(fresh)}}
        for at, settings in wanted.items():
            for group, values in zip(self._optimizers[at].param_groups, settings, strict=True):
                for name, value in values.items():
                    _put(group, name, value)


def moved_names(entry: Mapping[str, Any]) -> list[frozenset[str]]:
    """By group of a saved optimizer, the settings that go with its schedulers."""
    return [_OF_SCHEDULERS.union(values) for values in _moved(entry, {})]


def is_fresh(at: int, fresh: Collection[str]) -> bool:
    """Whether an optimizer begins anew: all do, or this one."""
    return "optimizer" in fresh or str(at) in fresh_of(fresh, "optimizer")


def _moved(entry: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Settings:
    """By group, the saved settings that a scheduler moves; without `tensors`, those that are none."""
    common = unflatten(entry["state"], {})[0]
    paths = lifted_tensors(common)
    # A placeholder for what is not loaded: only names are asked for then.
    given = {
        path: tensors.get(path, torch.empty(one.shape, dtype=one.dtype, device="cpu")) for path, one in paths.items()
    }
    groups: Settings = unflatten(common, given)["groups"]
    return [
        {
            name: value
            for name, value in values.items()
            if name in _OF_SCHEDULERS or (name in made and as_text(value) != made[name])
        }
        for values, made in zip(groups, saved_settings(entry), strict=True)
    ]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a setting. A tensor stays the same tensor, since captured graphs hold it; a plain rate stays plain."""
    live = group.get(name)
    if isinstance(live, torch.Tensor):
        live.detach().fill_(float(value))
    else:
        group[name] = value.item() if isinstance(value, torch.Tensor) else value


def set_group(group: dict[str, Any], saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """Give a group exactly the saved settings; returns those that were not saved and keep their default.

    A setting that a later torch has added keeps this optimizer's value. A tensor stays the same tensor, since
    captured graphs hold it.
    """
    before = dict(group)
    kept = [name for name in group if name != "params" and name not in saved and name in defaults]
    group.clear()
    group["params"] = before["params"]
    for name, value in saved.items():
        live = before.get(name)
        if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.dtype == value.dtype:
            group[name] = live
            live.detach().copy_(value)
        else:
            group[name] = value
    group.update({name: before[name] for name in kept})
    return kept
