"""Full, read-only and shared for real: small tmpfs, read-only mounts, file size limits, modes and umask."""

import json
import stat

import pytest

PRELUDE = """
import json, os, resource, subprocess, sys
from txstore.errors import *
from txstore.store import BytesSource
from txstore_posix import open_store
top = sys.argv[1]
def name_of(call):
    try:
        call()
    except TxStoreError as error:
        return [type(error).__name__, str(error)]
    return ["ok", ""]
def hidden():
    return [name for _, _, names in os.walk(top) for name in names if name.startswith(".")]
"""


def run(python, script, *arguments, before=()):
    return json.loads(python(PRELUDE + script, *arguments, before=before).splitlines()[-1])


@pytest.mark.parametrize("allocate", [True, False], ids=["found by preallocation", "found by write"])
def test_a_disk_that_is_really_full(allocate, python, namespace, tmp_path):
    found = run(
        python,
        """
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", top], check=True)
from txstore_posix.syscalls import Syscalls
if sys.argv[2] == "False":
    def allocate(self, fd, size):
        raise OSError(95, "not supported")
    Syscalls.allocate = allocate
store = open_store(top + "/place")
store.put("data/small", BytesSource(b"kept"))
store.put("data/replaced", BytesSource(bytes(1 << 20)))
out = {
    "big": name_of(lambda: store.put("data/big", BytesSource(bytes(3 << 20)))),
    "over": name_of(lambda: store.put("data/replaced", BytesSource(bytes(3 << 20)))),
    "keys": [[info.key, info.size] for info in store.list("")],
    "hidden": hidden(),
    "after": name_of(lambda: store.create("commits/a.0.json", b"fits")),
    "kept": store.read("data/small").decode(),
}
fill = os.open(top + "/fill", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(fill, bytes(4096))
except OSError:
    os.close(fill)
out["create"] = name_of(lambda: store.create("commits/b.0.json", b"x" * 4000))
out["none"] = name_of(lambda: store.read("commits/b.0.json"))
out["hidden after"] = hidden()
os.unlink(top + "/fill")
out["again"] = name_of(lambda: store.create("commits/b.0.json", b"x" * 4000))
print(json.dumps(out))
""",
        tmp_path,
        allocate,
        before=namespace,
    )
    for name in ("big", "over", "create"):
        assert found[name][0] == "StoreFullError", found
        assert "ENOSPC" in found[name][1]
    assert found["keys"] == [["data/replaced", 1 << 20], ["data/small", 4]]
    assert found["hidden"] == found["hidden after"] == []
    assert found["after"][0] == found["again"][0] == "ok"
    assert found["kept"] == "kept"
    assert found["none"][0] == "NotFoundError"


def test_a_mount_that_is_really_read_only(python, namespace, tmp_path):
    found = run(
        python,
        """
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", top], check=True)
store = open_store(top + "/place")
store.create("commits/a.0.json", b"1")
subprocess.run(["mount", "-o", "remount,ro", top], check=True)
print(json.dumps({
    "put": name_of(lambda: store.put("commits/a.0.json", BytesSource(b"2"))),
    "put in a new directory": name_of(lambda: store.put("data/x", BytesSource(b"2"))),
    "create": name_of(lambda: store.create("commits/b.0.json", b"2")),
    "delete": name_of(lambda: store.delete("commits/a.0.json")),
    "read": store.read("commits/a.0.json").decode(),
    "keys": [info.key for info in store.list("")],
}))
""",
        tmp_path,
        before=namespace,
    )
    for name in ("put", "put in a new directory", "create", "delete"):
        assert found[name][0] == "AccessDeniedError", found
        assert "EROFS" in found[name][1]
    assert found["read"] == "1"
    assert found["keys"] == ["commits/a.0.json"]


def test_a_directory_without_permission(python, tmp_path):
    found = run(
        python,
        """
store = open_store(top + "/place")
for key in ("commits/a.0.json", "locked/a", "data/x/y"):
    store.create(key, b"1")
os.chmod(top, 0o755)
os.chmod(top + "/place/commits", 0o555)
os.chmod(top + "/place/locked", 0o000)
if os.getuid() == 0:  # root passes every mode, so become somebody who does not
    for name in ("", "/place", "/place/commits", "/place/locked"):
        os.chown(top + name, 65534, 65534)
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
out = {
    "create": name_of(lambda: store.create("commits/b.0.json", b"2")),
    "put": name_of(lambda: store.put("commits/a.0.json", BytesSource(b"2"))),
    "delete": name_of(lambda: store.delete("commits/a.0.json")),
    "read": name_of(lambda: store.read("locked/a")),
    "head": name_of(lambda: store.head("locked/a")),
    "list": name_of(lambda: list(store.list("locked/"))),
    "list all": name_of(lambda: list(store.list(""))),
    "readable": store.read("commits/a.0.json").decode(),
    "keys": [info.key for info in store.list("commits/")],
    "root below": name_of(lambda: open_store(top + "/place/commits/run-1/sub").create("a", b"1")),
    "folder below": name_of(lambda: store.create("commits/below/a", b"1")),
}
os.chmod(top + "/place/commits", 0o755); os.chmod(top + "/place/locked", 0o755)
print(json.dumps(out))
""",
        tmp_path,
    )
    for name in ("create", "put", "delete", "read", "head", "list", "list all", "root below", "folder below"):
        assert found[name][0] == "AccessDeniedError", (name, found)
        assert "EACCES" in found[name][1]
    for name, made in (("root below", "run-1"), ("folder below", "below")):
        assert f"creation of the directory {tmp_path}/place/commits/{made} failed" in found[name][1]
        assert f"(check owner and mode of {tmp_path}/place/commits)" in found[name][1]
    assert found["readable"] == "1"
    assert found["keys"] == ["commits/a.0.json"]


def test_a_file_size_limit_is_store_full(python, tmp_path):
    found = run(
        python,
        """
store = open_store(top)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(json.dumps({
    "big": name_of(lambda: store.put("data/big", BytesSource(bytes(3 << 20)))),
    "fits": name_of(lambda: store.put("data/fits", BytesSource(bytes(1 << 20)))),
    "keys": [info.key for info in store.list("")],
    "hidden": hidden(),
}))
""",
        tmp_path,
    )
    assert found["big"][0] == "StoreFullError"
    assert "EFBIG" in found["big"][1]
    assert "ulimit" in found["big"][1]
    assert (found["fits"][0], found["keys"], found["hidden"]) == ("ok", ["data/fits"], [])


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o002, 0o664, 0o775)]
)
def test_modes_follow_the_umask(umask, file, folder, python, tmp_path):
    python(
        PRELUDE
        + """
os.umask(int(sys.argv[2]))
store = open_store(top + "/place")
store.put("data/x", BytesSource(b"1"))
store.create("commits/x", b"1")
""",
        tmp_path,
        umask,
    )
    found = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert found == {
        "place": folder,
        "place/data": folder,
        "place/commits": folder,
        "place/data/x": file,
        "place/commits/x": file,
    }


def test_a_store_works_on_both_sides_of_a_fork(python, tmp_path):
    found = run(
        python,
        """
store = open_store(top + "/place")
store.create("a", b"1")
child = os.fork()
if child == 0:
    store.put("b", BytesSource(b"2"))
    os._exit(0 if name_of(lambda: store.create("a", b"3"))[0] == "AlreadyExistsError" else 1)
status = os.waitpid(child, 0)[1]
print(json.dumps([status, store.read("b").decode(), store.read("a").decode()]))
""",
        tmp_path,
    )
    assert found == [0, "2", "1"]
