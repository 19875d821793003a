"""Resumes: what is damaged, foreign, gone or changed is refused by a typed error, and nothing is believed by halves."""

from __future__ import annotations

import inspect
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import Fault, FaultyStore, Raise
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from workers import Pool, Pools, Rank

from tests.train.runs import Run
from txstore.catalog import entries, find, newest
from txstore.compat.matrix import parse_matrix
from txstore.dcp import StorageReader, StorageWriter
from txstore.decisions import read_manifest
from txstore.errors import (
    AccessDeniedError,
    CheckpointRetired,
    FormatError,
    Incompatible,
    IntegrityError,
    NotProved,
    StateMismatch,
    StoreFullError,
    TransientError,
    TxStoreError,
    UnknownVersion,
)
from txstore.keys import retired_key
from txstore.manifest import Description, Tombstone, encode
from txstore.registry import open_store
from txstore.retry import RetryPolicy
from txstore.train.checkpointer import Checkpointer
from txstore.train.choice import choose
from txstore.train.proof import ProofPolicy
from txstore.train.proof_piece import Facts
from txstore.train.python_state import flatten
from txstore.train.report import ResumeReport
from txstore.train.resume import ResumeOptions
from txstore.train.rng import capture_streams, restore_streams
from txstore.train.state import TrainState
from txstore.train.stateful import shared
from txstore.transaction import begin

ONCE = RetryPolicy(attempts=1)
PREVIOUS = ResumeOptions(fallback="previous")


@pytest.fixture(autouse=True)
def _streams() -> Iterator[None]:
    before = capture_streams()
    yield
    restore_streams(before)


def trained(url: str, steps: int = 6, every: int = 2, **options: Any) -> Run:
    """A run that saves every few steps."""
    run = Run()
    with Checkpointer(url, run.state, **options) as saves:
        for step in range(1, steps + 1):
            run.step()
            if step % every == 0:
                saves.save()
    return run


def resumed(url: Any, options: ResumeOptions | None = None, run: Run | None = None, **more: Any) -> ResumeReport:
    run = run or Run(seed=8)
    with Checkpointer(url, run.state, **more) as saves:
        return saves.resume(options)


def everything(run: Run) -> dict[str, Any]:
    """All that a resume may change, by value."""
    return {
        **run.values(),
        "scheduler": run.scheduler.state_dict(),
        "optimizer": len(run.optimizer.state),
        "lr": run.optimizer.param_groups[0]["lr"],
        "step": run.state.progress.global_step,
        "records": len(run.state.history),
        "streams": flatten(capture_streams())[0],
    }


def differing(before: dict[str, Any], run: Run) -> set[str]:
    now = everything(run)
    return {
        name
        for name, was in before.items()
        if not (torch.equal(was, now[name]) if isinstance(was, torch.Tensor) else was == now[name])
    }


# damage


def objects_of(url: str, part: str, checkpoint: str) -> Path:
    """The file of the one object of a checkpoint that has `part` in its name."""
    folder = Path(url.removeprefix("file://"))
    found = [
        path
        for path in folder.rglob("*")
        if path.is_file() and part in path.name and checkpoint in path.relative_to(folder).as_posix()
    ]
    assert len(found) == 1, found
    return found[0]


PARTS = {"shard": "rank-00000", "index": "index.msgpack", "manifest": "manifest.json", "decision": ".0.json"}


