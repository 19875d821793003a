"""Multipart uploads: parallel parts with checksums, and proof that the completed object is ours.

Nothing is visible until the upload is completed, so a failure leaves at most parts, which are freed at once (or by
the sweep, if this process dies). A reply to the completion that was lost, or that says 200 and holds an error, is
settled by looking at the object: its size, and its checksum, our own mark, or its ETag.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from txstore.checksum import BLOCK_BYTES
from txstore.errors import ConfigError, IntegrityError, NotFoundError, OutcomeUnknownError, StoreError, TxStoreError
from txstore.retry import Retrier
from txstore.store import Source
from txstore_s3.client import Clients
from txstore_s3.config import MAX_PART_BYTES, S3Config
from txstore_s3.errors import Call, UploadGoneError
from txstore_s3.headers import CRC_HEADER, decode_crc, encode_crc, head_of
from txstore_s3.wire import Body, Request

_log = logging.getLogger(__name__)

MAX_PARTS = 10_000
MARK = "txstore-upload"
"""Name of the object metadata that holds the random mark of one upload."""

_FULL_OBJECT = "FULL_OBJECT"


def part_bytes_for(size: int, wanted: int) -> int:
    """The part size for an object: the wanted one, or as much more, in whole MiB, as 10,000 parts need.

    Raises:
        ConfigError: The object is too large for S3.
    """
    needed = -(-size // MAX_PARTS)
    found = max(wanted, -(-needed // BLOCK_BYTES) * BLOCK_BYTES)
    if found > MAX_PART_BYTES:
        raise ConfigError(f"an object of {size} bytes is too large for S3", next_step="write smaller shards")
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    etag: str
    crc: int

    def listed(self, *, checksum: bool) -> dict[str, object]:
        """As the completion names it."""
        named: dict[str, object] = {"PartNumber": self.number, "ETag": self.etag}
        return {**named, "ChecksumCRC32C": encode_crc(self.crc)} if checksum else named


class Upload:
    """One object, sent in parts.

    Args:
        clients: Makes the requests.
        retrier: Repeats one part, the start, or the completion.
        names: Bucket and key, as the API calls them.
        key: The key relative to the root, for errors.
        source: The bytes.
        extra: More arguments for the start: encryption.
    """

    def __init__(
        self,
        clients: Clients,
        retrier: Retrier,
        names: dict[str, str],
        key: str,
        source: Source,
        *,
        extra: dict[str, Any],
    ) -> None:
        config: S3Config = clients.config
        self._clients = clients
        self._retrier = retrier
        self._names = names
        self._key = key
        self._source = source
        self._extra = extra
        self._workers = config.part_workers
        self._checksum = config.checksum == "crc32c"
        self._part_bytes = part_bytes_for(source.size, config.part_bytes)
        self._mark = secrets.token_hex(16)
        self._full_object = False
        self._stop = threading.Event()

    def run(self) -> int | None:
        """Send everything and complete.

        Returns:
            The CRC32C that the store reports of the whole object, or None if it reports none.

        Raises:
            OutcomeUnknownError: The object may or may not be there.
            IntegrityError: It is there, and is not what was sent.
        """
        upload = self._retrier.call(self._start)
        names = {**self._names, "UploadId": upload}
        try:
            parts = self._send(names)
            return self._complete(names, parts)
        except BaseException as error:
            self._abort(names)
            if isinstance(error, UploadGoneError):
                raise OutcomeUnknownError("the multipart upload was aborted by somebody else", key=self._key) from error
            raise

    def _start(self) -> str:
        wanted: dict[str, Any] = {**self._names, **self._extra, "Metadata": {MARK: self._mark}}
        if self._checksum:
            wanted |= {"ChecksumAlgorithm": "CRC32C", "ChecksumType": _FULL_OBJECT}
        with self._clients.request(Call("CreateMultipartUpload", self._key, "write")) as client:
            answer = client.create_multipart_upload(**wanted)
        self._full_object = answer.get("ChecksumType") == _FULL_OBJECT
        upload = answer.get("UploadId")
        if not upload:
            raise OutcomeUnknownError("CreateMultipartUpload: the reply names no upload", key=self._key).because(
                "empty reply"
            )
        return str(upload)

    def _send(self, names: dict[str, str]) -> list[_Part]:
        count = -(-self._source.size // self._part_bytes)
        # All threads have ended when the block is left, so no part of ours is under way when the upload is aborted.
        with ThreadPoolExecutor(min(self._workers, count), thread_name_prefix="txstore-s3-part") as pool:
            sent = [pool.submit(self._send_part, names, number) for number in range(1, count + 1)]
            try:
                done, _ = wait(sent, return_when=FIRST_EXCEPTION)
                errors = [error for one in done if (error := one.exception()) is not None]
            finally:
                self._stop.set()
                for one in sent:
                    one.cancel()
        if errors:
            raise errors[0]
        return [one.result() for one in sent]

    def _send_part(self, names: dict[str, str], number: int) -> _Part:
        start = (number - 1) * self._part_bytes
        stop = min(start + self._part_bytes, self._source.size)

        def attempt() -> _Part:
            if self._stop.is_set():
                raise StoreError("another part failed", key=self._key)
            data = self._source.pieces(start, stop)
            crc = self._source.crc32c(start, stop)
            request = Request(
                operation="UploadPart",
                method="PUT",
                name=names["Key"],
                query=f"partNumber={number}&uploadId={quote(names['UploadId'], safe='-._~')}",
                headers={CRC_HEADER: encode_crc(crc)} if self._checksum else {},
                body=Body(data),
            )
            answer = self._clients.tell(Call("UploadPart", self._key, "write"), request)
            etag = answer.get("ETag")
            if not etag or decode_crc(answer.get(CRC_HEADER)) not in {None, crc}:
                raise OutcomeUnknownError("UploadPart: the store reports another checksum", key=self._key).because(
                    "wrong checksum"
                )
            return _Part(number, etag, crc)

        return self._retrier.call(attempt)

    def _complete(self, names: dict[str, str], parts: list[_Part]) -> int | None:
        crc = self._source.crc32c(0, self._source.size)
        listed = [part.listed(checksum=self._checksum) for part in parts]
        wanted: dict[str, Any] = {**names, "MultipartUpload": {"Parts": listed}}
        if self._full_object:
            wanted |= {
                "ChecksumCRC32C": encode_crc(crc),
                "ChecksumType": _FULL_OBJECT,
                "MpuObjectSize": self._source.size,
            }

        def attempt() -> int | None:
            try:
                with self._clients.request(Call("CompleteMultipartUpload", self._key, "write")) as client:
                    answer = client.complete_multipart_upload(**wanted)
            except UploadGoneError:
                # Completed by an attempt whose reply was lost, or aborted by somebody: only the object tells.
                return self._look(parts, crc)
            if decode_crc(answer.get("ChecksumCRC32C")) == crc:
                return crc
            return self._look(parts, crc)

        return self._retrier.call(attempt)

    def _look(self, parts: list[_Part], crc: int) -> int | None:
        """Prove that the object is the one sent here.

        Raises:
            UploadGoneError: Nothing is there, or something that is not surely ours.
            IntegrityError: It carries our mark, and is damaged.
        """
        request = head_of(self._names["Key"], checksum=self._checksum)
        try:
            answer = self._clients.tell(Call("HeadObject", self._key), request)
        except NotFoundError as error:
            raise UploadGoneError("the completed object is not there", key=self._key) from error
        size = answer.get("Content-Length", "")
        if not size.isdigit():
            raise OutcomeUnknownError("HeadObject: the reply was cut off", key=self._key).because("cut reply")
        stored = decode_crc(answer.get(CRC_HEADER))
        ours = answer.get(f"x-amz-meta-{MARK}") == self._mark
        same = int(size) == self._source.size and stored in {None, crc}
        if ours and not same:
            raise IntegrityError(
                f"sent {self._source.size} bytes, the store holds {size} or other ones",
                key=self._key,
            )
        proved = ours or stored is not None or answer.get("ETag") == _etag(parts)
        if not (same and proved):
            raise UploadGoneError("the object under this key is not the one that was sent", key=self._key)
        return stored

    def _abort(self, names: dict[str, str]) -> None:
        """Free the parts, best effort: what stays is found by the sweep."""
        try:
            abort(self._clients, names, self._key)
        except TxStoreError as error:
            _log.warning("the parts of an interrupted upload stay until the next sweep: %s", error)


def _etag(parts: list[_Part]) -> str:
    """The ETag that S3 gives an object of these parts, where parts are not encrypted with a key of KMS."""
    try:
        digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'


def abort(clients: Clients, names: dict[str, str], key: str) -> None:
    """Abort an upload; one that does not exist is success."""
    try:
        with clients.request(Call("AbortMultipartUpload", key, "write")) as client:
            client.abort_multipart_upload(**names)
    except (UploadGoneError, NotFoundError):
        return
