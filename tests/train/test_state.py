"""`TrainState`: what was saved is what is restored, bit for bit, and what does not fit is refused as a whole."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from tests.train.trainings import Training, continues, model, raw, resume, save
from txstore import manifest
from txstore.dcp import StorageReader
from txstore.errors import ConfigError, FormatError, StateMismatch, UnsupportedValue
from txstore.train.captured import unaccounted
from txstore.train.progress import TrainProgress
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.stateful import per_rank, shared


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    before = capture_streams()
    torch.manual_seed(1)
    yield
    restore_streams(before)


def plain() -> Training:
    module = model(norm=False)
    return Training(module, [torch.optim.AdamW(module.parameters(), lr=1e-2)])


def dropout() -> Training:
    module = model(dropout=0.4)
    return Training(module, [torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.8, 0.95), amsgrad=True)])


def warm_up() -> Training:
    from torch.optim import lr_scheduler as rates

    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    first = rates.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    then = rates.CosineAnnealingLR(optimizer, T_max=20)
    return Training(module, [optimizer], [rates.SequentialLR(optimizer, [first, then], milestones=[6])])


def one_cycle() -> Training:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    return Training(module, [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)])


def plateau() -> Training:
    module = model()
    optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-2)
    return Training(module, [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)])


def lambdas() -> Training:
    module = model()
    groups = [{"params": [p], "name": n, "tags": (1, None)} for n, p in module.named_parameters()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    return Training(module, [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)])


def scaled() -> Training:
    module = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return Training(module, [torch.optim.AdamW(module.parameters(), lr=1e-2)], scaler=scaler)


def frozen() -> Training:
    module = model()
    module[0].weight.requires_grad_(False)  # in the optimizer, without state
    module[3].bias.requires_grad_(False)  # in no optimizer
    held = [p for n, p in module.named_parameters() if n != "3.bias"]
    return Training(module, [torch.optim.AdamW(held, lr=1e-2)])


def low_rank() -> Training:
    """As LoRA: only the adapters are trained."""
    module = model()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    module[0] = nn.Sequential(module[0], nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False))
    return Training(module, [torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)])


def accumulating() -> Training:
    module = model(dropout=0.2)
    module[0].unused = nn.Linear(2, 2)  # never has a gradient
    return Training(module, [torch.optim.AdamW(module.parameters(), lr=1e-2)], window=4)


def no_state() -> Training:
    module = model()
    return Training(module, [torch.optim.SGD(module.parameters(), lr=1e-2)])


def two_optimizers() -> Training:
    module = model()
    first = torch.optim.Adam(module[0].parameters(), lr=torch.tensor(1e-2))
    second = torch.optim.Adafactor([*module[1].parameters(), *module[3].parameters()], lr=1e-2)
    return Training(module, [first, second])


KINDS = [
    plain,
    dropout,
    warm_up,
    one_cycle,
    plateau,
    lambdas,
    scaled,
    frozen,
    low_rank,
    accumulating,
    no_state,
    two_optimizers,
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_resumed_training_equals_an_untouched_one(make: Callable[[], Training], store_url: str) -> None:
    continues(make, store_url, before=7, after=9)


@pytest.mark.parametrize("make", [plain, scaled, warm_up], ids=lambda make: make.__name__)
def test_an_optimizer_that_has_never_stepped_stays_without_state(make: Callable[[], Training], store_url: str) -> None:
    untouched, _ = continues(make, store_url, before=0, after=3)
    assert untouched.optimizers[0].state, "it has stepped since"


def test_settings_come_back_with_their_types(store_url: str) -> None:
    first = lambdas()
    first.run(3)
    save(first.state, store_url, 3)
    other = lambdas()
    for group in other.optimizers[0].param_groups:
        group.update(lr=5.0, betas=[0.1, 0.2], weight_decay=1, added="later")
        del group["initial_lr"], group["tags"]
    resume(other.state, store_url)
    for now, then in zip(other.optimizers[0].param_groups, first.optimizers[0].param_groups, strict=True):
        assert {k: (type(v), v) for k, v in now.items() if k != "params"} == {
            k: (type(v), v) for k, v in then.items() if k != "params"
        }
    states = [list(one.optimizers[0].state.values()) for one in (first, other)]
    for then, now in zip(*states, strict=True):
        assert then.keys() == now.keys()
        assert all(raw(then[name]) == raw(now[name]) and then[name].dtype == now[name].dtype for name in then)


def test_a_setting_that_a_later_torch_has_added_keeps_its_default_and_is_told(store_url: str) -> None:
    first = plain()
    del first.optimizers[0].param_groups[0]["maximize"]
    save(first.state, store_url, 1)
    other = plain()
    applied = resume(other.state, store_url)
    assert applied.restored["optimizer"]["settings_not_saved"] == ["optimizer 0: maximize"]
    assert other.optimizers[0].param_groups[0]["maximize"] is False


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(store_url: str) -> None:
    first = two_optimizers()
    first.optimizers[0].param_groups[0]["lr"].fill_(0.125)
    save(first.state, store_url, 1)
    other = two_optimizers()
    rate = other.optimizers[0].param_groups[0]["lr"]
    resume(other.state, store_url)
    assert other.optimizers[0].param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_what_was_restored_is_told(store_url: str) -> None:
    first = scaled()
    first.run(4)
    save(first.state, store_url, 4)
    applied = resume(scaled().state, store_url)
    assert applied.progress == manifest.Progress(global_step=4, consumed_samples=20)
    assert applied.saved_world_size == 1
    assert applied.restored["optimizer"]["param_groups"] == 1
    assert applied.restored["optimizer"]["moment_tensors"] == 18
    assert applied.restored["rng"] == {"restored": ["python", "numpy", "torch"]}
    assert applied.restored["scaler"] == {"restored": ["0"]}
    assert applied.restored["model"] == {
        "tensors": 9,
        "extra_states": 0,
        "temporary_buffers": 0,
        "modes_of_models": 1,
    }


def test_a_capture_is_of_one_instant() -> None:
    one = dropout()
    one.run(2)
    captured = one.state.capture()
    before = raw(captured.state["python.rank-0"]), raw(captured.state["python.shared"])
    one.run(2)
    assert captured.progress.global_step == 2
    assert (raw(captured.state["python.rank-0"]), raw(captured.state["python.shared"])) == before
    assert one.state.capture().progress.global_step == 4
    assert all(isinstance(value, torch.Tensor) for value in captured.state.values()), "nothing is pickled"


def test_the_digests_tell_which_piece_differs_between_ranks() -> None:
    first, second = one_cycle(), one_cycle()
    second.module.load_state_dict(first.module.state_dict())
    assert first.state.capture().shared_digests == second.state.capture(1, 2).shared_digests
    second.optimizers[0].param_groups[0]["lr"] = 7.0
    a, b = first.state.capture().shared_digests, second.state.capture(1, 2).shared_digests
    assert [name for name in a if a[name] != b[name]] == ["optimizer", "proof"]


class Noted:
    """An object with plain state, as a callback has."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def test_extras_may_hold_tensors_and_grow(store_url: str) -> None:
    first = plain()
    first.state = TrainState(
        first.module, first.optimizers, extras={"a.b": Noted([{1: torch.arange(3)}]), "a": Noted(())}
    )
    save(first.state, store_url, 1)
    one, two = Noted([]), Noted(None)
    resume(TrainState(first.module, first.optimizers, extras={"a.b": one, "a": two}), store_url)
    assert one.value[0][1].tolist() == [0, 1, 2]
    assert two.value == ()


