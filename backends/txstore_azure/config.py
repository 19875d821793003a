"""Settings of an Azure store: URL, account, and how requests are made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self
from urllib.parse import quote, unquote

from txstore.checksum import BLOCK_BYTES
from txstore.errors import ConfigError
from txstore_azure import account as accounts
from txstore_azure.account import Account

_URL = re.compile(r"(?:az|abfss?)://([^/?#]*)(/[^?#]*)?", re.IGNORECASE)
_CONTAINER = re.compile(r"\$root|(?=.{3,63}$)[a-z0-9]+(?:-[a-z0-9]+)*")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "/=+,:~!$&'()*;"

NAME_MAX = 1024
"""Most characters of a blob's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureConfig:
    """Settings of one store.

    Raises:
        ConfigError: A value out of range.
    """

    account: Account
    """The account and its credentials; secrets are not part of any text."""
    container: str
    """Name of the container; it is never created."""
    prefix: str = ""
    """What the names of all blobs of the store begin with: "" or ``a/b/``."""
    part_bytes: int = 32 * BLOCK_BYTES
    """Bytes of one block, a multiple of 1 MiB. An object up to this size, and 8 MiB at most, goes up in one request."""
    workers: int = 4
    """Blocks of one object that are uploaded at the same time; bytes in flight are at most `part_bytes` x `workers`."""
    connect_timeout_s: float = 10.0
    """Longest wait for a connection, and for a piece of a request to be taken."""
    read_timeout_s: float = 60.0
    """Longest wait for the next bytes of an answer."""
    page_objects: int = 5000
    """Most objects of one page of a listing; the service gives at most 5000."""
    block_md5: bool = False
    """Send the MD5 of each block, which the service checks. Costs about 1.5 CPU-seconds per GiB."""

    def __post_init__(self) -> None:
        if not _CONTAINER.fullmatch(self.container):
            raise ConfigError(
                "not the name of a container",
                next_step="3 to 63 lower-case letters, digits and single dashes: az://container/prefix",
            )
        if self.prefix and not self.prefix.endswith("/"):
            raise ConfigError("the prefix of the store does not end with a slash", next_step="use AzureConfig.from_url")
        if len(self.prefix) > NAME_MAX // 2:
            raise ConfigError(f"the prefix of the store is longer than {NAME_MAX // 2} characters")
        if self.part_bytes % BLOCK_BYTES or not BLOCK_BYTES <= self.part_bytes <= 2048 * BLOCK_BYTES:
            raise ConfigError(f"part_bytes is not a multiple of {BLOCK_BYTES} up to 2 GiB: {self.part_bytes}")
        if not 1 <= self.page_objects <= 5000:
            raise ConfigError(f"page_objects is not 1 to 5000: {self.page_objects}")
        if self.workers < 1 or min(self.connect_timeout_s, self.read_timeout_s) <= 0:
            raise ConfigError("workers and the timeouts must be positive")

    @property
    def url(self) -> str:
        """Canonical URL, without secrets: equal on all ranks that mean the same place."""
        root = f"az://{self.container}@{self.account.label}"
        return f"{root}/{quote(self.prefix.rstrip('/'), safe=_SAFE)}".rstrip("/")

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> Self:
        """Parse a URL and options.

        ``az://container[/prefix]`` takes the account from the options or the environment;
        ``az://container@account[/prefix]`` names it; ``abfs[s]://container@account.dfs.core.windows.net[/prefix]`` is
        the same place in the notation of Hadoop. Percent escapes in the prefix are decoded, and nothing else is:
        a plus sign is a plus sign. Double and trailing slashes are dropped.

        Options, by the names that fsspec users know: ``connection_string``, ``account_name``, ``account_key``,
        ``sas_token``, ``account_url`` (with or without a SAS), ``account_host``, ``credential``, ``anon``; and the
        fields of this class that are numbers or truth values. Environment: ``AZURE_STORAGE_CONNECTION_STRING``,
        ``AZURE_STORAGE_ACCOUNT_NAME`` or ``AZURE_STORAGE_ACCOUNT``, ``AZURE_STORAGE_KEY`` or
        ``AZURE_STORAGE_ACCOUNT_KEY``, ``AZURE_STORAGE_SAS_TOKEN``. Without any of them ``DefaultAzureCredential`` is
        used, if azure-identity is installed.

        Raises:
            ConfigError: What is wrong, without quoting a secret.
        """
        given = dict(options or {})
        tuning = {name: given.pop(name) for name in _TUNING if name in given}
        _check_options(given)
        container, named, prefix = _parse(url)
        account = accounts.resolve(named, given, os.environ)
        return cls(account=account, container=container, prefix=prefix, **_typed(tuning))


_TUNING: dict[str, type] = {
    item.name: type(item.default) for item in fields(AzureConfig) if item.name not in {"account", "container", "prefix"}
}


def _typed(tuning: Mapping[str, object]) -> dict[str, Any]:
    """Numbers as numbers; from a command line they come as text."""
    found: dict[str, Any] = {}
    for name, value in tuning.items():
        wanted = _TUNING[name]
        if wanted is bool:
            found[name] = value if isinstance(value, bool) else str(value).lower() in {"1", "true", "yes"}
            continue
        try:
            found[name] = wanted(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the option {name} is not a number: {value!r}") from error
    return found


def _check_options(given: Mapping[str, object]) -> None:
    unknown = sorted(given.keys() - set(accounts.OPTIONS))
    if unknown:
        raise ConfigError(
            f"unknown option for an Azure store: {', '.join(unknown)}",
            next_step=f"known are {', '.join(sorted([*accounts.OPTIONS, *_TUNING]))}",
        )
    for name, value in given.items():
        if name not in {"credential", "anon"} and not isinstance(value, str | None):
            raise ConfigError(f"the option {name} is not a string")


def _parse(url: str) -> tuple[str, str, str]:
    """Container, account as named or "", prefix. Messages do not quote the URL: a query may be a SAS."""
    if "?" in url or "#" in url:
        raise ConfigError(
            "the URL of an Azure store has no query and no fragment",
            next_step="give a SAS as the option sas_token; write %3F or %23 for a ? or # that belongs to a name",
        )
    found = _URL.fullmatch(url)
    if not found:
        raise ConfigError("not the URL of an Azure store", next_step="use az://container/prefix")
    if _STRAY_PERCENT.search(url):
        raise ConfigError("the URL has a malformed percent escape", next_step="write %25 for a percent sign")
    container, _, named = found[1].partition("@")
    try:
        path = unquote(found[2] or "", errors="strict")
    except UnicodeDecodeError as error:
        raise ConfigError("the percent escapes of the URL are not UTF-8") from error
    parts = [part for part in path.split("/") if part]
    if any(part in {".", ".."} for part in parts) or not path.isprintable():
        raise ConfigError("the prefix of the store has a . or .. segment or a control character")
    named = named.lower().replace(".dfs.", ".blob.", 1).removesuffix(accounts.PUBLIC_SUFFIX)
    return container, named, "".join(f"{part}/" for part in parts)
