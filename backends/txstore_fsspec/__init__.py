"""The ``memory://`` and ``fsspec+scheme://`` backend: fsspec filesystems that can keep the contract."""

from __future__ import annotations

from txstore_fsspec.config import FsspecConfig
from txstore_fsspec.store import FsspecStore

__all__ = ["FsspecConfig", "FsspecStore", "open_store"]


def open_store(url: str, **options: object) -> FsspecStore:
    """Open the store at `url`; nothing is touched yet.

    Args:
        url: ``memory://folder/prefix``, or ``fsspec+scheme://...``. See `FsspecConfig.from_url`.
        options: Given to the filesystem's class as its ``storage_options``.

    Raises:
        ConfigError: Malformed URL, or a scheme that fsspec does not know.
        CapabilityError: The filesystem cannot keep the contract; the message says why and what to use instead.
    """
    return FsspecStore(FsspecConfig.from_url(url, options))
