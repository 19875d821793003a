"""Lightning: `TxStoreCheckpointIO` stores a Trainer's checkpoints as transactions. Copy the two classes.

    python examples/lightning_checkpoint.py file:///tmp/run-1 --die-at 9    # SIGKILL after step 9
    python examples/lightning_checkpoint.py file:///tmp/run-1               # goes on from the newest commit

The whole checkpoint dict of Lightning travels: weights, optimizers, schedulers, loops, callbacks, hyperparameters.
Nothing is pickled. docs/guides/lightning.md says what it cannot carry.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from txstore import catalog, open_store, sweep
from txstore.dcp import Snapshot, SnapshotBuffers, StorageReader, StorageWriter
from txstore.errors import CheckpointNotFound, CheckpointRetired, ConfigError, PlanMismatch
from txstore.keys import step_of
from txstore.manifest import Description, Progress
from txstore.retry import RetryingStore
from txstore.train import exit_guard
from txstore.train.python_state import flatten, unflatten
from txstore.train.rng import capture_streams, restore_streams

log = logging.getLogger(__name__)
PYTHON = "lightning"  # the key of the Python part; tensors lie beside it, each under its path


class TxStoreCheckpointIO(CheckpointIO):
    """``Trainer(plugins=[TxStoreCheckpointIO(url)])``; resume by ``trainer.fit(..., ckpt_path=io.newest())``.

    The checkpoint is named after the file that Lightning asks for, without folder and suffix. Names that end in
    ``{step}`` are recovery points, of which `newest` takes the newest; others ("last", "{step}-best") are loaded by
    their name.

    Args:
        url: The store.
        background: Return from a save when the copy is made. The error of a save is raised by the next one, or by
            the end of `fit`. Nothing is removed before the save that replaces it has committed: Lightning's own
            `AsyncCheckpointIO` around this class would not wait.
    """

    def __init__(self, url: str, *, background: bool = False) -> None:
        self._store = RetryingStore(open_store(url))
        self._thread = ThreadPoolExecutor(1, "txstore-lightning") if background else None
        self._buffers = SnapshotBuffers()
        self._in_flight: Future[None] | None = None
        self._to_remove: list[str] = []
        exit_guard.guard(self)  # a save after `fit` has nobody who waits for it

    def newest(self) -> str | None:
        """For ``ckpt_path=``: the newest committed checkpoint; None if the store has none, which is a fresh start."""
        try:
            return f"{catalog.newest(self._store).checkpoint}.ckpt"
        except CheckpointNotFound:
            return None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str, storage_options: Any = None) -> None:
        """Called on rank 0 alone."""
        if storage_options is not None:
            raise ConfigError("storage_options are not used", next_step="pass options to open_store")
        name, step = PurePath(path).stem, checkpoint["global_step"]
        if step_of(name) not in {None, step}:
            raise ConfigError(
                f"{name!r} would be taken for step {step_of(name)}, it is step {step}",
                next_step="ModelCheckpoint(filename='{epoch}-{step}'): end in {step}, or in a word",
            )
        self._settle()  # one save at a time
        # An attribute that torch hangs on the dict, with the versions of the modules.
        versions = getattr(checkpoint.get("state_dict"), "_metadata", None)
        python, tensors = flatten({"checkpoint": checkpoint, "versions": versions})
        blob = torch.frombuffer(bytearray(python), dtype=torch.uint8)
        snapshot = self._buffers.stage({PYTHON: blob, **tensors})
        progress = Progress(global_step=step, epoch=checkpoint["epoch"])
        writer = StorageWriter(
            self._store,
            description=Description(progress=progress),
            overwrite=step_of(name)
            is None,  # "last" is saved again and again; the old one stands until the new one does
        )
        if self._thread is None:
            _write(name, snapshot, writer)
        else:
            self._in_flight = self._thread.submit(_write, name, snapshot, writer)

    def load_checkpoint(
        self,
        path: str,
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: ARG002 - Lightning's signature
    ) -> dict[str, Any]:
        """Called on every rank. `weights_only` changes nothing: what is read is never unpickled."""
        if map_location is not None:
            raise ConfigError("map_location is not used: Lightning moves what is loaded from the CPU")
        self._settle()
        name = PurePath(path).stem
        decision = catalog.find(self._store, name)
        reader = StorageReader(self._store)
        reader.reset(name)
        saved = reader.read_metadata().state_dict_metadata
        state = {key: torch.empty(found.size, dtype=found.properties.dtype) for key, found in saved.items()}
        with _typed():
            dcp.load(state, checkpoint_id=name, storage_reader=reader, no_dist=True)
        if reader.decision is None or reader.decision.txn != decision.txn:
            raise PlanMismatch(f"{name} was committed again while it was read", next_step="resume again")
        _refuse_unequal(decision.txn)
        whole = unflatten(state.pop(PYTHON).numpy().tobytes(), state)
        if whole["versions"] is not None:
            whole["checkpoint"]["state_dict"]._metadata = whole["versions"]  # noqa: SLF001 - where torch keeps it
        return whole["checkpoint"]

    def remove_checkpoint(self, path: str) -> None:
        """Called on rank 0 after the save that replaces it; done when that save has committed."""
        self._to_remove.append(PurePath(path).stem)
        if self._in_flight is None:
            self._remove()

    def teardown(self) -> None:
        """Called at the end of `fit`, also of one that failed."""
        self._settle()

    def overlooked(self) -> str:
        """Asked when the interpreter ends: what went wrong with a save that nobody has waited for, or ""."""
        error = self._in_flight.exception() if self._in_flight is not None else None
        return f"a save failed: {error}" if error is not None else ""

    def _settle(self) -> None:
        """Wait for the save that is on its way and raise its error; then do what had to wait for it."""
        if self._in_flight is not None:
            save, self._in_flight = self._in_flight, None
            try:
                save.result()
            except BaseException:
                self._to_remove.clear()  # what should have replaced them does not exist
                raise
        self._remove()

    def _remove(self) -> None:
        names, self._to_remove = self._to_remove, []
        for name in names:
            try:
                decision = catalog.find(self._store, name)
            except (CheckpointNotFound, CheckpointRetired):
                continue
            if decision == catalog.newest(self._store):
                log.info("%s is the newest checkpoint: it is removed when there is a newer one", name)
                self._to_remove.append(name)
            else:
                sweep.retire(self._store, decision, reason="removed by Lightning")


def _write(name: str, snapshot: Snapshot, writer: StorageWriter) -> None:
    with snapshot, _typed():
        dcp.save(snapshot.state_dict, checkpoint_id=name, storage_writer=writer, no_dist=True)


@contextmanager
def _typed() -> Iterator[None]:
    """Raise txstore's own error, which DCP wraps in one that is not even an `Exception`."""
    try:
        yield
    except CheckpointException as wrapped:
        error, _ = wrapped.failures[0]
        raise error from None


