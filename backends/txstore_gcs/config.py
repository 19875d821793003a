"""Where a GCS store lies and how it is reached: ``gs://`` URLs and options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self
from urllib.parse import quote, unquote_to_bytes, urlsplit

from txstore.checksum import BLOCK_BYTES
from txstore.errors import ConfigError
from txstore.redact import redact

_URL = re.compile(r"(?:gs|gcs)://", re.IGNORECASE)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAFE = "/=+,@:~"
_NOT_IN_OPTIONS = frozenset({"bucket", "prefix"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsConfig:
    """Settings of one store.

    Raises:
        ConfigError: A value makes no sense.
    """

    bucket: str
    """The bucket; it exists already."""

    prefix: str = ""
    """What all object names begin with, without a slash at either end; "" for the whole bucket."""

    token: object = field(default=None, repr=False)
    """As in gcsfs: None or ``google_default`` (application default credentials), ``anon``, ``cloud`` (metadata
    server), the path of a JSON key file, its content as a dict, or a google-auth credentials object."""

    project: str | None = None
    """Passed to the SDK; no request of txstore needs it."""

    quota_project: str | None = None
    """Project that requests are counted against; the credentials' own by default."""

    user_project: str | None = None
    """Project that pays for requests to a requester-pays bucket (gcsfs: ``requester_pays``)."""

    endpoint_url: str | None = None
    """Another endpoint than the SDK would take (``STORAGE_EMULATOR_HOST``, else the public service)."""

    connect_timeout_s: float = 10.0
    """Longest wait for a connection, and for it to take the next MiB of an upload."""

    read_timeout_s: float = 60.0
    """Longest silence of the service when it is its turn to send."""

    window_bytes: int = 8 * BLOCK_BYTES
    """How much of a source is read at once: what an upload in progress holds in memory."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(
                f"not a valid bucket name: {redact(self.bucket)[:80]!r}",
                next_step="3 to 222 of a-z 0-9 . _ -, as in gs://my-bucket/runs/7",
            )
        self._check_prefix()
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
        for name in ("project", "quota_project", "user_project"):
            _check_project(name, getattr(self, name))
        for name in ("connect_timeout_s", "read_timeout_s"):
            _check_seconds(name, getattr(self, name))
        _check_count("window_bytes", self.window_bytes, BLOCK_BYTES)

    def _check_prefix(self) -> None:
        segments = self.prefix.split("/") if self.prefix else []
        if _CONTROL.search(self.prefix):
            raise ConfigError("the prefix of the store holds a control character")
        if any(segment in {"", ".", ".."} for segment in segments):
            raise ConfigError(
                f"not a normalised prefix: {self.prefix!r}",
                next_step="leave out . and .. segments, and slashes at the ends",
            )
        if self.prefix.startswith(".well-known/acme-challenge"):
            raise ConfigError("GCS keeps names below .well-known/acme-challenge/ for itself")

    @property
    def url(self) -> str:
        """Canonical URL: equal on all ranks that mean the same place."""
        return f"gs://{self.bucket}/{quote(self.prefix, safe=_SAFE)}".rstrip("/")

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> Self:
        """Parse ``gs://bucket/prefix`` and named options.

        The prefix is percent-decoded as UTF-8, as in any URL: write ``%25`` for a percent sign; ``+`` is an ordinary
        character, and spaces and non-Latin letters may stand as they are. Double and trailing slashes mean nothing.

        Raises:
            ConfigError: A query, a fragment, user information, a malformed escape, or an unknown option.
        """
        found = _URL.match(url)
        if not found:
            raise ConfigError(f"not a gs:// URL: {redact(url)!r}", next_step="give a URL such as gs://my-bucket/runs/7")
        bucket, _, path = url[found.end() :].partition("/")
        for mark, what, escape in (("?", "a query", "%3F"), ("#", "a fragment", "%23")):
            if mark in url:
                raise ConfigError(
                    f"a gs:// URL cannot have {what}: {redact(url)!r}",
                    next_step=f"pass options by name; write {escape} for a {mark} that belongs to the prefix",
                )
        if "@" in bucket:
            raise ConfigError(
                f"a gs:// URL cannot have user information: {redact(url)!r}",
                next_step="pass credentials as token=, or through GOOGLE_APPLICATION_CREDENTIALS",
            )
        return cls(bucket=bucket, prefix=_decode(path), **_known(cls, options or {}))


def _check_project(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value or _CONTROL.search(value)):
        raise ConfigError(f"{name} is not the name of a project")


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 < value <= 3600:
        raise ConfigError(f"{name} is {value!r}", next_step="give seconds, more than 0 and at most 3600")


def _check_count(name: str, value: object, unit: int) -> None:
    if not isinstance(value, int) or value < unit or value % unit:
        raise ConfigError(f"{name} is {value!r}", next_step=f"give a positive multiple of {unit}")


def check_endpoint(value: object) -> None:
    """Raises `ConfigError` for what is no endpoint."""
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        _ = parts and parts.port  # ValueError: no number, or out of range
    except ValueError:
        parts = None
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        raise ConfigError(
            f"not an endpoint: {redact(str(value))!r}",
            next_step="give scheme and host without user information, such as http://127.0.0.1:4443",
        )
    if parts.query or parts.fragment:
        raise ConfigError("an endpoint has neither query nor fragment")


def _decode(path: str) -> str:
    if _STRAY_PERCENT.search(path):
        raise ConfigError(f"malformed percent escape in {path!r}", next_step="write %25 for a percent sign")
    try:
        decoded = unquote_to_bytes(path).decode("utf-8")
    except UnicodeError as error:
        raise ConfigError("the prefix is not UTF-8", next_step="percent-encode UTF-8, or write it plainly") from error
    return "/".join(segment for segment in decoded.split("/") if segment)


def _known(cls: type[GcsConfig], options: Mapping[str, object]) -> dict[str, Any]:
    names = {one.name for one in fields(cls)} - _NOT_IN_OPTIONS
    known: dict[str, Any] = dict(options)
    if "requester_pays" in known:
        pays = known.pop("requester_pays")
        # gcsfs: True means the project of the store pays.
        known.setdefault("user_project", known.get("project") if pays is True else pays or None)
        if pays is True and not known["user_project"]:
            raise ConfigError("requester_pays=True needs to know who pays", next_step="give project= or user_project=")
    unknown = sorted(set(known) - names)
    if unknown:
        raise ConfigError(
            f"unknown option for a gs:// store: {', '.join(unknown)}",
            next_step=f"known are {', '.join(sorted(names | {'requester_pays'}))}",
        )
    return known
