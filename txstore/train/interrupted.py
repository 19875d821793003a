"""Saves that a signal has put into the middle of a step: refused, since half of it would be saved as a whole.

A signal handler runs between any two instructions of the main thread: inside ``optimizer.step()``, between the step and
its counter, after a batch was taken and before it was trained on.
"""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from txstore.dcp.one_at_a_time import SET_A_FLAG
from txstore.errors import TransactionStateError


def refuse_in_the_middle_of_a_step() -> None:
    """Refuse a save by a signal handler, or while an exception is handled that came with a signal.

    What is done after such an exception was handled cannot be told from any other call.

    Raises:
        TransactionStateError: Says what to do instead.
    """
    handlers = _handlers()
    if any(_is_handler(frame, handlers) for frame in _stack(sys._getframe(1))):  # noqa: SLF001 - inspect is slow
        raise _refused("a signal handler")
    if any(_came_with_a_signal(error, handlers) for error in _handled(sys.exception())):
        raise _refused("the handler of an exception that a signal has raised")


def _refused(where: str) -> TransactionStateError:
    return TransactionStateError(
        f"save() in {where}: training may be in the middle of a step, and half of it would be saved as a whole",
        next_step=SET_A_FLAG,
    )


def _handlers() -> set[CodeType]:
    """The code of this process's signal handlers, as far as they are written in Python."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        handler = getattr(handler, "__func__", handler)
        if callable(handler) and not hasattr(handler, "__code__"):
            handler = type(handler).__call__
        code = getattr(handler, "__code__", None)
        if code is not None:
            found.add(code)
    return found


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_handler(frame: FrameType, handlers: set[CodeType]) -> bool:
    """Whether a frame is that of a handler which Python has called: the loop may call the same function itself."""
    if frame.f_code not in handlers or frame.f_back is None:
        return False
    for value in frame.f_locals.values():
        if value is frame.f_back or (isinstance(value, tuple) and any(one is frame.f_back for one in value)):
            return True
    return False


def _handled(error: BaseException | None) -> Iterator[BaseException]:
    """An exception that is being handled, and those that it was raised for."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _came_with_a_signal(error: BaseException, handlers: set[CodeType]) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return True
    trace = error.__traceback__
    while trace is not None:
        if _is_handler(trace.tb_frame, handlers):
            return True
        trace = trace.tb_next
    return False
