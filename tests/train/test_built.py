"""What the code makes: what is compared at a resume, since no state dict tells of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from txstore.errors import Incompatible, StateMismatch, UnsupportedValue
from txstore.train.built import as_text, class_of
from txstore.train.checkpointer import Checkpointer
from txstore.train.report import ResumeReport
from txstore.train.resume import ResumeOptions
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.schedule_functions import PROBED, Functions
from txstore.train.state import TrainState


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


Scheduler = Callable[[torch.optim.Optimizer], Any]


class Rotary(nn.Module):
    """A layer with a table that the code computes, and counters that no state dict holds."""

    def __init__(self, base: float = 10.0, *, counted: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", base ** torch.arange(4.0), persistent=False)
        if counted:
            self.register_buffer("counts", torch.zeros(2, dtype=torch.int64), persistent=False)


def make(
    scheduler: Scheduler | None = None,
    module: nn.Module | None = None,
    groups: int = 1,
    scaler: Any = None,
    extras: dict[str, Any] | None = None,
    **settings: Any,
) -> TrainState:
    module = module or Rotary()
    parameters = list(module.parameters())
    parts = [{"params": parameters[at::groups]} for at in range(groups)]
    optimizer = torch.optim.AdamW(parts, **{"lr": 0.1, **settings})
    made = None if scheduler is None else scheduler(optimizer)
    return TrainState(module, optimizer, schedulers=made, scaler=scaler, extras=extras)


def save(state: TrainState, url: str) -> None:
    with Checkpointer(url, state) as saves:
        saves.save()


def resume(state: TrainState, url: str, **options: Any) -> ResumeReport:
    with Checkpointer(url, state) as saves:
        return saves.resume(ResumeOptions(**options))


def blocking(state: TrainState, url: str, **options: Any) -> list[str]:
    with pytest.raises(Incompatible) as caught:
        resume(state, url, **options)
    return [line.strip() for line in str(caught.value).splitlines() if line.strip().startswith("blocked: ")]


def told(report: ResumeReport) -> list[str]:
    return [note for note in report.notes if note.startswith("state ")]


def owner(state: TrainState) -> Any:
    return state.pieces["model"]._models.modules[""]  # type: ignore[attr-defined]


# buffers that no state dict holds


def test_a_table_that_the_code_computes_is_not_saved_and_another_one_blocks(store_url: str) -> None:
    first = make()
    assert not [key for key in first.capture().state if "table" in key or "counts" in key]
    save(first, store_url)
    assert told(resume(make(), store_url)) == []
    changed = make(module=Rotary(9.0))
    (line,) = blocking(changed, store_url)
    assert line.startswith("blocked: state buffer table: saved float32 [4] sha256:")
    report = resume(changed, store_url, accept={"buffers"})
    assert report.proved
    assert any("state buffer table" in line for line in report.accepted)
    assert owner(changed).table.tolist() == [1, 9, 81, 729], "the code's"


def test_a_buffer_that_training_has_changed_is_saved_and_comes_back(store_url: str) -> None:
    first = make()
    owner(first).counts += torch.tensor([3, 4])
    assert "temporary.rank-0.counts" in first.capture().state
    save(first, store_url)
    second = make()
    live = owner(second).counts
    report = resume(second, store_url)
    assert report.proved
    assert owner(second).counts.tolist() == [3, 4]
    assert owner(second).counts is live, "in place, since a captured graph holds it"
    owner(second).counts.zero_()
    assert "temporary.rank-0.counts" in second.capture().state, "training's from now on, though the code makes it so"


def test_a_cache_that_grew_comes_back_in_its_size_and_one_that_went_as_none(store_url: str) -> None:
    first = make()
    owner(first).table = torch.arange(9.0).double()
    owner(first).counts = None
    save(first, store_url)
    second = make()
    assert resume(second, store_url).proved
    assert owner(second).table.dtype == torch.float64
    assert owner(second).table.tolist() == list(range(9))
    assert owner(second).counts is None


def test_buffers_that_only_one_side_has(store_url: str) -> None:
    first = make()
    save(first, store_url)
    assert blocking(make(module=Rotary(counted=False)), store_url)[0].startswith("blocked: state buffer counts: saved")
    with Checkpointer(store_url, first) as saves:
        saves.resume()
        owner(first).counts += 1
        first.progress.global_step = 1
        saves.save()
    with pytest.raises(StateMismatch, match=r"buffer 'counts' was saved, and there is none here: make it"):
        resume(make(module=Rotary(counted=False)), store_url)


def test_a_large_table_is_digested_once_and_a_change_of_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from txstore.train import temporary

    hashed: list[int] = []
    sha256 = temporary.hashlib.sha256
    monkeypatch.setattr(temporary.hashlib, "sha256", lambda data=b"": hashed.append(len(data)) or sha256(data))
    module = Rotary()
    module.register_buffer("large", torch.zeros(1 << 19), persistent=False)
    state = make(module=module)
    for _ in range(3):
        assert "temporary.rank-0.large" not in state.capture().state
    assert hashed.count(1 << 21) == 1
    module.large[7] = 1
    assert "temporary.rank-0.large" in state.capture().state


# modes


def test_a_module_that_was_frozen_in_the_middle_of_a_run_stays_so(store_url: str) -> None:
    first = make()
    owner(first).norm.eval()
    save(first, store_url)
    second = make()
    report = resume(second, store_url)
    assert report.proved
    assert told(report) == ["state model mode: saved training, but evaluation for norm, now training"]
    assert (owner(second).training, owner(second).linear.training, owner(second).norm.training) == (True, True, False)
    third = make()
    third.capture()
    owner(third).eval()
    resume(third, store_url)
    assert (owner(third).training, owner(third).norm.training) == (True, False)


def test_a_save_in_the_middle_of_an_evaluation_does_not_leave_the_resumed_model_in_it(store_url: str) -> None:
    first = make()
    owner(first).eval()
    save(first, store_url)
    second = make()
    report = resume(second, store_url)
    assert told(report) == ["state model mode: saved evaluation, so modes are left as they are, now training"]
    assert all(part.training for part in owner(second).modules())


# optimizers


def test_settings_that_changed_in_the_code_are_told_and_lose(store_url: str) -> None:
    save(make(groups=4), store_url)
    changed = make(groups=4, lr=0.2, weight_decay=0.5, betas=(0.8, 0.9))
    changed._optimizers._optimizers[0].param_groups[3]["eps"] = 1.0
    with Checkpointer(store_url, changed) as saves:
        report = saves.resume()
        changed.progress.global_step = 1
        saves.save()
    assert sorted(told(report)) == [
        "state optimizer 0 betas, as the code sets it, in groups 0-3: saved (0.9, 0.999), now (0.8, 0.9); the saved one is in force",
        "state optimizer 0 lr, as the code sets it, in groups 0-3: saved 0.1, now 0.2; the saved one is in force",
        "state optimizer 0 weight_decay, as the code sets it, in groups 0-3: saved 0.01, now 0.5; the saved one is in force",
    ]
    assert changed._optimizers._optimizers[0].param_groups[0]["lr"] == 0.1
    assert len(told(resume(make(groups=4, lr=0.2, weight_decay=0.5, betas=(0.8, 0.9)), store_url))) == 3, "still so"
    assert told(resume(make(groups=4), store_url)) == []


def test_a_rate_that_a_schedule_has_moved_is_no_change_of_the_code(store_url: str) -> None:
    first = make(lambda optimizer: rates.OneCycleLR(optimizer, max_lr=0.1, total_steps=9))
    first._optimizers._optimizers[0].step()
    first.pieces["scheduler"]._items["0"].item.step()  # type: ignore[attr-defined]
    save(first, store_url)
    assert told(resume(make(lambda optimizer: rates.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)), store_url)) == []


def test_a_changed_rate_is_told_once_and_as_the_code_has_it_whatever_the_schedule_makes_of_it(store_url: str) -> None:
    def warm_up(optimizer: torch.optim.Optimizer) -> Any:
        return rates.LinearLR(optimizer, start_factor=0.1)

    save(make(warm_up), store_url)
    changed = make(warm_up, lr=0.2)
    assert told(resume(changed, store_url)) == [
        "state optimizer 0 lr, as the code sets it, in group 0: saved 0.1, now 0.2; the saved one is in force"
    ]


def test_another_optimizer_or_order_is_judged_with_everything_else(store_url: str) -> None:
    save(make(), store_url)
    module = Rotary()
    other = TrainState(module, torch.optim.SGD(list(module.parameters())[::-1]))
    lines = blocking(other, store_url)
    assert lines[0] == "blocked: optimizer 0 class: saved torch.optim.adamw.AdamW, now torch.optim.sgd.SGD"
    assert lines[1].startswith("blocked: parameter linear.weight: saved place 0 of optimizer 0, group 0, now")
    assert resume(other, store_url, fresh={"optimizer"}).checkpoint == "step-0"


# schedulers, scalers, extras


def stepped(factor: float) -> Callable[[int], float]:
    return lambda step: factor**step


SCHEDULES: list[tuple[Scheduler, Scheduler, str]] = [
    (
        lambda o: rates.StepLR(o, 3),
        lambda o: rates.CosineAnnealingLR(o, 3),
        "class: saved torch.optim.lr_scheduler.StepLR, now torch.optim.lr_scheduler.CosineAnnealingLR",
    ),
    (
        lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.StepLR(o, 3)], [2]),
        lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.ExponentialLR(o, 0.9)], [2]),
        "class: saved torch.optim.lr_scheduler.SequentialLR[LinearLR, StepLR], now",
    ),
    (lambda o: rates.LambdaLR(o, stepped(0.9)), lambda o: rates.LambdaLR(o, stepped(0.91)), "lr_lambdas[0]: saved sha"),
    (
        lambda o: rates.MultiplicativeLR(o, lambda step: 1.0 if step < 1000 else 0.5),
        lambda o: rates.MultiplicativeLR(o, lambda step: 1.0 if step < 1100 else 0.5),
        "lr_lambdas[0]: saved sha",
    ),
    (
        lambda o: rates.ChainedScheduler([rates.ConstantLR(o), rates.LambdaLR(o, functools.partial(pow, 0.9))]),
        lambda o: rates.ChainedScheduler([rates.ConstantLR(o), rates.LambdaLR(o, functools.partial(pow, 0.8))]),
        "1.lr_lambdas[0]: saved sha",
    ),
    (
        lambda o: rates.CyclicLR(o, 0.1, 0.2, scale_fn=stepped(0.9), cycle_momentum=False),
        lambda o: rates.CyclicLR(o, 0.1, 0.2, scale_fn=stepped(0.8), cycle_momentum=False),
        "scale_fn: saved sha",
    ),
]


@pytest.mark.parametrize(("saved", "now", "text"), SCHEDULES, ids=range(len(SCHEDULES)))
def test_another_schedule_is_told_by_name(saved: Scheduler, now: Scheduler, text: str, store_url: str) -> None:
    save(make(saved), store_url)
    assert told(resume(make(saved), store_url)) == []
    other = make(now)
    (line,) = blocking(other, store_url)
    assert line.startswith(f"blocked: state scheduler '0' {text}")
    if "class" in text:
        report = resume(other, store_url, fresh={"scheduler"})
        assert "fresh scheduler" in report.accepted
    else:
        report = resume(other, store_url, accept={"scheduler:0:functions"})
        assert text.partition(":")[0] in report.accepted[0]


def test_settings_of_a_schedule_and_a_scaler_that_changed_in_the_code_are_told(store_url: str) -> None:
    def state(steps: int, interval: int) -> TrainState:
        scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
        return make(lambda optimizer: rates.CosineAnnealingLR(optimizer, steps), scaler=scaler)

    save(state(100, 5), store_url)
    assert told(resume(state(200, 6), store_url)) == [
        "state scheduler '0' T_max, as the code sets it: saved 100, now 200; the saved one is in force",
        "state scaler '0' growth_interval, as the code sets it: saved 5, now 6; the saved one is in force",
    ]


def facts(scheduler: Any) -> dict[str, str]:
    return Functions("0", scheduler).facts


def test_functions_are_compared_by_what_they_do() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    rate = {"warm": 10}

    def slow(step: int) -> float:
        return min(1.0, (step + 1) / rate["warm"])

    def other(step: int) -> float:
        return (step + 1) / 10 if step < 9 else 1.0

    digests = {str(facts(rates.LambdaLR(optimizer, one))) for one in (slow, other)}
    assert len(digests) == 1, "other code, the same schedule"
    rate["warm"] = 20
    assert str(facts(rates.LambdaLR(optimizer, slow))) not in digests, "the same code reads another number"
    ends = rates.LambdaLR(optimizer, [1.0, 0.5].__getitem__)
    assert facts(ends) == facts(rates.LambdaLR(optimizer, [1.0, 0.5].__getitem__))
    assert PROBED[:257] == list(range(257))
    assert all(b - a <= max(1, 1 + a / 50) for a, b in pairwise(PROBED))


class WarmUp:
    """A wrapper around a scheduler, as training code has one: it names no optimizer itself."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


