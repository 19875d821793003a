"""SIGKILL of a real process before every system call of put and create."""

import json

import pytest

from txstore.errors import AlreadyExistsError
from txstore.store import BytesSource
from txstore_posix import open_store

KEY = "data/step-1/txn/object"
OLD, NEW, NEXT = b"the old object", b"the new object, in several windows", b"the next attempt"

# One interpreter; each victim is a fork of it that really dies, at call `at` of its operation.
SCRIPT = """
import json, os, signal, sys
from txstore.store import BytesSource
from txstore_posix import durability
from txstore_posix import store as posix_store
from txstore_posix.config import PosixConfig
from txstore_posix.store import PosixStore
from txstore_posix.syscalls import Syscalls

top, verb, key, old, new = sys.argv[1:]
durability.WINDOW_BYTES, durability.BLOCK_BYTES = 10, 1
posix_store.IN_MEMORY = frozenset()  # written as on a disk

class Deadly(Syscalls):
    def __init__(self, at):
        self.left = at
        self.done = []

def deadly(operation):
    def call(self, *arguments):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        os.write(3, (operation + "\\n").encode())
        return getattr(Syscalls, operation)(self, *arguments)
    return call

for operation in [name for name in vars(Syscalls) if not name.startswith("_")]:
    setattr(Deadly, operation, deadly(operation))

def victim(at):
    store = PosixStore(PosixConfig.from_url(f"{top}/at-{at}"), Deadly(at))
    if verb == "put":
        store.put(key, BytesSource(new.encode()))
    else:
        store.create(key, new.encode())

results = []
while not results or results[-1]["killed"]:
    at = len(results)
    if old:
        path = f"{top}/at-{at}/{key}"
        os.makedirs(os.path.dirname(path))
        with open(path, "w") as file:
            file.write(old)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 3)
            victim(at)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as lines:
        done = lines.read().split()
    status = os.waitpid(child, 0)[1]
    results.append({"killed": os.WIFSIGNALED(status), "status": status, "done": done})
print(json.dumps(results))
"""


@pytest.mark.parametrize(
    ("verb", "old"), [("put", None), ("put", OLD), ("create", None)], ids=["put new", "put over old", "create"]
)
def test_a_killed_writer_leaves_all_or_nothing(verb, old, python, tmp_path):
    results = json.loads(python(SCRIPT, tmp_path, verb, KEY, (old or b"").decode(), NEW.decode()))
    publish = "link" if verb == "create" else "rename"
    assert results[-1]["status"] == 0
    assert {"allocate", "pwrite", "fsync", "close", publish} <= set(results[-1]["done"])
    assert len(results) == len(results[-1]["done"]) + 1 > 15
    left_behind = 0
    for at, result in enumerate(results):
        root = tmp_path / f"at-{at}"
        path = root / KEY
        assert len(result["done"]) == at
        expected = NEW if publish in result["done"] else old
        assert (path.read_bytes() if path.exists() else None) == expected, result
        left_behind += len(list(root.rglob(".*")))

        store = open_store(str(root))
        assert [info.key for info in store.list("")] == ([] if expected is None else [KEY])
        if verb == "put":
            store.put(KEY, BytesSource(NEXT))
            assert store.read(KEY) == NEXT
        elif expected is None:
            store.create(KEY, NEXT)
            assert store.read(KEY) == NEXT
        else:
            with pytest.raises(AlreadyExistsError):
                store.create(KEY, NEXT)
            assert store.read(KEY) == NEW
        store.delete(KEY)
        assert list(store.list("")) == []
    assert left_behind > 3, "no victim died with a file in flight: the test shows nothing"
