"""Leave out one piece of state, and the matching check fails: one row a piece.

A row restores everything and then takes one thing back to what a new process has. Either the resume says so, or
the run that goes on is another than the untouched one; the row says which. That the whole state, with nothing
taken back, goes on as the untouched run is the first test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from txstore.errors import ConfigError, LoadError, NotProved
from txstore.train.checkpointer import Checkpointer
from txstore.train.cursor import ElasticBatchSampler
from txstore.train.piece import PieceState
from txstore.train.progress import TrainProgress
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState

SAMPLES, BATCH, WINDOW = 40, 4, 2
FROZEN_AT = 20  # samples


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


class Average:
    """An average of the weights, which the loss depends on."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for mean, parameter in zip(self.weights, self.module.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    def distance(self) -> torch.Tensor:
        pairs = zip(self.weights, self.module.parameters(), strict=True)
        return torch.stack([(parameter - mean).square().sum() for mean, parameter in pairs]).sum()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": list(self.weights), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = [weight.clone() for weight in state["weights"]]
        self.updates = state["updates"]


class Gate(nn.Module):
    """Remembers the last inputs in a buffer that no state dict holds, and scales by a table that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("recent", torch.zeros(3), persistent=False)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recent.lerp_(x.detach().mean(dim=0), 0.5)
        return x * self.table + self.recent


class Everything:
    """A training whose every step depends on every kind of state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.module = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3), nn.BatchNorm1d(3), Gate()
        )
        self.module[0].bias.requires_grad_(False)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        groups = [{"params": trained[:2], "betas": (0.8, 0.95)}, {"params": trained[2:], "weight_decay": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=60)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
        self.progress = TrainProgress()
        self.sampler = ElasticBatchSampler(SAMPLES, BATCH, self.progress, seed=7)
        self.average = Average(self.module)
        self.own = torch.Generator().manual_seed(seed)
        self.state = TrainState(
            self.module,
            self.optimizer,
            schedulers=self.scheduler,
            scaler=self.scaler,
            data=self.sampler,
            extras={"average": self.average},
            progress=self.progress,
            generators={"own": self.own},
        )
        self._batches: Iterator[list[int]] = iter(())

    def micro_step(self) -> dict[str, Any]:
        if self.progress.consumed_samples == FROZEN_AT:
            self.module[4].eval()  # frozen once, in the middle of the run: a resumed one does not come by here
        indices = next(self._batches, None)
        if indices is None:
            self._batches = iter(self.sampler)
            indices = next(self._batches)
        x = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(index)) for index in indices])
        noise = random.random() + float(np.random.rand()) + torch.rand(1, generator=self.own).item()
        out = self.module(x + 0.1 * noise)
        loss = nn.functional.cross_entropy(out, torch.tensor([i % 3 for i in indices])) + self.average.distance() / 10
        self.scaler.scale(loss / WINDOW).backward()
        self.progress.micro_step += 1
        self.progress.consumed_samples += BATCH
        self.progress.epoch = self.progress.consumed_samples // SAMPLES
        if self.progress.micro_step == WINDOW:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.average.update()
            self.progress.micro_step = 0
            self.progress.global_step += 1
        return {
            "loss": loss.item(),
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "scale": self.scaler.get_scale(),
            "batch": indices,
            "at": (self.progress.global_step, self.progress.micro_step, self.progress.epoch),
            "statistics": [buffer.tolist() for buffer in self.module.buffers()],
            "frozen": [parameter.requires_grad for parameter in self.module.parameters()],
            "weights": [parameter.detach().tolist() for parameter in self.module.parameters()],
            "updates": self.average.updates,
        }


BEFORE, AFTER = 13, 20  # the save is inside a window, in the first epoch's last batches


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """A store with one save of an untouched run, and how that run went on."""
    url = (tmp_path_factory.mktemp("left-out") / "store").as_uri()
    run = Everything(1)
    with Checkpointer(url, run.state) as saves:
        for _ in range(BEFORE):
            run.micro_step()
            if run.progress.micro_step == 0:
                saves.record(loss=1.0)
        saves.save()
    return url, [run.micro_step() for _ in range(AFTER)]