def test_several_models_have_names(store_url: str) -> None:
    def make() -> tuple[nn.ModuleDict, TrainState]:
        modules = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
        optimizer = torch.optim.Adam([p for m in modules.values() for p in m.parameters()])
        sum(m(torch.ones(1, 2)).sum() for m in modules.values()).backward()
        optimizer.step()
        return nn.ModuleDict(modules), TrainState(modules, optimizer)

    first, state = make()
    assert {"model.actor.weight", "optimizer.0.state.critic.bias.exp_avg"} <= state.capture().state.keys()
    save(state, store_url, 1)
    second, other = make()
    resume(other, store_url)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


class WithExtra(nn.Linear):
    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": torch.full((2,), float(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        assert state["scale"].tolist() == [float(state["calls"])] * 2
        self.calls = state["calls"]


def test_extra_state_and_wrappers_do_not_change_names(store_url: str) -> None:
    first = nn.Sequential(WithExtra(2, 2))
    first[0].calls = 7
    compiled = torch.compile(first)
    state = TrainState(compiled, torch.optim.Adam(compiled.parameters()))
    assert "model.0.weight" in state.capture().state
    save(state, store_url, 1)
    second = nn.Sequential(WithExtra(2, 2))
    resume(TrainState(second, torch.optim.Adam(second.parameters())), store_url)
    assert second[0].calls == 7


