"""torchtitan: a `CheckpointManager` that saves and loads through txstore. Copy the class, and put it in its place:

    import torchtitan.train
    torchtitan.train.CheckpointManager = TxStoreCheckpointManager  # before the Trainer is made

`checkpoint.folder` may be a URL, such as ``s3://bucket/run-7``; a plain folder lies below the dump folder, as before.
"Latest" is the newest *committed* step, and not the folder with the largest number. Written against torchtitan 0.2.2;
docs/guides/torchtitan.md says what differs from its own manager. It needs torchtitan, which needs triton, and run by
itself it does nothing.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from txstore import catalog, open_store, sweep
from txstore.dcp import SnapshotBuffers, StorageReader, StorageWriter
from txstore.errors import ConfigError, TxStoreError
from txstore.manifest import Description, Progress
from txstore.retry import RetryingStore
from txstore.train.choice import choose
from txstore.train.exchange import Exchange


class TxStoreCheckpointManager(CheckpointManager):
    """torchtitan's manager over a transactional store; the arguments are its own.

    Raises:
        ConfigError: An option asks for what does not go through the store: TorchFT, ``async_with_pinned_mem`` (use
            ``async``: txstore makes the copy), ``last_save_in_hf`` (an export is a step of its own).
    """

    def __init__(
        self,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        checkpoint_config: Any,
        sd_adapter: Any,
        base_folder: str = "",
        ft_manager: Any = None,
    ) -> None:
        super().__init__(
            dataloader,
            model_parts,
            optimizers,
            lr_schedulers,
            states,
            checkpoint_config,
            sd_adapter,
            base_folder,
            ft_manager,
        )
        if not self.enable:
            return
        if self.ft_manager or self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM or self.last_save_in_hf:
            raise ConfigError("TorchFT, async_with_pinned_mem and last_save_in_hf do not go through txstore")
        folder = checkpoint_config.folder
        self._store = RetryingStore(open_store(folder if "://" in folder else os.path.abspath(self.folder)))
        # A URL is no directory: what torchtitan's own code looks for in a folder, it does not find.
        self.folder = self._store.url
        self._ranks = Exchange("torchtitan checkpoints", deadline_s=600.0)
        self._buffers = SnapshotBuffers()
        self._step = 0
        self._is_export = False

    # What the trainer calls.

    def save(self, curr_step: int, last_step: bool = False) -> None:
        self._step = curr_step
        super().save(curr_step, last_step)

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        if not self.enable:
            return False
        name = None if step == -1 else f"step-{step}"
        # The coordinator chooses once, and an error of its is one on all ranks: never "no checkpoint yet".
        decision = self._ranks.decide("choose", lambda: choose(self._store, name))
        if decision is None:
            return super().load()  # initial_load_path, Hugging Face weights, or nothing
        begin = time.monotonic()
        model_only = decision.step == 0
        states = self._states_to_load(model_only)
        whole = not model_only and not self.exclude_from_loading
        reader = StorageReader(self._store, strict=whole)
        dcp.load(states, checkpoint_id=decision.checkpoint, storage_reader=reader)
        self.states[MODEL].load_state_dict(states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        logger.info("Loaded %s in %.2f seconds.", decision.checkpoint, time.monotonic() - begin)
        return True

    def close(self) -> None:
        super().close()
        # The last save may still be on its way: without this its error, or its commit, would be lost.
        save, self.save_future = getattr(self, "save_future", None), None
        if save is not None:
            save.result()

    # What torchtitan's own `save` calls.

    def _create_checkpoint_id(self, step: int, folder: str = "") -> str:  # noqa: ARG002 - torchtitan's signature
        # A name without a number at its end is never the newest: weights alone are nothing to resume from.
        return f"step-{step}-model-only" if self._is_export else f"step-{step}"

    def _save_last_step(self, curr_step: int) -> None:
        self._is_export = self.last_save_model_only and curr_step > 0  # step 0 is torchtitan's seed checkpoint
        try:
            super()._save_last_step(curr_step)
        finally:
            self._is_export = False

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,  # noqa: ARG002 - torchtitan's signature
    ) -> Future[Any] | None:
        description = Description(progress=Progress(global_step=self._step), topology={"world": dist.get_world_size()})
        writer = StorageWriter(self._store, buffers=self._buffers, description=description)
        saved = None
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer)
        else:
            saved = dcp.async_save(
                state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=self.pg
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def _purge_stale_checkpoints(self) -> None:
        """Keep the newest `keep_latest_k` committed steps. A save that is on its way does not count as one."""
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        try:
            for decision in sweep.expired(catalog.entries(self._store, damaged={}), keep_last=self.keep_latest_k):
                sweep.retire(self._store, decision)
        except TxStoreError as error:
            logger.warning("retention will try again after the next save: %s", error)
