"""The guide to training names what exists, and leaves out no option and no error."""

from __future__ import annotations

import builtins
import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import nn
from torch.optim import lr_scheduler as rates
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.train.runs import Run
from txstore import errors, train
from txstore.compat import migrations
from txstore.event_log import read_events
from txstore.manifest import Description
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import Resume
from txstore.train.state import TrainState

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
GUIDE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
NAMED = set(re.findall(r"`([A-Za-z_]+)`", GUIDE))


def test_every_option_is_told() -> None:
    for options in (train.SavePolicy, train.ResumeOptions):
        rows = {
            name for row in re.findall(r"^\| (`[^|]*) \|", GUIDE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        assert {field.name for field in dataclasses.fields(options)} <= rows, options
    named = {name.partition("=")[0] for name in re.findall(r"`([^`]+)`", GUIDE)}
    assert {field.name for field in dataclasses.fields(train.ProofPolicy)} <= named


def test_every_class_that_is_named_exists() -> None:
    classes = {name for name in NAMED if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", name)}
    foreign = {"StatefulDataLoader", *dir(builtins)}
    known = {*dir(errors), *dir(torch.utils.data), *train.__all__}
    assert classes - foreign - known == set()


def test_every_error_that_is_documented_has_a_row() -> None:
    documented = "".join(
        method.__doc__ or "" for method in (Checkpointer.save, Checkpointer.wait, Checkpointer.record, Resume.run)
    )
    raised = {name for line in re.findall(r"^\s+([\w, ]+): ", documented, re.MULTILINE) for name in line.split(", ")}
    raised = {name for name in raised if isinstance(getattr(errors, name, None), type)} - {"TxStoreError", "SaveError"}
    assert len(raised) > 8
    rows = re.findall(r"^\| (`.*?) \|", GUIDE.partition("## When it raises")[2], re.MULTILINE)
    assert raised <= set(re.findall(r"`(\w+)`", " ".join(rows)))


class Seen:
    """What each rank has seen."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"count": 1}


def test_where_everything_comes_from_is_shown_and_runs(store_url: str) -> None:
    (block,) = re.findall(r"```python\n(from txstore.train import ProofPolicy.*?)```", TEXT, re.DOTALL)
    named = set(re.findall(r"\w+", block.partition("import")[2].partition("\n")[0]))
    assert named == set(train.__all__) & named
    assert {"SavePolicy", "ProofPolicy", "repeatable", "ReplayedSampler", "WorkerStreams", "per_rank"} <= named
    samples = torch.utils.data.TensorDataset(torch.zeros(24, 1))
    body, head = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, other = torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)
    names = {
        "StatefulDataLoader": StatefulDataLoader,
        "TrainState": TrainState,
        "Checkpointer": Checkpointer,
        "dataset": samples,
        "sampler": torch.utils.data.SubsetRandomSampler(range(24), torch.Generator().manual_seed(3)),
        "held_out": StatefulDataLoader(samples, batch_size=8),
        "body": body,
        "head": head,
        "optimizer": optimizer,
        "other": other,
        "warmup": rates.StepLR(optimizer, 3),
        "decay": rates.StepLR(other, 3),
        "ema": Seen(),
        "seen": Seen(),
    }
    exec(block.replace("s3://bucket/run-7", store_url), names)
    saves: Any = names["saves"]
    assert saves.resume().fresh
    saves.save()
    assert saves.resume().checkpoint == "step-0"
    saves.close()


def test_metrics_and_event_log_are_closed_as_their_page_shows(store_url: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "observability" / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    text, log = tmp_path / "run.prom", tmp_path / "events.jsonl"
    shown = block.replace('labels={"run": "run-1"}', f'textfile={str(text)!r}, labels={{"run": "run-1"}}')
    shown = shown.replace("s3://bucket/run-1", store_url).replace("/var/log/run-1/events.rank-0.jsonl", str(log))
    shown = shown.replace("metrics.serve(9100)", "metrics.serve()").replace(
        "    ...\n", "    saves.save().committed.result()\n"
    )
    shown += "    assert TEXT.exists()\n"
    model = nn.Linear(1, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    exec(shown, {"Checkpointer": Checkpointer, "state": state, "description": Description(), "TEXT": text})
    assert not text.exists(), "a run that ended well leaves no file whose age would alert"
    assert {type(event).__name__ for event in read_events(log)} >= {"SaveRequested", "Committed"}


OLD, NEW = 0.1, 0.03
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, float], Any]] = {
    "StepLR": lambda o, _: rates.StepLR(o, 3),
    "ExponentialLR": lambda o, _: rates.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o, _: rates.CosineAnnealingLR(o, 30),
    "OneCycleLR": lambda o, rate: rates.OneCycleLR(o, max_lr=rate, total_steps=30),
    "LambdaLR": lambda o, _: rates.LambdaLR(o, lambda step: 0.95**step),
    "SequentialLR": lambda o, _: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, total_iters=9), rates.CosineAnnealingLR(o, 30)], [9]
    ),
    "ChainedScheduler": lambda o, _: rates.ChainedScheduler(
        [rates.LinearLR(o, 0.1, total_iters=9), rates.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o, _: rates.ReduceLROnPlateau(o, patience=1),
}


class Curve:
    """A run with a schedule; two groups, the second of twice the rate."""

    def __init__(self, name: str, rate: float) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        groups = [{"params": [self.model.weight]}, {"params": [self.model.bias], "lr": 2 * rate}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate)
        self.scheduler = SCHEDULES[name](self.optimizer, rate)
        self.state = TrainState(self.model, self.optimizer, schedulers=self.scheduler)

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def train(self, steps: int) -> list[list[float]]:
        told = []
        for _ in range(steps):
            self.optimizer.step()
            self.scheduler.step(*([1.0] if isinstance(self.scheduler, rates.ReduceLROnPlateau) else []))
            self.state.progress.global_step += 1
            told.append(self.rates())
        return told


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_new_learning_rate_is_that_of_a_run_that_had_it_all_along(name: str, store_url: str) -> None:
    """What the guide says of a changed rate, carried out at each of two resumes: the whole curve is the new one."""
    (recipe,) = re.findall(r"To use the new one,.*?```python\n(.*?)```", TEXT, re.DOTALL)
    (once,) = re.findall(r"`(group\[\"lr\"\] \*= new / old)`", TEXT)
    told = Curve(name, NEW).train(24)
    with Checkpointer(store_url, (first := Curve(name, OLD)).state) as saves:
        saves.resume()
        first.train(7)
        saves.save()
    for begin in (7, 12):
        run = Curve(name, NEW)
        with Checkpointer(store_url, run.state) as saves:
            names = {"optimizer": run.optimizer, "scheduler": run.scheduler, "saves": saves}
            if name != "ReduceLROnPlateau":
                exec(recipe, names)
            else:
                saves.resume()
                for group in run.optimizer.param_groups if begin == 7 else ():
                    exec(once, {"group": group, "new": NEW, "old": OLD})
            assert run.state.progress.global_step == begin
            found = [run.rates(), *run.train(5)]
            assert torch.allclose(torch.tensor(found), torch.tensor(told[begin - 1 : begin + 5]), rtol=1e-5, atol=0)
            saves.save()


def block(begin: str) -> str:
    """The first Python block after these words of the guide."""
    found = re.search(r"```python\n(.*?)```", TEXT.partition(begin)[2], re.DOTALL)
    assert found, begin
    return found[1]


def test_the_drill_of_the_guide_compares_what_it_says(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def start(change: float = 0.0) -> train.ControlReport | None:
        run = Run(seed=int(change) + 3)

        def train_step() -> tuple[float, str]:
            record = run.step()
            return record.loss + change * (record.step == 25), f"b{record.step}"

        names = {"Checkpointer": Checkpointer, "url": store_url, "state": run.state, "train_step": train_step}
        exec(block("A **drill** is stronger"), names)
        found: train.ControlReport | None = names.get("report")  # type: ignore[assignment]
        return found

    assert start() is None
    report = start()
    assert report is not None
    assert [row.step for row in report.rows] == list(range(11, 31))
    with pytest.raises(AssertionError, match="step 25: loss"):
        start(1.0)


def test_the_samples_that_are_trained_on_again_are_counted_from_the_first_start_on(
    store_url: str, tmp_path: Path
) -> None:
    counted = []
    for _ in range(2):
        run = Run()
        names = {
            "Checkpointer": Checkpointer, "ResumeOptions": train.ResumeOptions, "url": store_url, "state": run.state,
            "log_path": tmp_path / "events.jsonl",
        }  # fmt: skip
        recipe = block("### Samples that are trained on again")
        exec(recipe + TRAIN, {**names, "run": run, "counted": counted})
    assert counted == [None, 16]


TRAIN = """
    counted.append(report.reprocessed_samples)
    for step in range(3):
        record = run.step()
        saves.record(loss=record.loss)
        if step == 0:
            saves.save()
"""


def test_rolling_back_inside_a_run_ends_where_a_run_without_a_fault_does(store_url: str) -> None:
    def trained(url: str | None, bad_at: int) -> tuple[list[list[int]], dict[str, Any]]:
        torch.manual_seed(5)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = StatefulDataLoader(list(range(20)), batch_size=2, shuffle=True)
        state = TrainState(model, optimizer, data=loader)
        seen: list[list[int]] = []
        faults = [bad_at]

        def train_step(batch: torch.Tensor) -> float:
            seen.append(batch.tolist())
            loss = (model(batch.float()[:, None]) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) in faults:
                faults.clear()
                return math.nan
            return loss.item()

        body = block("**To roll back inside a run**").replace("        ...  # count, record, save\n", COUNT)
        assert COUNT in body
        with Checkpointer(url or store_url, state) as saves:
            saves.resume()
            names = {"state": state, "loader": loader, "train_step": train_step, "saves": saves, "math": math}
            exec(body, {**names, "steps": 25})
        return seen, {name: value.clone() for name, value in model.state_dict().items()}

    seen, values = trained(None, 0)
    again, after = trained(store_url + "-2", 18)
    assert seen == again[:16] + again[18:]
    assert all(torch.equal(values[name], after[name]) for name in values)


COUNT = """
        state.progress.global_step += 1
        state.progress.consumed_samples += len(batch)
        saves.record(loss=loss)
        if state.progress.global_step % 4 == 0:
            saves.save()
"""


EXAMPLES = [
    block
    for block in re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "guides" / "compatibility-of-resume.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    if "@migration(" in block
]


class Net(nn.Module):
    def __init__(self, rows: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(rows, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))


def made(rows: int, layers: int) -> tuple[Net, torch.optim.Optimizer, train.TrainState]:
    net = Net(rows, layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return net, optimizer, train.TrainState(net, optimizer)


def trained(net: Net, optimizer: torch.optim.Optimizer) -> None:
    x = net.embed(torch.arange(6))
    for layer in net.layers:
        x = x + layer(x)
    net.head(x).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("fresh", [set(), {"optimizer"}], ids=["moments kept", "moments anew"])
@pytest.mark.parametrize(
    ("name", "after"), [("grow-vocab-v2", (9, 2)), ("other-depth", (6, 3)), ("other-depth", (6, 1))]
)
def test_each_migration_of_the_guide_is_resumed_and_trained_on(
    name: str, after: tuple[int, int], fresh: set[str], store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "_registered", {})
    for example in EXAMPLES:
        exec(example, {})
    net, optimizer, state = made(6, 2)
    trained(net, optimizer)
    old, new = (Description(fingerprints={"model_config": name, "tokenizer": "same"}) for name in ("old", "new"))
    with Checkpointer(store_url, state, description=old) as saves:
        saves.save()
    now, again, state = made(*after)
    with Checkpointer(store_url, state, description=new) as saves:
        report = saves.resume(train.ResumeOptions(migrations=[name], fresh=fresh))
        assert report.proved
        assert f"migration {name}" in report.accepted
        assert torch.equal(now.embed.weight[:6], net.embed.weight)
        assert bool(again.state) is not bool(fresh)
        trained(now, again)
        state.progress.global_step += 1
        saves.save()
