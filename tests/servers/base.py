"""Real servers for tests: started on a free loopback port, awaited, ended by process id."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    """A loopback port that nobody listens on now.

    Not one that the kernel would choose: until the server binds it, any outgoing connection could be given it.
    """
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def listens(port: int) -> bool:
    """Whether something accepts connections on the loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def program(name: str, package: str) -> str:
    """A program that the test extra brings: beside the interpreter, since nobody need activate the environment.

    Raises:
        RuntimeError: It is not installed. Never a skip: a missing server must not look like a passing backend.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"no `{name}`: pip install {package} (it is in the test extra)")
    return found


@contextmanager
def running(
    command: Sequence[str],
    *,
    ready: Callable[[], bool],
    env: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
    folder: str = "",
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server while the block lasts; its output is shown if it does not come up.

    The server leads a process group of its own, so that what it started ends with it. Should this process be
    killed, the server ends too, and its `folder`, if it has one, is removed.
    """
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        guard = _guard(server, folder)
        try:
            give_up = time.monotonic() + deadline_s
            while not ready():
                if server.poll() is not None or time.monotonic() > give_up:
                    output.seek(0)
                    tail = output.read()[-4000:].decode(errors="replace")
                    raise RuntimeError(f"{Path(command[0]).name} did not come up (exit {server.poll()}):\n{tail}")
                time.sleep(0.05)
            yield server
        finally:
            # Before the server: its id may be another's once it has been waited for.
            guard.kill()
            guard.communicate()
            _end(server)


def _guard(server: subprocess.Popen[bytes], folder: str) -> subprocess.Popen[bytes]:
    """A process that reads a pipe from this one: its end means that nobody is left to end the server."""
    script = 'read -r _; kill -s KILL -- "-$1"; test -z "$2" || rm -rf -- "$2"'
    return subprocess.Popen(
        ["sh", "-c", script, "guard", str(server.pid), folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(server.pid, signal.SIGKILL)  # not SIGTERM: nobody needs what it would put in order for seconds
    except ProcessLookupError:
        pass  # it has ended by itself
    server.wait(20.0)
