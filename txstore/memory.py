"""MemoryStore: the contract in a dictionary. Reference implementation and test model; one process only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.errors import AlreadyExistsError, NotFoundError
from txstore.keys import check_key
from txstore.store import ObjectInfo, Source, Store


class MemoryStore(Store):
    """Objects in a dictionary, behind one lock."""

    needs_probe = False
    distant = False

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`."""
        check_key(key)
        window = 8 * BLOCK_BYTES
        data = b"".join(
            bytes(source.read(start, min(start + window, source.size))) for start in range(0, source.size, window)
        )
        with self._lock:
            self._objects[key] = (data, time.time())
        return ObjectInfo(key, len(data), crc32c(data))

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        check_key(key)
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError("object exists", key=key)
            self._objects[key] = (bytes(data), time.time())

    def _get(self, key: str) -> tuple[bytes, float]:
        check_key(key)
        with self._lock:
            try:
                return self._objects[key]
            except KeyError:
                raise NotFoundError("no such object", key=key) from None

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        data, _ = self._get(key)
        return data[start:] if size is None else data[start : start + size]

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`."""
        data = self.read(key, start, buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        data, modified_s = self._get(key)
        return ObjectInfo(key, len(data), crc32c(data), modified_s)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        with self._lock:
            found = [
                ObjectInfo(key, len(data), crc32c(data), modified_s)
                for key, (data, modified_s) in self._objects.items()
                if key.startswith(prefix) and key > start_after
            ]
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def close(self) -> None:
        """Nothing to release."""

    def __getstate__(self) -> dict[str, Any]:
        # A pickled copy would be another store with the same name: two ranks would both win a create.
        raise TypeError("a MemoryStore lives in one process and cannot be pickled")
