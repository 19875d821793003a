"""`open_store(url)`: from a URL scheme to a backend, through the entry-point group ``txstore.backends``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from txstore.errors import ConfigError
from txstore.store import Store

GROUP = "txstore.backends"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")

# SDK module -> the extra that brings it. Any other ImportError is a bug and propagates.
_EXTRAS = {"boto3": "s3", "botocore": "s3", "google": "gcs", "azure": "azure", "fsspec": "fsspec"}


def scheme_of(url: str) -> str:
    """The URL's scheme in lower case; a plain path has scheme ``file``."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else "file"


def open_store(url: str | os.PathLike[str], **options: object) -> Store:
    """Open the store at `url` with the backend registered for its scheme.

    Args:
        url: ``file:///path``, ``s3://bucket/prefix``, or a plain path.
        options: Passed to the backend as they are.

    Returns:
        The store. Nothing has been contacted or written yet.

    Raises:
        ConfigError: Unknown scheme, malformed URL, wrong option, or an SDK that is not installed.
    """
    if not isinstance(url, str | os.PathLike):
        raise ConfigError(f"the store is a {type(url).__name__}", next_step="pass its URL, or a Store")
    text = os.fspath(url)
    if not text:
        raise ConfigError("the store URL is empty", next_step="give a URL such as file:///checkpoints/run-1")
    scheme = scheme_of(text)
    mangled = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)", text)
    if mangled and scheme != "file":
        raise ConfigError(
            f"the URL has a single slash after {mangled[1]}:",
            next_step=f"pass a str, not pathlib.Path: {mangled[1]}://...",
        )
    # A backend for a family of schemes registers the part up to the plus sign: `fsspec+` serves fsspec+memory://.
    family = scheme[: scheme.find("+") + 1]
    entry = _backends().get(scheme) or _backends().get(family or scheme)
    if entry is None:
        raise ConfigError(
            f"no backend for scheme {scheme!r}",
            next_step=f"use one of {', '.join(sorted(_backends()))}, or install the package that provides it",
        )
    return _factory(entry)(text, **options)


@lru_cache(maxsize=1)
def _backends() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two backends claim scheme {entry.name!r}: {other.value} and {entry.value}",
                next_step="uninstall one of the two packages",
            )
    return found


def _factory(entry: EntryPoint) -> Callable[..., Store]:
    try:
        factory: Callable[..., Store] = entry.load()
    except ImportError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise ConfigError(
            f"the backend for {entry.name}:// needs a package that is not installed: {error.name}",
            next_step=f"pip install '.[{extra}]' in txstore's checkout",
        ) from error
    return factory
