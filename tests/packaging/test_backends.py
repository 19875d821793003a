"""Backends are found through entry points: the door that third parties use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MEMORY = "from txstore.memory import MemoryStore\ndef open_store(url, **options): return MemoryStore(url)\n"


def install(folder: Path, name: str, scheme: str, target: str, modules: dict[str, str]) -> None:
    """A distribution as pip leaves it: modules, and a dist-info folder with an entry point."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[txstore.backends]\n{scheme} = {target}\n")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


def python(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    # The folders are added by the program: PYTHONPATH may already name the checkout.
    prefix = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}\n"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", prefix + code], capture_output=True, text=True, timeout=60, check=False
    )


OPEN = """
from txstore import open_store
from txstore.errors import ConfigError
try:
    store = open_store({url!r})
    print("opened", type(store).__name__, store.url)
except ConfigError as error:
    print("refused", error)
"""


def opened(url: str, *folders: Path) -> str:
    done = python(OPEN.format(url=url), *folders)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_third_party_backend_is_found(tmp_path: Path) -> None:
    install(tmp_path, "acme_store", "acme", "acme_store:open_store", {"acme_store": MEMORY})
    assert opened("acme://bucket/run", tmp_path) == "opened MemoryStore acme://bucket/run\n"


def test_unknown_scheme_names_the_known_ones(tmp_path: Path) -> None:
    install(tmp_path, "acme_store", "acme", "acme_store:open_store", {"acme_store": MEMORY})
    answer = opened("nope://bucket", tmp_path)
    assert answer.startswith("refused no backend for scheme 'nope'")
    assert "acme" in answer
    assert "file" in answer


def test_missing_sdk_says_what_to_install(tmp_path: Path) -> None:
    source = "import sys; sys.modules['boto3'] = None\nimport boto3\n"
    install(tmp_path, "acme_store", "acme", "acme_store:open_store", {"acme_store": source})
    answer = opened("acme://bucket", tmp_path)
    assert answer.startswith("refused the backend for acme:// needs a package that is not installed: boto3")
    assert "pip install '.[s3]' in txstore's checkout" in answer


def test_a_bug_in_a_backend_is_not_reported_as_a_missing_sdk(tmp_path: Path) -> None:
    source = "import a_module_of_its_own_that_is_missing\n"
    install(tmp_path, "acme_store", "acme", "acme_store:open_store", {"acme_store": source})
    done = python(OPEN.format(url="acme://bucket"), tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'a_module_of_its_own_that_is_missing'" in done.stderr


def test_two_backends_for_one_scheme_are_refused(tmp_path: Path) -> None:
    install(tmp_path / "a", "acme_store", "acme", "acme_store:open_store", {"acme_store": MEMORY})
    install(tmp_path / "b", "other_store", "acme", "other_store:open_store", {"other_store": MEMORY})
    answer = opened("acme://bucket", tmp_path / "a", tmp_path / "b")
    assert answer.startswith("refused two backends claim scheme 'acme'")
    assert "acme_store:open_store" in answer
    assert "other_store:open_store" in answer


def test_a_copy_of_the_same_backend_is_no_conflict(tmp_path: Path) -> None:
    # The wheel and an editable install of one distribution may both be on the path.
    install(tmp_path / "a", "acme_store", "acme", "acme_store:open_store", {"acme_store": MEMORY})
    install(tmp_path / "b", "acme_copy", "acme", "acme_store:open_store", {})
    assert opened("acme://bucket", tmp_path / "a", tmp_path / "b").startswith("opened")


def test_a_third_party_cannot_take_over_a_scheme_of_ours(tmp_path: Path) -> None:
    install(tmp_path, "acme_store", "file", "acme_store:open_store", {"acme_store": MEMORY})
    assert opened(f"file://{tmp_path}/store", tmp_path).startswith("refused two backends claim scheme 'file'")
