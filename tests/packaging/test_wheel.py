"""What users install: the wheel's contents, and txstore run from outside the checkout."""

from __future__ import annotations

import configparser
import email
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import CleanEnv

CHECKOUT = Path(__file__).parents[2]

# Changing this list changes what users may rely on: say so in CHANGELOG.md.
PUBLIC_NAMES = ["Store", "__version__", "open_store"]

NO_HEAVY_MODULES = "assert not {m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'boto3', 'google', 'azure'}"


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def backends() -> set[str]:
    return {folder.name for folder in (CHECKOUT / "backends").iterdir() if (folder / "__init__.py").exists()}


def test_every_backend_folder_is_in_the_wheel_and_nothing_else(names: list[str]) -> None:
    packages = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packages == {"txstore"} | backends()


def test_every_backend_folder_has_an_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        points = configparser.ConfigParser()
        points.read_string(archive.read(name).decode())
    targets = dict(points["txstore.backends"])
    assert {target.partition(":")[0] for target in targets.values()} == backends()
    assert all(target.endswith(":open_store") for target in targets.values())
    assert dict(points["console_scripts"]) == {"txstore": "txstore.cli:main"}


def test_every_module_of_the_checkout_is_in_the_wheel(names: list[str]) -> None:
    sources = [*CHECKOUT.glob("txstore/**/*.py"), *CHECKOUT.glob("backends/**/*.py")]
    expected = {str(path.relative_to(CHECKOUT)).removeprefix("backends/") for path in sources}
    assert expected == {name for name in names if name.endswith(".py")}


def test_packages_are_typed(names: list[str]) -> None:
    assert {f"{package}/py.typed" for package in {"txstore"} | backends()} <= set(names)


def test_wheel_carries_no_tests_and_no_tools(names: list[str]) -> None:
    assert not [name for name in names if name.startswith(("tests/", "backends/", "examples/", "docs/", "."))]


def test_metadata(wheel: Path, names: list[str]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in names if name.endswith("METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(need.split(">=")[0] for need in needs) == ["crc32c", "msgspec", "rich", "tenacity", "typer"]


def test_wheel_runs_outside_the_checkout(clean_env: CleanEnv) -> None:
    done = clean_env.python("import txstore, txstore_posix; print(txstore.__file__, txstore_posix.__file__)")
    assert all(Path(file).is_relative_to(clean_env.root) for file in done.stdout.split())


def test_import_loads_neither_torch_nor_an_sdk(clean_env: CleanEnv) -> None:
    clean_env.python(f"import sys, txstore, txstore_posix; {NO_HEAVY_MODULES}")


def test_import_loads_no_command_line_library(clean_env: CleanEnv) -> None:
    clean_env.python(
        "import sys, txstore; assert not {m.split('.')[0] for m in sys.modules} & {'rich', 'typer', 'click'}"
    )


def test_open_store_finds_the_posix_backend(clean_env: CleanEnv, store_url: str) -> None:
    code = f"""
import sys, txstore
from txstore.store import BytesSource
with txstore.open_store({store_url!r}) as store:
    store.put("data/greeting", BytesSource(b"hello"))
    store.create("commits/one.0.json", b"{{}}")
    assert store.read("data/greeting") == b"hello"
    assert [info.key for info in store.list("commits/")] == ["commits/one.0.json"]
{NO_HEAVY_MODULES}
"""
    clean_env.python(code)


def test_command_line_works_without_torch(clean_env: CleanEnv, tmp_path: Path) -> None:
    # A module that is None in sys.modules cannot be imported: as on a machine without torch.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n")
    absent = clean_env.python("import torch", check=False, PYTHONPATH=str(tmp_path))
    assert "import of torch halted" in absent.stderr
    done = clean_env.run("txstore", "--help", PYTHONPATH=str(tmp_path))
    assert "Usage" in done.stdout


def test_public_names() -> None:
    import txstore

    assert sorted(txstore.__all__) == sorted(PUBLIC_NAMES)
    assert all(hasattr(txstore, name) for name in PUBLIC_NAMES)


def test_version_is_the_distributions() -> None:
    import importlib.metadata

    import txstore

    assert txstore.__version__ == importlib.metadata.version("txstore")
