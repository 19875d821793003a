"""Processes that die at a request, on S3."""

import json
import os
import subprocess
import sys

import pytest

from txstore.catalog import newest
from txstore.errors import CheckpointNotFound
from txstore.sweep import sweep
from txstore.testing.saves import contents, load, save
from txstore_s3 import open_store

VALUES = [b"rank 0" * 1000, bytes(range(256)) * (43 << 10)]  # the second is a multipart upload

# One interpreter; each victim is a fork of it that really dies, before or after its `at`-th request.
SCRIPT = """
import json, os, signal, sys
from contextlib import contextmanager
from txstore.testing.saves import save
from txstore_s3 import open_store
from txstore_s3.client import Clients

place, options, when, first, step, values = json.loads(sys.argv[1])
values = [bytes.fromhex(head) * times for head, times in values]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def victim(at):
    real, count = Clients._connected, iter(range(1_000_000))
    @contextmanager
    def request(self, call):
        number = next(count)
        if number == at and when == "before":
            die()
        try:
            with real(self, call) as client:
                yield client
        finally:  # also after an answer that is an error: a look that found nothing
            if number == at:
                die()
    Clients._connected = request
    save(open_store(f"{place}/{when}-{at}", **options), "step-1", values)

ends = []
at = first
while not ends or ends[-1][1] == -signal.SIGKILL:
    child = os.fork()
    if child == 0:
        victim(at)
        os._exit(0)
    ends.append((at, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    at += step
print(json.dumps(ends))
"""


def kill_everywhere(bucket, place, when, first, step):
    values = [(VALUES[0][:6].hex(), 1000), (VALUES[1][:256].hex(), 43 << 10)]
    options = {**bucket.options, "part_bytes": 5 << 20}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([place, options, when, first, step, values])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout)
    assert ends[-1][1] == 0, "the last one lived"
    committed = []
    for at, _ in ends:
        with open_store(f"{place}/{when}-{at}", **bucket.options) as store:
            committed.append(whole_or_nothing(store, f"{when} {at}"))
    assert committed == sorted(committed), "once committed, always committed"
    assert ends[-1][0] > 20, "a save has more requests than this"
    return committed


def whole_or_nothing(store, where):
    try:
        first = newest(store)
    except CheckpointNotFound:
        first = None
    else:
        assert load(store, first) == VALUES, where
    sweep(store, grace_s=0, force=True, dry_run=False, clock=lambda: 1e12)
    assert list(store.unfinished("")) == [], where
    left = {key.split("/")[2] for key in contents(store) if key.startswith("data/")}
    assert left == ({first.txn} if first else set()), where
    if first is None:
        save(store, "step-1", VALUES)
    assert load(store, newest(store)) == VALUES, where
    return first is not None


@pytest.mark.parametrize(("when", "first"), [("before", 1), ("after", 3)])
def test_a_killed_writer_leaves_all_or_nothing(s3_bucket, place, when, first):
    kill_everywhere(s3_bucket, place, when, first, step=4)


@pytest.mark.soak
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_writer_killed_at_any_request_leaves_all_or_nothing(s3_bucket, place, when):
    committed = kill_everywhere(s3_bucket, place, when, first=0, step=1)
    assert False in committed
    assert True in committed
