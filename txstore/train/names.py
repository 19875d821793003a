"""Names of parameters that do not depend on wrappers, as DCP gives them to a model's state dict."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from txstore.errors import ConfigError

_WRAPPED = "_checkpoint_wrapped_module"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and "." not in name


class Models:
    """One model, or several by name, and one name for every tensor of them.

    Args:
        model: A module, or modules by name; the names go before those of their tensors.

    Raises:
        ConfigError: No module, one under two names, one that holds nothing, a name with a dot, or a module under FSDP1,
            whose flat parameters have no names.
    """

    def __init__(self, model: nn.Module | Mapping[str, nn.Module]) -> None:
        if not isinstance(model, nn.Module | Mapping):
            raise ConfigError(
                f"model is a {type(model).__name__}",
                next_step="pass a module, or modules by name: {'actor': actor, ...}",
            )
        self.modules: dict[str, nn.Module] = {"": model} if isinstance(model, nn.Module) else dict(model)
        if not self.modules:
            raise ConfigError("no model is given")
        if len({id(module) for module in self.modules.values()}) < len(self.modules):
            raise ConfigError("one model is given under two names", next_step="pass each model under one name")
        for name, module in self.modules.items():
            if not isinstance(module, nn.Module):
                raise ConfigError(f"model {name!r} is a {type(module).__name__}, not a module")
            if isinstance(model, Mapping) and not _is_name(name):
                raise ConfigError(f"not a model's name: {name!r}", next_step="use a name without dots")
            if any(re.match(r"rank-[0-9]+\Z", part) for part in [name, *dict(module.named_children())]):
                raise ConfigError("a module is called like a rank, and so would its keys be", next_step="rename it")
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise ConfigError(
                    "FullyShardedDataParallel is not supported", next_step="shard with fully_shard (FSDP2)"
                )
            if next(module.parameters(), None) is None and not module.state_dict():
                raise ConfigError(
                    f"{f'model {name!r}' if name else 'the model'} has nothing in its state dict",
                    next_step="make its modules attributes, or keep them in nn.ModuleList or nn.ModuleDict, not in a "
                    "plain list; leave a model out that has nothing to save",
                )

    def state_dict(self) -> dict[str, object]:
        """Every tensor and extra state that the modules save, by reference. FSDP2 reshards for it."""
        found: dict[str, object] = {}
        for name, module in self.modules.items():
            for fqn, value in get_model_state_dict(module).items():
                found[_join(name, fqn)] = value
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by the first of its names. FSDP2 reshards for it: optimizers hold the shards."""
        for module in self.modules.values():
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()
        for name, module in self.modules.items():
            for fqn, tensor in _named(module):
                if isinstance(tensor, nn.Parameter) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[_join(name, fqn)] = tensor
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer, under each of its names."""
        return {_join(name, fqn): tensor for name, module in self.modules.items() for fqn, tensor in _named(module)}

    def saved_buffers(self) -> Iterator[torch.Tensor]:
        """Every buffer that a state dict holds."""
        for module in self.modules.values():
            for _, part in _modules(module, ""):
                temporary = part._non_persistent_buffers_set  # noqa: SLF001 - torch has no other name for it
                for name, buffer in part.named_buffers(recurse=False):
                    if name not in temporary:
                        yield buffer

    def temporary_buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """The module, and the name in it, of each buffer that no state dict holds; once, by the first of its names."""
        found: dict[str, tuple[nn.Module, str]] = {}
        seen: set[tuple[int, str]] = set()
        for model, module in self.modules.items():
            for path, part in _modules(module, ""):
                temporary = part._non_persistent_buffers_set  # noqa: SLF001 - as above
                # In the order in which they were registered: a resume makes late ones in the same.
                for name in part._buffers:  # noqa: SLF001 - with those that are None
                    if name in temporary and (id(part), name) not in seen:
                        seen.add((id(part), name))
                        found[_join(model, f"{path}.{name}" if path else name)] = part, name
        return found

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, by the first of its names."""
        seen: set[int] = set()
        for model, module in self.modules.items():
            for path, part in _modules(module, ""):
                if id(part) not in seen:
                    seen.add(id(part))
                    yield (_join(model, path) if path else model), part

    def module_names(self) -> set[str]:
        """Names of all modules."""
        return {
            f"{model}.{path}" if model and path else model or path
            for model, module in self.modules.items()
            for path, _ in _modules(module, "")
        }

    def modes(self) -> dict[str, list[str]]:
        """For each model in training mode, the modules in it that are in evaluation mode.

        A model that is evaluated at the moment is left out: all of it is, and nothing tells which of its modules would
        stay so.
        """
        return {
            model: sorted(path for path, part in _modules(module, "") if not part.training)
            for model, module in self.modules.items()
            if module.training
        }

    def set_modes(self, modes: Mapping[str, Collection[str]]) -> None:
        """Give every module of these models its mode. Not by `train`, which modules may override."""
        for model, evaluated in modes.items():
            paths = {id(part): path for path, part in _modules(self.modules[model], "")}
            for part in self.modules[model].modules():
                part.training = paths.get(id(part)) not in evaluated

    def buffer_names(self) -> set[str]:
        """Names of all buffers."""
        return {
            _join(name, fqn)
            for name, module in self.modules.items()
            for fqn, tensor in _named(module)
            if not isinstance(tensor, nn.Parameter)
        }

    def module_of(self, fqn: str) -> nn.Module:
        """The module that owns the tensor or extra state called `fqn`."""
        name, rest = ("", fqn) if "" in self.modules else fqn.split(".", 1)
        part = rest.rpartition(".")[0]
        for path, module in _modules(self.modules[name], ""):
            if path == part:
                return module
        raise ConfigError(f"no module holds {fqn!r}", key=fqn)


def _join(model: str, fqn: str) -> str:
    return f"{model}.{fqn}" if model else fqn


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in _modules(module, ""):
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            yield (f"{path}.{name}" if path else name), parameter
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            yield (f"{path}.{name}" if path else name), buffer


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Every module under its name without the wrappers of DDP, compile and activation checkpointing."""
    if isinstance(module, DistributedDataParallel):
        yield from _modules(module.module, path)
        return
    if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):  # noqa: SLF001 - torch.compile's only name for it
        yield from _modules(module._orig_mod, path)  # noqa: SLF001
        return
    if _WRAPPED in module._modules:  # noqa: SLF001 - what checkpoint_wrapper makes
        yield from _modules(module._modules[_WRAPPED], path)  # type: ignore[arg-type]  # noqa: SLF001
        return
    yield path, module
    for name, part in module.named_children():
        yield from _modules(part, f"{path}.{name}" if path else name)
