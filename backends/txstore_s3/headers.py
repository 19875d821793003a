"""What travels in headers: checksums, times, and the question for an object."""

from __future__ import annotations

import base64
from email.utils import parsedate_to_datetime

from txstore_s3.wire import Request

CRC_HEADER = "x-amz-checksum-crc32c"


def encode_crc(crc: int) -> str:
    """A CRC32C as S3 writes it."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


def decode_crc(text: str | None) -> int | None:
    """The CRC32C of the whole object, or None if there is none: also if it is one of the parts' checksums ("-3")."""
    if not text or "-" in text:
        return None
    try:
        return int.from_bytes(base64.b64decode(text, validate=True), "big")
    except ValueError:
        return None


def modified_s(text: str | None) -> float | None:
    """Seconds since the epoch; None if it is no time."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None


def head_of(name: str, *, checksum: bool) -> Request:
    """HeadObject; with `checksum` the answer holds it, if the store keeps one."""
    mode = {"x-amz-checksum-mode": "ENABLED"} if checksum else {}
    return Request(operation="HeadObject", method="HEAD", name=name, headers=mode)
