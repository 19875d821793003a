"""The ``az://`` and ``abfs://`` backend: a container of Azure Blob Storage."""

from __future__ import annotations

from txstore_azure.config import AzureConfig
from txstore_azure.store import AzureStore

__all__ = ["AzureConfig", "AzureStore", "open_store"]


def open_store(url: str, **options: object) -> AzureStore:
    """Open the store at `url`; nothing is contacted yet.

    Args:
        url: ``az://container/prefix``, ``az://container@account/prefix`` or
            ``abfs://container@account.dfs.core.windows.net/prefix``. See `AzureConfig.from_url`.
        options: See `AzureConfig.from_url`.

    Raises:
        ConfigError: Malformed URL, unknown option, or no credentials.
    """
    return AzureStore(AzureConfig.from_url(url, options))
