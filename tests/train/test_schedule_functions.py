"""Functions of schedulers: to look at one moves nothing, what one keeps is refused, what one reads may not move."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import itertools
import logging
import math
import operator
import random
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from txstore.errors import Incompatible, UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.only_reads import reading_of
from txstore.train.resume import ResumeOptions
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.schedule_functions import PROBED, Functions
from txstore.train.state import TrainState

Function = Callable[[int], Any]

BASE = 10
COUNT = 0


def state_of(function: Function, **more: Any) -> TrainState:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return TrainState(model, optimizer, schedulers=rates.LambdaLR(optimizer, function), **more)


# what only reads is asked


@dataclasses.dataclass
class Settings:
    warmup: int = 10
    steps: list[int] = dataclasses.field(default_factory=lambda: [3, 6])

    def ratio(self) -> float:
        return self.warmup / 2

    @property
    def half(self) -> float:
        return self.warmup / 2


class Point(NamedTuple):
    warm: int


class Kind(enum.Enum):
    COSINE = "cosine"


def cosine(step: int, given: Any) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / given.warmup)))


def with_import(step: int) -> float:
    import math as m
    from math import pi

    return m.cos(pi * step)


def by_branches(step: int) -> float:
    rate = 1.0
    if step < BASE:
        return step / BASE
    for milestone in (30, 60):
        if step >= milestone:
            rate *= 0.1
    if step in {500, 501}:
        raise ValueError("over")
    return rate


def by_local_containers(step: int) -> float:
    found = [1.0]
    found.append(step)
    named = {}
    named["a"] = step
    return sum(found) + named["a"] + sum(one for one in found if one < step)


def named(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(step: int) -> Any:
        return function(step)

    wrapper.name = "decay"  # type: ignore[attr-defined]
    return wrapper


def product(*functions: Function) -> Function:
    return lambda step: math.prod(function(step) for function in functions)


class Loop:
    """As a trainer is: it holds a model, and settings that its rate reads."""

    scale = 1.0

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.settings = Settings()
        self.best = 1.0
        self.seen: list[float] = [1.0]

    def rate(self, step: int) -> float:
        mine = self.settings
        return self.scale * self._warm(step) * mine.warmup

    def _warm(self, step: int) -> float:
        return step / (self.total + len(self.settings.steps))

    @property
    def total(self) -> int:
        return 5

    @staticmethod
    def plain(step: int) -> float:
        return 0.9**step

    @classmethod
    def of_class(cls, step: int) -> float:
        return cls.scale * step

    # and what does more than that

    def running(self, step: int) -> float:
        self.best = min(self.best, 0.9**step)
        return self.best

    def listed(self, step: int) -> float:
        self.seen.append(step)
        return self.seen[-1]

    def by_another_name(self, step: int) -> float:
        seen = self.seen
        seen[0] *= 0.9
        return seen[0]

    def logged(self, step: int) -> float:
        self.last = step
        return 0.9**step

    @property
    def lower(self) -> float:
        self.best *= 0.9
        return self.best

    def by_property(self, _: int) -> float:
        return self.lower


def readers() -> dict[str, Function]:
    given = argparse.Namespace(warmup=10, inner=types.SimpleNamespace(part=1.0))
    settings, milestones, table, loop = Settings(), [3, 6], {"v": 1.0}, Loop()
    point = Point(3)
    kind = Kind.COSINE
    return {
        "lambda": lambda step: 0.9**step,
        "global": lambda step: min(1.0, (step + 1) / BASE),
        "namespace": lambda step: step / given.warmup * given.inner.part,
        "passed on": lambda step: cosine(step, given),
        "dataclass": lambda step: settings.ratio() + settings.half + settings.warmup,
        "dataclass passed on": lambda step: cosine(step, settings),
        "partial": functools.partial(cosine, given=given),
        "builtin": functools.partial(pow, 0.9),
        "dict": lambda step: table["v"] * table.get("w", 0.9) ** step,
        "list": lambda step: sum(0.1 for milestone in milestones if step > milestone),
        "import": with_import,
        "branches": by_branches,
        "local containers": by_local_containers,
        "numpy": lambda step: float(np.interp(step, [0, 10], [0, 1])) * np.cos(np.pi * step),
        "torch": lambda step: torch.cos(torch.tensor(step * math.pi)).item(),
        "wrapped": named(lambda step: 0.5**step),
        "product": product(lambda step: 0.9**step, by_branches),
        "method": loop.rate,
        "method of a name": lambda step: 2 * loop.rate(step),
        "static": loop.plain,
        "of class": loop.of_class,
        "default": lambda step, most=100: step / most,
        "named tuple": lambda step: step * point.warm,
        "enum": lambda step: 0.9**step if kind is Kind.COSINE else 1.0,
        "cached": named(functools.lru_cache(lambda step: 0.9**step)),
        "item of a list": [1.0, 0.5].__getitem__,
    }


@pytest.mark.parametrize("name", readers())
def test_a_function_that_only_reads_is_asked(name: str) -> None:
    found = reading_of(readers()[name])
    assert (found.keeps, found.unproved) == ("", "")


# what does more is not


def keepers() -> dict[str, Function]:
    """Surely keep a state."""
    kept, table, array, loop = [1.0], {"v": 1.0}, np.ones(2), Loop()
    count = 0

    def decays(_: int) -> float:
        kept[0] *= 0.999
        return kept[0]

    def counts(_: int) -> int:
        nonlocal count
        count += 1
        return count

    def counts_in_a_global(_: int) -> int:
        global COUNT  # noqa: PLW0603 - as some do
        COUNT += 1
        return COUNT

    def counts_in_itself(_: int) -> int:
        counts_in_itself.count += 1  # type: ignore[attr-defined]
        return counts_in_itself.count  # type: ignore[attr-defined,no-any-return]

    counts_in_itself.count = 0  # type: ignore[attr-defined]

    def in_a_slice(_: int) -> float:
        array[:] *= 0.9
        return float(array[0])

    def inside(_: int) -> float:
        def lower() -> None:
            kept[0] *= 0.9

        lower()
        return kept[0]

    def swaps(_: int) -> float:
        kept[0], table["v"] = table["v"], kept[0]
        return kept[0]

    class Called:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, _: int) -> int:
            self.count += 1
            return self.count

    called = Called()
    several = [decays]
    return {
        "cell": decays,
        "nonlocal": counts,
        "global": counts_in_a_global,
        "attribute of a function": counts_in_itself,
        "slice": in_a_slice,
        "function inside": inside,
        "swap": swaps,
        "method": loop.running,
        "list of a method": loop.listed,
        "under another name": loop.by_another_name,
        "property": loop.by_property,
        "method of a name": lambda step: 2 * loop.running(step),
        "partial": functools.partial(lambda step, one: 2 * one.running(step), one=loop),
        "object in a partial": functools.partial(called),
        "object of a name": lambda step: 2 * called(step),
        "list of functions": lambda step: 2 * several[0](step),
        "update": lambda _: table.update(v=table["v"] * 0.9) or table["v"],
        "comprehension": lambda step: [kept.append(step) for _ in range(1)] and kept[-1],
        "wrapped": named(decays),
    }


@pytest.mark.parametrize("name", keepers())
def test_a_function_that_keeps_a_state_is_refused_and_not_asked(name: str) -> None:
    function = keepers()[name]
    text = r"scheduler '0' lr_lambdas\[0\], .*, keeps a state that torch does not save: it (sets|changes) '"
    with pytest.raises(UnsupportedValue, match=text) as caught:
        Functions("0", Unstarted(function))
    assert "make it an object with __call__" in caught.value.next_step


class Unstarted(rates.LambdaLR):
    """Torch's asks its functions when it is made."""

    def __init__(self, function: Function) -> None:
        self.lr_lambdas = [function]


