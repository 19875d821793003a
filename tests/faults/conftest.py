import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.servers.fixtures import CLOUDS
from txstore_posix.config import PosixConfig
from txstore_posix.store import PosixStore
from txstore_posix.syscalls import Syscalls

OPERATIONS = [name for name, value in vars(Syscalls).items() if callable(value) and not name.startswith("_")]
OPENING = {"open_directory", "create_file", "open_file"}


class TracedCalls(Syscalls):
    """Real calls, recorded, with faults at chosen places.

    `trace` holds ``(operation, (arguments..., result), inode or None)`` of each call that took place.
    `fault(index, operation)` gives None, ``"drop"`` (pretend success), or ``(when, errno)`` with when
    ``before`` (not applied) or ``after`` (applied).
    """

    def __init__(self, fault=lambda index, operation: None):
        self.fault = fault
        self.count = 0
        self.trace = []
        self.failed = []

    def _do(self, operation, arguments):
        index, self.count = self.count, self.count + 1
        fault = self.fault(index, operation)
        fd = arguments[0] if operation in {"fsync", "close", "pwrite", "allocate"} else None
        inode = os.fstat(fd).st_ino if fd is not None else None
        if fault == "drop":
            return None
        if fault and fault[0] == "before":
            self.failed.append((operation, arguments, inode))
            if operation == "close":
                os.close(fd)  # Linux releases the descriptor whatever close answers
            raise OSError(fault[1], os.strerror(fault[1]))
        if operation == "pwrite":
            arguments = (fd, bytes(arguments[1]), arguments[2])
        result = getattr(Syscalls, operation)(self, *arguments)
        if operation in OPENING:
            inode = os.fstat(result).st_ino
        self.trace.append((operation, (*arguments, result), inode))
        if fault:
            self.failed.append((operation, arguments, inode))
            if operation in OPENING:
                os.close(result)
            raise OSError(fault[1], os.strerror(fault[1]))
        return result

    def operations(self):
        return [operation for operation, _, _ in self.trace]


def _traced(operation):
    return lambda self, *arguments: self._do(operation, arguments)


for _operation in OPERATIONS:
    setattr(TracedCalls, _operation, _traced(_operation))


@pytest.fixture
def tmp_path():
    """On tmpfs where there is one: thousands of injected faults need thousands of fsyncs, not a disk."""
    memory = "/dev/shm"
    usable = os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="txstore-test-", dir=memory if usable else None) as folder:
        yield Path(folder)


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Make a store over traced calls: ``traced(fault, root)`` gives the store and its calls."""

    # These files lie in memory, and are to be written as on a disk.
    monkeypatch.setattr("txstore_posix.store.IN_MEMORY", frozenset())

    def make(fault=lambda index, operation: None, root=tmp_path / "root"):
        calls = TracedCalls(fault)
        return PosixStore(PosixConfig.from_url(str(root)), calls), calls

    return make


@pytest.fixture
def python():
    """Run a script in a fresh interpreter, optionally behind a command such as unshare; gives its stdout."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)

    def run(script, *arguments, before=()):
        done = subprocess.run(
            [*before, sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def namespace():
    """A command prefix that gives a private mount table; where that is not allowed the test cannot tell anything."""
    prefix = ("unshare", "--mount", "--map-root-user")
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        reason = "unshare --mount --map-root-user is not permitted: real full and read-only disks are untested"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return prefix


@pytest.fixture
def leftovers():
    """Function: files in flight below a root."""
    return lambda root: [path for path in Path(root).rglob("*") if path.name.startswith(".")]


@pytest.fixture(autouse=True)
def no_descriptor_leaks(request):
    """Every fault test also shows that no path forgets a descriptor."""
    for value in getattr(request.node, "callspec", SimpleNamespace(params={})).params.values():
        if isinstance(value, str) and value in CLOUDS:
            request.getfixturevalue(CLOUDS[value])  # a server that this test is the first to start is no leak
    before = set(os.listdir("/proc/self/fd"))
    yield
    after = set(os.listdir("/proc/self/fd"))
    if len(after) > len(before):
        gc.collect()  # an exception in a reference cycle may hold a closed client's connections
        after = set(os.listdir("/proc/self/fd"))
    assert len(after) <= len(before), f"leaked descriptors: {sorted(after - before)}"