def damage(url: str, kind: str, how: str, checkpoint: str = "step-6", part: str = "") -> str:
    """Damage one object; returns its name."""
    path = objects_of(url, part or PARTS[kind], checkpoint)
    data = bytearray(path.read_bytes())
    path.unlink()  # objects are read-only
    if how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "flipped":
        data[len(data) * 3 // 4] ^= 1
        path.write_bytes(data)
    return path.name


DAMAGE = [(kind, how) for kind in PARTS for how in ("truncated", "flipped", "missing")]


@pytest.mark.parametrize(("kind", "how"), DAMAGE)
def test_damage_is_a_typed_error_that_names_the_object_and_nothing_else_happens(
    kind: str, how: str, store_url: str
) -> None:
    trained(store_url)
    name = damage(store_url, kind, how)
    run = Run(seed=8)
    before = everything(run)
    store = FaultyStore(store_url)
    with pytest.raises(FormatError if kind == "decision" and how != "missing" else IntegrityError) as raised:
        resumed(store, run=run)
    assert name in raised.value.key or name in str(raised.value)
    assert "fallback='previous' takes the one before, step-4" in raised.value.next_step
    assert not [call for call in store.calls if call[0] in {"put", "create", "delete"}]
    changed = differing(before, run)
    if (kind, how) == ("shard", "flipped"):
        # Found while it is read: tensors of the live model may hold what was read before (`TrainState.target`).
        assert changed <= set(run.values()), "only the tensors that are loaded in place"
    else:
        assert changed == set()


@pytest.mark.parametrize(("kind", "how"), DAMAGE)
def test_the_one_before_is_taken_if_that_is_allowed_and_the_report_says_so(kind: str, how: str, store_url: str) -> None:
    control = trained(store_url)
    control_values = control.values()
    name = damage(store_url, kind, how)
    run = Run(seed=8)
    with Checkpointer(store_url, run.state) as saves:
        report = saves.resume(PREVIOUS)
        assert (report.checkpoint, report.step, report.proved) == ("step-4", 4, True)
        assert [one.checkpoint for one in report.fell_back] == ["step-6"]
        assert name in report.fell_back[0].reason
        assert "passed over step-6" in str(report)
        for _ in range(2):
            run.step()
        assert run.losses == {step: control.losses[step] for step in (5, 6)}
        assert all(torch.equal(value, control_values[name]) for name, value in run.values().items())


def test_a_checkpoint_of_a_release_to_come_is_not_damaged_and_not_passed_over(store_url: str) -> None:
    trained(store_url)
    path = objects_of(store_url, PARTS["decision"], "step-6")
    path.unlink()
    path.write_bytes(b'{"version":2}')
    for options in (None, PREVIOUS):
        with pytest.raises(UnknownVersion, match="use the txstore release that wrote it"):
            resumed(store_url, options)
    with Checkpointer(store_url, Run().state) as saves, pytest.raises(UnknownVersion):
        saves.save()


@pytest.mark.parametrize("gone", ["commits", "commits and txstore.json"])
def test_records_that_are_gone_are_no_fresh_start(gone: str, store_url: str) -> None:
    trained(store_url)
    root = Path(store_url.removeprefix("file://"))
    shutil.rmtree(root / "commits")
    if "and" in gone:
        (root / "txstore.json").unlink()
    for options in (None, PREVIOUS):
        with pytest.raises(IntegrityError) as raised:
            resumed(store_url, options)
    assert raised.value.next_step
    with Checkpointer(store_url, Run().state) as saves, pytest.raises(IntegrityError):
        saves.save()  # nor does a run that forgot to resume write over what is left
    with pytest.raises(CheckpointException, match="IntegrityError"):
        dcp.load({}, storage_reader=StorageReader(store_url), no_dist=True)
    (root / "latest.json").unlink()  # as the error says, if it was meant
    assert resumed(store_url).fresh


def test_a_run_that_fell_back_past_a_lost_record_saves_the_step_again(store_url: str) -> None:
    trained(store_url)
    damage(store_url, "decision", "missing")
    run = Run(seed=8)
    with Checkpointer(store_url, run.state) as saves:
        assert saves.resume(PREVIOUS).checkpoint == "step-4"
        for _ in range(2):
            run.step()
        saves.save()
    assert resumed(store_url).checkpoint == "step-6"


def test_a_first_save_that_was_killed_is_a_fresh_start_and_told(store_url: str, caplog: Any) -> None:
    with open_store(store_url) as store:
        begin(store, "step-2", world_size=1)
    assert resumed(store_url).fresh
    assert "data of 1 attempt, and no record says that any was ever committed" in caplog.text


@pytest.mark.parametrize("depth", ["sample", "full"])
def test_a_flipped_bit_is_found_before_the_load_if_the_depth_asks_for_it(depth: Any, store_url: str) -> None:
    trained(store_url)
    damage(store_url, "shard", "flipped")
    run = Run(seed=8)
    before = everything(run)
    with pytest.raises(IntegrityError):
        resumed(store_url, ResumeOptions(depth=depth), run)
    assert differing(before, run) == set()


def test_several_may_be_passed_over_and_all_are_told(store_url: str) -> None:
    trained(store_url)
    damage(store_url, "decision", "flipped")
    damage(store_url, "shard", "flipped", "step-4")
    report = resumed(store_url, PREVIOUS)
    assert report.checkpoint == "step-2"
    assert [one.checkpoint for one in report.fell_back] == ["step-6", "step-4"]


def test_when_all_are_damaged_there_is_no_fresh_start(store_url: str) -> None:
    trained(store_url)
    for step, (kind, how) in zip(
        (2, 4, 6), [("shard", "flipped"), ("decision", "truncated"), ("manifest", "missing")], strict=True
    ):
        damage(store_url, kind, how, f"step-{step}")
    with pytest.raises(IntegrityError, match="all 3 committed checkpoints are damaged"):
        resumed(store_url, PREVIOUS)


def test_a_damaged_store_document_is_nobodys_checkpoint(store_url: str) -> None:
    trained(store_url)
    Path(store_url.removeprefix("file://"), "txstore.json").unlink()
    for options in (None, PREVIOUS):
        with pytest.raises(IntegrityError, match=r"txstore\.json"):
            resumed(store_url, options)


def test_a_named_checkpoint_is_never_replaced_by_another(store_url: str) -> None:
    trained(store_url)
    damage(store_url, "manifest", "flipped", "step-4")
    with pytest.raises(IntegrityError) as raised:
        resumed(store_url, ResumeOptions(checkpoint="step-4", fallback="previous"))
    assert "fallback" not in str(raised.value)


def test_the_one_before_is_named_only_if_there_is_one(store_url: str) -> None:
    trained(store_url)
    for checkpoint in ("step-2", "step-4", "step-6"):
        damage(store_url, "decision", "flipped", checkpoint)
    with pytest.raises(FormatError) as raised:
        resumed(store_url)
    assert "fallback" not in str(raised.value)


@pytest.mark.parametrize("kind", PARTS)
def test_a_run_that_fell_back_saves_the_damaged_step_again(kind: str, store_url: str) -> None:
    """Else it would fail there, resume, and fail there again, for ever."""
    trained(store_url)
    damage(store_url, kind, "flipped")
    run = Run(seed=8)
    with Checkpointer(store_url, run.state) as saves:
        saves.resume(PREVIOUS)
        for _ in range(2):
            run.step()
        saves.save()
        saves.wait()
    with open_store(store_url) as store:
        assert (newest(store).checkpoint, newest(store).slot) == ("step-6", 1)
    for options in (None, ResumeOptions(checkpoint="step-6")):
        report = resumed(store_url, options)
        assert (report.checkpoint, report.slot, report.fell_back) == ("step-6", 1, [])


def test_a_later_save_inside_the_window_takes_the_place_of_an_earlier_one(store_url: str) -> None:
    """A preempted job saves where it stands: at a step that it has saved before, further in its window."""
    run = Run()
    run.step()
    with Checkpointer(store_url, run.state) as saves:
        saves.save()
        run.model(torch.ones(8, 6)).sum().backward()
        run.state.progress.micro_step = 1
        saves.save()
    other = Run(seed=8)
    saves = Checkpointer(store_url, other.state)
    report = saves.resume()
    assert (report.checkpoint, report.slot, other.state.progress.micro_step) == ("step-1", 1, 1)
    other.model(torch.ones(8, 6)).sum().backward()
    other.state.progress.micro_step = 2
    last = saves.save()
    saves.wait()
    assert saves.save() is last  # the same again is no progress
    saves.close()
    assert resumed(store_url).slot == 2


def test_what_is_whole_is_never_overwritten_unasked(store_url: str) -> None:
    trained(store_url)
    run = Run(seed=8)
    saves = Checkpointer(store_url, run.state)
    saves.resume(ResumeOptions(checkpoint="step-4"))
    for _ in range(2):
        run.step()
    saves.save()
    with pytest.raises(TxStoreError, match="already committed"):
        saves.close()


# no checkpoint, or none that can be seen


class Answer:
    """An action that raises an error of the store."""

    def __init__(self, kind: type[TxStoreError]) -> None:
        self.kind = kind

    def __call__(self, store: Any, key: str, call: Any) -> Any:
        raise self.kind("planted", key=key)


def test_an_empty_store_is_a_fresh_start(store_url: str) -> None:
    run = Run(seed=8)
    before = everything(run)
    report = resumed(store_url, run=run)
    assert (report.fresh, report.proved, report.checkpoint) == (True, False, "")
    assert "fresh start" in str(report)
    assert differing(before, run) == set()


@pytest.mark.parametrize("error", [TransientError, AccessDeniedError])
@pytest.mark.parametrize("has_some", [True, False])
@pytest.mark.parametrize("where", [("list", "commits/"), ("list", "retired/"), ("read", "txstore.json")])
def test_a_store_that_does_not_answer_is_never_a_fresh_start(
    where: tuple[str, str], has_some: bool, error: type[TxStoreError], store_url: str
) -> None:
    """Failure case B6."""
    if has_some:
        trained(store_url, 2)
    for options in (None, PREVIOUS):
        with pytest.raises(error, match="planted"):
            resumed(FaultyStore(store_url, Fault(Answer(error), *where, forever=True)), options, retry=ONCE)


@pytest.mark.parametrize("part", ["commits/step-6", "manifest.json", "index.msgpack"])
@pytest.mark.parametrize("error", [TransientError, AccessDeniedError])
def test_what_cannot_be_read_is_not_damaged_and_not_passed_over(
    part: str, error: type[TxStoreError], store_url: str
) -> None:
    trained(store_url)
    with pytest.raises(TxStoreError) as raised:
        resumed(FaultyStore(store_url, Fault(Answer(error), "read", part, forever=True)), PREVIOUS, retry=ONCE)
    assert not isinstance(raised.value, IntegrityError | FormatError)
    assert part in str(raised.value)


def test_attempts_that_were_not_committed_are_ignored(store_url: str) -> None:
    trained(store_url, 4)
    for step, verb, part in ((5, "put", ".safetensors"), (6, "put", "manifest.json"), (7, "create", "commits/")):
        run = Run(seed=2)
        saves = Checkpointer(FaultyStore(store_url, Fault(Raise("full"), verb, part)), run.state, retry=ONCE)
        saves.resume()
        run.state.progress.global_step = step
        saves.save()
        with pytest.raises(StoreFullError):
            saves.close()
    folder = Path(store_url.removeprefix("file://"))
    shutil.copytree(folder / "data" / "step-4", folder / "data" / "step-9")  # a copy of everything but the decision
    (folder / "data" / "step-11").mkdir()
    (folder / "commits" / ".step-12.0.json.tmp").write_bytes(b"{")
    report = resumed(store_url)
    assert (report.checkpoint, report.fell_back, report.proved) == ("step-4", [], True)


# what is not this run's


def variant(run: Run, **pieces: Any) -> TrainState:
    return TrainState(run.model, run.optimizer, **{"schedulers": run.scheduler, **pieces})


class Counter:
    """An extra with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def with_scaler(run: Run) -> TrainState:
    return variant(run, scaler=torch.amp.GradScaler("cpu"))


def with_extra(run: Run) -> TrainState:
    return variant(run, extras={"ema": Counter(3)})


def with_data(run: Run) -> TrainState:
    return variant(run, data=shared(Counter(3)))


def with_generator(run: Run) -> TrainState:
    return variant(run, generators={"mine": torch.Generator()})


def without_scheduler(run: Run) -> TrainState:
    return variant(run, schedulers=None)


def without_optimizer(run: Run) -> TrainState:
    return TrainState(run.model, [], schedulers=run.scheduler)


def without_rng(run: Run) -> TrainState:
    return variant(run, rng=False)


VARIANTS = [with_scaler, with_extra, with_data, with_generator, without_scheduler, without_optimizer, without_rng]


@pytest.mark.parametrize("make", VARIANTS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("saved_with", [True, False])
def test_a_piece_on_one_side_only_is_refused(
    make: Callable[[Run], TrainState], saved_with: bool, store_url: str
) -> None:
    run = Run()
    run.step()
    first = make(run) if saved_with else variant(run)
    first.progress.global_step = 1
    with Checkpointer(store_url, first) as saves:
        saves.save()
    other = Run(seed=8)
    other.state = variant(other) if saved_with else make(other)
    before = everything(other)
    with pytest.raises((StateMismatch, Incompatible)):
        resumed(store_url, PREVIOUS, other)
    assert differing(before, other) == set()


class Wrapped(nn.Module):
    """What wrappers do to names."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, module)


@pytest.mark.parametrize("name", ["_orig_mod", "module", "backbone"])
@pytest.mark.parametrize("saved_wrapped", [True, False])
def test_a_prefix_on_one_side_is_told_as_the_near_miss_it_is(name: str, saved_wrapped: bool, store_url: str) -> None:
    bare, wrapped = Run().model, Wrapped(Run().model, name)
    first, second = (wrapped, bare) if saved_wrapped else (bare, wrapped)
    with Checkpointer(store_url, TrainState(first)) as saves:
        saves.save()
    with (
        Checkpointer(store_url, TrainState(second)) as saves,
        pytest.raises(Incompatible, match=f"hint: all .*{name}") as raised,
    ):
        saves.resume()
    blocked = [one for one in raised.value.judgement["differences"] if one["verdict"] == "blocked"]
    assert len(blocked) == 2 * len(bare.state_dict())


def test_a_compiled_module_has_the_names_of_the_bare_one(store_url: str) -> None:
    run = trained(store_url, 2)
    other = Run(seed=8)
    with Checkpointer(
        store_url, TrainState(torch.compile(other.model), other.optimizer, schedulers=other.scheduler)
    ) as saves:
        assert saves.resume().proved
    assert all(torch.equal(value, run.values()[name]) for name, value in other.values().items())


def test_another_shape_is_refused_and_every_difference_is_listed(store_url: str) -> None:
    class Speaker(nn.Module):
        def __init__(self, words: int, width: int, bias: bool) -> None:
            super().__init__()
            self.embed = nn.Embedding(words, width)
            self.head = nn.Linear(width, words, bias=bias)

    with Checkpointer(store_url, TrainState(Speaker(100, 8, bias=False))) as saves:
        saves.save()
    other = Speaker(104, 8, bias=True)
    before = other.embed.weight.clone()
    with Checkpointer(store_url, TrainState(other)) as saves, pytest.raises(Incompatible) as raised:
        saves.resume()
    blocked = {one["name"] for one in raised.value.judgement["differences"] if one["verdict"] == "blocked"}
    assert blocked == {"model.embed.weight", "model.head.weight", "model.head.bias"}
    assert all(name in str(raised.value) for name in blocked)
    assert "vocabulary" in str(raised.value)
    assert torch.equal(other.embed.weight, before)


OLD = Description(
    topology={"dp": 1, "tp": 1, "pp": 1, "zero": 1},
    settings={"batch_size": 8, "workers": 2},
    fingerprints={"tokenizer": "a" * 64, "training_config": "b" * 64},
)


def changed(**fields: Any) -> Description:
    return Description(
        **{name: {**getattr(OLD, name), **fields.get(name, {})} for name in ("topology", "settings", "fingerprints")}
    )


@pytest.mark.parametrize(
    ("today", "names"),
    [
        (changed(settings={"batch_size": 16}), {"batch_size"}),
        (changed(settings={"batch_size": 16, "workers": 4, "seed": 1}), {"batch_size", "workers", "seed"}),
        (changed(fingerprints={"tokenizer": "c" * 64}), {"tokenizer"}),
        (changed(topology={"zero": 2}), {"zero"}),
        (changed(topology={"zero": 2}, settings={"workers": 0}, fingerprints={"tokenizer": "c" * 64}), {"zero", "workers", "tokenizer"}),
        (Description(), {"batch_size", "workers", "tokenizer", "training_config", "dp", "tp", "pp", "zero", "world"}),
    ],
)  # fmt: skip
def test_what_changed_is_told_by_name_before_anything_is_put_in_place(
    today: Description, names: set[str], store_url: str
) -> None:
    trained(store_url, 2, description=OLD)
    run = Run(seed=8)
    before = everything(run)
    store = FaultyStore(store_url)
    with pytest.raises(Incompatible) as raised:
        resumed(store, PREVIOUS, run, description=today)
    assert {one["name"] for one in raised.value.judgement["differences"] if one["verdict"] == "blocked"} == names
    assert differing(before, run) == set()


def test_all_that_differs_is_told_at_once_and_less_if_the_python_state_cannot_be_read(store_url: str) -> None:
    trained(store_url, 2, description=OLD)
    run = Run(seed=8)
    run.optimizer = torch.optim.NAdam(run.model.parameters())
    run.state = TrainState(run.model, run.optimizer)
    unreadable = FaultyStore(store_url, Fault(Raise("denied"), "read_into", ".safetensors"))
    for store, more in ((store_url, ["0 class"]), (unreadable, [])):
        with pytest.raises(Incompatible) as raised:
            resumed(store, PREVIOUS, run, description=changed(settings={"workers": 4}))
        told = raised.value.judgement["differences"]
        assert [one["name"] for one in told if one["verdict"] == "blocked"] == ["workers", *more]
        assert ("optimizer layouts" in str(raised.value)) is not bool(more)


def accepted_in(url: str, checkpoint: str) -> tuple[str, ...]:
    with open_store(url) as store:
        told: tuple[str, ...] = read_manifest(store, find(store, checkpoint)).description.accepted
    return told


def test_a_difference_that_is_accepted_is_recorded_in_every_manifest_from_then_on(store_url: str) -> None:
    trained(store_url, 2, description=OLD)
    today = changed(settings={"batch_size": 16})
    run = Run(seed=8)
    with Checkpointer(store_url, run.state, description=today) as saves:
        report = saves.resume(ResumeOptions(accept={"batch_size"}))
        assert len(report.accepted) == 1
        assert "batch_size" in report.accepted[0]
        run.step()
        saves.save()
    assert accepted_in(store_url, "step-2") == ()
    assert accepted_in(store_url, "step-3") == tuple(report.accepted)
    run = Run(seed=9)
    with Checkpointer(store_url, run.state, description=changed(settings={"batch_size": 16, "workers": 0})) as saves:
        later = saves.resume(ResumeOptions(accept={"workers"}))
        run.step()
        saves.save()
    assert later.accepted[:1] == report.accepted
    assert accepted_in(store_url, "step-4") == tuple(later.accepted)
    assert len(later.accepted) == 2


def test_a_fingerprint_that_is_required_must_be_known(store_url: str) -> None:
    trained(store_url, 2, description=OLD)
    with pytest.raises(Incompatible, match="dataset"):
        resumed(store_url, ResumeOptions(required={"dataset"}), description=OLD)
    assert resumed(store_url, ResumeOptions(required={"tokenizer"}), description=OLD).proved


@pytest.mark.parametrize("status", ["verified", "blocked_until_drill_passes"])
def test_the_matrix_decides_about_the_topology(status: str, store_url: str) -> None:
    trained(store_url, 2, description=OLD)
    entry = f"resume_compatibility:\n  - {{from: {{zero: 1}}, to: {{zero: 2}}, status: {status}}}\n"
    options = ResumeOptions(matrix=parse_matrix(entry))
    if status == "verified":
        assert resumed(store_url, options, description=changed(topology={"zero": 2})).proved
    else:
        with pytest.raises(Incompatible, match="matrix entry 1 says blocked_until_drill_passes"):
            resumed(store_url, options, description=changed(topology={"zero": 2}))


# meanwhile


class Meanwhile:
    """An action that lets something happen before a call."""

    def __init__(self, happen: Callable[[Any], None]) -> None:
        self.happen = happen

    def __call__(self, store: Any, key: str, call: Any) -> Any:
        self.happen(store)
        return call()


def take_away(store: Any) -> None:
    """Retention by another process: of the newest, since it saw a newer one."""
    decision = newest(store)
    record = Tombstone(checkpoint=decision.checkpoint, slot=decision.slot, txn=decision.txn, reason="retention")
    store.create(retired_key(decision.checkpoint, decision.slot), encode(record))
    for info in list(store.list(f"data/{decision.checkpoint}/")):
        store.delete(info.key)


@pytest.mark.parametrize(
    ("verb", "part", "at"),
    [
        ("read", "manifest.json", 0),
        ("head", "retired/", 0),
        ("read", "index.msgpack", 0),
        ("read_into", ".safetensors", 0),
        ("read_into", ".safetensors", 1),
    ],
)
def test_retention_during_a_resume_is_told_as_what_it_is(verb: str, part: str, at: int, store_url: str) -> None:
    trained(store_url)
    store = FaultyStore(store_url, Fault(Meanwhile(take_away), verb, part, at=at))
    with pytest.raises(CheckpointRetired, match="step-6"):
        resumed(store, PREVIOUS)
    assert any(found == verb and part in key for found, key in store.calls)
    assert resumed(store_url).checkpoint == "step-4"


def overwrite(store: Any) -> None:
    other = Run(seed=4)
    for _ in range(6):
        other.step()
    commit_again(store, other)


def overwrite_with_less(store: Any) -> None:
    """With fewer tensors: the optimizer has no state."""
    other = Run(seed=4)
    other.state.progress.global_step = 6
    commit_again(store, other)


def commit_again(store: Any, other: Run) -> None:
    writer = StorageWriter(store, overwrite=True, description=Description(topology={"world": 1}))
    dcp.save(other.state.capture().state, storage_writer=writer, checkpoint_id="step-6", no_dist=True)


@pytest.mark.parametrize(
    ("verb", "part"),
    [
        ("head", "retired/"),
        ("read", "manifest.json"),
        ("read", "index.msgpack"),
        ("read_into", ".safetensors"),
    ],
)
@pytest.mark.parametrize("happen", [overwrite, overwrite_with_less])
def test_a_checkpoint_that_is_committed_again_meanwhile_is_not_mixed(
    verb: str, part: str, happen: Any, store_url: str
) -> None:
    """What was chosen is loaded: its objects are never overwritten."""
    control = trained(store_url)
    run = Run(seed=8)
    store = FaultyStore(store_url, Fault(Meanwhile(happen), verb, part))
    report = resumed(store, run=run)
    assert (report.checkpoint, report.slot, report.proved) == ("step-6", 0, True)
    assert all(torch.equal(value, control.values()[name]) for name, value in run.values().items())
    run = Run(seed=8)
    assert (resumed(store_url, run=run).slot) == 1
    assert not torch.equal(run.values()["last.weight"], control.values()["last.weight"])


def test_a_resume_waits_for_the_saves_on_their_way(store_url: str) -> None:
    """Failure case C4."""
    gate, reached = threading.Event(), threading.Event()

    def hold(store: Any, key: str, call: Any) -> Any:
        reached.set()
        assert gate.wait(30)
        return call()

    run = Run()
    found: list[ResumeReport] = []
    with Checkpointer(FaultyStore(store_url, Fault(hold, "put", ".safetensors")), run.state) as saves:
        run.step()
        at_save = run.values()
        saves.save()
        run.step()
        assert reached.wait(30)
        thread = threading.Thread(target=lambda: found.append(saves.resume()))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        gate.set()
        thread.join(30)
    assert (found[0].checkpoint, found[0].proved, run.state.progress.global_step) == ("step-1", True, 1)
    assert all(torch.equal(value, at_save[name]) for name, value in run.values().items())


# the proof


def test_what_does_not_hold_after_the_restore_is_not_proved(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(store_url)
    now = Facts.shared
    monkeypatch.setattr(Facts, "shared", lambda facts: {**now(facts), "global step": 5})
    with pytest.raises(NotProved, match=r"global step: 5, 6 was saved.*end this process.*Build it as it was"):
        resumed(store_url, PREVIOUS)
    monkeypatch.setattr(Facts, "shared", lambda facts: {**now(facts), "param groups": [9]})
    with pytest.raises(NotProved, match=r"or begin this anew, on purpose: fresh=\{'optimizer'\}"):
        resumed(store_url)


class Cursor(Counter):
    """Data that can name its next batch."""

    def next_batch_id(self) -> str:
        return f"b{self.count}"


def steady(url: str, policy: ProofPolicy | None = None) -> tuple[Checkpointer, Cursor, ResumeReport]:
    """A run of 16 steady steps, resumed."""
    for resuming in (False, True):
        cursor = Cursor()
        state = TrainState(nn.Linear(2, 2), data=shared(cursor))
        saves = Checkpointer(url, state, proof=policy)
        report = saves.resume()
        while not resuming and cursor.count < 16:
            recorded(saves, cursor)
        if not resuming:
            saves.save()
            saves.close()
    return saves, cursor, report


def recorded(saves: Checkpointer, cursor: Cursor, *, loss: float = 2.0, skip: int = 0, batch: str = "") -> None:
    cursor.count += skip
    batch = batch or cursor.next_batch_id()
    cursor.count += 1
    saves.state.progress.global_step += 1 + skip
    saves.record(loss=loss + cursor.count / 100, grad_norm=1.0, update_norm=0.01, batch_id=batch)


@pytest.mark.parametrize(
    ("jump", "failing"),
    [
        ({"loss": 3.0}, {"loss"}),
        ({"loss": float("nan")}, {"loss"}),
        ({"batch": "b15"}, {"first batch"}),
        ({"batch": "b0"}, {"first batch"}),
        ({"skip": 1}, {"first batch", "next step"}),
    ],
)
@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_first_step_that_does_not_follow_is_not_proved(
    jump: dict[str, Any], failing: set[str], on_failure: Any, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saves, cursor, report = steady(store_url, ProofPolicy(on_failure=on_failure))
    assert report.proved
    with saves:
        if on_failure == "raise":
            with pytest.raises(NotProved) as raised:
                recorded(saves, cursor, **jump)
            assert all(name in str(raised.value) for name in failing)
        else:
            recorded(saves, cursor, **jump)
            assert all(name in caplog.text for name in failing)
    assert {check.name for check in report.failed} == failing
    assert not report.proved


def test_a_jump_in_a_later_step_of_the_proof_is_found_and_after_it_none_is_looked_for(store_url: str) -> None:
    saves, cursor, report = steady(store_url, ProofPolicy(steps=3))
    with saves:
        recorded(saves, cursor)
        recorded(saves, cursor)
        with pytest.raises(NotProved, match="step 19, 3 after the resume"):
            recorded(saves, cursor, loss=5.0)
        recorded(saves, cursor, loss=9.0)
    assert report.loss_delta == pytest.approx(0.01)


# ranks


WORLD = 2


@pytest.fixture(scope="module")
def pair(pools: Pools) -> Iterator[Pool]:
    with pools.fresh(WORLD) as pool:
        yield pool


def ranked_run(me: Rank, seed: int = 3) -> Run:
    run = Run(seed)
    torch.manual_seed(100 + me.rank)
    return run


def train_together(me: Rank, url: str) -> None:
    run = ranked_run(me)
    with Checkpointer(url, run.state) as saves:
        for step in (2, 4, 6):
            run.state.progress.global_step = step
            saves.save()


def resume_together(me: Rank, url: str, options: ResumeOptions, blind: int | None, fault: Any) -> Any:
    """The report, or the error, of each rank; rank `blind` has the fault."""
    run = ranked_run(me, seed=8)
    store = FaultyStore(url, *([Fault(*fault, forever=True)] if me.rank == blind else []))
    saves = Checkpointer(store, run.state, retry=ONCE)
    try:
        report = saves.resume(options)
        told = report.checkpoint, [(one.checkpoint, one.reason) for one in report.fell_back], report.proved
    except TxStoreError as error:
        told = type(error).__name__, str(error), error.rank
    saves.close()
    return told


@pytest.mark.parametrize(
    ("kind", "how", "part"),
    [("shard", "flipped", "rank-00001"), ("shard", "missing", "rank-00001"), ("index", "truncated", ""), ("manifest", "missing", ""), ("decision", "flipped", "")],
)  # fmt: skip
def test_all_ranks_fall_back_together(kind: str, how: str, part: str, pair: Pool, store_url: str) -> None:
    pair.run(WORLD, train_together, store_url)
    name = damage(store_url, kind, how, part=part)
    found = pair.run(WORLD, resume_together, store_url, PREVIOUS, None, None)
    assert found == [found[0]] * WORLD
    checkpoint, fell_back, proved = found[0]
    assert (checkpoint, proved) == ("step-4", True)
    assert [one[0] for one in fell_back] == ["step-6"]
    assert name in fell_back[0][1]
    refused = pair.run(WORLD, resume_together, store_url, ResumeOptions(), None, None)
    assert refused == [refused[0]] * WORLD
    assert name in refused[0][1]


class Flip:
    """An action that changes what is read: a cache that is wrong on one machine."""

    def __call__(self, store: Any, key: str, call: Any) -> Any:
        found = call()
        if isinstance(found, int):  # into a buffer
            inspect.getclosurevars(call).nonlocals["buffer"][found - 1] ^= 1
            return found
        return found[:-1] + bytes([found[-1] ^ 1])


@pytest.mark.parametrize(("verb", "part"), [("read", "index.msgpack"), ("read_into", ".safetensors")])
def test_damage_that_one_rank_sees_is_damage_for_all(verb: str, part: str, pair: Pool, store_url: str) -> None:
    pair.run(WORLD, train_together, store_url)
    found = pair.run(WORLD, resume_together, store_url, PREVIOUS, 1, (Flip(), verb, part))
    assert found == [found[0]] * WORLD
    assert found[0][0] == "IntegrityError"
    assert "all 3 committed checkpoints are damaged" in found[0][1]


@pytest.mark.parametrize(
    ("blind", "verb", "part"),
    [
        (0, "list", "commits/"),
        (0, "read", "manifest.json"),
        (0, "read", "index.msgpack"),
        (1, "read", "index.msgpack"),
        (0, "read_into", ".safetensors"),
        (1, "read_into", ".safetensors"),
    ],
)
def test_a_rank_that_may_not_read_is_the_same_error_on_all(
    blind: int, verb: str, part: str, pair: Pool, store_url: str
) -> None:
    pair.run(WORLD, train_together, store_url)
    found = pair.run(WORLD, resume_together, store_url, PREVIOUS, blind, (Raise("denied"), verb, part))
    assert found == [found[0]] * WORLD
    kind, text, rank = found[0]
    assert kind in {"AccessDeniedError", "LoadError"}
    assert "planted" in text
    assert rank == blind


@pytest.mark.parametrize(("verb", "part"), [("list", "commits/"), ("read", "commits/"), ("read", "manifest.json")])
def test_only_the_coordinator_looks_for_the_newest(verb: str, part: str, pair: Pool, store_url: str) -> None:
    """Failure case B2."""
    pair.run(WORLD, train_together, store_url)
    found = pair.run(WORLD, resume_together, store_url, PREVIOUS, 1, (Raise("denied"), verb, part))
    assert found == [("step-6", [], True)] * WORLD


def test_another_number_of_ranks_needs_a_word_in_the_matrix_and_a_choice_about_the_streams(
    pair: Pool, store_url: str
) -> None:
    """Nobody gave a topology: the number of ranks is compared all the same."""
    pair.run(WORLD, train_together, store_url)
    run = Run(seed=8)
    before = everything(run)
    with pytest.raises(Incompatible, match="topology world: saved 2, now 1") as raised:
        resumed(store_url, ResumeOptions(), run)
    assert "random streams: saved of world size 2, now of world size 1" in str(raised.value), "at once"
    entry = "resume_compatibility:\n  - {from: {world: 2}, to: {world: 1}, status: verified}\n"
    with pytest.raises(Incompatible, match=r"random streams.*\s+next: on_world_size_change=.reseed."):
        resumed(store_url, ResumeOptions(matrix=parse_matrix(entry)), run)
    assert differing(before, run) == set()
    report = resumed(store_url, ResumeOptions(matrix=parse_matrix(entry), on_world_size_change="reseed"), run)
    assert (report.proved, report.saved_world_size, report.world_size) == (True, 2, 1)
    assert [check.name for check in report.checks if check.ok is None] == ["facts of this rank"]


def test_choose_says_none_only_after_a_listing(store_url: str) -> None:
    with open_store(store_url) as store:
        assert choose(store, None) is None
    trained(store_url, 2)
    with open_store(store_url) as store:
        assert [entry.decision.checkpoint for entry in entries(store)] == ["step-2"]
