"""Calls that may not begin while the same thread is inside another one of the same object.

A signal handler, or an observer, may call what the frame below it is in the middle of. It would wait for that frame,
which goes on only when the handler has returned: for ever.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from txstore.errors import TransactionStateError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="Guarded")

SET_A_FLAG = "set a flag in the signal handler, and save between two steps when it is set"


class Guarded(Protocol):
    """What `one_at_a_time` needs of an object."""

    @property
    def inside(self) -> set[int]:
        """Identities of the threads that are inside one of its calls."""


def one_at_a_time(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Refuse a call while the same thread is inside another one of the object: it would wait for itself, or tear it.

    Raises:
        TransactionStateError: From a signal handler, or from an observer.
    """

    @functools.wraps(method)
    def guarded(self: _Self, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        inside, me = self.inside, threading.get_ident()
        if me in inside:
            raise TransactionStateError(
                f"{method.__name__}() inside another call of the same {type(self).__name__} on this thread, which a "
                "signal has interrupted, or which tells its observers",
                next_step=SET_A_FLAG,
            )
        try:
            inside.add(me)  # in here: a signal may raise between any two lines
            return method(self, *arguments, **named)
        finally:
            inside.discard(me)

    return guarded