# What does not fit.


def refused(other: TrainState, url: str, match: str) -> str:
    """The refusal, after which nothing that the target does not hold has changed."""
    before = {key: raw(value) for key, value in other.capture().state.items() if not key.startswith("model.")}
    with pytest.raises(StateMismatch, match=match) as caught:
        resume(other, url)
    after = {key: raw(value) for key, value in other.capture().state.items() if not key.startswith("model.")}
    assert before == after
    return str(caught.value)


def test_pieces_on_one_side_only_are_refused_all_at_once(store_url: str) -> None:
    first = scaled()
    save(first.state, store_url, 1)
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    other = TrainState(
        module,
        optimizer,
        schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        extras={"ema": Noted(1)},
        rng=False,
    )
    message = refused(other, store_url, "scaler '0' was saved, and there is none here")
    assert "scheduler '0' was not saved" in message
    assert "extra 'ema' was not saved" in message
    assert "'rng' was saved, and there is none here" in message


@pytest.mark.parametrize("piece", ["model", "optimizer", "scheduler", "progress", "rng", "data"])
def test_a_piece_that_was_left_out_of_the_save_is_missed(piece: str, store_url: str) -> None:
    first = one_cycle()
    del first.state.pieces[piece]
    save(first.state, store_url, 1)
    refused(one_cycle().state, store_url, f"'{piece}' was not saved|'model.0.weight' was not saved")


def test_parameters_in_another_order_are_refused_though_their_shapes_agree(store_url: str) -> None:
    # Matched by position, two moments would be swapped without a word.
    first = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    save(TrainState(first, torch.optim.Adam([first["a"].weight, first["b"].weight])), store_url, 1)
    swapped = TrainState(first, torch.optim.Adam([first["b"].weight, first["a"].weight]))
    refused(swapped, store_url, "a.weight: saved place 0 of optimizer 0, group 0, now b.weight is there")
    regrouped = TrainState(first, torch.optim.Adam([{"params": [first["a"].weight]}, {"params": [first["b"].weight]}]))
    refused(regrouped, store_url, "optimizer 0 groups: saved 1 group, now 2 groups")
    fewer = TrainState(first, [torch.optim.Adam([first["a"].weight]), torch.optim.Adam([first["b"].weight])])
    refused(fewer, store_url, "optimizer count: saved 1 optimizer, now 2 optimizers")
    another = TrainState(first, torch.optim.NAdam([first["a"].weight, first["b"].weight]))
    refused(another, store_url, "optimizer 0 class: saved torch.optim.adam.Adam, now torch.optim.nadam.NAdam")


