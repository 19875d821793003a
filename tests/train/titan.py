"""Run on two ranks by test_torchtitan.py: torchtitan's real containers through `TxStoreCheckpointManager`.

One module of torchtitan is stood in for: `torchtitan.models.moe.kernels` is written in triton, which has no wheel for
machines without a GPU, and torchtitan imports it for everybody. Nothing here calls it.
"""

# ruff: noqa: E402 - the stand-in comes before what imports it

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

kernels = types.ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = None  # type: ignore[attr-defined]
sys.modules[kernels.__name__] = kernels
sys.path[:0] = [str(Path(__file__).parents[2] / "examples"), str(Path(__file__).parents[1] / "dcp")]

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Raise
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Checkpoint
from torchtitan_manager import TxStoreCheckpointManager

from txstore import catalog, open_store
from txstore.errors import CheckpointNotFound, ConfigError, StoreFullError
from txstore.retry import RetryingStore, RetryPolicy
from txstore.transaction import begin


class Text(IterableDataset):
    """Counts; its position is state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield torch.full((4,), self.at / 10 + dist.get_rank())

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class TrainingState:
    """What torchtitan's Trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Training:
    """The parts of torchtitan's Trainer that its checkpoint manager sees."""

    def __init__(self, url: str, **config: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 1e-2})
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (1 + step))
        self.loader = ParallelAwareDataloader(Text(), dp_rank=dist.get_rank(), dp_world_size=2, batch_size=2)
        self.state = TrainingState()
        self.manager = TxStoreCheckpointManager(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.state},
            checkpoint_config=Checkpoint(**{"enable": True, "folder": url, "interval": 2, **config}),
            sd_adapter=None,
            base_folder="",
        )
        self._batches: Any = None

    def run(self, steps: int, *, until: int = 0) -> list[float]:
        if self._batches is None:
            self._batches = iter(self.loader)
        losses = []
        for _ in range(steps):
            loss = self.model(next(self._batches)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.state.step += 1
            losses.append(loss.item())
            self.manager.save(self.state.step, last_step=self.state.step == until)
        return losses

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().clone() for parameter in self.model.parameters()]


def states(url: str) -> dict[str, str]:
    dist.barrier()
    with open_store(url) as store:
        return {entry.decision.checkpoint: entry.state for entry in catalog.entries(store)}


def plant(url: str) -> None:
    """What a killed save leaves, and a folder of another tool, both with a larger number than any commit."""
    if dist.get_rank() == 0:
        with open_store(url) as store:
            begin(RetryingStore(store), "step-99", world_size=2)
        folder = Path(url.removeprefix("file://")) / "step-100"
        folder.mkdir()
        (folder / ".metadata").touch()
    dist.barrier()


def goes_on_from_the_newest_commit(url: str, async_mode: str) -> None:
    untouched = Training(url, async_mode=async_mode)
    assert untouched.manager.load() is False
    losses = untouched.run(8, until=8)
    untouched.manager.close()
    assert list(states(url)) == ["step-8-model-only", "step-2", "step-4", "step-6"]
    plant(url)
    resumed = Training(url, async_mode=async_mode)
    assert resumed.manager.load() is True
    assert resumed.state.step == 6, "the newest committed; not the weights alone, nor the largest number"
    resumed.manager.interval = 100
    assert resumed.run(2) == losses[6:]
    assert all(map(torch.equal, resumed.weights(), untouched.weights()))
    assert resumed.manager.load(4) is True
    assert resumed.state.step == 4
    with pytest.raises(CheckpointNotFound):
        resumed.manager.load(5)
    resumed.manager.close()


def some_states_may_be_left_out(url: str) -> None:
    partial = Training(url, exclude_from_loading=["lr_scheduler", "dataloader"])
    assert partial.manager.load() is True
    assert (partial.state.step, partial.schedulers.schedulers[0].last_epoch) == (6, 0)


def retention_keeps_the_newest(url: str) -> None:
    training = Training(url, keep_latest_k=2, async_mode="async")
    training.run(8)
    training.manager.close()
    assert states(url) == {"step-2": "retired", "step-4": "committed", "step-6": "committed", "step-8": "committed"}


def a_failed_background_save_is_raised(url: str, then: str) -> None:
    training = Training(url, async_mode="async")
    faults = [Fault(Raise("full"), "put", ".safetensors")] if dist.get_rank() == 1 else []
    training.manager._store = RetryingStore(FaultyStore(url, *faults), RetryPolicy(attempts=1))
    training.run(3)
    with pytest.raises(CheckpointException) as caught:
        if then == "save":
            training.run(1)
        else:
            training.manager.close()
    assert isinstance(caught.value.failures[1][0], StoreFullError)
    assert states(url) == {}


def initial_weights_are_loaded_by_torchtitan(url: str, folder: str) -> None:
    source = Training(url + "-source", interval=100)
    source.run(2)
    dcp.save(source.manager.states["model"].state_dict(), checkpoint_id=folder)
    training = Training(url, initial_load_path=folder)
    assert training.manager.load() is True
    assert all(map(torch.equal, training.weights(), source.weights()))
    assert training.state.step == 0


def what_does_not_go_through_the_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="do not go through txstore"):
        Training(url, async_mode="async_with_pinned_mem")
    disabled = Training(url, enable=False)
    assert disabled.manager.load() is False
    disabled.run(2)
    assert states(url) == {}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    at = Path(folder)
    for mode in ("disabled", "async"):
        goes_on_from_the_newest_commit((at / mode).as_uri(), mode)
    some_states_may_be_left_out((at / "disabled").as_uri())
    retention_keeps_the_newest((at / "retention").as_uri())
    for then in ("save", "close"):
        a_failed_background_save_is_raised((at / f"failed-{then}").as_uri(), then)
    initial_weights_are_loaded_by_torchtitan((at / "initial").as_uri(), str(at / "weights"))
    what_does_not_go_through_the_store_is_refused((at / "refused").as_uri())
    dist.barrier()
    dist.destroy_process_group()
    print("all is well", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
