"""Fixtures of the training tests: stores in memory, as for the DCP tests, for the same reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import _utils

from tests.dcp.conftest import tmp_path
from txstore.train import exit_guard

__all__ = ["tmp_path"]


@pytest.fixture(autouse=True)
def no_failure_is_left_for_the_end() -> Iterator[None]:
    """What a test provokes and sees is not told again at the end of the test process, as its exit status."""
    yield
    exit_guard._noted.clear()


@pytest.fixture(autouse=True)
def workers_that_were_left_are_ended_soon() -> Iterator[None]:
    """A loader that ends before its epoch waits 5 s for each worker that is still about to send what it has read."""
    # Not by monkeypatch: what every test asks for is undone last, and a test's own patches with it.
    before, _utils.MP_STATUS_CHECK_INTERVAL = _utils.MP_STATUS_CHECK_INTERVAL, 0.25
    yield
    _utils.MP_STATUS_CHECK_INTERVAL = before
