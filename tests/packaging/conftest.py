"""The wheel, built once, and a clean environment that holds it and knows nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class CleanEnv:
    """An environment with the wheel installed; its working directory is outside the checkout."""

    root: Path
    cwd: Path

    def run(self, *command: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, given by its name."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        done = subprocess.run(
            [str(self.root / "bin" / command[0]), *command[1:]],
            cwd=self.cwd,
            env={**inherited, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def python(self, code: str, *, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `code`; warnings are errors."""
        return self.run("python", "-W", "error", "-c", code, check=check, **env)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(CHECKOUT)],
        cwd=out,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def clean_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanEnv:
    """A new virtual environment with the wheel in it.

    Dependencies come from this environment's site-packages by way of a .pth file, without network.
    Path files *in* that folder are not read, so the editable install of the checkout stays out of sight.
    """
    root = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(root / "bin" / "python")]
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", *options, str(wheel)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = root.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return CleanEnv(root, tmp_path_factory.mktemp("outside"))
