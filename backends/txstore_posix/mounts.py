"""Refuses FUSE mounts of object stores: they look like directories and keep none of the promises.

gcsfuse renames by copy and delete, none of them links, data is stored at close or later, and
listings are cached. What they mount has a native backend that does it right.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass

from txstore.errors import CapabilityError

_log = logging.getLogger(__name__)

# Program name (mount type after "fuse.", or mount source) -> what to use instead.
_OBJECT_MOUNTS = {
    "gcsfuse": "gs://BUCKET/PREFIX",
    "mountpoint-s3": "s3://BUCKET/PREFIX",
    "mount-s3": "s3://BUCKET/PREFIX",
    "s3fs": "s3://BUCKET/PREFIX",
    "goofys": "s3://BUCKET/PREFIX",
    "geesefs": "s3://BUCKET/PREFIX",
    "yas3fs": "s3://BUCKET/PREFIX",
    "riofs": "s3://BUCKET/PREFIX",
    "ossfs": "s3://BUCKET/PREFIX with the endpoint of the service",
    "cosfs": "s3://BUCKET/PREFIX with the endpoint of the service",
    "obsfs": "s3://BUCKET/PREFIX with the endpoint of the service",
    "blobfuse": "az://CONTAINER/PREFIX",
    "blobfuse2": "az://CONTAINER/PREFIX",
    "rclone": "the backend of the remote: s3://, gs:// or az://",
}


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: ``major:minor``, where it is mounted, file system type, source."""

    device: str
    point: str
    kind: str
    source: str


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in the text of ``/proc/self/mountinfo`` (proc(5)); lines that do not parse are left out."""
    mounts = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if dash and len(before) >= 6 and len(after) >= 2:
            mounts.append(Mount(before[2], _unescape(before[4]), after[0], _unescape(after[1])))
    return mounts


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def mount_of(mounts: list[Mount], path: str, device: str) -> Mount | None:
    """The mount that holds `path`: by device, or else by longest mount point (a btrfs subvolume has its own device)."""
    under = [mount for mount in mounts if path == mount.point or path.startswith(mount.point.rstrip("/") + "/")]
    same = [mount for mount in under if mount.device == device]
    # Of mounts stacked on one point the last one is seen: max() keeps the first of equals, hence the reversal.
    return max(reversed(same or under), key=lambda mount: len(mount.point), default=None)


def object_mount(mount: Mount) -> tuple[str, str] | None:
    """Program and replacement if `mount` is an object store behind FUSE, else None."""
    if mount.kind != "fuse" and not mount.kind.startswith("fuse."):
        return None
    program = mount.kind.removeprefix("fuse").removeprefix(".")
    for name in (program, os.path.basename(mount.source).partition("#")[0]):
        if name.lower() in _OBJECT_MOUNTS:
            return name, _OBJECT_MOUNTS[name.lower()]
    return None


def accepted_mount(path: str, device: int, key: str) -> str:
    """The type of the file system that holds the existing directory `path`, such as ``ext4``; "" if it is not known.

    Args:
        path: Real path of the directory.
        device: Its ``st_dev``.
        key: For the message.

    Raises:
        CapabilityError: It is an object store behind FUSE.
    """
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = parse_mountinfo(file.read())
    except OSError as error:
        _log.debug("cannot read the mount table, object mounts are not detected: %s", error)
        return ""
    mount = mount_of(mounts, path, f"{os.major(device)}:{os.minor(device)}")
    found = object_mount(mount) if mount else None
    if mount and found:
        raise CapabilityError(
            f"{mount.point} is an object store mounted by {found[0]}: renames there are not atomic and links missing",
            key=key,
            next_step=f"use the native backend: {found[1]}",
        )
    return mount.kind if mount else ""
