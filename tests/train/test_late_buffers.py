"""Buffers that come and go while training runs: the resumed module is the one that was saved, or the save refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.train.trainings import resume
from txstore.dcp import StorageWriter
from txstore.errors import Incompatible, StateMismatch, UnsupportedValue
from txstore.train.checkpointer import Checkpointer
from txstore.train.report import ResumeReport
from txstore.train.resume import ResumeOptions
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


class Layer(nn.Module):
    """Keeps the last inputs in buffers that its first call makes, and drops a table that only the warm-up needs."""

    recent: torch.Tensor
    count: torch.Tensor
    warm: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("warm", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "recent"):
            self.register_buffer("recent", torch.zeros(2, dtype=torch.float64), persistent=False)
            self.register_buffer("empty", None, persistent=False)
            self.register_buffer("count", torch.zeros((), dtype=torch.int32), persistent=False)
        self.recent.lerp_(x.detach().double().mean(dim=0), 0.5)
        self.count += 1
        if self.count == 2:
            del self.warm
        out: torch.Tensor = self.linear(x) + self.recent.float()
        return out * self.warm if hasattr(self, "warm") else out


Make = Callable[[], nn.Module]


def one() -> nn.Module:
    torch.manual_seed(1)
    return Layer()


def nested() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Layer()))


class Run:
    """A short training."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        self.state = TrainState(module, self.optimizer)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.module(torch.randn(3, 2)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.progress.global_step += 1
            losses.append(loss.item())
        return losses

    def save(self, url: str) -> None:
        with Checkpointer(url, self.state) as saves:
            if self.state.progress.global_step > 3:
                saves.resume()
            saves.save()

    def resume(self, url: str, **options: Any) -> ResumeReport:
        with Checkpointer(url, self.state) as saves:
            return saves.resume(ResumeOptions(**options))

    def buffers(self) -> list[Any]:
        """Of all modules, in their order: name, value, dtype, and whether a state dict holds it."""
        found: list[Any] = []
        for path, part in self.module.named_modules():
            for name, value in part._buffers.items():
                told = None if value is None else (value.tolist(), value.dtype, value.device)
                found.append((path, name, told, name in part._non_persistent_buffers_set))
        return found


@pytest.mark.parametrize("make", [one, nested])
@pytest.mark.parametrize("before", [1, 3])
def test_buffers_that_came_and_went_are_as_they_were(make: Make, before: int, store_url: str) -> None:
    run = Run(make())
    run.steps(before)
    run.save(store_url)
    buffers = run.buffers()
    wanted = run.steps(4)
    other = Run(make())
    assert other.resume(store_url).proved
    assert other.buffers() == buffers
    assert other.steps(4) == wanted
    assert other.buffers() == run.buffers()


def test_a_second_resume_knows_them_too(store_url: str) -> None:
    run = Run(one())
    run.steps(3)
    run.save(store_url)
    wanted = run.steps(4)
    found = []
    for _ in range(4):
        run = Run(one())
        with Checkpointer(store_url, run.state) as saves:
            assert saves.resume().proved
            found += run.steps(1)
            saves.save()
    assert found == wanted


def test_what_this_process_has_made_and_deleted_does_not_survive_a_resume(store_url: str) -> None:
    run = Run(one())
    run.save(store_url)
    buffers = run.buffers()
    wanted = run.steps(4)
    run.steps(3)
    with pytest.raises(Incompatible, match="state buffer warm: saved float32"):
        run.resume(store_url)
    other = Run(one())
    other.steps(1)
    assert other.resume(store_url).proved
    assert other.buffers() == buffers
    assert other.steps(4) == wanted


def test_another_number_of_ranks_takes_those_of_rank_0(store_url: str) -> None:
    whole: dict[str, Any] = {}
    for rank in (1, 0):
        run = Run(one())
        run.steps(rank + 1)
        run.state.progress.global_step = 1
        whole |= run.state.capture(rank, 2).state
    assert {"late.rank-0.recent", "late.rank-1.recent"} <= whole.keys()
    dcp.save(whole, storage_writer=StorageWriter(store_url), checkpoint_id="step-1", no_dist=True)
    other = Run(one())
    resume(other.state, store_url, on_world_size_change="reseed")  # every saved key is accounted for
    assert other.buffers() == run.buffers()


def test_a_late_buffer_needs_a_place(store_url: str) -> None:
    run = Run(one())
    run.steps(1)
    run.save(store_url)
    bare = one()
    bare.recent = "taken"  # type: ignore[assignment]
    with pytest.raises(StateMismatch, match="'recent' was saved, and is no buffer here: let the code"):
        Run(bare).resume(store_url)


