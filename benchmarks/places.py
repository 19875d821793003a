"""Where checkpoints go: a folder, or a bucket on the servers that the tests use, described for each contender."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from benchmarks.cases import FSSPEC
from benchmarks.counting import CountingProxy

# The servers are imported where they are used: each needs the SDK of its backend.


ROOM_BYTES = 256 << 10
"""Smaller objects stay when a place is cleared."""


class Place(Protocol):
    """An empty place on one backend."""

    def of(self, contender: str, endpoint: str | None = None) -> dict[str, Any]:
        """URL and options for a contender, as `benchmarks.contenders.Place`; through another endpoint if given."""

    def clear(self) -> None:
        """Remove what takes room. Documents stay: a writer that is kept does not go on in a store that was emptied."""

    def proxy(self) -> CountingProxy | None:
        """A counting proxy in front, if there is a server."""


class Folder:
    """On a file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, contender: str, endpoint: str | None = None) -> dict[str, Any]:  # noqa: ARG002 - the protocol's
        return {"url": f"file://{self._root}/{_slug(contender)}", "options": {}}

    def clear(self) -> None:
        for path in self._root.rglob("*"):
            if path.is_file() and path.stat().st_size >= ROOM_BYTES:
                path.unlink()

    def proxy(self) -> None:
        return None

    def touch(self, nbytes: int) -> None:
        """Have the kernel own the memory of the pages to come: the first to use it would pay for all the others."""
        path = self._root / "touched"
        with path.open("wb") as file:
            for _ in range(nbytes >> 20):
                file.write(bytes(1 << 20))
        path.unlink()


@contextmanager
def folder(parent: str) -> Iterator[Folder]:
    """A folder below `parent`."""
    with tempfile.TemporaryDirectory(dir=parent, prefix="txstore-bench-") as root:
        yield Folder(Path(root))


class S3:
    """A bucket on SeaweedFS."""

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket

    def of(self, contender: str, endpoint: str | None = None) -> dict[str, Any]:
        key, secret = self._bucket.endpoint.key, self._bucket.endpoint.secret
        url, at = f"s3://{self._bucket.name}/{_slug(contender)}", endpoint or self._bucket.endpoint.url
        if contender == FSSPEC:
            return {"url": url, "options": {"key": key, "secret": secret, "client_kwargs": {"endpoint_url": at}}}
        return {"url": url, "options": {"key": key, "secret": secret, "endpoint_url": at}}

    def clear(self) -> None:
        client = self._bucket.client
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket.name):
            for found in page.get("Contents", ()):
                if found["Size"] >= ROOM_BYTES:
                    client.delete_object(Bucket=self._bucket.name, Key=found["Key"])

    def proxy(self) -> CountingProxy:
        return CountingProxy(self._bucket.endpoint.url)


@contextmanager
def s3() -> Iterator[S3]:
    """A server of its own: what was deleted takes room on it until it is vacuumed."""
    from tests.servers.seaweed import Bucket, seaweed

    with _without_aws(), seaweed(volumes=500) as endpoint:
        yield S3(Bucket(endpoint, "bench"))


@contextmanager
def _without_aws() -> Iterator[None]:
    """The user's own profile and endpoint must not be what is measured."""
    kept = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


class Gcs:
    """A bucket on fake-gcs-server."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def of(self, contender: str, endpoint: str | None = None) -> dict[str, Any]:
        options = {"endpoint_url": endpoint or self._server.url, "token": "anon"}
        return {"url": f"gs://bench/{_slug(contender)}", "options": options}

    def clear(self) -> None:
        send = self._server._send
        for one in send("GET", "/storage/v1/b/bench/o").json().get("items", ()):
            if int(one["size"]) >= ROOM_BYTES:
                send("DELETE", f"/storage/v1/b/bench/o/{quote(one['name'], safe='')}").raise_for_status()

    def proxy(self) -> CountingProxy:
        return CountingProxy(self._server.url, rewrite_host=True)


@contextmanager
def gcs() -> Iterator[Gcs]:
    """A server of its own; it keeps everything in memory."""
    from tests.servers.fake_gcs import fake_gcs

    with fake_gcs() as server:
        server.make_bucket("bench")
        yield Gcs(server)


class Azure:
    """A container on Azurite."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def of(self, contender: str, endpoint: str | None = None) -> dict[str, Any]:
        text = self._server.connection_string
        if endpoint is not None:
            text = text.replace(self._server.host_port, endpoint.removeprefix("http://"))
        scheme = "abfs" if contender == FSSPEC else "az"
        return {"url": f"{scheme}://bench/{_slug(contender)}", "options": {"connection_string": text}}

    def clear(self) -> None:
        with self._server.container("bench") as client:
            for blob in client.list_blobs():
                if blob.size >= ROOM_BYTES:
                    client.delete_blob(blob.name)

    def proxy(self) -> CountingProxy:
        return CountingProxy(f"http://{self._server.host_port}")


@contextmanager
def azure() -> Iterator[Azure]:
    """A server of its own; it keeps everything in memory."""
    from tests.servers.azurite import azurite

    with azurite() as server:
        server.make_container("bench")
        yield Azure(server)


def _slug(contender: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in contender).strip("-")
