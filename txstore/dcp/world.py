"""Which process group a writer belongs to: DCP takes a process whose group is gone for the whole world."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist


class World:
    """The default process group of this process at one moment, if there was one."""

    def __init__(self) -> None:
        group = _current()
        self._group: Callable[[], dist.ProcessGroup | None] | None = None if group is None else weakref.ref(group)

    @property
    def existed(self) -> bool:
        """Whether there was a group."""
        return self._group is not None

    @property
    def is_gone(self) -> bool:
        """Whether there was a group, and it is not the one of this process any more."""
        return self._group is not None and (_current() is None or _current() is not self._group())


def _current() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
