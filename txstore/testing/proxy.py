"""A proxy in front of a real server that applies a request and then loses, delays or falsifies the reply.

::

    with LostReplyProxy("http://127.0.0.1:8333") as proxy:
        store = open_store("s3://bucket/run", endpoint_url=proxy.url)
        proxy.add(Rule("PUT", r"/commits/", reply="reset"))          # applied, then the connection is reset
        proxy.add(Rule("GET", r"/commits/", reply=Answer(503), times=None))
        ...
        assert proxy.count("PUT", r"/commits/") == 1                  # requests that the client sent

A `Rule` says which requests it concerns (method; a regular expression searched in the raw, still encoded path with its
query; a `header` that must be present; a regular expression searched in the `body`), how many of them pass first
(`skip`), how many it then takes (`times`, None for all), and what happens:

* ``forward``: ``"now"`` applies the request upstream before the reply; ``"never"`` does not; ``"later"`` keeps it
  until `LostReplyProxy.release`, so that it lands long after its sender gave up.
* ``reply``: ``"pass"`` (the server's own), ``"reset"`` (TCP reset before the status line), ``"close"`` (an orderly end
  before it), ``"stall"`` (silence until the client leaves), ``"truncate"`` and ``"truncate-stall"`` (half of the reply,
  then the end, or silence), ``"garble"`` (no HTTP), ``"garble-body"`` (the server's status and headers, other
  bytes, on a connection that lives on), or an `Answer`.
* ``call``: a function that is called after the request was dealt with and before the reply: add more rules, kill a
  process, rotate credentials.

The first rule that matches and has uses left is taken; without one the request passes. The Host header goes through
unchanged, so signatures stay valid. Plain HTTP/1.1; whole bodies are held in memory.
"""

from __future__ import annotations

import http.client
import re
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection", "upgrade"})
_WITHOUT_BODY = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply of the proxy's own making."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict, hash=False)


