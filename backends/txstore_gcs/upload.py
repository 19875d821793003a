"""The body of an upload: one request, streamed from where the bytes are.

A large object goes up bare (``uploadType=media``): its checksum is known only when it has passed, and a service that
must look for the end of a multipart body takes longer. A small one takes its metadata along.
"""

from __future__ import annotations

import base64
import json
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence

from txstore.checksum import BLOCK_BYTES, Buffer
from txstore.lean_http import sendable
from txstore.store import Source

_CONTENT_TYPE = "application/octet-stream"


def encode_crc32c(value: int) -> str:
    """As the JSON API writes it: base64 of the four bytes, most significant first."""
    return base64.b64encode(struct.pack(">I", value)).decode()


def decode_crc32c(text: str) -> int:
    """Inverse of `encode_crc32c`; ValueError if it is no such text."""
    packed = base64.b64decode(text, validate=True)
    if len(packed) != 4:
        raise ValueError("not a CRC32C")
    return int(struct.unpack(">I", packed)[0])


class SourceFailedError(Exception):
    """The source raised while it was being sent: carried past the HTTP layers, which would rename it."""


class Body:
    """An iterable that may be begun again, as after a refresh of the credentials. Never empty.

    Args:
        size: Length of the data in bytes.
        windows: Gives the data from its start, piece by piece.
        content_type: Of the whole.
        around: What is sent before and after the data.

    Attributes:
        started: Whether a byte of it may have left this process; until then the service cannot have applied it.
        failure: What the source raised.
    """

    def __init__(
        self,
        size: int,
        windows: Callable[[], Iterator[Buffer]],
        *,
        content_type: str = _CONTENT_TYPE,
        around: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self.upload_type = "multipart" if around[0] else "media"
        self.content_type = content_type
        self._head, self._tail = around
        self._size = size
        self._windows = windows
        self.started = False
        self.failure: BaseException | None = None

    def __len__(self) -> int:
        return len(self._head) + self._size + len(self._tail)

    def __iter__(self) -> Iterator[Buffer]:
        # Asked for only when the connection stands and the headers are sent.
        self.started = True
        yield self._head
        try:
            yield from self._windows()
        except Exception as error:
            self.failure = error
            raise SourceFailedError from error
        yield self._tail


def with_metadata(name: str, data: Sequence[Buffer], crc32c: int) -> Body:
    """Metadata and data in one multipart/related body: the service refuses other bytes than `crc32c` says."""
    # no-store: GCS serves publicly readable objects from caches otherwise, and a reader must never see an old one.
    metadata = {
        "name": name,
        "crc32c": encode_crc32c(crc32c),
        "cacheControl": "no-store",
        "contentType": _CONTENT_TYPE,
    }
    boundary = secrets.token_hex(24)
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(metadata)}\r\n"
        f"--{boundary}\r\nContent-Type: {_CONTENT_TYPE}\r\n\r\n"
    )
    return Body(
        sum(memoryview(one).nbytes for one in data),
        lambda: sendable(data, BLOCK_BYTES),
        content_type=f'multipart/related; boundary="{boundary}"',
        around=(head.encode(), f"\r\n--{boundary}--\r\n".encode()),
    )


def read_range(source: Source, start: int, stop: int) -> Sequence[Buffer]:
    """The bytes of a range, all of them: a short body would leave the service waiting for the rest."""
    data = source.pieces(start, stop) if stop > start else ()
    if (count := sum(memoryview(one).nbytes for one in data)) != stop - start:
        raise ValueError(f"the source gave {count} bytes for {start}:{stop}")
    return data


def windows_of(source: Source, window_bytes: int) -> Callable[[], Iterator[Buffer]]:
    """Reads `source` front to back; `window_bytes` is a multiple of the block size."""

    def windows() -> Iterator[Buffer]:
        for start in range(0, source.size, window_bytes):
            # Each piece has `connect_timeout_s` to go out: urllib3 sets the read timeout only when all is sent.
            yield from sendable(read_range(source, start, min(start + window_bytes, source.size)), BLOCK_BYTES)

    return windows
