"""AzureStore: a prefix of a container as a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from azure.core.exceptions import AzureError

from txstore.checksum import Buffer
from txstore.errors import ConfigError, NotFoundError, OutcomeUnknownError, TransientError
from txstore.keys import check_key
from txstore.retry import Retrier, RetryPolicy
from txstore.store import ObjectInfo, Source, Store
from txstore_azure.client import Body, Client
from txstore_azure.config import NAME_MAX, AzureConfig
from txstore_azure.errors import Effect, translate_error
from txstore_azure.listing import Page, in_order, modified_s, parse_page
from txstore_azure.reading import Reading
from txstore_azure.upload import block_list, content_md5, new_block_ids, part_bytes_for, upload_parts

_PART_POLICY = RetryPolicy(attempts=4, deadline_s=60.0, longest_wait_s=5.0)
"""For the parts of one verb; the whole verb is repeated above (`txstore.retry.RetryingStore`)."""


class AzureStore(Store):
    """Objects are block blobs; a key is a blob's name after the prefix.

    Args:
        config: Where the store lies and how requests are made.
        retrier: Repeats single blocks and rereads; tests give one that does not wait.
    """

    def __init__(self, config: AzureConfig, *, retrier: Retrier | None = None) -> None:
        self.url = config.url
        self.config = config
        self._client = Client(config)
        self._retrier = retrier or Retrier(_PART_POLICY)

    def __repr__(self) -> str:
        return f"AzureStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "config": self.config, "_client": self._client}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._retrier = Retrier(_PART_POLICY)

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`: one Put Blob with its MD5, or blocks and a block list; the size is looked at afterwards."""
        url = self._url(key)
        if source.size <= self.config.part_bytes:
            self._put_blob(key, url, source.read(0, source.size) if source.size else b"", Effect.WRITE)
            return ObjectInfo(key, source.size)
        self._put_blocks(key, url, source)
        info = self.head(key)
        if info.size != source.size:
            raise OutcomeUnknownError(
                f"the stored object has {info.size} bytes instead of {source.size}", key=key
            ).because("size differs")
        return info

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`: one Put Blob with ``If-None-Match: *``, never blocks, never repeated."""
        self._put_blob(key, self._url(key), data, Effect.CREATE)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        if size is not None and size <= 0:
            self.head(key)
            return b""
        return bytes(Reading(self._client, key, self._url(key), start, size).run(self._retrier))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`: one ranged request, taken up again at the last good byte of the same version."""
        with buffer.cast("B") as view:
            if not view.nbytes:
                self.head(key)
                return 0
            return Reading(self._client, key, self._url(key), start, view.nbytes, view).run(self._retrier).nbytes

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        with self._client.request("HEAD", self._url(key), key=key, doing="head", expect=200) as response:
            headers = response.headers
        try:
            return ObjectInfo(key, int(headers["Content-Length"]), None, modified_s(headers.get("Last-Modified")))
        except (KeyError, ValueError) as error:
            raise TransientError("head was answered without a size", key=key).because("garbled reply") from error

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. The service's markers are opaque, so earlier keys are fetched and passed over."""
        yield from in_order(self._pages(prefix), start_after)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        try:
            with self._client.request(
                "DELETE", self._url(key), key=key, doing="delete", effect=Effect.WRITE, expect=202
            ):
                pass
        except NotFoundError:
            pass

    def close(self) -> None:
        """See `Store.close`."""
        self._client.close()

    def _url(self, key: str) -> str:
        name = self.config.prefix + check_key(key)
        if len(name) > NAME_MAX:
            raise ConfigError(
                f"the blob's name would be longer than {NAME_MAX} characters",
                key=key,
                next_step="use a shorter prefix or checkpoint name",
            )
        return self._client.blob_url(name)

    def _put_blob(self, key: str, url: str, data: Buffer, effect: Effect) -> None:
        headers = {"x-ms-blob-type": "BlockBlob", "Content-MD5": content_md5(data)}
        if effect is Effect.CREATE:
            headers["If-None-Match"] = "*"
        self._write(key, url, data, headers, effect, {}, "create" if effect is Effect.CREATE else "put")

    def _put_blocks(self, key: str, url: str, source: Source) -> None:
        part_bytes = part_bytes_for(source.size, self.config.part_bytes)
        ids = new_block_ids(-(-source.size // part_bytes))

        def stage(block: str, data: Buffer) -> None:
            headers = {"Content-MD5": content_md5(data)} if self.config.block_md5 else {}
            query = {"comp": "block", "blockid": block}
            self._retrier.call(self._write, key, url, data, headers, Effect.NONE, query, "put of a block")

        upload_parts(source, part_bytes, ids, workers=self.config.workers, stage=stage)
        document = block_list(ids)
        headers = {"Content-MD5": content_md5(document)}
        # Repeated after a lost reply it finds the same blocks, committed: the same object again.
        self._retrier.call(
            self._write, key, url, document, headers, Effect.WRITE, {"comp": "blocklist"}, "put of the block list"
        )

    def _write(
        self,
        key: str,
        url: str,
        data: Buffer,
        headers: dict[str, str],
        effect: Effect,
        query: dict[str, str],
        doing: str,
    ) -> None:
        with self._client.request(
            "PUT", url, key=key, doing=doing, effect=effect, expect=201, query=query, headers=headers, body=Body(data)
        ) as response:
            if "x-ms-request-id" not in response.headers:
                kind = TransientError if effect is Effect.NONE else OutcomeUnknownError
                raise kind(f"{doing} was answered by something else than the service", key=key).because("garbled reply")

    def _pages(self, prefix: str) -> Iterator[Page]:
        marker = ""
        while True:
            query = {
                "restype": "container",
                "comp": "list",
                "prefix": self.config.prefix + prefix,
                "maxresults": str(self.config.page_objects),
            }
            page = self._page(query | ({"marker": marker} if marker else {}), prefix)
            yield page
            marker = page.marker
            if not marker:
                return

    def _page(self, query: dict[str, str], prefix: str) -> Page:
        url = self._client.container_url
        with self._client.request("GET", url, key=prefix, doing="list", expect=200, query=query) as response:
            try:
                document = response.read()
            except AzureError as error:
                raise translate_error(error, key=prefix, doing="list", effect=Effect.NONE) from error
        return parse_page(document, self.config.prefix)