Forward = Literal["now", "never", "later"]
Loss = Literal["pass", "reset", "close", "stall", "truncate", "truncate-stall", "garble", "garble-body"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What to do with some requests; see the module docstring."""

    method: str = ""
    target: str = ""
    forward: Forward = "now"
    reply: Loss | Answer = "pass"
    skip: int = 0
    times: int | None = 1
    header: str = ""
    body: str = ""
    call: Callable[[], object] | None = None

    def matches(self, request: Request) -> bool:
        """Whether it concerns this request."""
        return (
            self.method in {"", request.method}
            and re.search(self.target, request.target) is not None
            and (not self.header or self.header.lower() in {name.lower() for name in request.headers})
            and (not self.body or re.search(self.body.encode(), request.body) is not None)
        )


@dataclass(slots=True)
class Request:
    """A request that the proxy received. `status` is the server's answer, None as long as it was not forwarded."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    status: int | None = None


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class LostReplyProxy:
    """Listens on a free loopback port while the `with` block lasts.

    Args:
        upstream: The real server, such as ``http://127.0.0.1:8333``.

    Attributes:
        url: Where clients connect.
        requests: Every request received, in order of arrival.
        connections: How many connections were made so far.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._lock = threading.Lock()
        self._rules: list[list[Any]] = []  # rule, matches so far
        self._held: list[Request] = []
        self.requests: list[Request] = []
        self.connections = 0
        self._server = _Server(self)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def add(self, *rules: Rule) -> None:
        """Add rules after those that are there."""
        with self._lock:
            self._rules += [[rule, 0] for rule in rules]

    def clear(self) -> None:
        """Forget rules and recorded requests; held requests stay held."""
        with self._lock:
            self._rules.clear()
            self.requests.clear()

    def count(self, method: str = "", target: str = "", header: str = "", body: str = "") -> int:
        """How many requests came that a rule with these would match."""
        rule = Rule(method, target, header=header, body=body)
        with self._lock:
            return sum(rule.matches(request) for request in self.requests)

    def release(self) -> list[int]:
        """Forward the held requests now, in order of arrival; returns the server's answers."""
        with self._lock:
            held, self._held = self._held, []
        return [self._forward(request).status for request in held]

    def drop_held(self) -> int:
        """Lose the held requests for good; returns how many there were."""
        with self._lock:
            held, self._held = self._held, []
        return len(held)

    def close(self) -> None:
        """Stop listening and end every connection, also stalled ones."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, request: Request) -> tuple[_Reply | None, Loss | Answer]:
        """Record and, if its rule says so, forward a request; the server's reply, and what the client gets."""
        with self._lock:
            self.requests.append(request)
            rule = self._rule_for(request)
            if rule.forward == "later":
                self._held.append(request)
        reply = self._forward(request) if rule.forward == "now" else None
        if rule.call is not None:
            rule.call()
        return reply, rule.reply

    def _rule_for(self, request: Request) -> Rule:
        for entry in self._rules:
            rule, seen = entry
            if rule.matches(request):
                last = None if rule.times is None else rule.skip + rule.times
                if last is not None and seen >= last:
                    continue
                entry[1] = seen + 1
                if seen >= rule.skip:
                    return rule  # type: ignore[no-any-return]
        return Rule()

    def _forward(self, request: Request) -> _Reply:
        connection = http.client.HTTPConnection(*self._upstream, timeout=120)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name.lower() not in _HOP_BY_HOP | {"content-length"}:
                    connection.putheader(name, value)
            if request.body or request.method in {"PUT", "POST", "PATCH"}:
                connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            reply = _Reply(answer.status, answer.reason, answer.getheaders(), answer.read())
        finally:
            connection.close()
        request.status = reply.status
        return reply


class _Server(socketserver.TCPServer):
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, proxy: LostReplyProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self._open: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.proxy.connections += 1
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        with self._lock:
            self._open[thread] = request
        thread.start()

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # the client went away: that is what these tests are about
        finally:
            self.shutdown_request(request)
            with self._lock:
                self._open.pop(threading.current_thread(), None)

    def end_connections(self) -> None:
        """Shut every connection down and wait for its thread."""
        with self._lock:
            still_open = list(self._open.items())
        for _, connection in still_open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has ended meanwhile
        for thread, _ in still_open:
            thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms for the first
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Nothing: pytest shows what matters."""

    def handle_one_request(self) -> None:
        """One request of the connection, whatever its method."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline:
            self.close_connection = True
            return
        if not self.parse_request():
            return
        # Not self.path: the base class takes double slashes at its beginning away.
        target = self.requestline.split()[1]
        request = Request(self.command, target, dict(self.headers.items()), self._body())
        try:
            reply, loss = self.server.proxy._receive(request)  # noqa: SLF001 - one class in two parts
        except (OSError, http.client.HTTPException) as error:
            self._write(_Reply(502, "Bad Gateway", [], f"the server did not answer: {error!r}".encode()))
            return
        if isinstance(loss, Answer):
            self._write(_Reply(loss.status, "Scripted", list(loss.headers.items()), loss.body))
        elif loss == "pass" and reply is not None:
            self._write(reply)
        else:
            self._lose("stall" if loss == "pass" else loss, reply or _Reply(200, "OK", [], b""))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:  # forwarded with its own length, half an upload would pass for a whole one
                raise ConnectionAbortedError("the client left in the middle of its request")
            return body
        parts = []
        while size := int(self._line().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self._line().strip():
            pass  # trailers
        return b"".join(parts)

    def _line(self) -> bytes:
        line = self.rfile.readline()
        if not line:
            raise ConnectionAbortedError("the client left in the middle of its request")
        return line

    def _bytes_of(self, reply: _Reply, body: bytes) -> tuple[bytes, bytes]:
        lines = [f"HTTP/1.1 {reply.status} {reply.reason}"]
        for name, value in reply.headers:
            # A HEAD reply announces a length without sending it.
            if name.lower() not in _HOP_BY_HOP and (name.lower() != "content-length" or self.command == "HEAD"):
                lines.append(f"{name}: {value}")
        if self.command != "HEAD" and reply.status not in _WITHOUT_BODY:
            lines.append(f"Content-Length: {len(body)}")
        elif self.command == "HEAD":
            body = b""
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), body

    def _write(self, reply: _Reply) -> None:
        head, body = self._bytes_of(reply, reply.body)
        self.wfile.write(head)
        self.wfile.write(body)

    def _lose(self, loss: Loss, reply: _Reply) -> None:
        # Not after "garble-body", a whole reply: the client keeps that connection, and an end that reaches it a moment
        # too late would be a second loss, on a request that no rule is about.
        self.close_connection |= loss != "garble-body"
        if loss == "garble":
            self.wfile.write(b"\x15\x03\x01\x00\x02 this is no HTTP\r\n\r\n")
        elif loss == "garble-body":
            junk = b"\x00<<<garbled"
            self._write(_Reply(reply.status, reply.reason, reply.headers, junk * (1 + len(reply.body) // len(junk))))
        elif loss in {"truncate", "truncate-stall"}:
            head, body = self._bytes_of(reply, reply.body)
            # An empty body cannot be cut: then nothing but the status comes.
            self.wfile.write(head + body[: len(body) // 2] if body else head[: len("HTTP/1.1 200")])
        elif loss == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
            return
        if loss in {"stall", "truncate-stall"}:
            self.connection.settimeout(None)
            while self.connection.recv(4096):
                pass  # until the client gives up
