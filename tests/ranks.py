"""Real ranks for the tests of every folder: `pools` and `pool`. The helpers beside the DCP tests are importable everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HELPERS = str(Path(__file__).parent / "dcp")
if HELPERS not in sys.path:
    sys.path.insert(0, HELPERS)

from workers import Pool, Pools  # noqa: E402 - after the path is set


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    with Pools(tmp_path_factory.mktemp("rendezvous")) as pools:
        yield pools


@pytest.fixture
def pool(pools: Pools) -> Pool:
    """Four ranks with a gloo group, the same processes for the whole session."""
    return pools.shared()
