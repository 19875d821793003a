"""Communication hooks of DDP that keep state, as error feedback is: training depends on it, no state dict has it."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks
from torch.nn.parallel import DistributedDataParallel

from txstore.errors import ConfigError
from txstore.train.names import Models

_STATELESS = (
    bool,
    int,
    float,
    str,
    type(None),
    weakref.ref,
    dist.ProcessGroup,
    mixed_precision_hooks._AllreduceUpcastHookState,  # noqa: SLF001 - DDP's own, under mixed_precision: a stream
)


def refuse_hooks_with_state(models: Models, saved: Collection[object]) -> None:
    """Refuse a hook whose state would be lost.

    Args:
        models: The models; a hook may be registered on any DDP module in them.
        saved: Objects that are saved by themselves: a hook may keep its state in one of them.

    Raises:
        ConfigError: A hook has a state object that is not saved, and may change.
    """
    for root in models.modules.values():
        for module in root.modules():
            if not isinstance(module, DistributedDataParallel):
                continue
            for hook, state in module._comm_hooks:  # noqa: SLF001 - torch has no other name for them
                if not isinstance(state, _STATELESS) and all(state is not one for one in saved):
                    name = getattr(hook, "__name__", type(hook).__name__)
                    raise ConfigError(
                        f"the communication hook {name} of DDP keeps state in a {type(state).__name__}, "
                        "which is not saved",
                        next_step="register one without state, such as fp16_compress_hook; or give that object "
                        "state_dict and load_state_dict, and pass it in extras as per_rank(...)",
                    )
