"""The console script on a terminal of a given width."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(sys.executable).with_name("txstore"))


def on_terminal(*args: str, columns: int = 200) -> tuple[int, str]:
    """Run the script with a terminal as stdout and stderr; returns its exit code and everything it wrote."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "50"}
    process = subprocess.Popen([SCRIPT, *args], stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    seen = b""
    try:
        while chunk := os.read(leader, 65536):
            seen += chunk
    except OSError:
        pass  # EIO: the other end is closed
    os.close(leader)
    return process.wait(timeout=30), seen.decode()
