"""Where a POSIX store lies: ``file://`` URLs and plain paths."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote_from_bytes, unquote_to_bytes

from txstore.errors import ConfigError
from txstore.redact import redact

_FILE_URL = re.compile(r"file:/", re.IGNORECASE)
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SAFE = "/=+,@:~"


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixConfig:
    """Settings of one store.

    Raises:
        ConfigError: `root` is not a normalised absolute path below ``/``.
    """

    root: str
    """Absolute, normalised path of the root directory; symbolic links are kept as they are."""

    def __post_init__(self) -> None:
        if "\0" in self.root:
            raise ConfigError("the path of the store holds a NUL character")
        if not self.root.startswith("/") or self.root != _normalise(self.root):
            raise ConfigError(
                f"not a normalised absolute path: {redact(self.root)!r}", next_step="use PosixConfig.from_url"
            )
        if self.root == "/":
            raise ConfigError(
                "the store would be the root of the file system",
                next_step="name a directory, such as file:///checkpoints/run-1",
            )

    @property
    def url(self) -> str:
        """Canonical URL: equal on all ranks that mean the same path."""
        return "file://" + quote_from_bytes(os.fsencode(self.root), safe=_SAFE)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Parse ``file:///abs``, ``file://localhost/abs``, ``file:/abs``, or a plain absolute or relative path.

        Only URLs are percent-decoded; a plain path is taken literally. ``~`` is an ordinary character.

        Raises:
            ConfigError: Another host, a query, a fragment, or a malformed escape.
        """
        if "\0" in url:
            raise ConfigError("the path of the store holds a NUL character")
        path = _path_of_url(url) if _FILE_URL.match(url) else url
        if not path:
            raise ConfigError("the store URL names no path", next_step="give a path, such as file:///checkpoints/run-1")
        try:
            return cls(root=_normalise(path))
        except FileNotFoundError as error:
            raise ConfigError(
                f"the relative path {redact(path)!r} has no meaning: the working directory was removed",
                next_step="give an absolute path",
            ) from error


def _normalise(path: str) -> str:
    # normpath keeps exactly two leading slashes, which would make //a and /a two stores.
    return "/" + os.path.abspath(path).lstrip("/")


def _path_of_url(url: str) -> str:
    rest = url[len("file:") :]
    for mark, what, escape in (("?", "a query", "%3F"), ("#", "a fragment", "%23")):
        if mark in rest:
            raise ConfigError(
                f"a file:// URL cannot have {what}: {redact(url)!r}",
                next_step=f"remove it; write {escape} for a {mark} that belongs to a name",
            )
    if _STRAY_PERCENT.search(rest):
        raise ConfigError(f"malformed percent escape in {redact(url)!r}", next_step="write %25 for a percent sign")
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host.lower() not in {"", "localhost"}:
            raise ConfigError(
                f"a file:// URL cannot name another host: {redact(url)!r}",
                next_step=f"for a local path use three slashes: {redact(f'file:///{host}{slash}{path}')}",
            )
        rest = slash + path
    return os.fsdecode(unquote_to_bytes(rest))
