"""The command line over real ``file://`` stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from txstore import open_store
from txstore.cli.app import app
from txstore.store import Store


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)

    @property
    def names(self) -> list[str]:
        return [entry["checkpoint"] for entry in self.json["checkpoints"]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def url(root: Path) -> str:
    return f"file://{root}"


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


@pytest.fixture
def cli() -> Callable[..., Answer]:
    """Run a command in this process."""

    def run(*args: str) -> Answer:
        done = CliRunner().invoke(app, list(args))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Answer(done.exit_code, done.stdout, done.stderr)

    return run


def console_script() -> list[str]:
    script = Path(sys.executable).with_name("txstore")
    assert script.exists(), "install the project: pip install -e ."
    return [str(script)]


@pytest.fixture
def script() -> Callable[..., Answer]:
    """Run the installed console script in a process of its own."""

    def run(*args: str, **kwargs) -> Answer:
        env = {**os.environ, **kwargs.pop("env", {})}
        done = subprocess.run(
            [*console_script(), *args], capture_output=True, text=True, env=env, timeout=60, check=False, **kwargs
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return run
