"""A ranged read straight into memory, taken up again at the last good byte of the same version of the object."""

from __future__ import annotations

import re

from azure.core.rest import HttpResponse
from urllib3.exceptions import HTTPError

from txstore.errors import StoreError, TransientError, TxStoreError
from txstore.lean_http import read_into
from txstore.retry import Retrier
from txstore_azure.client import Blob, Client, Request, body_of

_PIECE_BYTES = 1 << 20
_PROGRESS_BYTES = 1 << 20
"""A read that got this far begins a new budget: a long range over a bad line is not given up."""

# Azurite answers an empty range with its last byte before its first one, where the service has 416.
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(-?\d+)/(\d+)")


class Reading:
    """One range of one object.

    Args:
        client: Sends the requests.
        blob: Key and URL of the object.
        start: First byte of the range.
        size: Length of the range, or None to the object's end.
        into: Where the bytes go, `size` long; None to have memory made for what there is.
    """

    def __init__(
        self, client: Client, blob: Blob, start: int, size: int | None, *, into: memoryview | None = None
    ) -> None:
        self._client = client
        self._blob = blob
        self._start = start
        self._size = size
        self._into = into
        self._view: memoryview | None = None
        self._etag = ""
        self.done = 0

    def run(self, retrier: Retrier) -> memoryview:
        """Read the range; gives the part of the memory that was filled, short only at the end of the object.

        Raises:
            NotFoundError: No such object.
        """

        def step() -> bool:
            before = self.done
            try:
                self._go_on()
            except TransientError as error:
                if error.cause.startswith("412"):
                    # Replaced while it was read: bytes of two versions must not be mixed.
                    self._view, self._etag, self.done = None, "", 0
                elif self.done - before >= _PROGRESS_BYTES:
                    retrier.counts.add(error)
                    return False
                raise
            return True

        while not retrier.call(step):
            pass
        return self._view if self._view is not None else memoryview(b"")

    def _go_on(self) -> None:
        if self._view is not None and self.done == self._view.nbytes:
            return
        first = self._start + self.done
        last = "" if self._size is None else str(self._start + self._size - 1)
        headers = {"x-ms-range": f"bytes={first}-{last}"} | ({"If-Match": self._etag} if self._etag else {})
        request = Request(
            method="GET", url=self._blob.url, key=self._blob.key, doing="read", expect=206, headers=headers
        )
        try:
            with self._client.stream(request) as response:
                self._take(request, response, first)
        except StoreError as error:
            # Nothing lies at or behind `start`; an absent object is answered with 404.
            if not error.cause.startswith("416"):
                raise

    def _take(self, request: Request, response: HttpResponse, first: int) -> None:
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        etag = response.headers.get("ETag", "")
        if found is None or int(found[1]) != first or not etag:
            raise request.garbled("with another range")
        if self._view is None:
            there = int(found[3]) - first
            wanted = there if self._size is None else min(self._size, there)
            self._view = memoryview(bytearray(wanted)) if self._into is None else self._into[:wanted]
            self._etag = etag
        if int(found[2]) + 1 != self._start + self._view.nbytes:
            raise request.garbled("with another range")
        raw = body_of(response)
        try:
            while self.done < self._view.nbytes:
                with self._view[self.done : self.done + _PIECE_BYTES] as piece:
                    count = read_into(raw, piece)
                if not count:
                    raise request.garbled("with too few bytes")
                self.done += count
            if raw.read():  # nothing, and the connection is free again
                self.done = first - self._start  # what this answer brought is not believed
                raise request.garbled("with too many bytes")
        except (OSError, HTTPError) as error:
            if isinstance(error, TxStoreError):
                raise
            raise request.failed(error) from error
