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
from dataclasses import dataclass
from typing import Protocol

EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""


class Guarded(Protocol):
    """Something that may hold failures that nobody has seen."""

    def overlooked(self) -> str:
        """Wait for what is on its way; what nobody has been told, or ""."""


@dataclass(frozen=True, slots=True)
class _Noted:
    text: str
    url: str
    step: int


_noted: list[_Noted] = []
"""Failures that were only noted on an exception: somebody may catch it, or it may be the SystemExit of a green run.

Whether anybody read the note cannot be seen. So it counts as dealt with only if the work was saved after all.
"""


def remember(text: str, url: str, step: int) -> None:
    """Tell `text` at the end of the interpreter: saves to the store at `url` failed, the latest at `step`."""
    _noted.append(_Noted(text, url, step))


def overtaken(url: str, step: int) -> None:
    """This process has committed `step` to the store at `url`: earlier failures there have cost nothing."""
    _noted[:] = [one for one in _noted if one.url != url or one.step > step]


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
    found = [one.text for one in _noted] + [
        text for checkpointer in list(_open.values()) if (text := checkpointer.overlooked())
    ]
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
