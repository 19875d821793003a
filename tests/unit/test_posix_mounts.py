import os

import pytest

from txstore.errors import CapabilityError
from txstore_posix import mounts, open_store
from txstore_posix.mounts import Mount, mount_of, object_mount, parse_mountinfo

MOUNTINFO = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:40 / /lustre rw,relatime shared:5 - lustre 10.0.0.1@o2ib:/scratch rw,flock
41 27 0:41 / /nfs rw,relatime - nfs4 server:/export rw,vers=4.2
50 27 0:50 / /mnt/gcs rw,nosuid,nodev - fuse.gcsfuse my-bucket rw,user_id=0
51 27 0:51 / /mnt/mp rw,nosuid,nodev - fuse mountpoint-s3 rw,user_id=0
52 27 0:52 / /mnt/s3fs rw,nosuid,nodev - fuse.s3fs s3fs rw,user_id=0
53 27 0:53 / /mnt/blob rw,nosuid,nodev - fuse blobfuse2 rw,user_id=0
54 27 0:54 / /mnt/goofys rw,nosuid,nodev - fuse.goofys my-bucket rw
55 27 0:55 / /mnt/rclone rw,nosuid,nodev - fuse.rclone remote:bucket rw
56 27 0:56 / /mnt/juice rw,relatime - fuse.juicefs JuiceFS:jfs rw
57 27 0:57 / /mnt/sshfs rw,relatime - fuse.sshfs host:/dir rw
58 27 0:58 / /mnt/with\040space rw - fuse.gcsfuse bucket rw
59 27 0:59 / /mnt/gcs/inner rw - ext4 /dev/vdb rw
60 27 0:60 / /mnt/stacked rw - ext4 /dev/vdc rw
61 27 0:61 / /mnt/stacked rw - fuse.s3fs s3fs rw
62 27 0:62 / /mnt/named-gcsfuse rw - ext4 gcsfuse rw
63 27 0:63 / /mnt/old rw - fuse gcsfuse rw
64 27 0:64 / /mnt/blob1 rw - fuse.blobfuse blobfuse rw

not a mount line
65 27 0:65 / /short - x
"""


def find(path, device="9:9"):
    return mount_of(parse_mountinfo(MOUNTINFO), path, device)


def test_lines_are_parsed_and_junk_is_left_out():
    found = parse_mountinfo(MOUNTINFO)
    assert found[0] == Mount("0:21", "/proc", "proc", "proc")
    assert found[1] == Mount("254:0", "/", "ext4", "/dev/vda")
    assert Mount("0:58", "/mnt/with space", "fuse.gcsfuse", "bucket") in found
    assert len(found) == 19


@pytest.mark.parametrize(
    ("path", "program", "url"),
    [
        ("/mnt/gcs", "gcsfuse", "gs://"),
        ("/mnt/gcs/a/b", "gcsfuse", "gs://"),
        ("/mnt/old/a", "gcsfuse", "gs://"),
        ("/mnt/mp/a", "mountpoint-s3", "s3://"),
        ("/mnt/s3fs/a", "s3fs", "s3://"),
        ("/mnt/blob/a", "blobfuse2", "az://"),
        ("/mnt/blob1/a", "blobfuse", "az://"),
        ("/mnt/goofys/a", "goofys", "s3://"),
        ("/mnt/rclone/a", "rclone", "az://"),
        ("/mnt/with space/a", "gcsfuse", "gs://"),
        ("/mnt/stacked/a", "s3fs", "s3://"),
    ],
)
def test_an_object_mount_is_known(path, program, url):
    found = object_mount(find(path))
    assert found is not None
    assert found[0] == program
    assert url in found[1]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/home/x",
        "/lustre/a",
        "/nfs/a",
        "/mnt/juice/a",
        "/mnt/sshfs/a",
        "/mnt/gcs/inner/a",
        "/mnt/gcsother/a",
        "/mnt/named-gcsfuse/a",
    ],
)
def test_a_file_system_is_accepted(path):
    assert object_mount(find(path)) is None


def test_the_device_decides_before_the_path():
    # A mount stacked below another one on the same path is told apart by its device.
    assert find("/mnt/stacked/a", "0:60").kind == "ext4"
    assert find("/mnt/gcs/a", "0:50").kind == "fuse.gcsfuse"


def test_every_verb_refuses_an_object_mount_and_makes_nothing(tmp_path, monkeypatch):
    # A FUSE mount cannot be made on every test machine; the table is the real one with one line added.
    status = os.stat(tmp_path)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    line = f"99 27 {device} / {tmp_path} rw - fuse.gcsfuse bucket rw\n"
    real = mounts.parse_mountinfo
    monkeypatch.setattr(mounts, "parse_mountinfo", lambda text: real(text + line))
    store = open_store(f"{tmp_path}/run")
    from txstore.store import BytesSource

    for call in (
        lambda: store.put("a/b", BytesSource(b"x")),
        lambda: store.create("a/b", b"x"),
        lambda: store.read("a/b"),
        lambda: store.read_into("a/b", 0, memoryview(bytearray(1))),
        lambda: store.head("a/b"),
        lambda: list(store.list("")),
        lambda: store.delete("a/b"),
    ):
        with pytest.raises(CapabilityError) as caught:
            call()
        assert "gs://BUCKET/PREFIX" in str(caught.value)
        assert "gcsfuse" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_mount_table_is_no_error(tmp_path, monkeypatch):
    def no_table(*args, **kwargs):
        raise FileNotFoundError(2, "no /proc")

    monkeypatch.setattr("builtins.open", no_table)
    store = open_store(f"{tmp_path}/run")
    store.create("x", b"1")
    assert store.read("x") == b"1"
