"""Work that may never return, such as a read from a file system whose server is gone, run with an end to the wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from txstore.errors import DeadlineExceeded
from txstore.retry import RetryingStore
from txstore.store import Store

T = TypeVar("T")


def within(limit_s: float, store: Store, phase: str, work: Callable[[], T]) -> T:
    """The result of `work`, which runs on a thread of its own.

    Args:
        limit_s: How long to wait, in seconds. A thread that is still running then is left alone: nothing can end it.
        store: What it may be stuck in, for the message.
        phase: What it does, for the message.
        work: The work.

    Raises:
        DeadlineExceeded: It has not ended in time; names the object that the store is busy with.
        BaseException: What `work` raised.
    """
    result: list[T] = []
    errors: list[BaseException] = []
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run() -> None:
        try:
            with _on(device):
                result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, name=f"txstore-{phase}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        running = store.in_flight() if isinstance(store, RetryingStore) else []
        where = f"in {running[0]}" if running else "not waiting for the store"
        raise DeadlineExceeded(
            f"{phase} did not end within {limit_s:g} s: {where}",
            key=running[0].key if running else "",
            next_step="is the storage reachable from this rank?",
        )
    if errors:
        raise errors[0]
    return result[0]


@contextlib.contextmanager
def _on(device: int | None) -> Iterator[None]:
    """The current device is a thread's own: a copy to another one would allocate a context there."""
    if device is not None:
        torch.accelerator.set_device_index(device)
    yield
