"""S3Store: a prefix in a bucket as a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
)
from txstore.keys import check_key
from txstore.retry import Retrier, RetryPolicy
from txstore.store import ObjectInfo, Source, Store, Unfinished
from txstore_s3 import reading
from txstore_s3.client import Clients
from txstore_s3.config import S3Config
from txstore_s3.errors import Call, UploadGoneError, code_of
from txstore_s3.headers import CRC_HEADER, decode_crc, encode_crc, head_of, modified_s
from txstore_s3.upload import Upload, abort
from txstore_s3.wire import Body, Request

_SMALL_BYTES = 1 << 20
"""Up to this a body is sent as bytes, together with the headers."""

_PART_POLICY = RetryPolicy(attempts=5, deadline_s=60.0, longest_wait_s=10.0)
_UPLOAD_MARK = "/.upload/"
_NOT_KNOWN = frozenset({405, 501})
_NO_HEADERS: Mapping[str, str] = {}


class S3Store(Store):
    """Objects below a prefix of one bucket.

    `create` is PutObject with ``If-None-Match: *``; large objects are multipart uploads.

    Args:
        config: Where the store lies and how it is reached.
        retrier: Repeats parts of one verb; whole verbs are repeated by `txstore.retry.RetryingStore`.
    """

    streams = 8
    read_bytes = 32 * BLOCK_BYTES

    def __init__(self, config: S3Config, retrier: Retrier | None = None) -> None:
        self.url = config.url
        self._config = config
        self._clients = Clients(config)
        self._retrier = retrier or Retrier(_PART_POLICY)
        self._root = config.prefix + "/" if config.prefix else ""
        self._bucket_seen = False

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    @property
    def retries(self) -> dict[str, int]:
        """Parts of verbs that were repeated so far, by cause."""
        return self._retrier.counts.by_cause()

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`: PutObject, or a multipart upload above `S3Config.part_bytes`."""
        names = self._names(key)
        if source.size > self._config.part_bytes:
            crc = Upload(self._clients, self._retrier, names, key, source, extra=self._encryption()).run()
            return ObjectInfo(key, source.size, crc)
        data = source.pieces(0, source.size)
        crc = source.crc32c(0, source.size)
        body = b"".join(data) if source.size <= _SMALL_BYTES else Body(data)
        answer = self._put_object(Call("PutObject", key, "write"), body, crc)
        self._bucket_seen = True
        stored = decode_crc(answer.get(CRC_HEADER))
        if stored not in {None, crc}:
            raise IntegrityError("the store reports another checksum than was sent", key=key)
        return ObjectInfo(key, source.size, stored)

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: one PutObject with ``If-None-Match: *``."""
        self._put_object(Call("PutObject", key, "create"), bytes(data), crc32c(data), {"If-None-Match": "*"})

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        name = self._name(key)
        if size == 0:
            self.head(key)
            return b""
        return reading.read(self._clients, self._retrier, name, key, start=start, size=size)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`."""
        name = self._name(key)
        if not buffer.nbytes:
            self.head(key)
            return 0
        return reading.read_into(self._clients, self._retrier, name, key, start=start, buffer=buffer.cast("B"))

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        request = head_of(self._name(key), checksum=self._config.checksum == "crc32c")
        try:
            answer = self._clients.tell(Call("HeadObject", key), request)
        except NotFoundError:
            self._check_bucket(key)
            raise
        size = answer.get("Content-Length", "")
        if not size.isdigit():
            raise _cut_off(key, TransientError)
        self._bucket_seen = True
        return ObjectInfo(key, int(size), decode_crc(answer.get(CRC_HEADER)), modified_s(answer.get("Last-Modified")))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`: ListObjectsV2, page by page.

        Amazon lists in order of the key, so its pages are passed on as they come. Others may walk directories
        (SeaweedFS gives ``a/b`` before ``a+``), and skip by that order: there everything is read, then sorted.

        Raises:
            StoreError: Amazon's listing was not in ascending order: nothing in it can be trusted to be all.
        """
        if not _possible(prefix):
            return
        ordered = self._clients.amazon
        from_here = {"StartAfter": self._root + start_after} if ordered and start_after else {}
        found = self._listed(prefix, start_after, from_here)
        last = ""
        for info in found if ordered else sorted(found, key=lambda info: info.key):
            if info.key <= last:
                raise StoreError("the store lists keys out of order", key=info.key)
            last = info.key
            yield info

    def _listed(self, prefix: str, start_after: str, first: dict[str, str]) -> Iterator[ObjectInfo]:
        for page in self._pages("list_objects_v2", "ListObjectsV2", prefix, first):
            for entry in page.get("Contents", ()):
                key = self._relative(entry["Key"], prefix)
                if key is not None and key > start_after:
                    yield ObjectInfo(key, entry["Size"], None, entry["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        names = self._names(key)
        try:
            with self._clients.request(Call("DeleteObject", key, "write")) as client:
                client.delete_object(**names)
        except NotFoundError:
            pass

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Multipart uploads that were neither completed nor aborted; none where the store cannot list them."""
        if not _possible(prefix):
            return
        found = []
        try:
            for page in self._pages("list_multipart_uploads", "ListMultipartUploads", prefix, {}):
                for entry in page.get("Uploads", ()):
                    key = self._relative(entry["Key"], prefix)
                    if key is not None:
                        found.append((key, entry["UploadId"], entry["Initiated"].timestamp()))
        except StoreError as error:
            if code_of(error.__cause__)[0] not in _NOT_KNOWN:
                raise
            return
        for key, upload, started_s in sorted(found):
            size = self._size_of(key, upload)
            if size is not None:
                yield Unfinished(f"{key}{_UPLOAD_MARK}{quote(upload, safe='')}", size, started_s)

    def discard(self, unfinished: Unfinished) -> None:
        """Abort an upload. A part that was under way may land after it, so it is aborted until it is gone."""
        key, mark, upload = unfinished.key.rpartition(_UPLOAD_MARK)
        if not mark or not upload:
            raise FormatError("not an upload of this store", key=unfinished.key)
        names = {**self._names(key), "UploadId": unquote(upload)}
        for _ in range(3):
            abort(self._clients, names, key)
            if self._size_of(key, names["UploadId"]) is None:
                return

    def close(self) -> None:
        """Close the connections."""
        self._clients.close()

    def _put_object(
        self, call: Call, body: bytes | Body, crc: int, headers: Mapping[str, str] = _NO_HEADERS
    ) -> Mapping[str, str]:
        config = self._config
        wanted = {
            "x-amz-server-side-encryption": config.server_side_encryption,
            "x-amz-server-side-encryption-aws-kms-key-id": config.kms_key_id,
            CRC_HEADER: encode_crc(crc) if config.checksum == "crc32c" else None,
        }
        request = Request(
            operation=call.operation,
            method="PUT",
            name=self._name(call.key),
            headers={name: value for name, value in wanted.items() if value} | {**headers},
            body=body,
        )
        answer = self._clients.tell(call, request)
        if not answer.get("ETag"):
            raise _cut_off(call.key, OutcomeUnknownError)
        return answer

    def _name(self, key: str) -> str:
        return self._root + check_key(key)

    def _names(self, key: str) -> dict[str, str]:
        return {"Bucket": self._config.bucket, "Key": self._name(key), **self._config.owner}

    def _encryption(self) -> dict[str, str]:
        config = self._config
        wanted = {"ServerSideEncryption": config.server_side_encryption, "SSEKMSKeyId": config.kms_key_id}
        return {name: value for name, value in wanted.items() if value}

    def _relative(self, name: str, prefix: str) -> str | None:
        """The key of a listed object, or None if it is none of ours."""
        if not name.startswith(self._root + prefix):
            return None
        try:
            return check_key(name[len(self._root) :])
        except FormatError:
            return None

    def _pages(self, method: str, operation: str, prefix: str, first: dict[str, str]) -> Iterator[dict[str, Any]]:
        names = {"Bucket": self._config.bucket, "Prefix": self._root + prefix} | self._config.owner
        more = first

        def fetch() -> dict[str, Any]:
            with self._clients.request(Call(operation, prefix)) as client:
                return _whole(getattr(client, method)(**names, **more), prefix)

        page = fetch()
        self._bucket_seen = True
        while True:
            yield page
            if not page.get("IsTruncated"):
                return
            more = _next_page(page)
            page = self._retrier.call(fetch)  # what was read already is not read again

    def _size_of(self, key: str, upload: str) -> int | None:
        """Bytes that an upload's parts hold; None if there is no such upload."""
        names = {**self._names(key), "UploadId": upload}
        size = after = 0
        try:
            while True:
                with self._clients.request(Call("ListParts", key)) as client:
                    page = _whole(client.list_parts(**names, PartNumberMarker=after), key)
                size += sum(int(part["Size"]) for part in page.get("Parts", ()))
                if not page.get("IsTruncated"):
                    return size
                after = page["NextPartNumberMarker"]
        except (UploadGoneError, NotFoundError):
            return None

    def _check_bucket(self, key: str) -> None:
        """Tell a missing object from a missing bucket: HEAD answers both with a bare 404.

        Raises:
            ConfigError: There is no such bucket.
        """
        if self._bucket_seen:
            return
        try:
            with self._clients.request(Call("HeadBucket", key)) as client:
                client.head_bucket(Bucket=self._config.bucket, **self._config.owner)
        except NotFoundError as error:
            raise ConfigError(
                f"there is no bucket {self._config.bucket}",
                key=key,
                next_step="create the bucket first, or correct its name: txstore never creates one",
            ) from error
        self._bucket_seen = True


def _cut_off(key: str, kind: type[StoreError]) -> StoreError:
    """A reply that was cut off within its headers looks like success: only a field is missing."""
    return kind("the reply was cut off", key=key).because("cut reply")


def _possible(prefix: str) -> bool:
    """Whether any key begins with this: some servers would resolve ``..`` and list another place."""
    folder = prefix.rpartition("/")[0]
    try:
        check_key((folder + "/x") if folder or prefix.startswith("/") else "x")
        check_key(prefix.rpartition("/")[2] or "x")
    except FormatError:
        return False
    return True


def _whole(page: dict[str, Any], key: str) -> dict[str, Any]:
    # botocore makes a page without entries of an empty body, as after a cut behind the status line. A resume would
    # take that for "no checkpoint yet" and begin anew.
    if "IsTruncated" not in page:
        raise _cut_off(key, TransientError)
    return page


def _next_page(page: dict[str, Any]) -> dict[str, str]:
    if "Contents" in page or "NextContinuationToken" in page:
        return {"ContinuationToken": page["NextContinuationToken"]}
    return {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