def resume(url: str, run: Everything) -> Any:
    with Checkpointer(url, run.state) as saves:
        return saves.resume()


def test_with_everything_the_run_goes_on_untouched(control: tuple[str, list[dict[str, Any]]]) -> None:
    url, wanted = control
    run = Everything(2)
    report = resume(url, run)
    assert report.proved
    assert [check.name for check in report.checks if check.ok is None] == []
    assert [run.micro_step() for _ in range(AFTER)] == wanted


@dataclass(frozen=True)
class Row:
    """One thing that is left out.

    Attributes:
        what: Its name.
        piece: The piece of state that should have restored it.
        forget: Takes it back to what a new process has.
        told: Names of the checks that fail; empty if no product check can see it, and only the run differs.
        unknown: Name of a check that is then told as not possible.
    """

    what: str
    piece: str
    forget: Callable[[Everything], None]
    told: frozenset[str] = field(default_factory=frozenset)
    unknown: str = ""


def fresh_tensor(at: int) -> Callable[[Everything], None]:
    def forget(run: Everything) -> None:
        with torch.no_grad():
            list(run.module.parameters())[at].copy_(list(Everything(2).module.parameters())[at])

    return undrawn(forget)


def undrawn(forget: Callable[[Everything], None]) -> Callable[[Everything], None]:
    """Forget without touching the random streams."""

    def wrapped(run: Everything) -> None:
        before = capture_streams()
        forget(run)
        restore_streams(before)

    return wrapped


def buffers(run: Everything) -> None:
    run.module[1].reset_running_stats()


def a_buffer(run: Everything) -> None:
    run.module[1].num_batches_tracked.zero_()


def unseen_buffer(run: Everything) -> None:
    run.module[5].recent.zero_()


def modes(run: Everything) -> None:
    run.module.train()


def moment(name: str) -> Callable[[Everything], None]:
    def forget(run: Everything) -> None:
        for state in run.optimizer.state.values():
            state[name].zero_()

    return forget


def one_moment(run: Everything) -> None:
    list(run.optimizer.state.values())[-1]["exp_avg"].zero_()


def no_state(run: Everything) -> None:
    run.optimizer.state.clear()


def state_of_one(run: Everything) -> None:
    del run.optimizer.state[run.module[3].bias]


def setting(name: str, value: Any) -> Callable[[Everything], None]:
    def forget(run: Everything) -> None:
        run.optimizer.param_groups[1][name] = value

    return forget


def schedule(run: Everything) -> None:
    run.scheduler.last_epoch = 0
    run.scheduler._step_count = 1


def scheduler_settings(run: Everything) -> None:
    run.scheduler.total_steps = 100


def scale(run: Everything) -> None:
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 2.0**12})


def growth(run: Everything) -> None:
    run.scaler.load_state_dict({**run.scaler.state_dict(), "_growth_tracker": 0})


def growth_interval(run: Everything) -> None:
    run.scaler.set_growth_interval(1)


def gradients(run: Everything) -> None:
    run.optimizer.zero_grad()


def a_gradient(run: Everything) -> None:
    run.module[3].weight.grad.zero_()


def count(name: str) -> Callable[[Everything], None]:
    def forget(run: Everything) -> None:
        setattr(run.progress, name, 0)

    return forget


def frozen(run: Everything) -> None:
    run.module[0].bias.requires_grad_()


def average(run: Everything) -> None:
    run.average.weights = [torch.zeros_like(weight) for weight in run.average.weights]


def updates(run: Everything) -> None:
    run.average.updates = 0


def stream_python(run: Everything) -> None:
    random.seed(2)


def stream_numpy(run: Everything) -> None:
    np.random.seed(2)


def stream_torch(run: Everything) -> None:
    torch.manual_seed(2)


def stream_own(run: Everything) -> None:
    run.own.manual_seed(2)


def one_draw(run: Everything) -> None:
    torch.rand(1)


def history(run: Everything) -> None:
    run.state.history.load_state_dict({"records": []})


