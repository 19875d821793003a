"""The functions of a step that schedulers are made with: torch leaves them out of a scheduler's state.

Their code says little: it may move, and what it reads may change. So they are asked for their values, if their code
proves that this moves nothing. What they read may change while training runs, and a new process would have what the
code makes of it: so they are asked again at each save, and another answer refuses it.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType
from typing import Any

from torch.optim import lr_scheduler

from txstore.errors import UnsupportedValue
from txstore.train.built import class_of, parts_of
from txstore.train.only_reads import Reading, reading_of
from txstore.train.rng import process_streams

PROBED = [*range(257), *sorted({int(257 * 1.02**power) for power in range(420)})]
"""Steps at which functions of a step are compared: each one at first, then one in fifty, up to a million."""

_AGAIN = [bisect.bisect_left(PROBED, step) for step in (1, 10, 100, 1_000, 10_000, 100_000)]
"""Places of those that are asked again at each save."""

FUNCTIONS = (
    FunctionType, MethodType, BuiltinFunctionType, MethodWrapperType, functools.partial, functools._lru_cache_wrapper,  # noqa: SLF001
)  # fmt: skip
"""Of these torch saves nothing, or what is of no use. Of other objects it saves the attributes."""

_OF_TORCH = ("]", "scale_fn")
"""How the paths of functions end that torch's schedulers call with a step. Others may be called for something else."""

_AS_OBJECT = "make it an object with __call__: torch saves its attributes with the scheduler"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A function that only reads, and its values when this was made."""

    path: str
    scheduler: Any
    function: Callable[[int], Any]
    values: Sequence[str]

    def places(self) -> list[int]:
        """Which of `PROBED` are asked again: some, and those around the step at which the scheduler is."""
        at = bisect.bisect_left(PROBED, max(0, getattr(self.scheduler, "last_epoch", 0)))
        return [*_AGAIN, *range(max(0, at - 1), min(at + 1, len(PROBED)))]


class Functions:
    """The functions of one scheduler, and of those in it.

    Args:
        name: The scheduler, for people.
        scheduler: That scheduler.
        saved: Objects whose state is saved: what a function reads from them comes back at a resume.

    Attributes:
        facts: What each function does, by its path: a digest of its values; the name of one that may not be asked; the
            class of an object that can be called, since torch keeps its state in the scheduler's.
        unproved: Why a function may not be asked, by its path and name.

    Raises:
        UnsupportedValue: A function keeps a state that torch does not save.
    """

    def __init__(self, name: str, scheduler: object, saved: Collection[object] = ()) -> None:
        self.facts: dict[str, str] = {}
        self.unproved: dict[str, str] = {}
        self._name = name
        self._again: list[_Asked] = []
        known: dict[int, str] = {}
        for path, owner, function in _functions(scheduler, ""):
            if id(function) not in known:
                known[id(function)] = self._fact(path, owner, function, saved)
            self.facts[path] = known[id(function)]

    def _fact(self, path: str, scheduler: object, function: Any, saved: Collection[object]) -> str:
        if not isinstance(function, FUNCTIONS):
            return class_of(function)
        reading = reading_of(function)
        if reading.keeps and path.endswith(_OF_TORCH):
            raise UnsupportedValue(
                f"scheduler {self._name!r} {path}, {_called(function)}, keeps a state that torch does not save: it "
                f"{reading.keeps}",
                key=f"scheduler.{self._name}",
                next_step=_AS_OBJECT,
            )
        why = reading.keeps or reading.unproved
        asked = [] if why else _ask((function, PROBED))
        if not asked:
            self.unproved[f"{path}, {_called(function)}"] = why or "draws random numbers"
            return _called(function)
        if not _reads_any(reading, saved):
            self._again.append(_Asked(path, scheduler, function, asked[0]))
        lines = "".join(f"{value}\n" for value in asked[0])
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()[:16]}"

    def refuse_moved(self) -> None:
        """Ask again, at a few steps.

        Raises:
            UnsupportedValue: A function has other values than when this was made.
        """
        if not self._again:
            return
        places = [one.places() for one in self._again]
        steps = [[PROBED[place] for place in mine] for mine in places]
        answers = _ask(*((one.function, mine) for one, mine in zip(self._again, steps, strict=True)))
        for at, one in enumerate(self._again):
            if answers[at : at + 1] != [[one.values[place] for place in places[at]]]:
                raise UnsupportedValue(
                    f"scheduler {self._name!r} {one.path}, {_called(one.function)}, has other values than when the "
                    "TrainState was made: something that it reads has changed, and no checkpoint holds that",
                    key=f"scheduler.{self._name}",
                    next_step=f"{_AS_OBJECT}; or keep what changes in an object among the extras",
                )


def _functions(scheduler: object, path: str) -> Iterator[tuple[str, object, object]]:
    """Functions by path, each with the scheduler that has it."""
    if isinstance(scheduler, lr_scheduler.LambdaLR | lr_scheduler.MultiplicativeLR):
        for at, function in enumerate(scheduler.lr_lambdas):
            yield f"{path}lr_lambdas[{at}]", scheduler, function
    elif isinstance(scheduler, lr_scheduler.CyclicLR):
        custom = getattr(scheduler, "_scale_fn_custom", None)
        if custom is not None:
            yield f"{path}scale_fn", scheduler, custom
    if not type(scheduler).__module__.startswith("torch."):
        for name, value in getattr(scheduler, "__dict__", {}).items():
            if isinstance(value, FUNCTIONS) and not name.startswith("_scale_fn"):
                yield f"{path}{name}", scheduler, value
    for at, part in enumerate(parts_of(scheduler)):
        yield from _functions(part, f"{path}{at}.")


def _called(function: Any) -> str:
    if isinstance(function, functools.partial):
        return f"a partial of {_called(function.func)}"
    return f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', class_of(function))}"


def _reads_any(reading: Reading, saved: Collection[object]) -> bool:
    return any(read is one for read in reading.reads for one in saved)


def _ask(*questions: tuple[Callable[[int], Any], Sequence[int]]) -> list[list[str]]:
    """Values of functions, each at its steps; none of any if one draws random numbers, which its code may not show.

    What was drawn is put back, whatever happens.
    """
    streams = process_streams().values()
    before = [stream.get() for stream in streams]
    has_drawn = False
    try:
        answers = [[_value(function, step) for step in steps] for function, steps in questions]
    finally:
        if pickle.dumps([stream.get() for stream in streams]) != pickle.dumps(before):
            has_drawn = True
            for stream, state in zip(streams, before, strict=True):
                stream.set(state)
    return [] if has_drawn else answers


def _value(function: Callable[[int], Any], step: int) -> str:
    try:
        return f"{float(function(step)):.12g}"  # the last bits are the machine's
    except Exception as error:  # noqa: BLE001 - a function may end where the training does
        return type(error).__name__
