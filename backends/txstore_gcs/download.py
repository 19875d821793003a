"""One ranged read, pinned to a generation, that goes on from the last good byte when its connection breaks."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import requests

from txstore.errors import NotFoundError, TransientError
from txstore.lean_http import read_into
from txstore.retry import Retrier, RetryCounts, RetryPolicy
from txstore_gcs.client import Call
from txstore_gcs.errors import TRANSPORT, translate, unclear

log = logging.getLogger(__name__)

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)", re.ASCII)
_MOST_RESUMES = 16
# Only for going on in the middle of a body; a read that has not begun is repeated by RetryingStore.
_RESUME = RetryPolicy(attempts=4, deadline_s=30.0)

Opener = Callable[[Call, str], AbstractContextManager[requests.Response]]
"""Sends a call about a key and yields a good answer (200, 206 or 416); other answers are raised."""


class RangeReader:
    """Bytes `start` to `stop` of one object, piece by piece.

    Args:
        opened: Sends one request.
        call: The request without its range.
        key: The object's key.
        start: First byte.
        stop: End of the range; None for the end of the object.
        piece_bytes: Longest piece.
        into: Where all of them go, as long as the range; else each has memory of its own.
        counts: Where resumptions are counted.
    """

    def __init__(
        self,
        opened: Opener,
        call: Call,
        key: str,
        *,
        start: int,
        stop: int | None,
        piece_bytes: int,
        into: memoryview | None = None,
        counts: RetryCounts | None = None,
    ) -> None:
        self._opened = opened
        self._call = call
        self._key = key
        self._start = self._position = start
        self._stop = stop
        self._piece_bytes = piece_bytes
        self._into = into
        self._total: int | None = None
        self._version = ""
        self._retrier = Retrier(_RESUME, counts=counts)

    def pieces(self) -> Iterator[memoryview]:
        """The bytes, in order, each once.

        Raises:
            NotFoundError: No such object.
            TransientError: The object was replaced meanwhile, or the connection broke too often.
        """
        resumes = 0
        while not self._complete():
            with ExitStack() as stack:
                begun = self._position > self._start
                response = self._retrier.call(self._open, stack) if begun else self._open(stack)
                try:
                    yield from self._body(response)
                except TransientError as error:
                    resumes += 1
                    if self._position == self._start or resumes > _MOST_RESUMES:
                        raise
                    self._retrier.counts.add(error)
                    log.debug("going on with %s from byte %d: %s", self._key, self._position, error)

    def _complete(self) -> bool:
        if self._total is None:
            return False
        return self._position >= (self._total if self._stop is None else min(self._stop, self._total))

    def _open(self, stack: ExitStack) -> requests.Response:
        last = "" if self._stop is None else str(self._stop - 1)
        headers = {"Range": f"bytes={self._position}-{last}"}
        call = Call(method="GET", path=self._call.path, params=self._call.params, headers=headers)
        try:
            response = stack.enter_context(self._opened(call, self._key))
        except NotFoundError as error:
            if self._position == self._start:
                raise
            raise self._replaced() from error
        self._pin(response)
        self._learn_total(response)
        return response

    def _pin(self, response: requests.Response) -> None:
        # Compared here, since a replaced object would otherwise be read half old, half new; and some servers ignore
        # a condition in a GET. A server that names no version cannot be gone on with.
        version = response.headers.get("x-goog-generation", "") or response.headers.get("ETag", "")
        if not version and response.status_code != 416:  # every object has one: this is not an answer about an object
            raise unclear("the answer names no version of the object", self._key, "cut reply", may_apply=False)
        if self._position > self._start and (not version or version != self._version):
            raise self._replaced()
        self._version = version

    def _replaced(self) -> TransientError:
        return TransientError("the object was replaced or removed while it was being read", key=self._key).because(
            "generation changed"
        )

    def _learn_total(self, response: requests.Response) -> None:
        if response.status_code == 416:
            self._total = self._position  # nothing lies here or beyond
            # Left unread, so that the connection is not used again: fake-gcs-server ends it after this answer, and
            # the next request would be reset.
            return
        length = response.headers.get("Content-Length", "")
        if response.status_code == 200:
            if self._position == 0 and length.isdigit():
                self._total = int(length)
                return
        elif found := _RANGE.fullmatch(response.headers.get("Content-Range", "")):
            first, last, total = map(int, found.groups())
            if first == self._position and (last + 1 == total or last + 1 == self._stop):
                self._total = total
                return
        raise unclear("the answer is not the range that was asked for", self._key, "wrong range", may_apply=False)

    def _body(self, response: requests.Response) -> Iterator[memoryview]:
        assert self._total is not None
        end = self._total if self._stop is None else min(self._stop, self._total)
        while self._position < end:
            piece = self._room(min(self._piece_bytes, end - self._position))
            try:
                count = read_into(response.raw, piece)
                if self._position + count == end:
                    response.raw.read()  # nothing is left: the connection is free again
            except TRANSPORT as error:
                raise translate(error, self._key, may_apply=False) from error
            if not count:
                raise unclear("the body ended early", self._key, "truncated", may_apply=False)
            self._position += count
            yield piece[:count]

    def _room(self, size: int) -> memoryview:
        if self._into is None:
            return memoryview(bytearray(size))
        at = self._position - self._start
        return self._into[at : at + size]
