"""AzureStore: a prefix of a container as a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from txstore.checksum import BLOCK_BYTES, Buffer
from txstore.errors import ConfigError, NotFoundError, OutcomeUnknownError
from txstore.keys import check_key
from txstore.retry import Retrier, RetryPolicy
from txstore.store import ObjectInfo, Source, Store
from txstore_azure.client import Blob, Body, Client, Request
from txstore_azure.config import NAME_MAX, AzureConfig
from txstore_azure.errors import Effect
from txstore_azure.listing import Page, in_order, modified_s, parse_page
from txstore_azure.reading import Reading
from txstore_azure.upload import block_list, content_md5, new_block_ids, part_bytes_for, read_part, upload_parts

_PART_POLICY = RetryPolicy(attempts=4, deadline_s=60.0, longest_wait_s=5.0)
"""For the parts of one verb; the whole verb is repeated above (`txstore.retry.RetryingStore`)."""

_ONE_REQUEST_BYTES = 8 * BLOCK_BYTES
"""Above this the MD5 that goes with one request takes more time than a block list."""

_NO_QUERY: Mapping[str, str] = {}


class AzureStore(Store):
    """Objects are block blobs; a key is a blob's name after the prefix.

    Args:
        config: Where the store lies and how requests are made.
        retrier: Repeats single blocks and rereads; tests give one that does not wait.
    """

    streams = 8
    read_bytes = 32 * BLOCK_BYTES

    def __init__(self, config: AzureConfig, *, retrier: Retrier | None = None) -> None:
        self.url = config.url
        self.config = config
        self._client = Client(config)
        self._retrier = retrier or Retrier(_PART_POLICY)

    def __repr__(self) -> str:
        return f"AzureStore({self.url!r})"

    @property
    def retries(self) -> dict[str, int]:
        """Blocks and reads that were repeated so far, by cause."""
        return self._retrier.counts.by_cause()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "config": self.config, "_client": self._client}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._retrier = Retrier(_PART_POLICY)

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`: one Put Blob with its MD5, or blocks and a block list; the size is looked at afterwards."""
        blob = self._blob(key)
        if source.size <= min(self.config.part_bytes, _ONE_REQUEST_BYTES):
            self._put_blob(blob, read_part(source, 0, source.size) if source.size else (), Effect.WRITE)
            return ObjectInfo(key, source.size)
        self._put_blocks(blob, source)
        info = self.head(key)
        if info.size != source.size:
            raise OutcomeUnknownError(
                f"the stored object has {info.size} bytes instead of {source.size}", key=key
            ).because("size differs")
        return info

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: one Put Blob with ``If-None-Match: *``, never blocks, never repeated."""
        self._put_blob(self._blob(key), (data,), Effect.CREATE)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        blob = self._blob(key)
        if size is not None and size <= 0:
            self.head(key)
            return b""
        return bytes(Reading(self._client, blob, start, size).run(self._retrier))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`: one ranged request, taken up again at the last good byte of the same version."""
        blob = self._blob(key)
        with buffer.cast("B") as view:
            if not view.nbytes:
                self.head(key)
                return 0
            with Reading(self._client, blob, start, view.nbytes, into=view).run(self._retrier) as filled:
                return filled.nbytes

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        request = Request(method="HEAD", url=self._blob(key).url, key=key, doing="head", expect=200)
        headers = self._client.send(request).headers
        try:
            return ObjectInfo(key, int(headers["Content-Length"]), None, modified_s(headers.get("Last-Modified")))
        except (KeyError, ValueError) as error:
            raise request.garbled("without a size") from error

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. The service's markers are opaque, so earlier keys are fetched and passed over."""
        yield from in_order(self._pages(prefix), start_after)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        request = Request(
            method="DELETE", url=self._blob(key).url, key=key, doing="delete", effect=Effect.WRITE, expect=202
        )
        with suppress(NotFoundError):
            self._client.send(request)

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    def _blob(self, key: str) -> Blob:
        name = self.config.prefix + check_key(key)
        if len(name) > NAME_MAX:
            raise ConfigError(
                f"the blob's name would be longer than {NAME_MAX} characters",
                key=key,
                next_step="use a shorter prefix or checkpoint name",
            )
        return Blob(key, self._client.blob_url(name))

    def _put_blob(self, blob: Blob, data: Sequence[Buffer], effect: Effect) -> None:
        headers = {"x-ms-blob-type": "BlockBlob", "Content-MD5": content_md5(data)}
        if effect is Effect.CREATE:
            headers["If-None-Match"] = "*"
        self._write(blob, data, "create" if effect is Effect.CREATE else "put", effect, headers=headers)

    def _put_blocks(self, blob: Blob, source: Source) -> None:
        part_bytes = part_bytes_for(source.size, self.config.part_bytes)
        ids = new_block_ids(-(-source.size // part_bytes))

        def stage(block: str, data: Sequence[Buffer]) -> None:
            headers = {"Content-MD5": content_md5(data)} if self.config.block_md5 else {}
            query = {"comp": "block", "blockid": block}
            self._retrier.call(lambda: self._write(blob, data, "put of a block", headers=headers, query=query))

        upload_parts(source, part_bytes, ids, workers=self.config.workers, stage=stage)
        document = (block_list(ids),)
        headers = {"Content-MD5": content_md5(document)}
        query = {"comp": "blocklist"}
        # Repeated after a lost reply it finds the same blocks, committed: the same object again.
        self._retrier.call(
            lambda: self._write(blob, document, "put of the block list", Effect.WRITE, headers=headers, query=query)
        )

    def _write(
        self,
        blob: Blob,
        data: Sequence[Buffer],
        doing: str,
        effect: Effect = Effect.NONE,
        *,
        headers: Mapping[str, str],
        query: Mapping[str, str] = _NO_QUERY,
    ) -> None:
        request = Request(
            method="PUT",
            url=blob.url,
            key=blob.key,
            doing=doing,
            expect=201,
            effect=effect,
            query=query,
            headers=headers,
            body=Body(data),
        )
        if "x-ms-request-id" not in self._client.send(request).headers:
            raise request.garbled("by something else than the service")

    def _pages(self, prefix: str) -> Iterator[Page]:
        query = {
            "restype": "container",
            "comp": "list",
            "prefix": self.config.prefix + prefix,
            "maxresults": str(self.config.page_objects),
        }
        while True:
            request = Request(
                method="GET", url=self._client.container_url, key=prefix, doing="list", expect=200, query=query
            )
            page = parse_page(self._client.send(request).body, self.config.prefix)
            yield page
            if not page.marker:
                return
            query["marker"] = page.marker