def told(*names: str) -> frozenset[str]:
    return frozenset(names)


ROWS = [
    Row("weights of the first layer", "model", fresh_tensor(0), told("parameters")),
    Row("a frozen parameter", "model", fresh_tensor(1), told("parameters")),
    Row("bias of the last layer", "model", fresh_tensor(5), told("parameters")),
    Row("all buffers", "model", buffers, told("shards and buffers")),
    Row("one buffer", "model", a_buffer, told("shards and buffers")),
    Row("a buffer that no state dict holds", "model", unseen_buffer, told("buffers outside state dicts")),
    Row("which modules are frozen in evaluation mode", "model", modes, told("modules in evaluation mode")),
    Row("frozen flags", "model", frozen, told("trained parameters")),
    Row("first moments", "optimizer", moment("exp_avg"), told("moments")),
    Row("second moments", "optimizer", moment("exp_avg_sq"), told("moments")),
    Row("largest second moments", "optimizer", moment("max_exp_avg_sq"), told("moments")),
    Row("step counters", "optimizer", moment("step"), told("moments")),
    Row("one moment of one parameter", "optimizer", one_moment, told("moments")),
    Row("all state of the optimizer", "optimizer", no_state, told("moments", "moment tensors")),
    Row("state of one parameter", "optimizer", state_of_one, told("moments", "moment tensors")),
    Row("learning rate", "optimizer", setting("lr", 1e-2), told("learning rates", "settings of param groups")),
    Row("betas", "optimizer", setting("betas", (0.9, 0.99)), told("settings of param groups")),
    Row("weight decay", "optimizer", setting("weight_decay", 0.0), told("settings of param groups")),
    Row("initial learning rate", "optimizer", setting("initial_lr", 1.0), told("settings of param groups")),
    Row("where the schedule stands", "scheduler", schedule, told("schedulers")),
    Row("what the schedule is", "scheduler", scheduler_settings, told("schedulers")),
    Row("loss scale", "scaler", scale, told("loss scale", "scalers")),
    Row("growth of the scale", "scaler", growth, told("scalers")),
    Row("growth interval", "scaler", growth_interval, told("scalers")),
    Row("all gradients", "gradients", gradients, told("gradients")),
    Row("one gradient", "gradients", a_gradient, told("gradients")),
    Row("global step", "progress", count("global_step"), told("global step")),
    Row("epoch", "progress", count("epoch"), told("epoch")),
    Row("micro step", "progress", count("micro_step"), told("micro step", "gradients")),
    Row("consumed samples: the cursor", "progress", count("consumed_samples"), told("consumed samples", "next batch")),
    Row("weights of an average", "extras", average, unknown="extra average"),
    Row("counter of an average", "extras", updates, unknown="extra average"),
    Row("Python's stream", "rng", stream_python, told("random streams")),
    Row("numpy's stream", "rng", stream_numpy, told("random streams")),
    Row("torch's stream", "rng", stream_torch, told("random streams")),
    Row("a stream of one's own", "rng", stream_own, told("random streams")),
    Row("one draw too many", "rng", one_draw, told("random streams")),
    Row("the history", "proof", history, told("history")),
]


class Forgetting:
    """A piece that restores all but one thing. The average takes its state when it is asked whether it did."""

    def __init__(self, inner: Any, forget: Callable[[], None]) -> None:
        self._inner = inner
        self._forget = forget

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def restore(self, loaded: Any) -> Any:
        told = self._inner.restore(loaded)
        self._forget()
        return told


def forgetting(run: Everything, row: Row) -> None:
    if row.piece == "extras":
        load = run.average.load_state_dict
        run.average.load_state_dict = lambda state: (load(state), row.forget(run))  # type: ignore[method-assign, assignment]
        return
    # What is forgotten early may be set by a later piece, as the learning rate by a scheduler: forget it last.
    run.state.pieces["proof"] = Forgetting(run.state.pieces["proof"], lambda: row.forget(run))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_what_is_left_out_is_noticed(row: Row, control: tuple[str, list[dict[str, Any]]]) -> None:
    url, wanted = control
    run = Everything(2)
    forgetting(run, row)
    if row.told:
        with pytest.raises(NotProved) as raised:
            resume(url, run)
        failing = {part.split(":")[0] for part in str(raised.value).removeprefix("after the restore: ").split("; ")}
        assert failing == row.told
        return
    report = resume(url, run)
    assert {check.name for check in report.checks if check.ok is None} == {row.unknown}
    assert [run.micro_step() for _ in range(AFTER)] != wanted


