"""A sampling profiler of all threads, with nothing but the standard library: where the time of a save or load goes."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Self

INTERVAL_S = 0.002

_WAITING = frozenset(
    {"wait", "acquire", "_wait_for_tstate_lock", "_worker", "select", "poll", "result", "get", "_poll"}
)
"""Functions in which a thread waits for another one; native calls under them are not seen."""


class Sampler:
    """Samples while the block lasts; `self` and `whole` then hold the share of samples by function.

    Samples of threads that wait for other threads are left out. What remains is work, and waits for the kernel or the
    network: a thread inside ``pwrite`` or ``recv`` is seen in the function that called it.
    """

    def __init__(self) -> None:
        self._own: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()
        self._samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        me = threading.get_ident()
        while not self._stop.is_set():
            for thread, frame in sys._current_frames().items():
                if thread != me and frame.f_code.co_name not in _WAITING:
                    self._count(frame)
            time.sleep(INTERVAL_S)

    def _count(self, frame: FrameType) -> None:
        self._samples += 1
        self._own[_name(frame)] += 1
        seen = set()
        walk: FrameType | None = frame
        while walk is not None:
            seen.add(_name(walk))
            walk = walk.f_back
        self._whole.update(seen)

    def shares(self, most: int = 25) -> dict[str, list[tuple[str, float]]]:
        """The functions with the largest shares, by their own samples and with what they called."""
        total = max(1, self._samples)
        return {
            what: [(name, round(count / total, 3)) for name, count in counter.most_common(most)]
            for what, counter in (("own", self._own), ("whole", self._whole))
        }


def _name(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_code.co_qualname}"
