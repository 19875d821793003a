"""Ordered walk over the files of a store."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator

from txstore.keys import is_key
from txstore.store import ObjectInfo, Unfinished
from txstore_posix.dead_ends import refuse_dead_end
from txstore_posix.errors import ABSENT, translate

_log = logging.getLogger(__name__)

_NOWHERE = ABSENT | {errno.ELOOP}


def walk(root: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Objects under `root` in ascending order of key; see `Store.list`.

    Names with a leading dot (files in flight), names that are no keys, and symbolic links to directories
    are passed over; directories that cannot match are not read. A directory that is not there is empty;
    one that cannot be read, or lies behind a dangling link, is an error, since "no checkpoint" must never
    be a guess. For the same reason whatever else has the name of a key is listed: a link to a file as
    that file, a dangling link, FIFO, socket or device with size 0. Reading those is `NotFoundError`, and
    a reader that was told of the key reports damage.

    Raises:
        ConfigError: The root, or a directory of the prefix, is behind a dangling link; or the root is a file.
        StoreError: The kernel's answer.
    """
    folder = prefix.rpartition("/")[0]
    if folder and not is_key(folder):
        return
    yield from _walk(root, folder + "/" if folder else "", prefix, start_after)


def _walk(root: str, base: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    path = os.path.join(root, base).rstrip("/")
    try:
        with os.scandir(path) as entries:
            # With the slash in its sort string a directory takes the place of all its keys: "a-b" < "a/b" < "a0".
            found = sorted(
                (name, entry) for entry in entries if (name := _wanted(entry, base, prefix, start_after)) is not None
            )
    except (FileNotFoundError, NotADirectoryError):
        refuse_dead_end(path, root, base or prefix)
        return
    except OSError as error:
        raise translate(error, base or prefix, "list", root) from error
    for name, entry in found:
        if name.endswith("/"):
            yield from _walk(root, base + name, prefix, start_after)
            continue
        try:
            status = _status(entry)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise translate(error, base + name, "list", root) from error
        if stat.S_ISDIR(status.st_mode):
            _log.warning(
                "list passes over %s: links to directories inside a store are not followed; name it in the prefix",
                entry.path,
            )
            continue
        yield ObjectInfo(base + name, status.st_size if stat.S_ISREG(status.st_mode) else 0, None, status.st_mtime)


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    """What a link leads to, as `read` sees it; the link itself if it leads nowhere."""
    if entry.is_symlink():
        try:
            return os.stat(entry.path)
        except OSError as error:
            if error.errno not in _NOWHERE:
                raise
    return entry.stat(follow_symlinks=False)


def temporaries(root: str, prefix: str, leading: str) -> Iterator[Unfinished]:
    """Files in flight below `root`: those whose name begins with `leading`, in ascending order of key."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise translate(error, prefix, "list", root) from error

    found = []
    for path, _, names in os.walk(root, onerror=fail):
        folder = os.path.relpath(path, root)
        for name in names:
            key = name if folder == "." else f"{folder}/{name}"
            if name.startswith(leading) and key.startswith(prefix):
                found.append((key, os.path.join(path, name)))
    for key, path in sorted(found):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue  # its write ended
        except OSError as error:
            raise translate(error, key, "list", root) from error
        yield Unfinished(key, status.st_size, status.st_mtime)


def _wanted(entry: os.DirEntry[str], base: str, prefix: str, start_after: str) -> str | None:
    """The entry's name, with a slash if it is a directory to descend into; None to pass over it."""
    if entry.name.startswith(".") or not is_key(entry.name):
        return None
    key = base + entry.name
    if entry.is_dir(follow_symlinks=False):
        inside = key + "/"
        ahead = inside > start_after or start_after.startswith(inside)
        matches = inside.startswith(prefix) or prefix.startswith(inside)
        return entry.name + "/" if ahead and matches else None
    return entry.name if key.startswith(prefix) and key > start_after else None
