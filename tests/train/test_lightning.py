"""`TxStoreCheckpointIO` of examples/lightning_checkpoint.py: what Lightning hands over comes back, and what it removes waits."""

from __future__ import annotations

import collections
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from faults import Fault, FaultyStore, Raise

from txstore import catalog
from txstore.decisions import read_index, read_manifest
from txstore.errors import AlreadyCommitted, CheckpointRetired, ConfigError, StoreFullError, UnsupportedValue
from txstore.index import TensorRecord
from txstore.registry import open_store
from txstore.retry import RetryingStore, RetryPolicy

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning_checkpoint
    return lightning_checkpoint


def checkpoint(step: int, value: float = 0.0) -> dict[str, Any]:
    """Of the shape that a Trainer makes, with every kind of value that its loops and callbacks hold."""
    net = torch.nn.BatchNorm1d(3)
    torch.nn.init.constant_(net.weight, value)
    return {
        "epoch": 1,
        "global_step": step,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": net.state_dict(),
        "loops": {
            "fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": {"total": {"ready": 3}, "is_last": False}}
        },
        "callbacks": {
            "ModelCheckpoint{'monitor': 'val/loss'}": {
                "best_model_score": torch.tensor(0.5),
                "best_k_models": {"/a/b.ckpt": torch.tensor(0.25, dtype=torch.float64)},
                "best_model_path": "",
                "dirpath": None,
            }
        },
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]}],
        "lr_schedulers": [{"milestones": collections.Counter([3, 5])}],
        "hyper_parameters": {"lr": 1e-3},
    }


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def states(url: str) -> dict[str, str]:
    with open_store(url) as store:
        return {entry.decision.checkpoint: entry.state for entry in catalog.entries(store)}


@pytest.mark.parametrize("background", [False, True])
def test_a_whole_checkpoint_comes_back(lightning: ModuleType, store_url: str, background: bool) -> None:
    io = lightning.TxStoreCheckpointIO(store_url, background=background)
    assert io.newest() is None
    saved, wanted = checkpoint(9, 1.0), checkpoint(9, 1.0)
    io.save_checkpoint(saved, "/some/where/epoch=1-step=9.ckpt")
    saved["state_dict"]["weight"].fill_(7)  # training goes on
    saved["callbacks"].clear()
    io.teardown()
    assert io.newest() == "epoch=1-step=9.ckpt"
    found = io.load_checkpoint(io.newest(), weights_only=True)
    assert same(found, wanted)
    assert found["state_dict"]._metadata == wanted["state_dict"]._metadata
    with open_store(store_url) as store:
        decision = catalog.newest(store)
        manifest = read_manifest(store, decision)
        kinds = {type(record) for record in read_index(store, decision, manifest).items}
        assert kinds == {TensorRecord}, "nothing is pickled"
        assert manifest.description.progress.global_step == 9


def test_what_cannot_come_back_is_refused_at_the_save(lightning: ModuleType, store_url: str) -> None:
    io = lightning.TxStoreCheckpointIO(store_url)
    with pytest.raises(UnsupportedValue, match=r"hyper_parameters\.model"):
        io.save_checkpoint(
            {**checkpoint(1), "hyper_parameters": {"model": torch.nn.Linear(1, 1)}}, "epoch=0-step=1.ckpt"
        )
    assert io.newest() is None


def test_names_that_would_lie_about_the_step_are_refused(lightning: ModuleType, store_url: str) -> None:
    io = lightning.TxStoreCheckpointIO(store_url)
    with pytest.raises(ConfigError, match="would be taken for step 12, it is step 400"):
        io.save_checkpoint(checkpoint(400), "epoch=3-val_loss=0.12.ckpt")
    io.save_checkpoint(checkpoint(400), "epoch=3-val_loss=0.12-step=400.ckpt")
    with pytest.raises(AlreadyCommitted):
        io.save_checkpoint(checkpoint(400), "epoch=3-val_loss=0.12-step=400.ckpt")


def test_last_and_best_are_kept_by_name_and_are_never_the_newest(lightning: ModuleType, store_url: str) -> None:
    io = lightning.TxStoreCheckpointIO(store_url)
    io.save_checkpoint(checkpoint(1), "epoch=0-step=1.ckpt")
    for step in (2, 3):
        io.save_checkpoint(checkpoint(step), "last.ckpt")
    io.save_checkpoint(checkpoint(3), "step=3-best.ckpt")
    assert io.newest() == "epoch=0-step=1.ckpt"
    assert io.load_checkpoint("last.ckpt")["global_step"] == 3


def test_what_is_removed_is_retired_but_for_the_newest(lightning: ModuleType, store_url: str) -> None:
    io = lightning.TxStoreCheckpointIO(store_url)
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), f"epoch=0-step={step}.ckpt")
    io.remove_checkpoint("/some/where/epoch=0-step=1.ckpt")
    io.remove_checkpoint("/some/where/epoch=0-step=2.ckpt")
    io.remove_checkpoint("/some/where/of-another-run.ckpt")
    assert states(store_url) == {"epoch=0-step=1": "retired", "epoch=0-step=2": "committed"}
    with pytest.raises(CheckpointRetired):
        io.load_checkpoint("epoch=0-step=1.ckpt")
    io.save_checkpoint(checkpoint(3), "epoch=0-step=3.ckpt")
    io.teardown()
    assert states(store_url)["epoch=0-step=2"] == "retired", "when there is a newer one"


@pytest.mark.parametrize("then", ["save", "load", "teardown"])
def test_a_failed_background_save_is_raised_and_removes_nothing(
    lightning: ModuleType, store_url: str, then: str
) -> None:
    io = lightning.TxStoreCheckpointIO(store_url, background=True)
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), f"epoch=0-step={step}.ckpt")
    io.teardown()
    io._store = RetryingStore(
        FaultyStore(store_url, Fault(Raise("full"), "put", ".safetensors")), RetryPolicy(attempts=1)
    )
    io.save_checkpoint(checkpoint(3), "epoch=0-step=3.ckpt")
    io.remove_checkpoint("epoch=0-step=1.ckpt")  # as ModelCheckpoint does, at once
    assert "no space left" in io.overlooked()
    with pytest.raises(StoreFullError):
        if then == "save":
            io.save_checkpoint(checkpoint(4), "epoch=0-step=4.ckpt")
        elif then == "load":
            io.load_checkpoint("epoch=0-step=1.ckpt")
        else:
            io.teardown()
    io.teardown()
    assert states(store_url) == {"epoch=0-step=1": "committed", "epoch=0-step=2": "committed"}
    io.save_checkpoint(checkpoint(5), "epoch=0-step=5.ckpt")
    io.teardown()
    assert (io.newest(), io.overlooked()) == ("epoch=0-step=5.ckpt", "")
