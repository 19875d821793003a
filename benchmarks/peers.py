"""The environment of the peers whose pins clash with ours: `.venv-peers`, built when it is missing or out of date."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1] / ".venv-peers"

REQUIREMENTS = (
    "adlfs==2026.8.0",
    "gcsfs==2026.10.1",
    "matplotlib==3.11.2",
    "s3fs==2026.9.0",
    "s3torchconnector[dcp]==1.5.0",
    "torch-checkpointing==0.1.1",
)
"""Exact, so that a table can be repeated; torch is the one that this environment has."""


def python() -> Path:
    """The interpreter of the environment, which is made if need be: minutes, the first time."""
    wanted = [f"torch=={torch.__version__.partition('+')[0]}", *REQUIREMENTS]
    stamp, interpreter = ROOT / "requirements.txt", ROOT / "bin" / "python"
    if stamp.is_file() and stamp.read_text().split() == wanted and interpreter.is_file():
        return interpreter
    print(f"building {ROOT.name} (once): {' '.join(wanted)}", file=sys.stderr)
    venv.create(ROOT, with_pip=True, clear=True)
    subprocess.run([interpreter, "-m", "pip", "install", "-q", *wanted], check=True)
    stamp.write_text("\n".join(wanted))
    return interpreter
