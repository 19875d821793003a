"""The ``gs://`` backend: a prefix of a Google Cloud Storage bucket, through the native JSON API."""

from __future__ import annotations

from txstore_gcs.config import GcsConfig
from txstore_gcs.store import GcsStore

__all__ = ["GcsConfig", "GcsStore", "open_store"]


def open_store(url: str, **options: object) -> GcsStore:
    """Open the store at `url`; nothing is contacted yet, and the bucket is never created.

    Args:
        url: ``gs://bucket/prefix`` or ``gcs://bucket/prefix``. See `GcsConfig.from_url`.
        options: The other fields of `GcsConfig`, or the names that gcsfs has for them.

    Raises:
        ConfigError: Malformed URL, unknown option, or a value that makes no sense.
    """
    return GcsStore(GcsConfig.from_url(url, options))