CHANGES_NOTHING = {"what the schedule is", "epoch", "the history"}
"""What this training happens not to depend on: told all the same."""


@pytest.mark.parametrize("row", [row for row in ROWS if row.told], ids=lambda row: row.what)
def test_what_is_left_out_matters(
    row: Row, control: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the check the run would go on as another one: the check is not pedantry."""
    url, wanted = control
    run = Everything(2)
    resume(url, run)
    row.forget(run)
    found = [run.micro_step() for _ in range(AFTER)]
    assert (found == wanted) == (row.what in CHANGES_NOTHING)


PIECES = ["model", "optimizer", "scheduler", "scaler", "gradients", "extras", "progress", "data", "rng", "proof"]


def test_the_rows_know_all_pieces() -> None:
    assert list(Everything(1).state.pieces) == PIECES


class Nothing:
    """A piece that saves nothing, as if its capture were broken."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def capture(self, place: Any) -> PieceState:
        return PieceState()


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("where", ["not saved", "not asked for", "captured as nothing"])
def test_a_piece_that_one_side_leaves_out_is_refused(
    piece: str, where: str, control: tuple[str, list[dict[str, Any]]], store_url: str
) -> None:
    run, url = Everything(1), control[0]
    if where == "not asked for":
        other = Everything(2)
        del other.state.pieces[piece]
    else:
        url, other = store_url, Everything(2)
        for _ in range(BEFORE):
            run.micro_step()
        if where == "not saved":
            del run.state.pieces[piece]
        else:
            run.state.pieces[piece] = Nothing(run.state.pieces[piece])
        with Checkpointer(url, run.state) as saves:
            saves.save()
    with pytest.raises(LoadError):
        resume(url, other)


@pytest.mark.parametrize("piece", [piece for piece in PIECES if piece != "proof"])
def test_a_piece_that_both_sides_leave_out_is_not_proved(
    piece: str, control: tuple[str, list[dict[str, Any]]], store_url: str
) -> None:
    run, other = Everything(1), Everything(2)
    for _ in range(BEFORE):
        run.micro_step()
    del run.state.pieces[piece], other.state.pieces[piece]
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
    if piece == "extras":  # no fact tells of it: a run that is built without its extras differs
        resume(store_url, other)
        assert [other.micro_step() for _ in range(AFTER)] != control[1]
        return
    if piece == "data":  # its cursor is progress.consumed_samples: that comes back with the progress
        resume(store_url, other)
        assert [other.micro_step()["batch"] for _ in range(AFTER)] == [line["batch"] for line in control[1]]
        return
    with pytest.raises(LoadError if piece == "model" else NotProved):
        resume(store_url, other)


HOOKED = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]


@pytest.mark.parametrize("hook", HOOKED)
def test_an_optimizer_with_a_hook_around_its_state_dict_is_refused(hook: str) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    getattr(optimizer, f"register_{hook}_hook")(lambda *given: None)
    with pytest.raises(ConfigError, match=f"SGD has a {hook.replace('_dict_', '_dict ')} hook of its own"):
        TrainState(module, optimizer)


def test_a_hook_that_comes_later_is_refused_at_the_save() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = TrainState(module, optimizer)
    optimizer.register_step_post_hook(lambda *given: None)  # adds nothing to the state
    state.capture()
    optimizer.register_state_dict_post_hook(lambda *given: None)
    with pytest.raises(ConfigError, match="state_dict post hook"):
        state.capture()


def test_a_state_dict_that_is_put_on_one_optimizer_is_refused() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state_dict = dict  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="SGD has a state_dict of its own"):
        TrainState(module, optimizer)
