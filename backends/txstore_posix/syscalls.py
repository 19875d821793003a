"""The operating-system calls that the store makes, one method each: the seam for fault and crash tests.

The methods decide nothing. They take directory descriptors, so that what is written, published and
synced is one directory even if its path is moved meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache

_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2


class Syscalls:
    """Thin calls; each raises OSError with the kernel's errno. Stateless, so it can be pickled and forked."""

    def open_directory(self, path: str) -> int:
        """A descriptor of a directory."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def mkdir(self, path: str) -> None:
        """Make a directory; the mode is what the umask leaves."""
        os.mkdir(path, 0o777)

    def create_file(self, directory: int, name: str) -> int:
        """A new file that nobody else has; the mode is what the umask leaves (mkstemp's 0600 shuts out the group)."""
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)

    def open_file(self, directory: int, name: str) -> int:
        """A descriptor to read or sync an existing file. O_NONBLOCK: a stray FIFO must not hang the caller."""
        return os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve `size` bytes. Not `os.posix_fallocate`: glibc emulates that by writing into every block."""
        libc = _libc()
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
            _raise_errno()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data`; returns how much."""
        return os.pwrite(fd, data, offset)

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        """``sync_file_range(SYNC_FILE_RANGE_WRITE)``: the disk begins now, and nothing is promised. Absent on macOS."""
        start = getattr(_libc(), "sync_file_range", None)
        if start is not None and start(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE):
            _raise_errno()

    def fsync(self, fd: int) -> None:
        """Make a file's content, or a directory's entries, survive a crash."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close; network file systems report lost writes here."""
        os.close(fd)

    def stat(self, directory: int, name: str) -> os.stat_result:
        """Identity of a name in a directory, links not followed."""
        return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def link(self, directory: int, old: str, new: str) -> None:
        """A second name in the same directory; EEXIST if it is taken."""
        os.link(old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)

    def rename(self, directory: int, old: str, new: str) -> None:
        """Another name in the same directory, replacing what had it."""
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def rename_noreplace(self, directory: int, old: str, new: str) -> None:
        """``renameat2(RENAME_NOREPLACE)``; ENOSYS where the C library has none."""
        libc = _libc()
        if not hasattr(libc, "renameat2"):
            ctypes.set_errno(errno.ENOSYS)
            _raise_errno()
        if libc.renameat2(directory, os.fsencode(old), directory, os.fsencode(new), _RENAME_NOREPLACE):
            _raise_errno()

    def unlink(self, directory: int, name: str) -> None:
        """Remove a name."""
        os.unlink(name, dir_fd=directory)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _raise_errno() -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
