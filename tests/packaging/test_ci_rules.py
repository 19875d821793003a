"""The rule about skipped tests: with CI=true a skip is a failure, and the long sweeps wait for `make soak`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SKIPS = "import pytest\n@pytest.mark.skipif(True, reason='no server')\ndef test_backend(): pass\n"
ALLOWED = "import pytest\n@pytest.mark.may_skip(reason='only on NFS')\n@pytest.mark.skip\ndef test_nfs(): pass\n"
MODULE = "import pytest\npytest.importorskip('no_such_sdk')\n"
XFAIL = "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_known(): assert False\n"
INSIDE = "import pytest\ndef test_late(): pytest.skip('no server')\n"
SOAK = "import pytest\n@pytest.mark.soak\ndef test_long(): assert False\n"
PASSES = "def test_pass(): pass\n"


def run_pytest(folder: Path, source: str, *args: str, ci: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  soak: long\n  may_skip(reason): allowed\n")
    (folder / "test_it.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        cwd=folder,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("source", "ci", "status"),
    [
        pytest.param(PASSES + SKIPS, "true", 1, id="skip-fails-in-ci"),
        pytest.param(PASSES + SKIPS, "", 0, id="skip-is-fine-elsewhere"),
        pytest.param(PASSES + ALLOWED, "true", 0, id="allowed-skip"),
        pytest.param(PASSES + XFAIL, "true", 0, id="xfail-is-no-skip"),
        pytest.param(PASSES + INSIDE, "true", 1, id="skip-inside-a-test"),
        pytest.param(MODULE, "true", 1, id="whole-module-skipped"),
        pytest.param(PASSES + SOAK, "true", 0, id="soak-is-left-out"),
    ],
)
def test_exit_status(tmp_path: Path, source: str, ci: str, status: int) -> None:
    done = run_pytest(tmp_path, source, ci=ci)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("CI=true allows no skips" in done.stdout) == (status == 1)


@pytest.mark.parametrize(("source", "status"), [(PASSES + SKIPS, 1), (PASSES + ALLOWED, 0)])
def test_exit_status_of_several_processes(tmp_path: Path, source: str, status: int) -> None:
    done = run_pytest(tmp_path, source, "-n", "1", ci="true")
    assert done.returncode == status, done.stdout + done.stderr


def test_skipped_tests_are_named(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, PASSES + SKIPS, ci="true")
    assert "test_it.py::test_backend" in done.stdout.split("allows no skips")[1]


def test_soak_runs_when_asked_for(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, PASSES + SOAK, "-m", "soak", ci="true")
    assert done.returncode == 1
    assert "test_long" in done.stdout