def test_a_late_buffer_of_a_late_module_is_refused_at_the_save() -> None:
    run = Run(nn.Sequential(nn.Linear(2, 2)))
    late = nn.Identity()
    late.register_buffer("cache", torch.zeros(2), persistent=False)
    run.module.append(late)  # type: ignore[operator]
    with pytest.raises(UnsupportedValue, match=r"'1.cache' belongs to a module that was not there.*make it in the mod"):
        run.state.capture()


def buffer(module: nn.Module) -> None:
    module.register_buffer("late", torch.zeros(1))


def parameter(module: nn.Module) -> None:
    module.register_parameter("late", nn.Parameter(torch.zeros(1)))


def submodule(module: nn.Module) -> None:
    module.add_module("late", nn.BatchNorm1d(2))


def deleted(module: nn.Module) -> None:
    del module.weight


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (buffer, r"now also has \['late'\]"),
        (parameter, r"now also has \['late'\]"),
        (submodule, r"now also has \['late.bias', 'late.num_batches_tracked',"),
        (deleted, r"lacks \['weight'\]"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_dict_of_other_names_is_refused_at_the_save(change: Any, text: str, rank: int) -> None:
    """The next start could not load it: it builds the model as the code does, and resumes before a forward pass."""
    module = nn.Linear(2, 2)
    module.register_buffer("there", torch.zeros(1))
    state = TrainState(module)
    change(module)
    with pytest.raises(UnsupportedValue, match=rf"{text}.*make the model whole in __init__"):
        state.capture(rank, 2)


def test_a_lazy_module_that_the_first_step_shapes_is_no_other_one(store_url: str) -> None:
    module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    state = TrainState(module)
    module(torch.randn(3, 4))
    with Checkpointer(store_url, state) as saves:
        saves.save()


def test_a_lazy_module_without_shapes_is_told_at_once_and_named_at_the_resume(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first start trains and saves; only the second one would meet that nothing can be loaded."""

    def start() -> tuple[nn.Module, TrainState]:
        module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
        return module, TrainState(module)

    module, state = start()
    assert ["'0.weight' has no shape yet" in text and "one forward pass" in text for text in caplog.messages] == [True]
    with Checkpointer(store_url, state) as saves:
        saves.resume()
        with pytest.raises(UnsupportedValue, match=r"'0\.weight' has no shape yet.*one forward pass"):
            saves.save()
        module(torch.randn(3, 4))
        saves.save()
    with (
        Checkpointer(store_url, start()[1]) as saves,
        pytest.raises(UnsupportedValue, match=r"'0\.weight' has no shape yet.*one forward pass"),
    ):
        saves.resume()
    module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    module(torch.randn(3, 4))
    caplog.clear()
    with Checkpointer(store_url, TrainState(module)) as saves:
        assert not saves.resume().fresh
    assert "has no shape yet" not in caplog.text


def frozen_by_its_code() -> nn.Module:
    module: Any = one()
    module.linear.bias.requires_grad_(False)
    return module


def test_frozen_parameters_that_changed_are_told_with_what_to_do(store_url: str) -> None:
    run = Run(frozen_by_its_code())
    run.save(store_url)
    other = Run(one())
    text = (
        r"parameters linear.bias: saved frozen, now trained\s+next: call requires_grad_\(False\) on them before resume"
    )
    with pytest.raises(Incompatible, match=text):
        other.resume(store_url)
    other.module.linear.bias.requires_grad_(False)  # type: ignore[union-attr]
    assert other.resume(store_url).proved


@pytest.mark.parametrize("frozen", [True, False])
def test_a_run_that_thaws_goes_on_at_every_start_of_one_script(frozen: bool, store_url: str) -> None:
    """Frozen before the resume and trained after it, or trained all along: the first start is like the others."""
    run = Run(frozen_by_its_code())
    run.save(store_url)
    for start in range(3):
        again = Run(one())
        again.module.linear.bias.requires_grad_(not frozen)  # type: ignore[union-attr]
        with Checkpointer(store_url, again.state) as saves:
            report = saves.resume(ResumeOptions(accept={"trained"}))
            assert report.proved
            assert len(report.accepted) == (start > 0 or not frozen), "recorded once it differs"
            again.module.linear.bias.requires_grad_()  # type: ignore[union-attr]
            again.state.progress.global_step += 1
            saves.save()
