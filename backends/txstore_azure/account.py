"""Which account, and with which credentials: options first, then the environment, as the Azure tools do."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from txstore.errors import ConfigError

PUBLIC_SUFFIX = ".blob.core.windows.net"

# The account and key that every storage emulator knows; published in its documentation.
_EMULATOR_ACCOUNT = "devstoreaccount1"
_EMULATOR_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_EMULATOR_URL = f"http://127.0.0.1:10000/{_EMULATOR_ACCOUNT}"

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_HOST = re.compile(r"[A-Za-z0-9.-]+(?::\d{1,5})?")

OPTIONS = (
    "account_host",
    "account_key",
    "account_name",
    "account_url",
    "anon",
    "connection_string",
    "credential",
    "sas_token",
)
"""The options that `resolve` reads, by the names that fsspec users know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the account's blobs are served, and what proves that we may use them."""

    name: str
    """Account name, or "" if the endpoint does not tell."""
    endpoint: str
    """Root URL of the account's blobs, without a trailing slash or a query."""
    key: str = field(default="", repr=False)
    sas_token: str = field(default="", repr=False)
    credential: Any = field(default=None, repr=False)
    """A credential object of the SDK, or None."""
    anonymous: bool = False

    @property
    def credential_expires(self) -> bool:
        """Whether a token is used that the SDK renews."""
        return not (self.key or self.sas_token or self.anonymous)

    @property
    def label(self) -> str:
        """The account as a canonical URL names it: its name in the public cloud, else the host."""
        host = urlsplit(self.endpoint).netloc.lower()
        return host.removesuffix(PUBLIC_SUFFIX) if host.endswith(PUBLIC_SUFFIX) else host


def resolve(named: str, options: Mapping[str, Any], env: Mapping[str, str]) -> Account:
    """Find the account.

    Args:
        named: The account as the URL names it, a name or a host, or "".
        options: What the caller gave, by the names in `OPTIONS`; all but `credential` and `anon` are strings.
        env: The environment.

    Raises:
        ConfigError: No account, two accounts, or a malformed credential. Messages hold no secret.
    """
    account = _from_settings(named, options, env)
    if named and not _agrees(named, account):
        raise ConfigError(
            f"the URL names the account {named!r}, but the settings are for {account.name or account.label!r}",
            next_step="give the credentials of the account in the URL, or leave the account out of the URL",
        )
    return account


def _agrees(named: str, account: Account) -> bool:
    return named in {account.name, account.label, urlsplit(account.endpoint).netloc.lower()}


def _from_settings(named: str, options: Mapping[str, Any], env: Mapping[str, str]) -> Account:
    explicit = any(options.get(name) for name in ("account_url", "account_name", "account_key", "sas_token"))
    connection = options.get("connection_string") or (
        "" if explicit else env.get("AZURE_STORAGE_CONNECTION_STRING", "")
    )
    parsed = _parse_connection_string(connection) if connection else None
    endpoint, url_sas = _endpoint(named, options, env, parsed)
    name = options.get("account_name") or (parsed.name if parsed else "") or _name_of(endpoint)
    ours = not named or _env_account(env) in {None, named, name}
    secret = _secret(options, env if ours else {}, parsed, url_sas)
    return Account(name=name, endpoint=endpoint, **secret)


def _endpoint(
    named: str, options: Mapping[str, Any], env: Mapping[str, str], parsed: Account | None
) -> tuple[str, str]:
    if url := options.get("account_url"):
        return _split_account_url(url)
    if parsed:
        return parsed.endpoint, ""
    if host := options.get("account_host"):
        return f"https://{_check_host(host)}", ""
    if "." in named or ":" in named:
        return f"https://{_check_host(named)}", ""
    name = named or options.get("account_name") or _env_account(env)
    if not name:
        raise ConfigError(
            "no storage account is named",
            next_step="use az://container@account/prefix, or set AZURE_STORAGE_ACCOUNT or "
            "AZURE_STORAGE_CONNECTION_STRING",
        )
    if not _ACCOUNT.fullmatch(name):
        raise ConfigError(f"not the name of a storage account: {name[:80]!r}", next_step="3 to 24 of a-z 0-9")
    return f"https://{name}{PUBLIC_SUFFIX}", ""


