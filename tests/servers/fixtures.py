"""One server of each kind for a test session, started when the first test asks for it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from txstore import request_cap

if TYPE_CHECKING:
    from tests.servers.azurite import Azurite
    from tests.servers.fake_gcs import FakeGcs
    from tests.servers.seaweed import Bucket

# The servers are imported where they are used: a test of one backend must not need the SDK of another.


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[Bucket]:
    """A bucket on a SeaweedFS of this test session."""
    from tests.servers.seaweed import Bucket, seaweed

    with pytest.MonkeyPatch.context() as patch, seaweed() as endpoint:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)  # the developer's own profile and endpoint
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield Bucket(endpoint, "txstore-tests")


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[FakeGcs]:
    """fake-gcs-server with a bucket named `bucket`."""
    from tests.servers.fake_gcs import fake_gcs

    with fake_gcs() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def gcs_prefix() -> str:
    """A fresh prefix for one test, within the bucket `bucket`."""
    return f"runs/{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Azurite]:
    """Azurite with the container ``checkpoints``."""
    from tests.servers.azurite import azurite

    with azurite() as server:
        server.make_container("checkpoints")
        yield server


@pytest.fixture
def azure_prefix() -> str:
    """A prefix that no other test uses."""
    return secrets.token_hex(16)


@pytest.fixture
def memory_root() -> Iterator[str]:
    """A folder of fsspec's memory filesystem, emptied after the test."""
    import fsspec

    root = secrets.token_hex(16)
    yield root
    store = fsspec.filesystem("memory").store
    for path in [path for path in store if path.startswith(f"/{root}/")]:
        del store[path]


@dataclass(frozen=True)
class Place:
    """An empty place on a server, the options that reach it, and the environment by which its SDK finds it."""

    url: str
    options: dict[str, Any]
    env: dict[str, str]
    upstream: str

    def options_by(self, endpoint: str, **more: object) -> dict[str, Any]:
        """Options that reach it by another endpoint: that of a proxy."""
        moved = {
            name: value.replace(self.upstream, endpoint) if isinstance(value, str) else value
            for name, value in self.options.items()
        }
        return {**moved, **more}


CLOUDS = {"s3": "s3_bucket", "gs": "gcs_server", "az": "azure_server"}
"""URL schemes, and the fixture of the server of each."""


@pytest.fixture(params=CLOUDS)
def place(request: pytest.FixtureRequest) -> Place:
    """A fresh prefix, with odd letters in it, on the server of each cloud backend in turn."""
    return empty_place(request, request.param)


@pytest.fixture
def places(request: pytest.FixtureRequest) -> list[Place]:
    """A place of each cloud backend."""
    return [empty_place(request, scheme) for scheme in CLOUDS]


def empty_place(request: pytest.FixtureRequest, scheme: str) -> Place:
    """A fresh prefix, with odd letters in it, on the server of one cloud backend."""
    prefix = f"{secrets.token_hex(8)}/ünï code"
    if scheme == "s3":
        bucket: Bucket = request.getfixturevalue(CLOUDS[scheme])
        env = {
            "AWS_ENDPOINT_URL": bucket.endpoint.url,
            "AWS_ACCESS_KEY_ID": bucket.endpoint.key,
            "AWS_SECRET_ACCESS_KEY": bucket.endpoint.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        options = {**bucket.options, "part_bytes": 5 << 20}
        return Place(f"s3://{bucket.name}/{prefix}", options, env, bucket.endpoint.url)
    if scheme == "gs":
        gcs: FakeGcs = request.getfixturevalue(CLOUDS[scheme])
        options = {"endpoint_url": gcs.url, "token": "anon"}
        return Place(f"gs://bucket/{prefix}", options, {"STORAGE_EMULATOR_HOST": gcs.url}, gcs.url)
    azure: Azurite = request.getfixturevalue(CLOUDS[scheme])
    options = {"connection_string": azure.connection_string, "part_bytes": 1 << 20}
    env = {"AZURE_STORAGE_CONNECTION_STRING": azure.connection_string}
    return Place(f"az://checkpoints/{prefix}", options, env, f"http://{azure.host_port}")


@pytest.fixture
def set_max_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Function: set the cap on requests of this process, for one test."""

    def set_to(limit: int) -> None:
        monkeypatch.setenv(request_cap.VARIABLE, str(limit))
        request_cap.forget()

    yield set_to
    request_cap.forget()
