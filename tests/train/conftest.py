"""Fixtures of the training tests: stores in memory, as for the DCP tests, for the same reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dcp.conftest import tmp_path
from txstore.train import exit_guard

__all__ = ["tmp_path"]


@pytest.fixture(autouse=True)
def no_failure_is_left_for_the_end() -> Iterator[None]:
    """What a test provokes and sees is not told again at the end of the test process, as its exit status."""
    yield
    exit_guard._noted.clear()