def _refuse_unequal(txn: str) -> None:
    """All ranks must have loaded the same commit."""
    if dist.is_initialized():
        found = [txn] * dist.get_world_size()
        dist.all_gather_object(found, txn)
        if len(set(found)) > 1:
            raise PlanMismatch(f"the ranks have loaded different commits: {found}", next_step="start again")


class RandomStreams(Callback):
    """Saves and restores the random streams of every rank, which Lightning does not."""

    def __init__(self) -> None:
        self._saved: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        mine = capture_streams()
        found = [mine]
        if dist.is_initialized():  # called on every rank
            found = [mine] * dist.get_world_size()
            dist.all_gather_object(found, mine)
        return {"streams": found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["streams"]

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        # As late as possible: setting up the loaders draws from the streams.
        if self._saved:
            if len(self._saved) != trainer.world_size:
                raise ConfigError(f"{len(self._saved)} ranks saved their random streams, {trainer.world_size} resume")
            restore_streams(self._saved[trainer.global_rank])
            self._saved = []


# From here on: the training that shows it.


class Net(LightningModule):
    def __init__(self, lr: float) -> None:  # noqa: ARG002 - a hyperparameter, which Lightning finds for itself
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Tell(Callback):
    """Prints each step, and may kill the process after one."""

    def __init__(self, die_at: int) -> None:
        self._die_at = die_at

    def on_train_batch_end(self, trainer: Trainer, _: LightningModule, outputs: Any, *__: Any) -> None:
        print(f"step {trainer.global_step} loss {outputs['loss'].item()!r}", flush=True)
        if trainer.global_step == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def train(url: str, *, steps: int, save_every: int, die_at: int = 0, background: bool = False) -> None:
    torch.manual_seed(7)
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(40, 8, generator=numbers)
    # A loader with a state dict: Lightning saves it with its loops, so that a resume goes on inside the epoch.
    loader = StatefulDataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    model = Net(lr=1e-2)
    io = TxStoreCheckpointIO(url, background=background)
    saves = ModelCheckpoint(dirpath="checkpoints", filename="{epoch}-{step}", every_n_train_steps=save_every)
    newest = io.newest()
    print(f"resuming {newest}" if newest else "a fresh start", flush=True)
    with tempfile.TemporaryDirectory() as folder:  # Lightning's logs; the checkpoints are in the store
        trainer = Trainer(
            plugins=[io],
            callbacks=[RandomStreams(), Tell(die_at), saves],
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader, ckpt_path=newest)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    print("parameters", digest.hexdigest())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the store: file:///path, s3://bucket/prefix, ...")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--die-at", type=int, default=0, help="kill this process after that step")
    parser.add_argument("--background", action="store_true", help="write beside training")
    options = parser.parse_args(arguments)
    train(
        options.url,
        steps=options.steps,
        save_every=options.save_every,
        die_at=options.die_at,
        background=options.background,
    )


if __name__ == "__main__":
    main()
