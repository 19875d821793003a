"""FsspecStore: a path of an fsspec filesystem that can keep the contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any

import fsspec

from txstore.checksum import BLOCK_BYTES
from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
    describe,
)
from txstore.keys import check_key, is_key
from txstore.store import ObjectInfo, Source, Store
from txstore_fsspec.config import FsspecConfig

_WINDOW_BYTES = 8 * BLOCK_BYTES

_one_winner = threading.Lock()
"""Taken for every create on a filesystem that looks and then writes: one lock for all stores of this process."""

_OWN_ROOT = "txstore makes no such thing: find out who did, and use a root of its own for each store"

_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class FsspecStore(Store):
    """Objects are files of one filesystem, each written by a single call with all its bytes.

    Args:
        config: Which filesystem, and where in it.
    """

    def __init__(self, config: FsspecConfig) -> None:
        self.url = config.url
        self.config = config
        self._pid = os.getpid()
        self._made: Any = None

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        if self.config.verdict.one_process:
            # In another process the same URL is another, empty store: two ranks would both win a create.
            raise TypeError(f"a {self.config.scheme}:// store lives in one process and cannot be pickled")
        return {**self.__dict__, "_made": None}

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`: all bytes are gathered first, then handed over in one call."""
        path = self._path(key)
        fs = self._fs(key)
        data = b"".join(
            bytes(source.read(start, min(start + _WINDOW_BYTES, source.size)))
            for start in range(0, source.size, _WINDOW_BYTES)
        )
        with self._translated(key, "put", OutcomeUnknownError):
            fs.pipe_file(path, data)
        return ObjectInfo(key, len(data))

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        path = self._path(key)
        fs = self._fs(key)
        with _one_winner if self.config.verdict.one_process else nullcontext():
            try:
                with self._translated(key, "create", OutcomeUnknownError):
                    fs.pipe_file(path, bytes(data), mode="create")
            except AlreadyExistsError:
                # The memory filesystem says the same when a part of the path is a file.
                if not fs.isfile(path) and not fs.isdir(path):
                    raise ConfigError("a part of the key is already an object", key=key, next_step=_OWN_ROOT) from None
                raise

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        path = self._path(key)
        with self._translated(key, "read", TransientError):
            data: bytes = self._fs(key).cat_file(path, start, None if size is None else start + size)
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`."""
        with buffer.cast("B") as view:
            data = self.read(key, start, view.nbytes)
            view[: len(data)] = data
        return len(data)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        path = self._path(key)
        with self._translated(key, "head", TransientError):
            info = self._fs(key).info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
        return ObjectInfo(key, info["size"], None, _seconds(info.get("created")))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`; every call asks the filesystem anew."""
        fs = self._fs(prefix)
        folder = self._root + prefix.rpartition("/")[0]
        with self._translated(prefix, "list", TransientError):
            fs.invalidate_cache()
            found = fs.find(folder.rstrip("/"), detail=True)
        infos = []
        for path, info in found.items():
            key = path.removeprefix(self._root)
            if path.startswith(self._root) and key.startswith(prefix) and key > start_after and is_key(key):
                infos.append(ObjectInfo(key, info["size"], None, _seconds(info.get("created"))))
        yield from sorted(infos, key=lambda one: one.key)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        path = self._path(key)
        try:
            with self._translated(key, "delete", OutcomeUnknownError):
                self._fs(key).rm_file(path)
        except NotFoundError:
            pass

    def close(self) -> None:
        """Forget the filesystem; the next verb makes it again."""
        self._made = None

    @property
    def _root(self) -> str:
        return f"/{self.config.root}/" if self.config.root else "/"

    def _path(self, key: str) -> str:
        return self._root + check_key(key)

    def _fs(self, key: str) -> Any:
        if self._pid != os.getpid() and self.config.verdict.one_process:
            raise CapabilityError(
                f"a {self.config.scheme}:// store lives in one process, and this is another one since a fork",
                key=key,
                next_step="use file:// for what several processes share",
            )
        made = self._made
        if made is None:
            # An instance of our own: a transaction that somebody began on a shared one would hold our writes back.
            made = self._made = fsspec.filesystem(
                self.config.scheme, **{**self.config.options, "use_listings_cache": False, "skip_instance_cache": True}
            )
        return made

    @contextmanager
    def _translated(self, key: str, doing: str, unclear: type[StoreError]) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            if doing == "create":
                raise AlreadyExistsError("object exists", key=key) from error
            raise ConfigError("a part of the key is already an object", key=key, next_step=_OWN_ROOT) from error
        except _ABSENT as error:
            if doing in {"put", "create"}:
                raise ConfigError(f"{doing} failed: {type(error).__name__}", key=key, next_step=_OWN_ROOT) from error
            raise NotFoundError("no such object", key=key) from error
        except PermissionError as error:
            raise AccessDeniedError(f"{doing} failed: {type(error).__name__}", key=key) from error
        except OSError as error:
            raise unclear(f"{doing} failed: {describe(error)}", key=key).because(type(error).__name__) from error


def _seconds(created: object) -> float | None:
    if isinstance(created, datetime):
        return created.timestamp()
    return float(created) if isinstance(created, int | float) else None
