"""Which fsspec filesystems can keep the contract: decided by reading their code, class by class.

fsspec promises nothing about ``open(path, "xb")`` and ``pipe_file(mode="create")``: the base class looks and then
writes, so two writers can both win, and most filesystems show a file while it is being written. A class that is not
listed here as good is therefore refused, whatever it seems to do; a subclass is another class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of one class.

    Attributes:
        refusal: Why it is refused; "" if it is accepted.
        instead: What to use instead.
        one_process: All its objects live in the memory of one process, so a lock of that process makes its
            look-then-write exclusive; such a store cannot be pickled or used after a fork.
    """

    refusal: str = ""
    instead: str = ""
    one_process: bool = False


_NATIVE = "its own retries and multi-step writes hide whether a conditional write has won"
_VISIBLE = "a file is visible, and empty or short, while it is being written"
_READ_ONLY = "it cannot be written"
_WRAPPER = "it changes or caches what another filesystem answers"

_VERDICTS: dict[str, Verdict] = {
    # `pipe_file` builds the object and puts it into a dictionary by one assignment; "xb" looks first.
    "fsspec.implementations.memory.MemoryFileSystem": Verdict(one_process=True),
    "fsspec.implementations.local.LocalFileSystem": Verdict(
        refusal=_VISIBLE + ", and nothing is flushed to the disk", instead="use file://"
    ),
    "s3fs.core.S3FileSystem": Verdict(refusal=_NATIVE, instead="use s3:// (extra 's3')"),
    "gcsfs.core.GCSFileSystem": Verdict(refusal=_NATIVE, instead="use gs:// (extra 'gcs')"),
    "adlfs.spec.AzureBlobFileSystem": Verdict(refusal=_NATIVE, instead="use az:// (extra 'azure')"),
    "fsspec.implementations.arrow.HadoopFileSystem": Verdict(refusal=_VISIBLE, instead="use an object store"),
    "fsspec.implementations.sftp.SFTPFileSystem": Verdict(
        refusal=_VISIBLE, instead="mount the directory and use file://"
    ),
    "fsspec.implementations.smb.SMBFileSystem": Verdict(refusal=_VISIBLE, instead="mount the share and use file://"),
    "fsspec.implementations.webhdfs.WebHDFS": Verdict(refusal=_VISIBLE, instead="use an object store"),
    "fsspec.implementations.ftp.FTPFileSystem": Verdict(
        refusal="it has no exclusive create", instead="use an object store"
    ),
    **dict.fromkeys(
        (
            "fsspec.implementations.http.HTTPFileSystem",
            "fsspec.implementations.github.GithubFileSystem",
            "fsspec.implementations.git.GitFileSystem",
            "fsspec.implementations.tar.TarFileSystem",
        ),
        Verdict(refusal=_READ_ONLY, instead="use a store that can be written"),
    ),
    **dict.fromkeys(
        (
            "fsspec.implementations.cached.CachingFileSystem",
            "fsspec.implementations.cached.WholeFileCacheFileSystem",
            "fsspec.implementations.cached.SimpleCacheFileSystem",
            "fsspec.implementations.dirfs.DirFileSystem",
            "fsspec.implementations.reference.ReferenceFileSystem",
        ),
        Verdict(refusal=_WRAPPER, instead="open the filesystem below it"),
    ),
}

_UNKNOWN = Verdict(
    refusal="nobody has shown that its exclusive create is exclusive and its writes are whole or nothing",
    instead="use file://, s3://, gs:// or az://, or a backend of its own (txstore.testing.conformance is its test)",
)


def judge(kind: type[Any]) -> Verdict:
    """What is known of a filesystem's class, by its full name."""
    return _VERDICTS.get(f"{kind.__module__}.{kind.__qualname__}", _UNKNOWN)
