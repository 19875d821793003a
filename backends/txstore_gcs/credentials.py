"""From the ``token`` option to google-auth credentials, by the SDK's conventions and the names that gcsfs gave them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import google.auth
from google.auth import compute_engine
from google.auth.credentials import AnonymousCredentials, Credentials, with_scopes_if_required
from google.auth.exceptions import GoogleAuthError
from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account

from txstore.errors import ConfigError
from txstore_gcs.config import GcsConfig

SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)

_KINDS: dict[object, Callable[[dict[str, object]], Any]] = {
    "service_account": service_account.Credentials.from_service_account_info,
    "authorized_user": user_credentials.Credentials.from_authorized_user_info,
}


def load(config: GcsConfig) -> Credentials:
    """The credentials to sign requests with. Asks no server yet.

    Raises:
        ConfigError: The option names none.
        google.auth.exceptions.GoogleAuthError: There are none, or they are malformed.
    """
    token = config.token
    if token is None and os.environ.get("STORAGE_EMULATOR_HOST") and config.endpoint_url is None:
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    given = _named(token) if token is None or isinstance(token, str) else _given(token)
    found: Credentials = with_scopes_if_required(given, SCOPES)  # type: ignore[no-untyped-call]
    if config.quota_project is not None:
        if not hasattr(found, "with_quota_project"):
            raise ConfigError("these credentials cannot take a quota_project", next_step="leave quota_project out")
        found = found.with_quota_project(config.quota_project)
    return found


def _named(token: str | None) -> Credentials:
    if token is None or token == "google_default":  # noqa: S105 - gcsfs's word for it
        return _default()
    if token == "anon":  # noqa: S105 - gcsfs's word for it
        return AnonymousCredentials()  # type: ignore[no-untyped-call]
    if token == "cloud":  # noqa: S105 - gcsfs's word for it
        return compute_engine.Credentials()  # type: ignore[no-untyped-call]
    try:
        with open(os.path.expanduser(token), encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        # The text may be a secret that was given in the wrong place: neither it nor the cause's text is shown.
        raise ConfigError(
            f"token names no readable JSON file ({type(error).__name__})",
            next_step="give the path of a key file, google_default, cloud, anon, a dict, or a credentials object",
        ) from None
    return _given(content)


def _default() -> Credentials:
    try:
        found, _ = google.auth.default(scopes=SCOPES)
    except OSError as error:
        if isinstance(error, GoogleAuthError):
            raise
        raise ConfigError(
            f"the application default credentials cannot be read ({type(error).__name__})",
            next_step="check GOOGLE_APPLICATION_CREDENTIALS and the mode of that file",
        ) from error
    return found


def _given(token: object) -> Credentials:
    if isinstance(token, Credentials):
        return token
    if isinstance(token, Mapping):
        kind = token.get("type")
        try:
            if kind in _KINDS:
                made: Credentials = _KINDS[kind](dict(token))
                return made
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"token is not a valid {kind} key ({type(error).__name__})") from None
    raise ConfigError(
        "token is of no known kind",
        next_step="for workload identity and impersonation set GOOGLE_APPLICATION_CREDENTIALS and leave token out",
    )
