"""A communication hook of DDP that keeps state is refused, at once and at the save; one without goes through."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from workers import Pool, Rank

from txstore.errors import ConfigError
from txstore.train.state import TrainState
from txstore.train.stateful import per_rank


class Feedback:
    """State of a hook that can be saved."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.error = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"error": self.error}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.error = state["error"]


HOOKS: dict[str, Any] = {
    "none": lambda group: None,
    "fp16": lambda group: (None, default_hooks.fp16_compress_hook),
    "allreduce of a group": lambda group: (group, default_hooks.allreduce_hook),
    "powerSGD": lambda group: (powerSGD_hook.PowerSGDState(group, 1), powerSGD_hook.powerSGD_hook),
    "powerSGD in 16 bits": lambda group: (
        powerSGD_hook.PowerSGDState(group, 1),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "own": lambda group: (Feedback(group), lambda state, bucket: default_hooks.allreduce_hook(state.group, bucket)),
}


def hooked(rank: Rank, kind: str) -> Any:
    """What the TrainState says of a model with the hook, and what its save says of one that was registered later."""
    found = []
    for later in (False, True):
        module = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=rank.group)
        wrapped = nn.ModuleDict({"part": module})  # DDP need not be the outermost
        chosen = HOOKS[kind](rank.group)
        try:
            state = TrainState(wrapped) if later else None
            if chosen is not None:
                module.register_comm_hook(*chosen)
            state = state or TrainState(wrapped)
            state.capture(rank.rank, rank.world)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    if kind == "own":
        TrainState(wrapped, extras={"hook": per_rank(chosen[0])}).capture(rank.rank, rank.world)
    return found


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_with_state_is_refused(kind: str, pool: Pool) -> None:
    wanted = {"powerSGD": "a PowerSGDState", "powerSGD in 16 bits": "a PowerSGDState", "own": "a Feedback"}.get(kind)
    for found in pool.run(2, hooked, kind):
        for text in found:
            assert (f"keeps state in {wanted}" in text) if wanted else text == ""
