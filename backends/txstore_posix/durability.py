"""Durable, atomic publication of one file (commit protocol, "POSIX").

The order that every step rests on: make directories; open the directory; temporary file in it (which
pins the directories: none of them can be pruned any more); fsync the directories above; write, fsync
and close the file; publish its name; fsync the directory. An fsync that failed is never repeated on
the same file: after a failure the kernel marks the pages clean, and the second fsync would lie.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import TracebackType
from typing import Self

from txstore.checksum import BLOCK_BYTES
from txstore.errors import AlreadyExistsError, CapabilityError, ConfigError, TransientError, TxStoreError
from txstore.store import Source
from txstore_posix.dead_ends import refuse_dead_end
from txstore_posix.errors import UNSUPPORTED, errno_name, translate_mkdir, translate_publish, translate_write, unknown
from txstore_posix.syscalls import Syscalls

_log = logging.getLogger(__name__)

WINDOW_BYTES = 8 * BLOCK_BYTES
TEMPORARY_PREFIX = ".txstore-"
"""Temporary names do not depend on the key, so that a key may be as long as the file system's names."""

_NO_LINKS = UNSUPPORTED | {errno.EPERM, errno.EMLINK, errno.EXDEV}
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_ALLOCATE = UNSUPPORTED | {errno.EINTR, errno.ENODEV, errno.EPERM}
_ATTEMPTS = 8

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose pages preallocation would fill with zeros, for the write to fill again."""


class StagedFile:
    """A temporary file beside the name it will get, in a directory that is held open.

    Leaving the context removes what was not published.

    Args:
        calls: The system calls.
        path: Directory, made if it is missing.
        name: The name to publish under.
        key: For messages.
        root: The store's root; see `above_root`.
        above_root: Also sync the directories above the root, up to the mount point. Another process may
            have made them, or the root, and died before it synced them.
        preallocate: Reserve the space of a large file before it is written.
    """

    def __init__(
        self, calls: Syscalls, path: str, name: str, *, key: str, root: str, above_root: bool, preallocate: bool = True
    ) -> None:
        self._calls = calls
        self._name = name
        self._key = key
        self._path = path
        self._root = root
        self._preallocate = preallocate
        self._file: int | None = None
        self._temporary = TEMPORARY_PREFIX + secrets.token_hex(8)
        self._directory, made_root = self._begin()
        try:
            self._sync_parents(above_root=above_root or made_root)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._discard()

    def write(self, source: Source) -> None:
        """Write all of `source`, fsync, close. An error of the source propagates as it is.

        Raises:
            StoreFullError: No space or quota.
            TransientError: The file is abandoned; the key is untouched.
        """
        assert self._file is not None, "written twice"
        if source.size > BLOCK_BYTES and self._preallocate:
            self._allocate(self._file, source.size)
        for start in range(0, source.size, WINDOW_BYTES):
            stop = min(start + WINDOW_BYTES, source.size)
            with memoryview(source.read(start, stop)) as data, data.cast("B") as view:
                if view.nbytes != stop - start:
                    raise ValueError(f"the source returned {view.nbytes} bytes for {start}:{stop}")
                self._write_at(self._file, view, start)
            if source.size > WINDOW_BYTES:
                # The disk works while the next window is read and checked, so that fsync finds little left to do.
                # Only a hint: its error is not asked for, because fsync reports what became of the bytes.
                with suppress(OSError):
                    self._calls.start_writeback(self._file, start, stop - start)
        with self._translated("fsync"):
            self._calls.fsync(self._file)
        fd, self._file = self._file, None
        with self._translated("close"):
            self._calls.close(fd)

    def replace(self) -> None:
        """Publish, replacing what has the name; durable on return.

        Raises:
            OutcomeUnknownError: The new object may be visible, or may not survive a crash.
        """
        try:
            self._calls.rename(self._directory, self._temporary, self._name)
        except OSError as error:
            raise translate_publish(error, self._key, "rename", self._root) from error
        self._temporary = ""
        self._sync_published()

    def publish(self) -> None:
        """Publish if the name is free; durable on return.

        Raises:
            AlreadyExistsError: The name is taken, by an object that is durable.
            CapabilityError: The file system has neither links nor RENAME_NOREPLACE.
            OutcomeUnknownError: The object may be visible, or may not survive a crash.
        """
        try:
            self._calls.link(self._directory, self._temporary, self._name)
        except FileExistsError as error:
            if not self._is_ours():
                self._settle_existing()
                raise AlreadyExistsError(f"object exists in {self._root}", key=self._key) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise translate_publish(error, self._key, "link", self._root) from error
            self._publish_by_rename(error)
        self._remove_temporary()
        self._sync_published()

    def _publish_by_rename(self, no_links: OSError) -> None:
        try:
            self._calls.rename_noreplace(self._directory, self._temporary, self._name)
        except FileExistsError as error:
            self._settle_existing()
            raise AlreadyExistsError(f"object exists in {self._root}", key=self._key) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise translate_publish(error, self._key, "renameat2", self._root) from error
            raise CapabilityError(
                f"the file system of {self._root} cannot publish a file exclusively: link {errno_name(no_links)}, "
                f"renameat2 {errno_name(error)}",
                key=self._key,
                next_step="use a file system with hard links, or an object store backend",
            ) from error
        self._temporary = ""

    def _is_ours(self) -> bool:
        # NFS: the reply to our link was lost, the client sent it again and met its own work. The identity
        # decides, not st_nlink == 2: a backup tool's link to the temporary file would look like a win.
        try:
            ours = self._calls.stat(self._directory, self._temporary)
            taken = self._calls.stat(self._directory, self._name)
        except OSError:
            return False  # the caller reads back and compares bytes
        return (ours.st_dev, ours.st_ino) == (taken.st_dev, taken.st_ino)

    def _settle_existing(self) -> None:
        """Make the object that has the name durable before anybody is told of it."""
        try:
            fd = self._calls.open_file(self._directory, self._name)
            try:
                found = os.fstat(fd)
                self._calls.fsync(fd)
            finally:
                with suppress(OSError):
                    os.close(fd)
        except FileNotFoundError as error:
            raise TransientError(f"the object that was in the way is gone in {self._root}", key=self._key) from error
        except PermissionError as error:
            raise translate_write(error, self._key, "open of the existing object", self._root) from error
        except OSError as error:
            raise unknown(error, self._key, "fsync of the existing object", self._root) from error
        if not _is_regular(found):
            raise ConfigError(
                f"the key is taken in {self._root} by something that is no object, such as a directory of other keys",
                key=self._key,
                next_step="txstore makes no such thing: find out who did, and use a root of its own for each store",
            )
        self._sync_published()

    def _begin(self) -> tuple[int, bool]:
        made_root = False
        for _ in range(_ATTEMPTS):
            with self._translated("open of the directory"):
                try:
                    directory, made = open_directory(self._calls, self._path, self._root, self._key)
                except NotADirectoryError:
                    refuse_dead_end(self._root, self._root, self._key)
                    raise
            made_root |= any(len(path) <= len(self._root) for path in made)
            try:
                self._file = self._calls.create_file(directory, self._temporary)
            except OSError as error:
                with suppress(OSError):
                    os.close(directory)
                if error.errno != errno.ENOENT:
                    raise translate_write(error, self._key, "creation of a temporary file", self._root) from error
                continue  # an empty directory was pruned between the two calls
            return directory, made_root
        raise TransientError(f"the directory was removed again and again in {self._root}", key=self._key)

    def _sync_parents(self, *, above_root: bool) -> None:
        with self._translated("stat of a directory"):
            parents = list(_parents(self._path, self._root, above_root=above_root))
        for path, must in parents:
            try:
                fd = self._calls.open_directory(path)
            except PermissionError as error:
                if must:
                    raise translate_write(error, self._key, "open of a directory", self._root) from error
                _log.debug("cannot sync %s above the store: %s", path, error)
                continue
            except OSError as error:
                raise translate_write(error, self._key, "open of a directory", self._root) from error
            try:
                with self._translated("fsync of a directory"):
                    sync_directory(self._calls, fd)
            finally:
                with suppress(OSError):
                    os.close(fd)

    def _allocate(self, fd: int, size: int) -> None:
        # Fails at once if the disk is too full, and keeps the file in few extents.
        try:
            self._calls.allocate(fd, size)
        except OSError as error:
            if error.errno not in _NO_ALLOCATE:
                raise translate_write(error, self._key, "preallocation", self._root) from error

    def _write_at(self, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < view.nbytes:
            with self._translated("write"):
                count = self._calls.pwrite(fd, view[done:], offset + done)
                if count <= 0:
                    raise OSError(errno.EIO, "nothing was written")
            done += count

    def _sync_published(self) -> None:
        try:
            sync_directory(self._calls, self._directory)
        except OSError as error:
            raise unknown(error, self._key, "fsync of the directory after publishing", self._root) from error

    def _remove_temporary(self) -> None:
        if self._temporary:
            with suppress(OSError):
                self._calls.unlink(self._directory, self._temporary)
            self._temporary = ""

    def _discard(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None
        self._remove_temporary()
        if self._directory >= 0:
            with suppress(OSError):
                os.close(self._directory)
            self._directory = -1

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except TxStoreError:
            raise  # some of them are OSErrors too
        except OSError as error:
            raise translate_write(error, self._key, doing, self._root) from error


def open_directory(calls: Syscalls, path: str, root: str, key: str) -> tuple[int, list[str]]:
    """A descriptor of the directory, and the directories that had to be made for it.

    Raises:
        ConfigError: A dangling symbolic link is in the way, such as one to a disk that is not mounted.
        TxStoreError: A directory could not be made; names it.
        OSError: Any other answer of the kernel.
    """
    made: list[str] = []
    for _ in range(_ATTEMPTS):
        try:
            return calls.open_directory(path), made
        except FileNotFoundError:
            refuse_dead_end(path, root, key)
            made += _make_directories(calls, path, key)
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes", path)


def _make_directories(calls: Syscalls, path: str, key: str) -> list[str]:
    missing = [path]
    while not os.path.lexists(parent := os.path.dirname(missing[-1])):
        missing.append(parent)
    made = []
    # One pass down, which ends where it meets a dangling link or a pruned directory; the caller looks again.
    with suppress(FileNotFoundError):
        for directory in reversed(missing):
            try:
                calls.mkdir(directory)
                made.append(directory)
            except FileExistsError:
                pass
            except (FileNotFoundError, NotADirectoryError):
                raise
            except OSError as error:
                raise translate_mkdir(error, key, directory) from error
    return made


def sync_directory(calls: Syscalls, fd: int) -> None:
    """Make the entries of a directory durable; only a file system without such a call (CIFS, some FUSE) is excused."""
    try:
        calls.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
        _warn_unsynced(os.fstat(fd).st_dev, errno_name(error))


@lru_cache(maxsize=64)  # once for each file system, not for each save
def _warn_unsynced(device: int, name: str) -> None:
    _log.warning(
        "the file system %d:%d cannot fsync a directory (%s): after a power loss a file may be missing",
        os.major(device),
        os.minor(device),
        name,
    )


def _parents(path: str, root: str, *, above_root: bool) -> Iterator[tuple[str, bool]]:
    """Directories whose entries lead to `path`, and whether each one must be synced.

    Always those up to the root: that one existed before says nothing, its maker may not have synced it
    yet. The entry of a mount point is nobody's to sync.
    """
    path, root = os.path.realpath(path), os.path.realpath(root)
    device = os.stat(path).st_dev
    below = path == root or path.startswith(root + "/")
    while path != "/":
        if path == root:
            below = False
            if not above_root:
                return
        path = os.path.dirname(path)
        if os.stat(path).st_dev != device:
            return
        yield path, below


def _is_regular(found: os.stat_result) -> bool:
    return (found.st_mode & 0o170000) == 0o100000
