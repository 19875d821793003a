"""The last chance of a failure that nobody looked at (failure case C7).

A run that ends "green" with nothing stored is worse than one that crashes: at the end of the interpreter every
checkpointer that is still open is waited for, and if a save has failed and nobody has seen its error, the message
goes to stderr and the process ends with a status other than zero.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before ours: they run in reverse order
import logging
import os
import sys
import threading
from typing import Protocol

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""


class Guarded(Protocol):
    """Something that may hold failures that nobody has seen."""

    def overlooked(self) -> str:
        """Wait for what is on its way; what nobody has been told, or ""."""


_noted: list[str] = []
"""Failures that were only noted on an exception: somebody may catch it, or it may be the SystemExit of a green run."""


def remember(text: str) -> None:
    """Tell `text` at the end of the interpreter."""
    _noted.append(text)


# Strong references: a checkpointer that was only dropped may hold a failure too.
_open: dict[int, Guarded] = {}
# A forked process (a data loader's worker) has no background thread: it would wait for saves that never end in it.
os.register_at_fork(after_in_child=_open.clear)
os.register_at_fork(after_in_child=_noted.clear)


def guard(checkpointer: Guarded) -> None:
    """Ask `checkpointer` at the end of the interpreter."""
    _open[id(checkpointer)] = checkpointer


def release(checkpointer: Guarded) -> None:
    """Forget it: its errors were raised."""
    _open.pop(id(checkpointer), None)


def _at_exit() -> None:
    found = _noted + [text for checkpointer in list(_open.values()) if (text := checkpointer.overlooked())]
    if not found:
        return
    for text in found:
        sys.stderr.write(f"txstore: {text}\n")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter ends with the status of the main program whatever an exit handler raises.
    os._exit(EXIT_STATUS)


# Not `atexit`: it comes after concurrent.futures has stopped accepting work, and a save on its way could not end.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001