def test_another_set_of_trained_parameters_is_refused(store_url: str) -> None:
    save(plain().state, store_url, 1)
    other = plain()
    other.module[0].bias.requires_grad_(False)
    refused(
        other.state, store_url, r"state parameters 0\.bias: saved trained, now frozen \(call requires_grad_\(True\)"
    )


def test_another_model_is_refused_before_a_byte_is_loaded(store_url: str) -> None:
    save(plain().state, store_url, 1)
    metadata = StorageReader(store_url).read_metadata()
    wide = nn.Sequential(nn.Linear(4, 7).double(), nn.Identity(), nn.Identity(), nn.Linear(7, 2), nn.Linear(1, 1))
    with pytest.raises(StateMismatch) as caught:
        TrainState(wide, torch.optim.AdamW(wide.parameters())).target(metadata)
    for text in (
        "shape (7, 4), (6, 4) was saved",
        "torch.float64, torch.float32 was saved",
        "'model.4.bias' was not saved",
    ):
        assert text in str(caught.value)


def test_saved_keys_that_nobody_asks_for_are_found(store_url: str) -> None:
    first = plain()
    first.module.register_buffer("extra", torch.ones(1))
    save(TrainState(first.module, first.optimizers), store_url, 1)
    metadata = StorageReader(store_url).read_metadata()
    other = plain()
    left = unaccounted(metadata, [other.state.expected_keys(metadata)])
    assert left == ["model.extra"]


def test_a_checkpoint_of_something_else_is_refused(store_url: str) -> None:
    with pytest.raises(FormatError, match="TrainState"):
        plain().state.target(Metadata({}))


def test_a_damaged_blob_is_refused(store_url: str) -> None:
    one = plain()
    state = one.state.capture().state
    for key in ("python.shared", "python.rank-0"):
        damaged = {**state, key: state[key][:-3]}
        with pytest.raises(FormatError):
            one.state.apply(damaged)
        with pytest.raises(StateMismatch, match="was not loaded"):
            one.state.apply({name: value for name, value in state.items() if name != key})
    one.run(1)
    state = one.state.capture().state
    with pytest.raises(StateMismatch, match="exp_avg' was not loaded"):
        one.state.apply({key: value for key, value in state.items() if not key.endswith("exp_avg")})