DRIVERS: dict[str, Scheduler] = {
    "plain": lambda o: rates.StepLR(o, 3),
    "sequence": lambda o: rates.SequentialLR(o, [rates.LinearLR(o), rates.StepLR(o, 3)], [2]),
    "chain": lambda o: rates.ChainedScheduler([rates.ConstantLR(o), rates.ExponentialLR(o, 0.9)]),
    "wrapper": lambda o: WarmUp(rates.LinearLR(o)),
}


def two(scheduler: Scheduler, *driven: int) -> TrainState:
    """Two optimizers, and a scheduler of each that is named."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    several = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    return TrainState(model, several, schedulers=[scheduler(several[at]) for at in driven])


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_scheduler_of_another_optimizer_is_told(kind: str, store_url: str) -> None:
    save(two(DRIVERS[kind], 0, 1), store_url)
    assert told(resume(two(DRIVERS[kind], 0, 1), store_url)) == []
    assert blocking(two(DRIVERS[kind], 1, 0), store_url) == [
        "blocked: state scheduler '0' optimizer: saved 0, now 1",
        "blocked: state scheduler '1' optimizer: saved 1, now 0",
    ]
    assert blocking(two(DRIVERS[kind], 0, 0), store_url) == ["blocked: state scheduler '1' optimizer: saved 1, now 0"]
    report = resume(two(DRIVERS[kind], 0, 0), store_url, fresh={"scheduler:1"})
    assert "fresh scheduler:1" in report.accepted


def test_a_scheduler_of_an_optimizer_that_is_not_given_is_told(store_url: str) -> None:
    def stale(optimizer: torch.optim.Optimizer) -> Any:
        return rates.StepLR(torch.optim.SGD(optimizer.param_groups[0]["params"]), 3)

    save(make(DRIVERS["plain"]), store_url)
    assert blocking(make(stale), store_url) == [
        "blocked: state scheduler '0' optimizer: saved 0, now none of those given"
    ]


def test_a_checkpoint_that_does_not_say_which_optimizer_is_driven_is_resumed(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("txstore.train.stateful.driven_by", lambda *_: {})
        save(two(DRIVERS["plain"], 0), store_url)
    assert told(resume(two(DRIVERS["plain"], 0), store_url)) == [
        "state scheduler '0' optimizer: saved not recorded, now 0"
    ]


class Counting:
    """A function with state of its own: to ask it would move it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0


