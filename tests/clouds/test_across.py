"""What crosses backends: a store copied from one to the next, and the demo on each of their servers."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from tests.copying import assert_same_store, copy, fill
from tests.servers.azurite import Azurite
from tests.servers.fake_gcs import FakeGcs
from tests.servers.fixtures import Place
from tests.servers.seaweed import Bucket
from txstore import open_store

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "run.py"


def test_a_store_goes_from_a_directory_to_s3_to_gcs_to_azure(
    tmp_path: Path, s3_bucket: Bucket, gcs_server: FakeGcs, gcs_prefix: str, azure_server: Azurite, azure_prefix: str
) -> None:
    stores = [
        open_store(tmp_path),
        open_store(f"s3://{s3_bucket.name}/across/{gcs_prefix}", **s3_bucket.options),
        open_store(f"gs://bucket/{gcs_prefix}", endpoint_url=gcs_server.url, token="anon"),
        open_store(f"az://checkpoints/{azure_prefix}", connection_string=azure_server.connection_string),
    ]
    fill(stores[0])
    for source, target in pairwise(stores):
        assert copy(source, target) > 10
    for target in stores[:0:-1]:
        assert_same_store(stores[0], target)


def test_the_demo_runs_there(place: Place, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--dir", str(tmp_path), "--url", place.url, "--steps", "6", "--save-every", "2"],
        capture_output=True,
        text=True,
        timeout=190,
        check=False,
        env={**os.environ, **place.env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "half-written, no decision" in done.stdout
    assert "bit for bit, 4 steps" in done.stdout
