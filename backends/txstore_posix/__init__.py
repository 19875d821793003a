"""The ``file://`` backend: a directory on a local or shared POSIX file system."""

from __future__ import annotations

from txstore.errors import ConfigError
from txstore_posix.config import PosixConfig
from txstore_posix.store import PosixStore

__all__ = ["PosixConfig", "PosixStore", "open_store"]


def open_store(url: str, **options: object) -> PosixStore:
    """Open the store at `url`; nothing is touched yet.

    Args:
        url: ``file:///path`` or a plain path. See `PosixConfig.from_url`.
        options: None exist; a name given here is a mistake.

    Raises:
        ConfigError: Malformed URL, or an option.
    """
    if options:
        raise ConfigError(
            f"unknown option for a file:// store: {', '.join(sorted(options))}",
            next_step="a file:// store has no options; remove it",
        )
    return PosixStore(PosixConfig.from_url(url))
