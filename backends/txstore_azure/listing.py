"""Pages of List Blobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from txstore.errors import FormatError, TransientError
from txstore.keys import check_key
from txstore.store import ObjectInfo


@dataclass(frozen=True, slots=True)
class Page:
    """One page: what it shows, and how to ask for the next one ("" on the last page)."""

    objects: list[ObjectInfo]
    marker: str


def parse_page(document: bytes, prefix: str) -> Page:
    """Read one page; keys are relative to `prefix`, and names that are no keys are passed over.

    Raises:
        TransientError: The document is cut or is none: "no checkpoint" must never be a guess.
    """
    try:
        root = ET.fromstring(document)  # noqa: S314 - from the service; expat bounds entity expansion
        blobs, marker = root.find("Blobs"), root.find("NextMarker")
        if root.tag != "EnumerationResults" or blobs is None:
            raise TransientError("a listing is not a list of blobs")
        objects = [info for blob in blobs.iter("Blob") if (info := _object(blob, prefix)) is not None]
    except (ET.ParseError, ValueError, TypeError) as error:
        raise TransientError("a listing cannot be read").because("garbled listing") from error
    return Page(objects, (marker.text or "") if marker is not None else "")


def _object(blob: ET.Element, prefix: str) -> ObjectInfo | None:
    name = blob.find("Name")
    if name is None or not name.text:
        raise ValueError("a blob without a name")
    text = unquote(name.text) if name.get("Encoded") == "true" else name.text
    if not text.startswith(prefix) or blob.findtext("Properties/ResourceType") == "directory":
        return None
    try:
        key = check_key(text[len(prefix) :])
    except FormatError:
        return None
    size = int(blob.findtext("Properties/Content-Length") or "")
    return ObjectInfo(key, size, None, modified_s(blob.findtext("Properties/Last-Modified")))


def modified_s(text: str | None) -> float | None:
    """An HTTP date as seconds since the epoch."""
    return parsedate_to_datetime(text).timestamp() if text else None


def in_order(pages: Iterator[Page], start_after: str) -> Iterator[ObjectInfo]:
    """The objects of all pages after a key.

    Raises:
        TransientError: The service gave them in another order, as an account with a hierarchical namespace may.
    """
    last = start_after
    for page in pages:
        for info in sorted(page.objects, key=lambda one: one.key):
            if info.key > start_after:
                if info.key < last:
                    raise TransientError("a listing is not in ascending order", key=info.key).because(
                        "unordered listing"
                    )
                last = info.key
                yield info