def test_an_object_that_can_be_called_is_not_asked(store_url: str) -> None:
    counting = Counting()
    state = make(lambda optimizer: rates.LambdaLR(optimizer, counting))
    calls = counting.calls
    state.capture()
    assert counting.calls == calls
    save(state, store_url)
    (line,) = blocking(make(lambda optimizer: rates.LambdaLR(optimizer, stepped(1.0))), store_url)
    assert f"saved {class_of(counting)}, now sha256" in line


class Noted:
    """An object with state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


class Renamed(Noted):
    """Another class that takes the same state."""


def test_an_extra_of_another_class_is_told(store_url: str) -> None:
    save(make(extras={"ema": Noted(3)}), store_url)
    other = make(extras={"ema": Renamed(0)})
    (line,) = blocking(other, store_url)
    assert line.startswith("blocked: state extra 'ema' class: saved ")
    assert resume(other, store_url, accept={"extra:ema:class"}).proved
    assert other._extras._items["ema"].item.value == 3  # type: ignore[attr-defined]


def whole() -> torch.Tensor:
    return torch.ones(2, 3)


COMPLEX = torch.ones(2, dtype=torch.complex64)

INEXACT: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "coo": (lambda: whole().to_sparse(), "to_dense()"),
    "csr": (lambda: whole().to_sparse_csr(), "to_dense()"),
    "meta": (lambda: whole().to("meta"), "leave it out"),
    "conj": (COMPLEX.conj, "resolve_conj()"),
    "neg": (lambda: COMPLEX.conj().imag, "resolve_neg()"),
    "quantized": (lambda: torch.quantize_per_tensor(whole(), 0.1, 0, torch.qint8), "int_repr()"),
    "nested": (lambda: torch.nested.nested_tensor([whole()]), "unbind()"),
    "jagged": (lambda: torch.nested.nested_tensor([whole()], layout=torch.jagged), "plain tensor"),
}


@pytest.mark.parametrize("kind", INEXACT)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_would_not_come_back_is_refused_at_the_save_by_its_path(kind: str) -> None:
    make_value, hint = INEXACT[kind]
    state = make(extras={"ema": Noted([0, {"mean": make_value()}])})
    with pytest.raises(UnsupportedValue) as caught:
        state.capture()
    assert caught.value.key == "python.shared.extras.ema.state.value[1].mean"
    assert "python.shared.extras.ema.state.value[1].mean" in str(caught.value)
    assert hint in caught.value.next_step


def test_text_of_settings() -> None:
    assert as_text(torch.tensor(0.5)) == "0.5"
    assert as_text(torch.ones(2)) is None
    assert as_text((1, None)) == "(1, None)"
    assert as_text("x" * 300) is None
    assert as_text(object()) is None
