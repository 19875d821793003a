"""The servers that tests start: they end with the block, and with a test process that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.servers.base import running

HOLDER = """
import sys, time
from tests.servers.base import running
with running(["sleep", "600"], ready=lambda: True, folder=sys.argv[1]) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def lives(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_ends_with_its_block(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    with running(["sleep", "600"], ready=lambda: True, folder=str(folder)) as server:
        assert lives(server.pid)
    assert not lives(server.pid)
    assert folder.is_dir(), "its owner removes it"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_a_killed_test_process_and_its_folder_goes(how: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    assert lives(pid)
    holder.send_signal(how)
    holder.wait(10)
    holder.stdout.close()
    give_up = time.monotonic() + 10
    while (lives(pid) or folder.exists()) and time.monotonic() < give_up:
        time.sleep(0.01)
    left = lives(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not folder.exists()
