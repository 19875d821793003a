"""Fixtures of the DCP tests. The helper modules beside this file are importable, here and in every worker."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from workers import Pool, Pools  # noqa: E402 - after the path is set


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with Pools(tmp_path_factory.mktemp("rendezvous")) as pools:
        yield pools


@pytest.fixture
def pool(pools: Pools) -> Pool:
    """Four ranks with a gloo group, the same processes for the whole session."""
    return pools.shared()


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
