"""What was accepted is said again at each resume in which it is in force; and commands that are advised can be typed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.train.runs import Run
from txstore.compat import migration, migrations
from txstore.manifest import Description
from txstore.train.checkpointer import Checkpointer
from txstore.train.resume import ResumeOptions

SOURCES = Path(__file__).parents[2] / "txstore"


def start(url: str, options: ResumeOptions, **fields: dict[str, int | str]) -> None:
    run = Run()
    with Checkpointer(url, run.state, description=Description(**fields)) as saves:  # type: ignore[arg-type]
        saves.resume(options)
        run.step()
        saves.save()


def test_each_resume_in_which_an_accept_is_in_force_says_so(store_url: str, caplog: pytest.LogCaptureFixture) -> None:
    options = ResumeOptions(accept={"batch_size"})
    told = []
    for batch_size in (8, 16, 16, 4):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            start(store_url, options, settings={"batch_size": batch_size})
        told.append(re.findall(r"batch_size: saved \d+, now \d+", caplog.text))
    assert told == [[], ["batch_size: saved 8, now 16"], [], ["batch_size: saved 16, now 4"]]


def test_so_does_a_migration(store_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "_registered", {})
    migration("other-words", fingerprints=["tokenizer"])(lambda saved, today: migrations.KeyPlan())
    options = ResumeOptions(migrations=["other-words"])
    for name in "abc":
        caplog.clear()
        start(store_url, options, fingerprints={"tokenizer": name * 64})
    assert f"tokenizer: saved {'b' * 64}, now {'c' * 64}" in caplog.text
    assert "by migration other-words" in caplog.text


def test_commands_that_errors_advise_name_the_root() -> None:
    bare = []
    for path in SOURCES.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            for rest in re.findall(r"\"[^\"]*\btxstore (?:ls|verify|show)\b([^\"]*)\"", line):
                if not rest.startswith(" {") and "``" not in line and '"""' not in line:
                    bare.append(f"{path.name}: {line.strip()}")
    assert bare == []
