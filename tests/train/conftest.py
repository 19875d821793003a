"""Fixtures of the training tests: stores in memory, as for the DCP tests, for the same reason."""

from __future__ import annotations

from tests.dcp.conftest import tmp_path

__all__ = ["tmp_path"]
