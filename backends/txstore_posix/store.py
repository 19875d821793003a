"""PosixStore: a directory as a store."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from txstore.errors import FormatError, NotFoundError
from txstore.keys import DATA_PREFIX, check_key
from txstore.store import BytesSource, ObjectInfo, Source, Store, Unfinished
from txstore_posix import listing
from txstore_posix.config import PosixConfig
from txstore_posix.dead_ends import refuse_dead_end
from txstore_posix.durability import IN_MEMORY, TEMPORARY_PREFIX, StagedFile, sync_directory
from txstore_posix.errors import ABSENT, translate, translate_publish, unknown
from txstore_posix.mounts import accepted_mount
from txstore_posix.syscalls import Syscalls


class PosixStore(Store):
    """Objects are files below one directory; a key is the path from there.

    Holds no descriptor between calls, so it survives pickling and fork.

    Args:
        config: Where the store lies.
        calls: The system calls; tests inject faults here.
    """

    needs_probe = False  # link and RENAME_NOREPLACE either keep the contract or are refused
    distant = False

    def __init__(self, config: PosixConfig, calls: Syscalls | None = None) -> None:
        self.url = config.url
        self._root = config.root
        self._calls = calls or Syscalls()
        self._above_root_synced = False
        self._kinds: dict[int, str] = {}  # file system types by device, of mounts that were accepted

    def __repr__(self) -> str:
        return f"PosixStore({self.url!r})"

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`: temporary file, fsync, rename over, fsync of the directory."""
        with self._staged(key) as staged:
            staged.write(source)
            staged.replace()
        return ObjectInfo(key, source.size)

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: temporary file, fsync, link (or RENAME_NOREPLACE), fsync of the directory."""
        with self._staged(key) as staged:
            staged.write(BytesSource(data))
            staged.publish()

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        with self._opened(key) as fd:
            left = max(0, os.fstat(fd).st_size - start)
            left = left if size is None else min(left, size)
            parts = []
            while left > 0 and (part := os.pread(fd, left, start)):
                parts.append(part)
                start += len(part)
                left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`: no copy besides the kernel's."""
        done = 0
        with self._opened(key) as fd, buffer.cast("B") as view:
            while done < view.nbytes:
                with view[done:] as rest:
                    count = os.preadv(fd, [rest], start + done)
                if count == 0:
                    break
                done += count
        return done

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`. The file is opened: over NFS only that asks the server again."""
        with self._opened(key) as fd:
            status = os.fstat(fd)
        return ObjectInfo(key, status.st_size, None, status.st_mtime)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        self._check_mount(self._root, prefix)
        yield from listing.walk(self._root, prefix, start_after)

    def delete(self, key: str) -> None:
        """See `Store.delete`. Directories under ``data/`` that are empty then go too."""
        path, name = self._place(key)
        self._check_mount(path, key)
        try:
            directory = self._calls.open_directory(path)
        except (FileNotFoundError, NotADirectoryError):
            refuse_dead_end(path, self._root, key)
            return
        except OSError as error:
            raise translate(error, key, "open of the directory", self._root) from error
        try:
            self._unlink(directory, name, key)
        finally:
            with suppress(OSError):
                os.close(directory)
        self._prune(key)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Temporary files of writes that were killed, or still run; see `KeepsUnfinished`."""
        self._check_mount(self._root, prefix)
        refuse_dead_end(self._root, self._root, prefix)
        yield from listing.temporaries(self._root, prefix, TEMPORARY_PREFIX)

    def discard(self, unfinished: Unfinished) -> None:
        """Unlink a temporary file, and its directory if that is empty then."""
        folder, _, name = unfinished.key.rpartition("/")
        if not name.startswith(TEMPORARY_PREFIX):
            raise FormatError("not a temporary file of this store", key=unfinished.key)
        try:
            os.unlink(os.path.join(self._root, check_key(folder) if folder else "", name))
        except FileNotFoundError:
            pass  # its write ended
        except OSError as error:
            raise translate(error, unfinished.key, "unlink of a temporary file", self._root) from error
        self._prune(unfinished.key)

    def close(self) -> None:
        """Nothing is held open."""

    def _unlink(self, directory: int, name: str, key: str) -> None:
        try:
            self._calls.unlink(directory, name)
        except OSError as error:
            if error.errno not in ABSENT:
                raise translate_publish(error, key, "unlink", self._root) from error
        # Also when it was absent: an earlier delete may have failed between unlink and this fsync.
        try:
            sync_directory(self._calls, directory)
        except OSError as error:
            raise unknown(error, key, "fsync of the directory after unlink", self._root) from error

    def _prune(self, key: str) -> None:
        # Only rmdir: a writer that has begun holds a temporary file there, one that has not makes it again.
        folder = os.path.dirname(key)
        while folder.startswith(DATA_PREFIX):
            try:
                self._calls.rmdir(os.path.join(self._root, folder))
            except OSError:
                return
            folder = os.path.dirname(folder)

    @contextmanager
    def _staged(self, key: str) -> Iterator[StagedFile]:
        path, name = self._place(key)
        kind = self._check_mount(path, key)
        above_root = not self._above_root_synced
        with StagedFile(
            self._calls,
            path,
            name,
            key=key,
            root=self._root,
            above_root=above_root,
            preallocate=kind not in IN_MEMORY,
        ) as staged:
            self._above_root_synced = True
            yield staged

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        path, name = self._place(key)
        self._check_mount(path, key)
        try:
            fd = os.open(os.path.join(path, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NotFoundError(f"no such object in {self._root}", key=key)
                yield fd
            finally:
                os.close(fd)
        except NotFoundError:
            raise
        except OSError as error:
            if error.errno in ABSENT:
                refuse_dead_end(self._root, self._root, key)
            if error.errno == errno.ENXIO and not os.path.isfile(os.path.join(path, name)):
                # The kernel's answer to the open of a socket. A file on a disk that died may get it, too.
                raise NotFoundError(f"no such object in {self._root}", key=key) from error
            raise translate(error, key, "read", self._root) from error

    def _place(self, key: str) -> tuple[str, str]:
        folder, _, name = check_key(key).rpartition("/")
        return os.path.join(self._root, folder).rstrip("/"), name

    def _check_mount(self, path: str, key: str) -> str:
        """Refuse an object mount, before anything is made in it: asks the nearest directory that exists.

        Returns:
            The type of the file system; "" if it is not known.
        """
        while True:
            try:
                device = os.stat(path).st_dev
            except (FileNotFoundError, NotADirectoryError):
                path = os.path.dirname(path)
                continue
            except OSError:
                return ""  # the call that follows meets the same error and reports it
            break
        if device not in self._kinds:
            self._kinds[device] = accepted_mount(os.path.realpath(path), device, key)
        return self._kinds[device]
