"""A proxy that counts requests and bytes. Streams both ways; used in a run of its own, which is not timed."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection", "upgrade"}
_PIECE = 256 << 10


class CountingProxy:
    """In front of a server while the block lasts.

    Args:
        upstream: URL of the server.
        rewrite_host: Send the server's own name as Host. Not where a signature covers it.
    """

    def __init__(self, upstream: str, *, rewrite_host: bool = False) -> None:
        parts = urlsplit(upstream)
        self.upstream = (parts.hostname or "", parts.port or 80)
        self.rewrite_host = rewrite_host
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.proxy = self
        self.host_port = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host_port}"
        self.reset()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def reset(self) -> None:
        """Begin to count."""
        self.methods: Counter[str] = Counter()
        self.sent_bytes = self.received_bytes = 0

    def count(self, method: str | None = None, *, sent: int = 0, received: int = 0) -> None:
        """A request, or a piece of a reply; called before the client gets it, so that it is counted when it has it."""
        with self._lock:
            if method is not None:
                self.methods[method] += 1
            self.sent_bytes += sent
            self.received_bytes += received

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Nothing."""

    def handle_one_request(self) -> None:
        """One request, whatever its method."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        proxy: CountingProxy = self.server.proxy
        connection = http.client.HTTPConnection(*proxy.upstream, timeout=300)
        try:
            sent = self._forward(connection, proxy)
            reply = connection.getresponse()
            proxy.count(self.command, sent=sent)
            self._answer(reply, proxy)
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            connection.close()

    def _forward(self, connection: http.client.HTTPConnection, proxy: CountingProxy) -> int:
        connection.putrequest(self.command, self.requestline.split()[1], skip_host=True, skip_accept_encoding=True)
        chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
        for name, value in self.headers.items():
            if name.lower() == "host" and proxy.rewrite_host:
                connection.putheader(name, "{}:{}".format(*proxy.upstream))
            elif name.lower() not in _HOP_BY_HOP and not (chunked and name.lower() == "content-length"):
                connection.putheader(name, value)
        if chunked:
            body = b"".join(self._chunks())
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            return len(body)
        connection.endheaders()
        left = length = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, _PIECE))
            if not piece:
                raise ConnectionAbortedError("the client left")
            connection.send(piece)
            left -= len(piece)
        return length

    def _chunks(self) -> list[bytes]:
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return parts

    def _answer(self, reply: http.client.HTTPResponse, proxy: CountingProxy) -> None:
        lines = [f"HTTP/1.1 {reply.status} {reply.reason}"]
        for name, value in reply.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                # An upload that goes on at the server's own address would not be counted.
                lines.append(f"{name}: {value.replace('{}:{}'.format(*proxy.upstream), proxy.host_port)}")
        bodiless = self.command == "HEAD" or reply.status in {204, 304}
        chunked = not bodiless and reply.getheader("Content-Length") is None
        if chunked:
            lines.append("Transfer-Encoding: chunked")
        self.wfile.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        while not bodiless and (piece := reply.read(_PIECE)):
            proxy.count(received=len(piece))
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")
