"""What the documents promise exists: commands, error names, links, and the example, which is run."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import dedent

import pytest

from txstore import errors, open_store, train
from txstore.catalog import entries
from txstore.transaction import begin

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
    assert len([line for line in block[1].splitlines() if line]) <= 7
    example = block[1].replace("file:///checkpoints/run-1", (tmp_path / "store").as_uri())
    assert example != block[1]
    setup = "import warnings; warnings.simplefilter('ignore')\n"
    zeroed = example.replace("dcp.load(", "state['weight'].zero_()\ndcp.load(")
    check = "assert state['weight'].tolist() == [0, 1, 2, 3, 4, 5], state\n"
    twice = (
        f"try: exec({example!r})\nexcept BaseException as error: assert 'AlreadyCommitted' in str(error), error\n"
        "else: raise SystemExit('the second run overwrote')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setup + zeroed + check + twice], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_beside_training_runs(tmp_path: Path) -> None:
    """Its copy is what was there at the call, and the future has the commit."""
    first, beside = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[:2]
    assert "dcp.async_save" in beside
    imports = "".join(line + "\n" for line in first.splitlines() if "import" in line or line.startswith("state ="))
    example = beside.replace("file:///checkpoints/run-1", (tmp_path / "store").as_uri())
    assert example != beside
    check = (
        f"assert state['weight'].tolist() == [1, 2, 3, 4, 5, 6], state\n"
        f"dcp.load(state, storage_reader=StorageReader({(tmp_path / 'store').as_uri()!r}), checkpoint_id='step-101')\n"
        f"assert state['weight'].tolist() == [0, 1, 2, 3, 4, 5], state\n"
    )
    program = "import warnings; warnings.simplefilter('ignore')\n" + imports + example + check
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


REFUSED = """
import warnings
import torch
import torch.distributed.checkpoint as dcp
from txstore.dcp import StorageWriter

warnings.simplefilter("ignore")
state = {"w": torch.ones(2)}
dcp.save(state, storage_writer=StorageWriter(URL), checkpoint_id="step-102")
try:
    try:
        exec(SNIPPET)
    except Exception as error:
        raise SystemExit(f"an Exception: {error!r}")
except BaseException as error:
    assert "AlreadyCommitted" in str(error), error
"""


def test_what_plain_dcp_raises_is_caught_as_shown(tmp_path: Path) -> None:
    """Its error is no `Exception`; one that is not meant is raised again; a full store is told, and the loop goes on."""
    block = re.search(r"Errors of plain DCP.*?```python\n(.*?)```", README, re.DOTALL)
    assert block
    url = (tmp_path / "store").as_uri()
    snippet = block[1].replace("file:///checkpoints/run-1", url)
    full = (
        "from txstore.errors import StoreFullError\n"
        "from torch.distributed.checkpoint.api import CheckpointException\n"
        "def full(*args, **kwargs): raise CheckpointException('planted', {0: (StoreFullError('no space'), None)})\n"
        "dcp.save = full\nexec(SNIPPET)\n"
    )
    program = f"URL = {url!r}\nSNIPPET = {snippet!r}\n{REFUSED}{full}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "not saved: no space" in done.stdout


def test_nothing_tells_to_install_what_is_not_released() -> None:
    """There is no release: an index would answer with nothing, or with a package of somebody else's."""
    texts = [*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md")]
    texts += [*CHECKOUT.glob("txstore/**/*.py"), *CHECKOUT.glob("backends/**/*.py"), *CHECKOUT.glob("examples/**/*.py")]
    assert [path.name for path in texts if re.search(r"pip install '?txstore", path.read_text(encoding="utf-8"))] == []


TRAINING = """
import io, warnings
from contextlib import redirect_stdout
import torch
from txstore.errors import Incompatible

warnings.simplefilter("ignore")

def run(seed, dropout="0.2"):
    pasted = BEFORE.replace("manual_seed(7)", f"manual_seed({seed})").replace('"dropout": 0.2', f'"dropout": {dropout}')
    told, names = io.StringIO(), {}
    with redirect_stdout(told):
        exec(pasted + SNIPPET, names)
    return told.getvalue(), [parameter.detach().clone() for parameter in names["model"].parameters()]

whole, at = SNIPPET, SNIPPET.index("    if saves.saved_step")
SNIPPET = whole[:at]  # as a run that was killed before its last save
first = run(1)
SNIPPET = whole
second, third = run(2), run(3)
assert "a fresh start" in first[0], first[0]
assert "resumed step-200" in second[0], second[0]
assert "resumed step-240" in third[0], third[0]  # the tail of the run was saved
assert all(map(torch.equal, first[1], second[1])), "the resumed run went another way"
assert all(map(torch.equal, first[1], third[1])), "the final weights were not saved"
try:
    run(3, dropout="0.3")
except Incompatible as error:
    assert "fingerprint model_config" in str(error), error
else:
    raise SystemExit("another dropout was taken")
"""


def test_the_training_loop_runs_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.partition("## Training loop")[2], re.DOTALL)
    loop, before = blocks[:2]
    assert len([line for line in loop.splitlines() if line]) <= 21
    snippet = loop.replace("file:///checkpoints/run-2", (tmp_path / "store").as_uri())
    assert snippet != loop
    done = subprocess.run(
        [sys.executable, "-c", f"BEFORE = {before!r}\nSNIPPET = {snippet!r}\n{TRAINING}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_answer_to_an_unknown_commit_runs_when_the_process_is_gone(tmp_path: Path) -> None:
    block = re.search(r"- \*\*`CommitUnknown`.*?```python\n(.*?)```", README, re.DOTALL)
    assert block
    url = (tmp_path / "store").as_uri()
    with open_store(url) as store:
        txn = begin(store, "step-100", world_size=1).ticket.txn
    snippet = dedent(block[1]).replace("file:///checkpoints/run-1", url)
    told = io.StringIO()
    with redirect_stdout(told):
        exec(snippet, {"txn": txn})
    assert told.getvalue() == "abort\n"
    with open_store(url) as store:
        assert [entry.decision.kind for entry in entries(store)] == ["abort"]


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
    foreign = {"BaseException", "CheckpointException", "Exception", "RuntimeError", "ValueError"}
    known = set(dir(errors)) | set(train.__all__)
    assert named - foreign - known == set()
    assert "AlreadyCommitted" in named


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (CHECKOUT / document).read_text())
    assert [link for link in links if "://" not in link and not (CHECKOUT / link).exists()] == []
