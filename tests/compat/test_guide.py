"""The guide's examples run, its names exist, and its words are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from txstore import compat
from txstore.compat import migrations
from txstore.compat.topology import FIELDS
from txstore.manifest import Description

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "compatibility-of-resume.md").read_text(encoding="utf-8")
_, *EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)  # the first is run by tests/train


def test_a_run_can_describe_itself_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in (("tokenizer", "tokenizer.json"), ("data", "shard-0.bin")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compat, "code_version", lambda folder: "git:" + "0" * 40)
    given = {"model_config": {"layers": 2}, "args": {"lr": 0.1, "output_dir": "x"}}
    given["tokenizer"] = SimpleNamespace(chat_template="{{ x }}")
    exec(EXAMPLES[0], given)
    description = given["description"]
    assert description.fingerprints.keys() == set(compat.RECOVERY_POINT)
    assert compat.judge(description, description, {}, {}).allowed


def test_the_migration_does_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})
    given: dict = {}
    exec(EXAMPLES[1], given)
    saved = {"model.embed.weight": compat.TensorFact("float32", (2, 1)), "model.a": compat.TensorFact("int8", ())}
    today = {**saved, "model.embed.weight": compat.TensorFact("float32", (3, 1))}
    sides = [Description(fingerprints={"tokenizer": name}) for name in ("old", "new")]
    judgement = compat.judge(*sides, saved, today, migrations=["grow-vocab-v2"])
    assert judgement.allowed
    assert judgement.plan.transforms["model.embed.weight"]([1, 2], [0, 0, 3]) == [1, 2, 3]
    assert not compat.judge(*sides, saved, today).allowed


def test_the_migration_of_a_config_alone_does_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})
    (shown,) = [one for one in EXAMPLES if "dropout" in one]
    exec(shown, {})
    keys = {"model.a": compat.TensorFact("int8", ())}
    sides = [Description(fingerprints={"model_config": name}) for name in ("old", "new")]
    assert compat.judge(*sides, keys, keys, migrations=["dropout-0.3"]).allowed
    assert not compat.judge(*sides, keys, keys).allowed
    more = {**keys, "model.b": compat.TensorFact("int8", ())}
    assert not compat.judge(*sides, keys, more, migrations=["dropout-0.3"]).allowed


def test_the_matrix_is_one() -> None:
    text, _ = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert [entry.status for entry in compat.parse_matrix(text).entries] == ["verified", "blocked_until_drill_passes"]


def test_fields_and_names_to_accept_are_those_of_the_code() -> None:
    assert all(f"`{name}`" in GUIDE for name in FIELDS)
    named = set(re.findall(r'accept=\{"([^"]+)"\}', GUIDE))
    assert named == {
        "batch_size",
        "fingerprint:training_config",
        "fingerprint:tokenizer",
        "topology:zero",
        "optimizer:layout",
        "buffers",
        "trained",
        "tied",
        "scheduler:0:functions",
        "extra:ema:class",
    }
