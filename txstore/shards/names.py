"""Names of state items in documents and headers: any str that Python knows, made into valid Unicode."""

from __future__ import annotations

from txstore.errors import FormatError


def escape(text: str) -> str:
    """Reversible ASCII form of any str, lone surrogates included."""
    return text.encode("unicode_escape").decode("ascii")


def unescape(text: str, key: str) -> str:
    """Inverse of `escape`; FormatError for anything that `escape` cannot have made."""
    try:
        plain = text.encode("ascii").decode("unicode_escape")
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        raise FormatError(f"not an escaped name: {text!r}", key=key) from error
    return plain


def header_name(fqn: str) -> str:
    """The item's name in a safetensors header, which is for stock readers only; ours go by position.

    ``__metadata__`` is the header's own, and a lone surrogate is no valid JSON text.
    """
    if fqn == "__metadata__":
        return "__metadata__.value"
    try:
        fqn.encode()
    except UnicodeEncodeError:
        return escape(fqn)
    return fqn
