"""What the benchmark rests on: the proxy counts, the raw limit moves every byte, a missed target is called missed."""

from __future__ import annotations

import http.client
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import raw, report, states
from benchmarks.counting import CountingProxy
from tests.servers.fake_gcs import FakeGcs


def test_the_proxy_counts_requests_and_bytes_of_a_real_server(gcs_server: FakeGcs, gcs_prefix: str) -> None:
    body = random.Random(1).randbytes(1_000_003)
    with CountingProxy(gcs_server.url, rewrite_host=True) as proxy:
        connection = http.client.HTTPConnection(proxy.host_port)
        name = f"{gcs_prefix}/a".replace("/", "%2F")
        for payload in (body, iter([body[:500_000], body[500_000:]])):  # with a length, and in chunks
            connection.request("POST", f"/upload/storage/v1/b/bucket/o?uploadType=media&name={name}", payload)
            assert connection.getresponse().read()
        assert proxy.methods == {"POST": 2}
        assert proxy.sent_bytes == 2 * len(body)
        proxy.reset()
        connection.request("GET", f"/storage/v1/b/bucket/o/{name}?alt=media")
        assert connection.getresponse().read() == body
        connection.request("HEAD", f"/storage/v1/b/bucket/o/{name}?alt=media")
        connection.getresponse().read()
        connection.close()
        assert (proxy.methods, proxy.sent_bytes, proxy.received_bytes) == ({"GET": 1, "HEAD": 1}, 0, len(body))


@pytest.mark.parametrize("best", [False, True])
def test_raw_writes_and_reads_every_byte(tmp_path: Path, best: bool) -> None:
    many = {f"small.{i}": torch.randint(0, 255, (i % 7,), dtype=torch.uint8) for i in range(3000)}
    state: dict[str, Any] = {"model": many, "optim": {"large": torch.randn((3 * raw.WINDOW_BYTES) // 4 + 5)}}
    wanted = states.digests(state)
    raw.write(tmp_path / "0.bin", state, best=best)
    states.wipe(state)
    assert states.digests(state) != wanted
    raw.read(tmp_path / "0.bin", state, best=best)
    assert states.digests(state) == wanted


def test_every_rank_makes_its_part_of_the_same_tensor() -> None:
    whole = states.build("llama", 4)
    again = states.build("llama", 4)
    assert states.digests(whole) == states.digests(again)
    assert len(set(states.digests({"model": whole["model"]}))) == len(whole["model"])
    flat = torch.empty(1000, dtype=torch.float32)
    states._fill(flat, 3, 0)
    part = torch.empty(400, dtype=torch.float32)
    states._fill(part, 3, 600)
    assert torch.equal(part.view(torch.int32), flat[600:].view(torch.int32))


def record(contender: str, operation: str, seconds: float) -> dict[str, Any]:
    one = {"wall_s": seconds, "cpu_s": 0.1, "needed_bytes": 1 << 30, "extra_bytes": 0}
    common = {"backend": "disk", "case": "a case", "contender": contender, "operation": operation}
    return common | {"rounds": [one | {"wall_s": seconds * factor} for factor in (1, 100, 0.99)]}


def test_verdicts_compare_medians_with_the_better_peer() -> None:
    records = [
        record("txstore", "save", 1.0),
        record("DCP FileSystem, 1 thread", "save", 9.0),
        record("DCP FileSystem, 2 threads", "save", 1.1),
        record("txstore", "load", 1.0),
        record("DCP FileSystem, 1 thread", "load", 4.1),
    ]
    lines = report.verdicts(records)
    assert any(
        line.startswith("MISSED") and "save against DCP" in line and "1.10 (goal >= 1.2)" in line for line in lines
    )
    assert any(line.startswith("met") and "load against DCP" in line and "4.10 (goal >= 4)" in line for line in lines)
