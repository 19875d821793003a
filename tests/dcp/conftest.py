"""Fixtures of the DCP tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a file system: these tests are about values and errors, not about disks."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="txstore-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """URL of an empty store."""
    return f"file://{tmp_path}/store"
