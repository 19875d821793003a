"""Where an fsspec store lies, and whether its filesystem can keep the contract."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote, unquote

import fsspec

from txstore.errors import CapabilityError, ConfigError
from txstore_fsspec.verdicts import Verdict, judge

_URL = re.compile(r"(?:fsspec\+)?(?P<scheme>[a-z][a-z0-9.-]*)://(?P<path>[^?#]*)", re.IGNORECASE)
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "/=+,@:~"

# Cached listings would hide commits; a memory filesystem that is not the shared one would be lost with its instance.
_RESERVED = frozenset({"use_listings_cache", "skip_instance_cache", "global_store"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecConfig:
    """Settings of one store.

    Raises:
        CapabilityError: No filesystem of this class can keep the contract.
    """

    scheme: str
    """The scheme as fsspec knows it."""
    root: str
    """Path within the filesystem, without slashes at its ends; may be ""."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """``storage_options`` of the filesystem; they may hold secrets and are not part of any text."""
    verdict: Verdict = field(init=False, repr=False)
    """What is known of the filesystem's class."""

    def __post_init__(self) -> None:
        if reserved := _RESERVED & self.options.keys():
            raise ConfigError(f"the store sets these options itself: {', '.join(sorted(reserved))}")
        kind = _class_of(self.scheme)
        verdict = judge(kind)
        if verdict.refusal:
            raise CapabilityError(
                f"{kind.__module__}.{kind.__qualname__} cannot keep the contract: {verdict.refusal}",
                next_step=verdict.instead,
            )
        object.__setattr__(self, "verdict", verdict)

    @property
    def url(self) -> str:
        """Canonical URL, without options."""
        prefix = "" if self.scheme == "memory" else "fsspec+"
        return f"{prefix}{self.scheme}://{quote(self.root, safe=_SAFE)}"

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> Self:
        """Parse ``memory://path`` or ``fsspec+scheme://path``; percent escapes in the path are decoded.

        Raises:
            ConfigError: A query, a fragment, a chain of filesystems (``::``), a malformed escape, an unknown scheme.
            CapabilityError: The filesystem cannot keep the contract.
        """
        found = _URL.fullmatch(url)
        if not found or "::" in url:
            raise ConfigError(
                "not the URL of one filesystem",
                next_step="use memory://folder/prefix; no query, no fragment, no chain with ::",
            )
        if _STRAY_PERCENT.search(url):
            raise ConfigError("the URL has a malformed percent escape", next_step="write %25 for a percent sign")
        try:
            path = unquote(found["path"], errors="strict")
        except UnicodeDecodeError as error:
            raise ConfigError("the percent escapes of the URL are not UTF-8") from error
        parts = [part for part in path.split("/") if part]
        if any(part in {".", ".."} for part in parts) or not path.isprintable() or "::" in path:
            raise ConfigError("the path has a . or .. segment, a control character, or ::")
        return cls(scheme=found["scheme"].lower(), root="/".join(parts), options=dict(options or {}))


def _class_of(scheme: str) -> type[Any]:
    try:
        found: type[Any] = fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"fsspec has no filesystem for {scheme}:// here: {error}",
            next_step="check the scheme, or install its package",
        ) from error
    return found
