"""The architecture's layers and the house rules that a tool can check."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
MODULES = sorted([*CHECKOUT.glob("txstore/**/*.py"), *CHECKOUT.glob("backends/**/*.py")])
MAX_LINES = 400

# Directories of the machines on which txstore is written, and addresses of package registries: neither belongs in it.
FOREIGN = re.compile(
    rb"(?<![\w.])/(?:work/|root/\.|opt/|Users/|home/[a-z]+/)|\b(?:files\.pythonhosted|pypi|test\.pypi|download\.pytorch)\.org"
)


# What the tools leave in a checkout; .gitignore names the same.
GENERATED = {"__pycache__", "build", "dist"}


def our_files() -> list[Path]:
    """Every file that git would carry; without git (an unpacked archive) every file that no tool made."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=CHECKOUT,
            capture_output=True,
            check=True,
        ).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return [path for path in CHECKOUT.rglob("*") if path.is_file() and not _is_generated(path)]
    return [path for name in listed.split(b"\0") if name and (path := CHECKOUT / name.decode()).is_file()]


def _is_generated(path: Path) -> bool:
    folders = path.relative_to(CHECKOUT).parent.parts
    hidden = folders and folders[0].startswith(".") and folders[0] != ".ci"
    return bool(hidden or GENERATED & set(folders) or any(folder.endswith(".egg-info") for folder in folders))


def test_layers_import_downwards_only() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_torch_rule_names_every_module_above_the_pair() -> None:
    # A forbidden-import contract that does not name a new module does not guard it.
    config = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    contracts = {contract["name"]: contract for contract in config["tool"]["importlinter"]["contracts"]}
    guarded = set(contracts["only dcp imports torch"]["source_modules"])
    modules = {f"txstore.{path.stem}" for path in (CHECKOUT / "txstore").glob("*.py") if path.stem != "__init__"}
    packages = {f"txstore.{path.parent.name}" for path in (CHECKOUT / "txstore").glob("*/__init__.py")}
    assert (modules | packages) - {"txstore.dcp", "txstore.train"} <= guarded


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_modules_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_backends_is_a_folder_and_not_a_package() -> None:
    # With an __init__.py, `import backends.txstore_posix` would yield other classes: `except` would silently miss.
    assert not (CHECKOUT / "backends" / "__init__.py").exists()


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in our_files():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if path != Path(__file__) and FOREIGN.search(line):
                found.append(f"{path.relative_to(CHECKOUT)}:{number}: {line[:120]!r}")
    assert not found, "\n".join(found)


def test_every_third_party_package_is_pinned_exactly() -> None:
    config = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    extras = config["optional-dependencies"]
    wanted = {
        re.split(r"[<>=\[]", need)[0].lower() for need in [*config["dependencies"], *extras["torch"], *extras["test"]]
    }
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin) for pin in pins), "a range or a local build"
    assert wanted <= {pin.partition("==")[0].lower() for pin in pins}


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("txstore", "torch numpy boto3 google azure rich typer click msgspec"),
        ("txstore, txstore_posix", "torch numpy boto3 google azure rich typer click"),
        ("txstore.cli", "torch numpy boto3 google azure"),
    ],
)
def test_imports_stay_light(imported: str, absent: str) -> None:
    code = (
        f"import sys, {imported}\nloaded = {{m.split('.')[0] for m in sys.modules}} & set({absent!r}.split())\n"
        "sys.exit(' '.join(sorted(loaded)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"import {imported} loads {done.stderr.strip()}"
