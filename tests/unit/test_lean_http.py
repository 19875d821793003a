"""What is taken past urllib3 and requests, against a real server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
import urllib3
from hypothesis import given
from hypothesis import strategies as st

from txstore.lean_http import SettledEnvironment, read_into, sendable

BODY = os.urandom(100_000)
MIB = 1 << 20


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        pass

    def do_GET(self):
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
            return
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[: len(BODY) // 2] if self.path == "/short" else BODY)
        self.close_connection = self.path == "/short"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def read_all(response, step) -> bytes:
    out = bytearray(2 * len(BODY))
    done = 0
    with memoryview(out) as view:
        while count := read_into(response, view[done : done + step]):
            done += count
    return bytes(out[:done])


@pytest.mark.parametrize("step", [999, len(BODY), 2 * len(BODY)])
@pytest.mark.parametrize("path", ["/", "/chunked"])
def test_a_body_is_read_into_memory_whether_its_length_is_known_or_not(server, path, step):
    with urllib3.connection_from_url(server) as pool:
        for _ in range(2):
            response = pool.request("GET", path, preload_content=False, retries=False)
            assert read_all(response, step) == BODY
            response.read()
        assert pool.num_connections == 1, "the connection is used again"


def test_a_body_that_ends_early_is_short(server):
    with urllib3.connection_from_url(server) as pool:
        response = pool.request("GET", "/short", preload_content=False, retries=False)
        assert read_all(response, 999) == BODY[: len(BODY) // 2]
        response.close()


def test_a_response_of_another_kind_is_read_the_slow_way():
    class Plain:
        def readinto(self, view):
            view[:3] = b"abc"
            return 3

    buffer = bytearray(5)
    assert read_into(Plain(), memoryview(buffer)) == 3
    assert buffer[:3] == b"abc"


@given(st.lists(st.sampled_from([0, 1, 1000, 65_535, 65_536, MIB, MIB + 1]), max_size=12))
def test_what_is_sent_is_the_bytes_in_order_and_no_piece_is_too_large_or_one_of_many_small_ones(sizes):
    data = [bytes([number]) * size for number, size in enumerate(sizes)]
    sent = [bytes(piece) for piece in sendable(data, MIB)]
    assert b"".join(sent) == b"".join(data)
    assert all(0 < len(piece) <= MIB for piece in sent)
    small = [len(piece) < 65_536 for piece in sent]
    # Two small pieces in a row only where the first ends a large buffer.
    assert len(sent) <= 2 * sum(-(-size // MIB) for size in sizes if size >= 65_536) + 1, small


def test_large_memory_is_sent_where_it_lies():
    data = bytearray(3 * MIB)
    assert [memoryview(piece).obj is data for piece in sendable([data], MIB)] == [True] * 3


class Counting:
    def __init__(self):
        super().__init__()
        self.asked = []

    def merge_environment_settings(self, url, *rest):
        self.asked.append(url)
        return super().merge_environment_settings(url, *rest)


def test_the_environment_is_looked_at_once_for_each_server(monkeypatch):
    class Session(SettledEnvironment, Counting, requests.Session):
        pass

    monkeypatch.setenv("HTTP_PROXY", "http://proxy:1")
    monkeypatch.setenv("NO_PROXY", "b.example")
    session = Session()
    for _ in range(2):
        for stream in (True, False):
            near = session.merge_environment_settings("http://b.example/x?y", {}, stream, None, None)
            far = session.merge_environment_settings("http://a.example/x?y", {}, stream, None, None)
            assert (near["stream"], far["stream"]) == (stream, stream)
            assert not near["proxies"].get("http")
            assert far["proxies"]["http"] == "http://proxy:1"
    assert len(session.asked) == 2
    assert session.merge_environment_settings("http://a.example/", {}, None, False, None)["verify"] is False
