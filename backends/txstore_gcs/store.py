"""GcsStore: a prefix of a bucket as a store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Literal, NoReturn, TypeVar
from urllib.parse import quote

import msgspec
import requests

from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.errors import AlreadyExistsError, ConfigError, NotFoundError, TxStoreError
from txstore.keys import check_key, is_key
from txstore.retry import RetryCounts
from txstore.store import ObjectInfo, Source, Store
from txstore_gcs.client import Call, Client, Reply
from txstore_gcs.config import GcsConfig
from txstore_gcs.download import RangeReader
from txstore_gcs.errors import CAUGHT, refused, translate, unclear
from txstore_gcs.upload import Body, SourceFailedError, decode_crc32c, read_range, windows_of, with_metadata

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_LONGEST_NAME_BYTES = 1024
_PAGE = 1000
_FIELDS = "name,size,crc32c,updated"


class _Object(msgspec.Struct):
    """The part of an object resource that is asked for. The API writes 64-bit numbers as text."""

    name: str
    size: str
    crc32c: str | None = None
    updated: datetime | None = None


class _Page(msgspec.Struct, rename="camel"):
    kind: Literal["storage#objects"]  # else any JSON from a wrong endpoint would be an empty listing: "no checkpoint"
    items: list[_Object] = []
    next_page_token: str | None = None


class GcsStore(Store):
    """Objects are named by the prefix, a slash and the key.

    Args:
        config: Where the store lies and how it is reached.
    """

    streams = 8
    read_bytes = 32 * BLOCK_BYTES

    def __init__(self, config: GcsConfig) -> None:
        self.url = config.url
        self._config = config
        self._client = Client(config)
        self._counts = RetryCounts()
        self._root = config.prefix + "/" if config.prefix else ""
        self._objects = f"/storage/v1/b/{config.bucket}/o"
        self._uploads = f"/upload/storage/v1/b/{config.bucket}/o"

    @property
    def retries(self) -> dict[str, int]:
        """Reads that were gone on with after a break, by cause."""
        return self._counts.by_cause()

    def __repr__(self) -> str:
        return f"GcsStore({self.url!r})"

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`: one request, streamed; the stored checksum is compared with the source's.

        What fits into one window is read first, so that its checksum goes along and the service refuses other bytes.
        """
        name = self._name(key)
        if source.size <= self._config.window_bytes:
            data = read_range(source, 0, source.size)
            body = with_metadata(name, data, source.crc32c(0, source.size))
        else:
            body = Body(source.size, windows_of(source, self._config.window_bytes))
        reply = self._upload(key, name, body)
        return self._stored(reply, key, source.size, source.crc32c(0, source.size))

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: one request with ``ifGenerationMatch=0``, which only the first can satisfy."""
        name, checksum = self._name(key), crc32c(data)
        reply = self._upload(key, name, with_metadata(name, (data,), checksum), ifGenerationMatch="0")
        if reply.status == 412:
            raise AlreadyExistsError("object exists", key=key).because("412")
        self._stored(reply, key, len(data), checksum)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        if size == 0:
            self.head(key)
            return b""
        stop = None if size is None else start + size
        pieces = list(self._pieces(key, start, stop, self._config.window_bytes))
        return b"".join(pieces)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`: from the socket to its place, without a copy."""
        with buffer.cast("B") as view:
            if not view.nbytes:
                self.head(key)
                return 0
            return sum(len(piece) for piece in self._pieces(key, start, start + view.nbytes, BLOCK_BYTES, view))

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        call = Call(method="GET", path=self._path(key), params={"fields": _FIELDS})
        reply = self._call(call, key)
        if reply.status == 404:
            self._absent(key)
        if reply.status != 200:
            raise self._refused(reply, key)
        return _info(_decode(reply.body, _Object, key), key)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. Names that are no keys, such as a console's "folders", are passed over."""
        params = {
            "prefix": self._root + prefix,
            "fields": f"kind,nextPageToken,items({_FIELDS})",
            "maxResults": str(_PAGE),
        }
        if start_after:
            params["startOffset"] = self._root + start_after
        while True:
            page = self._page(params, prefix)
            for item in page.items:
                key = item.name[len(self._root) :]
                if key > start_after and is_key(key):
                    yield _info(item, key)
            if not page.next_page_token:
                return
            params["pageToken"] = page.next_page_token

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        reply = self._call(Call(method="DELETE", path=self._path(key)), key, may_apply=True)
        if reply.status == 404:
            self._check_bucket(key)
        elif reply.status not in {200, 204}:
            raise self._refused(reply, key, may_apply=True)

    def close(self) -> None:
        """Close idle connections."""
        self._client.close()

    def _name(self, key: str) -> str:
        name = self._root + check_key(key)
        if len(name.encode()) > _LONGEST_NAME_BYTES:
            raise ConfigError(
                f"the object's name would be longer than {_LONGEST_NAME_BYTES} bytes",
                key=key,
                next_step="use a shorter prefix in the store's URL",
            )
        return name

    def _path(self, key: str) -> str:
        return f"{self._objects}/{quote(self._name(key), safe='')}"

    def _call(self, call: Call, key: str, *, may_apply: bool = False) -> Reply:
        try:
            return self._client.call(call)
        except CAUGHT as error:
            raise translate(error, key, may_apply=may_apply) from error

    def _upload(self, key: str, name: str, body: Body, **conditions: str) -> Reply:
        params = {"uploadType": body.upload_type, "name": name, "fields": _FIELDS, **conditions}
        headers = {"Content-Type": body.content_type}
        call = Call(method="POST", path=self._uploads, params=params, headers=headers, body=body)
        try:
            return self._client.call(call)
        except SourceFailedError as error:
            assert body.failure is not None
            raise body.failure from error.__cause__
        except CAUGHT as error:
            raise translate(error, key, may_apply=body.started) from error

    def _stored(self, reply: Reply, key: str, size: int, checksum: int) -> ObjectInfo:
        """What the service says that it stored, if that is what was sent."""
        if reply.status == 404:
            raise self._no_bucket(key)
        if reply.status != 200:
            raise self._refused(reply, key, may_apply=True)
        info = _info(_decode(reply.body, _Object, key, may_apply=True), key, may_apply=True)
        if (info.size, info.crc32c) != (size, checksum):
            raise unclear("the service stored other bytes than were sent", key, "stored differently", may_apply=True)
        return info

    def _pieces(
        self, key: str, start: int, stop: int | None, piece_bytes: int, into: memoryview | None = None
    ) -> Iterator[memoryview]:
        call = Call(method="GET", path=self._path(key), params={"alt": "media"})
        reader = RangeReader(
            self._opened,
            call,
            key,
            start=start,
            stop=stop,
            piece_bytes=piece_bytes,
            into=into,
            counts=self._counts,
        )
        return reader.pieces()

    @contextmanager
    def _opened(self, call: Call, key: str) -> Iterator[requests.Response]:
        reply: Reply | None = None
        try:
            with self._client.stream(call) as response:
                if response.status_code in {200, 206, 416}:
                    yield response
                    return
                reply = Reply(response.status_code, response.headers, response.content)
        except CAUGHT as error:
            raise translate(error, key, may_apply=False) from error
        # Outside the block: the look at the bucket is a request of its own, and needs a free slot.
        if reply.status == 404:
            self._absent(key)
        raise self._refused(reply, key)

    def _page(self, params: dict[str, str], prefix: str) -> _Page:
        reply = self._call(Call(method="GET", path=self._objects, params=params), prefix)
        if reply.status == 404:
            raise self._no_bucket(prefix)
        if reply.status != 200:
            raise self._refused(reply, prefix)
        return _decode(reply.body, _Page, prefix)

    def _absent(self, key: str) -> NoReturn:
        """A missing bucket answers 404 like a missing object, and must never look like one."""
        self._check_bucket(key)
        raise NotFoundError("no such object", key=key).because("404")

    def _check_bucket(self, key: str) -> None:
        # A listing, since looking at the bucket itself needs a permission that object roles lack.
        self._page({"prefix": self._root, "fields": "kind,nextPageToken", "maxResults": "1"}, key)

    def _no_bucket(self, key: str) -> ConfigError:
        return ConfigError(
            f"no such bucket: {self._config.bucket}",
            key=key,
            next_step="check its name and the endpoint, or create it: txstore never creates buckets",
        )

    def _refused(self, reply: Reply, key: str, *, may_apply: bool = False) -> TxStoreError:
        return refused(reply.status, reply.headers, reply.body, key, may_apply=may_apply)


def _decode(body: bytes, kind: type[_T], key: str, *, may_apply: bool = False) -> _T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise unclear("the service's answer is garbled", key, "garbled", may_apply=may_apply) from error


def _info(item: _Object, key: str, *, may_apply: bool = False) -> ObjectInfo:
    try:
        checksum = None if item.crc32c is None else decode_crc32c(item.crc32c)
        size = int(item.size)
    except ValueError as error:
        raise unclear("the service's answer is garbled", key, "garbled", may_apply=may_apply) from error
    return ObjectInfo(key, size, checksum, item.updated.timestamp() if item.updated else None)