class Answers:
    def __getattr__(self, name: str) -> float:
        LOG.append(name)
        return 1.0


class Multiplies:
    def __mul__(self, other: float) -> float:
        LOG.append("mul")
        return 1.0


class Defaults(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        LOG.append(key)
        return 1.0


class Slow:
    def __init__(self) -> None:
        self.value = 1.0

    def lower(self) -> float:
        self.value = self.value * 0.9
        return self.value


class Steady:
    def lower(self) -> float:
        return 0.9


class Logs:
    def __init__(self, value: float) -> None:
        LOG.append("made")
        self.value = value


class LogsToo(Logs):
    """What it does when it is made stands elsewhere."""


class Broken:
    """Answers with an error of its own."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")


LOG: list[str] = []


def unproved() -> dict[str, Function]:
    """May do more than read, or surely do, without a state that is theirs."""
    array, tensor, generator = np.ones(2), torch.ones(1), np.random.default_rng(0)
    loop, answers, multiplies, defaults, slow = Loop(), Answers(), Multiplies(), Defaults(), Slow()
    steady = Steady()
    numbers, counted, rest = iter([1, 2, 3]), itertools.count(), collections.defaultdict(float)
    kept, other, broken = [1.0], [2.0], Broken()

    def aliased(_: int) -> float:
        one = kept if BASE else other
        one[0] *= 0.9
        return one[0]

    def cached(step: int, cache: dict[int, float] = {}) -> float:  # noqa: B006 - as some do
        if step not in cache:
            cache[step] = 0.9**step
        return cache[step]

    def lowered(one: Slow) -> float:
        return one.lower()

    def either(step: int) -> float:
        one = slow if step else steady
        return one.lower()

    def in_a_loop(_: int) -> float:
        for one in (kept,):
            one[0] *= 0.5
        return 1.0

    return {
        "numpy": lambda _: np.random.uniform(0, 1),
        "random": lambda _: random.random(),
        "torch": lambda _: torch.rand(1).item(),
        "generator": lambda _: generator.normal(),
        "seed": lambda _: torch.manual_seed(0) and 1.0,
        "in place": lambda _: tensor.mul_(0.9).item(),
        "out": lambda _: float(np.multiply(array, 0.9, out=array)[0]),
        "fill": lambda step: array.fill(step) or 1.0,
        "iterator": lambda _: next(numbers),
        "count": lambda _: next(counted),
        "print": lambda _: print("called") or 1.0,
        "file": lambda _: open("/nowhere/at/all").read(),
        "time": lambda _: time.time(),
        "log": loop.logged,
        "getattr": lambda _: answers.anything,
        "operator": lambda _: multiplies * 2.0,
        "items": lambda _: defaults["v"],
        "default dict": lambda step: rest[step],
        "setattr": lambda step: setattr(loop, "best", step) or 1.0,
        "setitem": lambda step: operator.setitem(kept, 0, step) or 1.0,
        "vars": lambda step: vars(loop).update(best=step) or 1.0,
        "exec": lambda _: exec("LOG.append('x')") or 1.0,
        "aliased": aliased,
        "in a loop": in_a_loop,
        "cache": cached,
        "record": lambda _: lowered(slow),
        "either": either,
        "class": lambda step: 1.0 if LogsToo(step) else 0.0,
        "broken": lambda _: len(str(broken)),
        "unknown name": lambda step: nowhere if step > 700 else 1.0,  # type: ignore[name-defined]  # noqa: F821
    }


class Decorated(Loop):
    @torch.no_grad()
    def without_gradient(self, step: int) -> float:
        return 0.9**step

    @functools.lru_cache  # noqa: B019 - as people write it
    def kept(self, step: int) -> float:
        return 0.9**step

    def logged(self, step: int) -> float:
        logging.getLogger("training").info("step %d", step)
        return 0.9**step


@functools.cache
def cached(step: int) -> float:
    return 0.9**step


@pytest.mark.parametrize(
    "function",
    [
        Decorated().without_gradient,
        Decorated().kept,
        Decorated().logged,
        cached,
        functools.update_wrapper(functools.partial(pow, 0.9), cached),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_what_decorators_and_libraries_keep_is_no_state(function: Function, *, inside: bool, store_url: str) -> None:
    def make() -> TrainState:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        schedule: Any = rates.LambdaLR(optimizer, function)
        if inside:
            schedule = rates.SequentialLR(optimizer, [schedule, rates.ConstantLR(optimizer)], [5])
        return TrainState(net, optimizer, schedulers=schedule)

    with Checkpointer(store_url, make()) as saves:
        saves.save()
    with Checkpointer(store_url, make()) as saves:
        assert saves.resume().step == 0


@pytest.mark.parametrize("name", unproved())
def test_a_function_that_may_do_more_than_read_is_not_asked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    LOG.clear()
    function = unproved()[name]
    found = reading_of(function)
    assert found.unproved or found.keeps
    if not found.keeps:
        before = capture_streams()
        functions = Functions("0", Unstarted(function))
        assert str(capture_streams()) == str(before)
        assert not functions.facts["lr_lambdas[0]"].startswith("sha256")
        assert len(functions.unproved) == 1
    assert not LOG
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["numpy", "random", "generator"])
def test_a_function_that_draws_is_told_so(name: str) -> None:
    assert reading_of(unproved()[name]).unproved.startswith("draws random numbers by ")


@pytest.mark.parametrize("kind", ["cell", "method", "random"])
def test_making_a_state_moves_no_schedule(kind: str) -> None:
    """A running minimum, asked at a million, was there at once; random numbers were others."""

    def steps(*, with_state: bool) -> list[float]:
        kept, loop = [1.0], Loop()

        def decays(_: int) -> float:
            kept[0] *= 0.999
            return kept[0]

        functions: dict[str, Function] = {
            "cell": decays,
            "method": loop.running,
            "random": lambda _: 1 + np.random.randn(),
        }
        np.random.seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = rates.LambdaLR(optimizer, functions[kind])
        if with_state and kind == "random":
            TrainState(model, optimizer, schedulers=scheduler)
        elif with_state:
            with pytest.raises(UnsupportedValue):
                TrainState(model, optimizer, schedulers=scheduler)
        found = []
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    before = capture_streams()
    assert steps(with_state=True) == steps(with_state=False)
    restore_streams(before)


def test_random_numbers_that_no_code_shows_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from txstore.train import only_reads

    monkeypatch.setattr(only_reads, "is_library", lambda _: True)
    before = str(capture_streams())
    functions = Functions("0", Unstarted(lambda _: torch.rand(1).item() + random.random()))
    assert str(capture_streams()) == before
    assert list(functions.unproved.values()) == ["draws random numbers"]


def test_what_is_not_asked_is_told_once_and_compared_by_name(store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        state_of(lambda step: 0.9**step)
        assert not caplog.messages
        first = state_of(lambda _: 1 + 0 * time.time())
    assert len(caplog.messages) == 1
    assert "scheduler '0' lr_lambdas[0], " in caplog.messages[0]
    assert caplog.messages[0].endswith("<lambda> uses 'time.time'")
    with Checkpointer(store_url, first) as saves:
        saves.save()

    def other(_: int) -> float:
        return 1 + 0 * time.time()

    with Checkpointer(store_url, state_of(lambda _: 2 + 0 * time.time())) as saves:
        assert saves.resume().step == 0
    with (
        Checkpointer(store_url, state_of(other)) as saves,
        pytest.raises(Incompatible, match=r"lr_lambdas\[0\]: saved"),
    ):
        saves.resume()


@pytest.mark.parametrize("kind", ["wraps", "attribute"])
def test_a_function_with_attributes_is_compared_by_its_values(kind: str, store_url: str) -> None:
    def made(factor: float) -> Function:
        if kind == "wraps":
            return named(lambda step: factor**step)
        function: Any = lambda step: factor**step  # noqa: E731
        function.name = "decay"
        return function  # type: ignore[no-any-return]

    with Checkpointer(store_url, state_of(made(0.9))) as saves:
        saves.save()
    with Checkpointer(store_url, state_of(made(0.9))) as saves:
        saves.resume()
    with Checkpointer(store_url, state_of(made(0.5))) as saves, pytest.raises(Incompatible, match="saved sha256"):
        saves.resume()


# what a function reads


def behind(kind: str) -> tuple[Function, Callable[[], None]]:
    """A function that only reads, and what changes its values."""
    table, loop = {"v": 1.0}, Loop()

    def halve() -> None:
        global BASE  # noqa: PLW0603 - as some do
        table["v"] *= 0.5
        loop.scale *= 0.5
        BASE = 5

    functions: dict[str, Function] = {
        "closure": lambda step: table["v"] * 0.99**step,
        "method": loop.rate,
        "global": lambda step: min(1.0, step / BASE),
        "late": lambda step: 1.0 if step < 700 else table["v"],
    }
    return functions[kind], halve


@pytest.mark.parametrize("kind", ["closure", "method", "global", "late"])
def test_a_save_is_refused_when_what_a_function_reads_has_changed(
    kind: str, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "BASE", 10)
    function, halve = behind(kind)
    state = state_of(function)
    with Checkpointer(store_url, state) as saves:
        saves.save()
        halve()
        state.progress.global_step = 1
        with pytest.raises(
            UnsupportedValue, match=r"scheduler '0' lr_lambdas\[0\], .* has other values than"
        ) as caught:
            saves.save()
    assert "make it an object with __call__" in caught.value.next_step


def test_the_step_of_a_schedule_is_among_those_that_are_asked_again() -> None:
    kept = {"from": 500}
    state = state_of(lambda step: 0.5 if step == kept["from"] else 1.0)
    state.capture()
    kept["from"] = PROBED[300]
    state.capture()
    state.pieces["scheduler"]._items["0"].item.last_epoch = PROBED[300]  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedValue, match="has other values"):
        state.capture()


class Kept(Loop):
    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_what_a_function_reads_from_an_extra_is_saved_there_and_may_change(store_url: str) -> None:
    kept = Kept()
    first = state_of(kept.rate, extras={"loop": kept})
    kept.scale = 0.5
    with Checkpointer(store_url, first) as saves:
        saves.save()
    again = Kept()
    second = state_of(again.rate, extras={"loop": again})
    with Checkpointer(store_url, second) as saves:
        assert saves.resume(ResumeOptions()).proved
    assert again.scale == 0.5
    second.capture()


# schedulers of one's own


class OfItsOwn(rates.LRScheduler):
    """Its state dict leaves out the function, and a number that it moves."""

    def __init__(self, optimizer: Any, function: Function) -> None:
        self.function, self.best, self.kept = function, 1.0, 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.best, self.kept = self.best * 0.9, self.kept * 0.9
        self.late = self.last_epoch
        return [rate * self.best * self.function(self.last_epoch) for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: one for name, one in vars(self).items() if name not in {"optimizer", "function", "best"}}


def of_its_own(function: Function) -> tuple[TrainState, OfItsOwn]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = OfItsOwn(optimizer, function)
    del scheduler.late
    return TrainState(model, optimizer, schedulers=scheduler), scheduler


def test_a_function_that_a_state_dict_of_ones_own_leaves_out_is_compared(store_url: str) -> None:
    with Checkpointer(store_url, of_its_own(lambda step: 0.9**step)[0]) as saves:
        saves.save()
    with Checkpointer(store_url, of_its_own(lambda step: 0.9**step)[0]) as saves:
        saves.resume()
    with Checkpointer(store_url, of_its_own(lambda step: 0.5**step)[0]) as saves:
        with pytest.raises(Incompatible, match=r"scheduler '0' function: saved sha256"):
            saves.resume()
        saves.resume(ResumeOptions(accept={"scheduler:0:functions"}))


def test_a_function_that_is_no_schedule_may_keep_what_it_likes() -> None:
    seen: list[int] = []
    scheduler = of_its_own(lambda step: 0.9**step)[1]
    scheduler.function = lambda step: seen.append(step) or 1.0
    functions = Functions("0", scheduler)
    assert not seen
    (why,) = functions.unproved.values()
    assert why == "changes 'seen' in <lambda>"


def test_an_attribute_that_a_state_dict_of_ones_own_leaves_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    state, scheduler = of_its_own(lambda step: 0.9**step)
    scheduler.optimizer.step()
    scheduler.step()
    with caplog.at_level(logging.WARNING):
        state.capture()
    (line,) = [line for line in caplog.messages if "not saved" in line]
    assert "training changes scheduler.0.best. If" in line
    assert "scheduler's state_dict" in line


def test_other_milestones_are_told(store_url: str) -> None:
    def state(first: int, second: int) -> TrainState:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        parts = [rates.LinearLR(optimizer), rates.MultiStepLR(optimizer, [first, 9])]
        return TrainState(model, optimizer, schedulers=rates.SequentialLR(optimizer, parts, [second]))

    with Checkpointer(store_url, state(3, 2)) as saves:
        saves.save()
    with Checkpointer(store_url, state(4, 5)) as saves:
        notes = [note for note in saves.resume().notes if "milestones" in note]
    assert notes == [
        "state scheduler '0' _milestones, as the code sets it: saved [2], now [5]; the saved one is in force",
        "state scheduler '0' _schedulers[1].milestones, as the code sets it: saved [3, 9], now [4, 9]; the saved one is in force",
    ]
