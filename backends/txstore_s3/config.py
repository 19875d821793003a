"""Where an S3 store lies and how it is reached: ``s3://`` URLs and options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, SupportsIndex
from urllib.parse import quote, unquote_to_bytes, urlsplit

from boto3.session import Session

from txstore.checksum import BLOCK_BYTES
from txstore.errors import ConfigError

MIN_PART_BYTES = 5 << 20
"""The smallest part that S3 takes, the last one excepted."""

MAX_PART_BYTES = 5 << 30
"""The largest part, and the largest object that one request can bring."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAFE = "/=+,@:~"
_MAX_PREFIX_BYTES = 1024 - 900  # S3 allows 1024 bytes for a key, txstore.keys 900

# The names under which s3fs, boto3 and others know our fields.
_ALIASES = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "region_name": "region",
    "profile_name": "profile",
    "aws_profile": "profile",
}
_NESTED = {"client_kwargs": {"endpoint_url", "region_name", "verify", *_ALIASES}, "config_kwargs": {"s3"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    """Settings of one store. What is not given follows the SDK: environment, profile, instance role.

    Raises:
        ConfigError: A value is impossible.
    """

    bucket: str
    """The bucket; it must exist, txstore never creates one."""
    prefix: str = ""
    """Key prefix of the root inside the bucket, without slashes at its ends."""
    endpoint_url: str | None = None
    """Another endpoint than Amazon's; else ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, or the profile decide."""
    region: str | None = None
    """Region; else ``AWS_REGION``, ``AWS_DEFAULT_REGION``, or the profile; ``us-east-1`` for a custom endpoint."""
    profile: str | None = None
    """Profile in the AWS configuration files; else ``AWS_PROFILE``."""
    session: Session | None = field(default=None, repr=False)
    """A boto3 session: its credentials, region and handlers. A store that has one stays in its process. Else the
    session of ``boto3.setup_default_session``, if the program has called it and neither profile nor key is given."""
    key: str | None = field(default=None, repr=False)
    """Access key id; else the SDK's credential chain, which also refreshes what expires."""
    secret: str | None = field(default=None, repr=False)
    """Secret access key."""
    token: str | None = field(default=None, repr=False)
    """Session token of temporary credentials."""
    anon: bool = False
    """Send unsigned requests."""
    verify: bool | str | None = None
    """False: do not verify TLS certificates. A string: path of a CA bundle. Else ``AWS_CA_BUNDLE``."""
    addressing_style: Literal["path", "virtual", "auto"] | None = None
    """How the bucket is named in requests; ``path`` for a custom endpoint unless the profile says otherwise."""
    checksum: Literal["crc32c", "none"] = "crc32c"
    """Checksum sent with every upload. ``none`` only for endpoints that reject the header."""
    sign_payload: bool | None = None
    """Whether signatures cover the body, which costs a SHA-256 pass. None: without TLS those of documents and decisions
    do; data goes with its CRC32C, which is signed, and which the server compares."""
    server_side_encryption: str | None = None
    """``AES256``, ``aws:kms`` or ``aws:kms:dsse``; else the bucket's default."""
    kms_key_id: str | None = None
    """Key for ``aws:kms``."""
    expected_bucket_owner: str | None = None
    """Account that must own the bucket: requests to another one's bucket of that name are refused."""
    part_bytes: int = 32 << 20
    """Size of an upload's parts; larger where 10,000 would not do. An object up to this size is one request."""
    part_workers: int = 4
    """Parts of one object that are sent at the same time: an upload holds at most this many parts in memory."""
    connect_timeout_s: float = 10.0
    """Longest wait for a connection."""
    read_timeout_s: float = 60.0
    """Longest silence of the server before a request counts as lost."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(
                f"not a bucket name: {self.bucket[:100]!r}", next_step="give a URL such as s3://bucket/runs/run-1"
            )
        if self.bucket.endswith("--x-s3"):
            raise ConfigError(
                f"{self.bucket} is a directory bucket, whose listings have no order",
                next_step="use a general purpose bucket",
            )
        _check_prefix(self.prefix)
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
        if (self.key is None) != (self.secret is None):
            raise ConfigError("key and secret belong together", next_step="give both, or neither")
        if self.token is not None and self.key is None:
            raise ConfigError("a token needs key and secret", next_step="give all three, or none")
        self._check_session()
        if self.anon and self.key is not None:
            raise ConfigError("anon=True and a key exclude each other", next_step="give one of them")
        _check_choice("addressing_style", self.addressing_style, (None, "path", "virtual", "auto"))
        _check_choice("checksum", self.checksum, ("crc32c", "none"))
        _check_choice("sign_payload", self.sign_payload, (None, True, False))
        self._check_numbers()

    def _check_session(self) -> None:
        if self.session is None:
            return
        if not isinstance(self.session, Session):
            raise ConfigError(
                f"session is a {type(self.session).__qualname__}",
                next_step="give a boto3.session.Session, or leave it out",
            )
        if self.profile is not None or self.key is not None:
            raise ConfigError("a session excludes profile and key", next_step="give them to the session")

    def _check_numbers(self) -> None:
        if not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES or self.part_bytes % BLOCK_BYTES:
            raise ConfigError(f"part_bytes={self.part_bytes} is not a multiple of 1 MiB from 5 MiB to 5 GiB")
        if not 1 <= self.part_workers <= 1024:
            raise ConfigError(f"part_workers={self.part_workers} is not between 1 and 1024")
        for name in ("connect_timeout_s", "read_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not a time in seconds above 0")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if self.session is not None:
            # Its credentials may renew themselves; a copy of today's secrets would not.
            raise TypeError(
                "an s3:// store with a session of its own cannot go to another process: "
                "give profile=, or leave credentials to the environment"
            )
        return object.__reduce_ex__(self, protocol)

    @property
    def owner(self) -> dict[str, str]:
        """The account that must own the bucket, as the API names it; empty if any may."""
        return {"ExpectedBucketOwner": self.expected_bucket_owner} if self.expected_bucket_owner else {}

    @property
    def url(self) -> str:
        """Canonical URL, without secrets: equal on all ranks that mean the same root."""
        return f"s3://{self.bucket}" + (f"/{quote(self.prefix, safe=_SAFE)}" if self.prefix else "")

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object] | None = None) -> Self:
        """Parse ``s3://bucket/prefix`` and options.

        The path is percent-decoded as UTF-8 (a plus is a plus); a literal space or letter means the same as its escape.
        Repeated and trailing slashes do not count. Messages never repeat the URL: it may hold a secret.

        Args:
            url: The root.
            options: Fields of this class; ``storage_options`` of s3fs (``client_kwargs``, ``aws_access_key_id``, ...).

        Raises:
            ConfigError: Malformed URL, unknown option, or an impossible value.
        """
        scheme, mark, rest = url.partition("://")
        if not mark or scheme.lower() != "s3":
            raise ConfigError("not an s3:// URL", next_step="give a URL such as s3://bucket/runs/run-1")
        bucket, _, path = rest.partition("/")
        if "@" in bucket:
            raise ConfigError("an s3:// URL cannot hold credentials", next_step="use options key and secret")
        for sign, what, escape in (("?", "a query", "%3F"), ("#", "a fragment", "%23")):
            if sign in rest:
                raise ConfigError(
                    f"an s3:// URL cannot have {what}",
                    next_step=f"remove it; write {escape} for a {sign} in the prefix",
                )
        return cls(bucket=bucket, prefix=_decode(path), **_known(options or {}))


_ENDPOINT_HINT = "give http://host:port or https://host"


def check_endpoint(endpoint_url: str) -> None:
    """Refuse what is no endpoint, and the one that is known to ignore conditions.

    Raises:
        ConfigError: With what to do.
    """
    try:
        parts = urlsplit(endpoint_url)
        _ = parts.port  # ValueError: no number, or out of range
    except ValueError as error:
        raise ConfigError("endpoint_url is not a URL", next_step=_ENDPOINT_HINT) from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError("endpoint_url is not a URL", next_step=_ENDPOINT_HINT)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError("endpoint_url cannot hold credentials, a query or a fragment")
    if parts.hostname == "storage.googleapis.com" or parts.hostname.endswith(".storage.googleapis.com"):
        raise ConfigError(
            "storage.googleapis.com ignores conditions on writes made through its S3 interface",
            next_step="use a gs:// URL: pip install '.[gcs]' in txstore's checkout",
        )


def _check_prefix(prefix: str) -> None:
    if _CONTROL.search(prefix):
        raise ConfigError("the prefix holds a control character")
    if prefix and any(part in {"", ".", ".."} for part in prefix.split("/")):
        raise ConfigError("the prefix has an empty, '.' or '..' segment", next_step="use S3Config.from_url")
    if len(prefix.encode()) > _MAX_PREFIX_BYTES:
        raise ConfigError(f"the prefix is longer than {_MAX_PREFIX_BYTES} bytes", next_step="use a shorter one")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def _decode(path: str) -> str:
    if _STRAY_PERCENT.search(path):
        raise ConfigError("malformed percent escape in the URL", next_step="write %25 for a percent sign")
    try:
        text = unquote_to_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("the URL's escapes are not UTF-8") from error
    return "/".join(part for part in text.split("/") if part)


def _known(options: Mapping[str, object]) -> dict[str, Any]:
    """Options under our names; nested ones of s3fs are taken apart."""
    known = {one.name for one in fields(S3Config)} - {"bucket", "prefix"}
    values: dict[str, Any] = {}
    for name, value in _flat(options):
        ours = _ALIASES.get(name, name)
        if ours not in known:
            raise ConfigError(
                f"unknown option for an s3:// store: {name}",
                next_step=f"known are {', '.join(sorted(known | set(_ALIASES) | set(_NESTED)))}",
            )
        if values.setdefault(ours, value) != value:
            raise ConfigError(f"option {ours} is given twice, with different values")
    return values


def _flat(options: Mapping[str, object]) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in options.items():
        if name not in _NESTED:
            found.append((name, value))
            continue
        if not isinstance(value, Mapping) or not set(value) <= _NESTED[name]:
            raise ConfigError(f"{name} can hold {', '.join(sorted(_NESTED[name]))}", next_step="use the option itself")
        for inner, inner_value in value.items():
            if name == "config_kwargs":  # {"s3": {"addressing_style": "path"}}
                found += _flat_s3(inner_value)
            else:
                found.append((inner, inner_value))
    return found


def _flat_s3(value: object) -> list[tuple[str, object]]:
    if not isinstance(value, Mapping) or not set(value) <= {"addressing_style"}:
        raise ConfigError("config_kwargs can hold s3.addressing_style only", next_step="use the option itself")
    return list(value.items())