def test_an_object_that_does_not_take_its_state_is_found(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = one_cycle()
    first.run(2)
    save(first.state, store_url, 2)
    other = one_cycle()
    monkeypatch.setattr(torch.optim.lr_scheduler.OneCycleLR, "load_state_dict", lambda self, state: None)
    with pytest.raises(StateMismatch, match="scheduler '0' does not take the saved state"):
        resume(other.state, store_url)


def test_a_scaler_between_unscale_and_step_is_refused() -> None:
    one = scaled()
    one.scaler.scale(one.module(torch.randn(5, 4)).sum()).backward()
    one.scaler.unscale_(one.optimizers[0])
    with pytest.raises(UnsupportedValue, match="unscaled"):
        one.state.capture()


def test_a_scaler_between_step_and_update_is_refused() -> None:
    one = scaled()
    one.run(1)
    one.scaler.scale(one.module(torch.randn(5, 4)).sum()).backward()
    one.state.progress.micro_step = 1  # of two: gradients that no step has used are no reason
    one.state.capture()
    one.scaler.step(one.optimizers[0])
    with pytest.raises(UnsupportedValue, match=r"step has used, and no update has followed"):
        one.state.capture()
    one.scaler.update()
    one.state.capture()


def test_a_scaler_that_is_enabled_on_one_side_only_is_refused(store_url: str) -> None:
    save(scaled().state, store_url, 1)
    other = scaled()
    other.scaler = torch.amp.GradScaler("cpu", enabled=False)
    other.state = TrainState(other.module, other.optimizers, scaler=other.scaler)
    refused(other.state, store_url, "enabled on one side only")


def test_what_cannot_be_saved_is_refused_by_its_path() -> None:
    one = plain()
    one.optimizers[0].param_groups[0]["hook"] = lambda: None
    with pytest.raises(UnsupportedValue) as caught:
        one.state.capture()
    assert caught.value.key == "optimizer.0.groups[0].hook"
    state = TrainState(model(), extras={"callback": Noted(object())})
    with pytest.raises(UnsupportedValue) as caught:
        state.capture()
    assert caught.value.key == "python.shared.extras.callback.state.value"


def test_wrong_calls_are_refused() -> None:
    module = model()
    with pytest.raises(ConfigError, match="that no model has"):
        TrainState(module, torch.optim.SGD(nn.Linear(1, 1).parameters()))
    with pytest.raises(ConfigError, match="without state_dict"):
        TrainState(module, extras={"x": 1})
    with pytest.raises(ConfigError, match="not a module"):
        TrainState({"x": 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="without dots"):
        TrainState({"x.y": module})
    with pytest.raises(ConfigError, match="called like a rank"):
        TrainState(nn.ModuleDict({"rank-0": module}))
    with pytest.raises(ConfigError, match="not a progress"):
        TrainState(module, progress=TrainProgress(global_step=-1)).capture()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": None}, "model is a NoneType"),
        ({"model": [nn.Linear(1, 1)]}, r"modules by name: \{'actor': actor"),
        ({"model": {1: nn.Linear(1, 1)}}, "not a model's name: 1"),
        ({"optimizers": None}, "leave optimizers out if there is none"),
        ({"optimizers": {"a": None}}, "a NoneType is no optimizer"),
        ({"optimizers": "x"}, "a str is no optimizer"),
        ({"extras": {1: Noted(1)}}, "not a name of the extra pieces: 1"),
        ({"extras": {"g": torch.Generator()}}, "generators={'name': generator}"),
        ({"generators": [random.Random()]}, "pass them by name"),
        ({"generators": {"a": 5}}, "pass a numpy Generator or RandomState"),
        ({"generators": {2: random.Random()}}, "not a generator's name: 2"),
        ({"generators": {"a": random.SystemRandom()}}, "has no state"),
        ({"generators": {"a": random.Random()}, "rng": False}, "rng=False saves none"),
        ({"progress": {"global_step": 3}}, "progress is a dict"),
    ],
    ids=lambda value: None if isinstance(value, dict) else re.sub("[^a-z]+", "-", value.lower()),
)
def test_an_argument_of_another_kind_is_refused_at_once(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainState(**{"model": model(), **given})


def test_optimizers_may_come_by_name_or_from_an_iterator() -> None:
    for several in (lambda a, b: {"first": a, "second": b}, lambda a, b: iter([a, b])):
        module = model()
        first, *others = module.parameters()
        one = TrainState(module, several(torch.optim.SGD([first], momentum=0.9), torch.optim.Adam(others)))
        kinds = [layout.kind.rpartition(".")[2] for layout in one._optimizers.layouts()]
        assert kinds == ["SGD", "Adam"]


def test_state_of_each_rank_needs_as_many_ranks() -> None:
    module = model()
    two = TrainState(module, data=Noted(3), extras={"own": per_rank(Noted(4)), "all": shared(Noted(5))})
    state = two.capture(0, 2).state
    with pytest.raises(StateMismatch) as caught:
        two.apply(state, 0, 1)
    for text in ("data '0': saved one for each rank of 2", "extra 'own'", 'on_world_size_change="reseed"'):
        assert text in str(caught.value)
    applied = TrainState(module).apply(TrainState(module).capture(0, 2).state, 0, 1, on_world_size_change="reseed")
    assert applied.restored["rng"] == {"reseeded": ["python", "numpy", "torch"]}


def test_progress_is_recorded_field_by_field() -> None:
    assert {f.name for f in dataclasses.fields(TrainProgress)} == set(manifest.Progress.__struct_fields__)
