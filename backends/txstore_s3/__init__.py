"""The ``s3://`` backend: Amazon S3, and S3-compatible stores that honour conditional writes."""

from __future__ import annotations

from txstore_s3.config import S3Config
from txstore_s3.store import S3Store

__all__ = ["S3Config", "S3Store", "open_store"]


def open_store(url: str, **options: object) -> S3Store:
    """Open the store at `url`; nothing is contacted yet.

    Args:
        url: ``s3://bucket/prefix``. See `S3Config.from_url`.
        options: Fields of `S3Config`, or ``storage_options`` as fsspec users know them.

    Raises:
        ConfigError: Malformed URL, or a wrong option.
    """
    return S3Store(S3Config.from_url(url, options))
