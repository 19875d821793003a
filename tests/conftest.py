"""What every test shares: assertion rewriting, the `store_url` fixture, and the rule about skipped tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("txstore.testing")
pytest_plugins = ["tests.servers.fixtures", "tests.ranks"]

# A busy machine is not a failure: the time limits are pytest's.
settings.register_profile("txstore", deadline=None)
settings.load_profile("txstore")

# Two or four ranks on a small machine: with a thread pool each, they would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """The URL of an empty place on the local file system."""
    return (tmp_path / "store").as_uri()


class SkipRule:
    """With CI=true a skipped test fails the session.

    Otherwise a backend whose server or SDK is missing on the CI machine would be green for ever.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The keywords travel with the report: with several worker processes, only its own process knows the item.
        if report.skipped and not hasattr(report, "wasxfail") and "may_skip" not in report.keywords:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(f"{report.nodeid} (the whole module)")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped, and CI=true allows no skips", red=True)
            for nodeid in self.skipped:
                terminalreporter.line(nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") == "true":
        config.pluginmanager.register(SkipRule(), "txstore-skip-rule")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long sweeps run only when they are asked for: `make soak`, or any `-m` that names them."""
    if unstable := [item.nodeid for item in items if " at 0x" in item.name]:
        # Two processes that share the tests out would name them differently, and run none.
        raise pytest.UsageError(f"a memory address in the name of a test, give it ids: {unstable[0]}")
    if "soak" in (config.getoption("-m") or ""):
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak:
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