def _env_account(env: Mapping[str, str]) -> str | None:
    return env.get("AZURE_STORAGE_ACCOUNT_NAME") or env.get("AZURE_STORAGE_ACCOUNT") or None


def _secret(options: Mapping[str, Any], env: Mapping[str, str], parsed: Account | None, url_sas: str) -> dict[str, Any]:
    """The first of: anon, credential, key, SAS, connection string, then the environment's key and SAS."""
    if options.get("anon"):
        return {"anonymous": True}
    credential = options.get("credential")
    if credential is not None and not isinstance(credential, str):
        return {"credential": credential}
    text = credential or ""
    # As adlfs and the SDK take a string: a SAS has a signature, a key is base64.
    candidates = [
        ("sas_token" if "sig=" in text else "key", text),
        ("key", options.get("account_key")),
        ("sas_token", options.get("sas_token") or url_sas),
        ("key", parsed.key if parsed else ""),
        ("sas_token", parsed.sas_token if parsed else ""),
        ("key", env.get("AZURE_STORAGE_KEY") or env.get("AZURE_STORAGE_ACCOUNT_KEY")),
        ("sas_token", env.get("AZURE_STORAGE_SAS_TOKEN")),
    ]
    for name, value in candidates:
        if value:
            return {name: _check_key(value) if name == "key" else _check_sas(value)}
    return {}


def _check_key(key: str) -> str:
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        # The cause is left out: its text may quote the key.
        raise ConfigError(
            "the account key is not valid base64", next_step="copy it again, without quotes or blanks"
        ) from None
    return key


def _check_sas(token: str) -> str:
    token = token.strip().lstrip("?")
    if "sig=" not in token:
        raise ConfigError("the SAS token has no signature", next_step="give the whole token: sv=...&sp=...&sig=...")
    return token


def _check_host(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ConfigError("not the host of a storage account", next_step="for example account.blob.core.windows.net")
    # The Blob endpoint serves the same objects, and conditional Put Blob exists only there.
    return host.lower().replace(".dfs.", ".blob.", 1)


_ACCOUNT_URL_HINT = "for example https://account.blob.core.windows.net"


def _split_account_url(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError: no number, or out of range
    except ValueError as error:
        raise ConfigError("not an account URL", next_step=_ACCOUNT_URL_HINT) from error
    if parts.scheme not in {"http", "https"} or not parts.netloc or "@" in parts.netloc or parts.fragment:
        raise ConfigError("not an account URL", next_step=_ACCOUNT_URL_HINT)
    endpoint = f"{parts.scheme}://{_check_host(parts.netloc)}{parts.path.rstrip('/')}"
    return endpoint, _check_sas(parts.query) if parts.query else ""


def _name_of(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    host = parts.netloc
    if re.fullmatch(r"[\d.]+(:\d+)?|localhost(:\d+)?", host):
        return parts.path.strip("/")
    # account.z12.blob.storage.azure.net and account.blob.core.windows.net alike; -secondary is read-only.
    return host.partition(".")[0]


def _parse_connection_string(text: str) -> Account:
    fields = {}
    for part in text.strip().strip(";").split(";"):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("the connection string is malformed", next_step="it reads Name=value;Name=value")
        fields[name.strip().lower()] = value.strip()
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        return Account(name=_EMULATOR_ACCOUNT, endpoint=_EMULATOR_URL, key=_EMULATOR_KEY)
    name = fields.get("accountname", "")
    endpoint, url_sas = _split_account_url(fields["blobendpoint"]) if fields.get("blobendpoint") else ("", "")
    if not endpoint and name:
        suffix = fields.get("endpointsuffix", "core.windows.net")
        protocol = fields.get("defaultendpointsprotocol", "https")
        endpoint, _ = _split_account_url(f"{protocol}://{name}.blob.{suffix}")
    if not endpoint:
        raise ConfigError("the connection string names no account", next_step="it needs AccountName or BlobEndpoint")
    key, sas = fields.get("accountkey", ""), fields.get("sharedaccesssignature", "") or url_sas
    return Account(
        name=name or _name_of(endpoint),
        endpoint=endpoint,
        key=_check_key(key) if key else "",
        sas_token=_check_sas(sas) if sas and not key else "",
    )
