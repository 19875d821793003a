"""Many small operations on a store, some at once: the one way in which commit, listing and verification do it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

LOOKS = 32
"""How many small requests wait for their answers at once: below the cap of a process, which is shared with shards."""


def side_by_side(work: Callable[[T], R], items: Iterable[T], *, at_once: int = LOOKS) -> list[R]:
    """`work` of each item, in worker threads; at most `at_once` run at the same time. Results are in the items' order.

    The first error ends it: nothing that has not begun begins, what runs is waited for, and of several errors the one
    of the earliest item is raised. A single item is worked on in the caller's thread.
    """
    todo = list(items)
    if at_once < 2 or len(todo) < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(at_once, len(todo)), thread_name_prefix="txstore-look") as pool:
        futures = [pool.submit(work, item) for item in todo]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # also when the caller is interrupted: ten thousand requests are not waited for
            for future in futures:
                future.cancel()
    return [future.result() for future in futures if not future.cancelled()]
