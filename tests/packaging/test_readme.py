"""What the documents promise exists: commands, error names, links, and the example, which is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from txstore import errors

CHECKOUT = Path(__file__).parents[2]
README = (CHECKOUT / "README.md").read_text()


def test_the_first_two_commands() -> None:
    block = re.search(r"```console\n(.*?)```", README, re.DOTALL)
    assert block
    assert [line.split("  ")[0] for line in block[1].splitlines()] == ["make demo", "make test"]
    targets = re.findall(r"^([a-z]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test", "lint", "soak", "clean", "setup"} <= set(targets)


def test_the_example_runs(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert block
    assert len([line for line in block[1].splitlines() if line]) <= 5
    example = block[1].replace("file:///checkpoints/run-1", (tmp_path / "store").as_uri())
    assert example != block[1]
    setup = "import torch, warnings; warnings.simplefilter('ignore')\nstate = {'weight': torch.arange(6.0)}\n"
    example = example.replace("dcp.load(", "state['weight'].zero_()\ndcp.load(")
    check = "assert state['weight'].tolist() == [0, 1, 2, 3, 4, 5], state\n"
    done = subprocess.run(
        [sys.executable, "-c", setup + example + check], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_command_exists_and_none_is_left_out() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("txstore")), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shown = set(re.findall(r"^  ([a-z]+) {2,}\S", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert set(re.findall(r"^\| `txstore ([a-z]+) ", README, re.MULTILINE)) == shown


def test_every_error_that_is_named_exists() -> None:
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", README)) - {"URL", "NAME", "StrictLoadPlanner"}
    foreign = {"CheckpointException", "ValueError", "RuntimeError"}
    assert {name for name in named - foreign if not hasattr(errors, name)} == set()
    assert "AlreadyCommitted" in named


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (CHECKOUT / document).read_text())
    assert [link for link in links if "://" not in link and not (CHECKOUT / link).exists()] == []
