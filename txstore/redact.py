"""Text from outside made fit to print: URLs without secrets, names without terminal controls."""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/+)(?P<rest>.*)", re.DOTALL)
# Linear in the length of the text: a name is looked at from its beginning only, and never given back in parts.
_SECRET = re.compile(
    r"(?<![\w.-])(?=[\w.-]*?(?:secret|token|passw(?:or)?d|passphrase|pwd|credential|signature|access[_-]?key"
    r"|account[_-]?key|api[_-]?key|\bsig|\bsas|\bkey))(?P<name>[\w.-]++)(?P<equals>=|%3[dD])(?P<value>[^&;,#?\s/]+)",
    re.IGNORECASE,
)
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,64}://[^\s'\"]+")
# In abfs://container@account.dfs.core.windows.net/ a container stands where other URLs have user and password.
_CONTAINER_URL = re.compile(r"(?:az|abfss?):/+(?:\$root|[a-z0-9-]{3,63})@[^/@]*(?:/.*)?", re.IGNORECASE | re.DOTALL)
_SHORTEST = 4
"""Secrets shorter than this are not looked for in other text: they would hide every word that holds them."""


def redact(url: str) -> str:
    """`url` without user information, query values, fragment and secret parameters; use it wherever one is printed.

    A text without a scheme is a path: only parameters with a telling name, such as ``token=``, are hidden.
    """
    found = _URL.fullmatch(url)
    text = url
    if found:
        rest, mark, _ = found["rest"].partition("#")
        place, question, query = rest.partition("?")
        text = found["scheme"] + _without_user(found["scheme"], place)
        if question:
            text += "?" + "&".join(_without_value(part) for part in query.split("&"))
        if mark:
            text += "#" + HIDDEN
    return _SECRET.sub(lambda one: f"{one['name']}{one['equals']}{HIDDEN}", text)


def _without_user(scheme: str, place: str) -> str:
    if _CONTAINER_URL.fullmatch(scheme + place):
        return place
    host, slash, path = place.partition("/")
    if "@" in host:
        return HIDDEN + "@" + host.rpartition("@")[2] + slash + path
    if ":" in host and "@" in path:
        # A password with a slash in it that nobody escaped: whatever comes before the last @ may be secret.
        return HIDDEN + "@" + path.rpartition("@")[2]
    return place


def _without_value(parameter: str) -> str:
    name, equals, _ = parameter.partition("=")
    return name + equals + HIDDEN if equals else HIDDEN


def _secrets_in(url: str) -> set[str]:
    """The parts of `url` that `redact` hides."""
    found = _URL.fullmatch(url)
    secrets = {one["value"] for one in _SECRET.finditer(url)}
    if found:
        rest, _, fragment = found["rest"].partition("#")
        place, _, query = rest.partition("?")
        user = place.rpartition("@")[0] if _without_user(found["scheme"], place) != place else ""
        secrets |= {fragment, query, user, *user.split(":", 1)}
        secrets |= {part.partition("=")[2] or part for part in query.split("&")}
    return {text for secret in secrets for text in (secret, unquote(secret)) if len(text) >= _SHORTEST}


def scrub(text: str, url: str) -> str:
    """`text`, such as a backend's error, without the secrets that `url` holds."""
    text = text.replace(url, redact(url))
    for secret in sorted(_secrets_in(url), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redact_text(text: str) -> str:
    """`text` with every URL in it redacted."""
    return _URL_IN_TEXT.sub(lambda one: redact(one[0]), text)


def printable(text: str) -> str:
    r"""`text` on one line with everything that is not visible escaped (``\x1b``, ``\u202e``).

    Names come out of documents that others wrote: a raw escape sequence could rewrite what the terminal
    shows, and a bidirectional override could make one name look like another.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
