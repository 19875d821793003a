"""An argument or a field of another type is a `ConfigError` that names it, where it is given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from txstore.errors import ConfigError, TransactionStateError
from txstore.retry import RetryPolicy
from txstore.train.checkpointer import Checkpointer
from txstore.train.policy import SavePolicy
from txstore.train.proof import ProofPolicy
from txstore.train.resume import ResumeOptions
from txstore.train.state import TrainState

net = nn.Linear(2, 2)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)


def run(**given: Any) -> Any:
    return Checkpointer("memory://wrong-types", TrainState(net), **given)


class InAList(nn.Module):
    """Registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(1, 1)]


def refused(message: str, make: Any) -> Any:
    return pytest.param(make, message, id=message)


WRONG = [
    refused("policy is a dict, not SavePolicy or None", lambda: run(policy={"max_in_flight": 2})),
    refused("policy is the class SavePolicy", lambda: run(policy=SavePolicy)),
    refused("proof is a int, not ProofPolicy or None", lambda: run(proof=3)),
    refused("retry is a int", lambda: run(retry=3)),
    refused("description is a dict", lambda: run(description={"world": 1})),
    refused("overwrite is a str, not bool", lambda: run(overwrite="yes")),
    refused("observers is a int", lambda: run(observers=3)),
    refused("observers is a tuple, not Collection of Callable", lambda: run(observers=[3])),
    refused("observers is a function", lambda: run(observers=lambda event: None)),
    refused("max_in_flight is a str, not int", lambda: SavePolicy(max_in_flight="2")),  # type: ignore[arg-type]
    refused("max_in_flight is a bool", lambda: SavePolicy(max_in_flight=True)),
    refused("when_busy='later' is not one of 'wait'", lambda: SavePolicy(when_busy="later")),  # type: ignore[arg-type]
    refused("max_staging_bytes is a str, not int or None", lambda: SavePolicy(max_staging_bytes="1G")),  # type: ignore[arg-type]
    refused("max_commit_lag_s is a str", lambda: SavePolicy(max_commit_lag_s="5")),  # type: ignore[arg-type]
    refused("verify is a bool", lambda: SavePolicy(verify=True)),  # type: ignore[arg-type]
    refused("max_failed_in_a_row is a NoneType", lambda: SavePolicy(max_failed_in_a_row=None)),  # type: ignore[arg-type]
    refused("deadline_s=nan is not float", lambda: SavePolicy(deadline_s=math.nan)),
    refused("loss_fraction is a str, not float", lambda: ProofPolicy(loss_fraction="x")),  # type: ignore[arg-type]
    refused("norm_factor=nan is not float", lambda: ProofPolicy(norm_factor=math.nan)),
    refused("on_failure='log' is not one of 'raise'", lambda: ProofPolicy(on_failure="log")),  # type: ignore[arg-type]
    refused("attempts is a str", lambda: RetryPolicy(attempts="3")),  # type: ignore[arg-type]
    refused("checkpoint is a int, not str or None", lambda: ResumeOptions(checkpoint=3)),  # type: ignore[arg-type]
    refused("fresh is a set, not Collection of str", lambda: ResumeOptions(fresh={1})),  # type: ignore[arg-type]
    refused("fresh is a str", lambda: ResumeOptions(fresh="optimizer")),
    refused("accept is a str", lambda: ResumeOptions(accept="batch_size")),
    refused("seen_samples is a str", lambda: ResumeOptions(seen_samples="x")),  # type: ignore[arg-type]
    refused("matrix= takes what is in the file, not its name", lambda: ResumeOptions(matrix="a.yml")),  # type: ignore[arg-type]
    refused("fallback='newest' is not one of", lambda: ResumeOptions(fallback="newest")),  # type: ignore[arg-type]
    refused("extra 'a' is the class Linear", lambda: TrainState(net, extras={"a": nn.Linear})),
    refused("one SGD is given twice", lambda: TrainState(net, [sgd, sgd])),
    refused("one model is given under two names", lambda: TrainState({"a": net, "b": net})),
    refused("the model has nothing in its state dict", lambda: TrainState(InAList())),
    refused("model 'b' has nothing in its state dict", lambda: TrainState({"a": net, "b": nn.Identity()})),
    refused("rng is a str, not bool", lambda: TrainState(net, rng="no")),  # type: ignore[arg-type]
    refused(
        "scheduler '0' does not tell its state",
        lambda: TrainState(net, sgd, schedulers=rates.LambdaLR(sgd, math.exp)),
    ),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_a_wrong_type_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert str(raised.value).startswith(message), str(raised.value)
    assert raised.value.next_step or "=" in message


def test_calls_on_a_checkpointer() -> None:
    saves = run()
    for options in ({"checkpoint": "step-1"}, "step-1"):
        with pytest.raises(ConfigError, match=r"options is a (dict|str), not ResumeOptions or None"):
            saves.resume(options)
    with pytest.raises(ConfigError, match="step 0: batch_id is a int, not str or None"):
        saves.record(loss=1.0, batch_id=3)
    saves.close()
    with pytest.raises(TransactionStateError, match="closed"):
        saves.record(loss=1.0)


def test_numbers_of_numpy_and_whole_numbers_for_floats_are_taken() -> None:
    assert SavePolicy(max_in_flight=np.int64(2), deadline_s=60).deadline_s == 60  # type: ignore[arg-type]
    assert ProofPolicy(loss_fraction=np.float32(0.5), loss_spreads=math.inf).loss_spreads == math.inf  # type: ignore[arg-type]
    assert ResumeOptions(fresh=["optimizer"], accept={"batch_size": 1}).seen_samples is None
    run(observers=iter([print])).close()
