"""The lost-reply proxy loses what it is told to lose, and nothing else."""

import http.client
import http.server
import threading
import time

import pytest

from txstore.testing.proxy import Answer, LostReplyProxy, Rule


class Upstream(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.applied.append((self.command, self.path, self.headers["Host"], body))
        self.reply(b"applied " + body)

    def do_GET(self):
        self.server.applied.append((self.command, self.path, self.headers["Host"], b""))
        self.reply(b"0123456789" * 100)

    do_HEAD = do_GET

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"tag"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def upstream():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    server.applied = []
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(upstream):
    upstream.applied.clear()
    with LostReplyProxy(f"http://127.0.0.1:{upstream.server_address[1]}") as running:
        yield running


@pytest.fixture
def ask(proxy):
    def ask(method, target, body=None, timeout_s=5, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout_s)
        try:
            connection.request(method, target, body, {"Host": "signed.example", **headers})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    return ask


def test_without_rules_everything_passes_as_it_is(proxy, upstream, ask):
    assert ask("PUT", "//a%2Fb?x=%20y", b"body") == (200, b"applied body")
    assert ask("GET", "/a") == (200, b"0123456789" * 100)
    assert ask("HEAD", "/a") == (200, b"")
    assert [call[0] for call in upstream.applied] == ["PUT", "GET", "HEAD"]
    assert upstream.applied[0][2:] == ("signed.example", b"body")
    assert [(request.method, request.target, request.status) for request in proxy.requests] == [
        ("PUT", "//a%2Fb?x=%20y", 200),
        ("GET", "/a", 200),
        ("HEAD", "/a", 200),
    ]


def test_one_connection_serves_several_requests(proxy):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    for number in range(3):
        connection.request("PUT", f"/{number}", b"x")
        assert connection.getresponse().read() == b"applied x"
    connection.close()


def test_a_chunked_body_is_passed_on(proxy, upstream, ask):
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    connection.request("PUT", "/c", iter([b"one ", b"two"]), encode_chunked=True)
    assert connection.getresponse().read() == b"applied one two"
    connection.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("reset", ConnectionResetError),
        ("close", http.client.RemoteDisconnected),
        ("stall", TimeoutError),
        ("truncate", http.client.IncompleteRead),
        ("truncate-stall", TimeoutError),
        ("garble", http.client.BadStatusLine),
    ],
)
def test_a_lost_reply_was_applied(proxy, upstream, ask, reply, error):
    proxy.add(Rule("PUT", "^/lost", reply=reply))
    with pytest.raises(error):
        ask("PUT", "/lost", b"body", timeout_s=0.3)
    assert upstream.applied == [("PUT", "/lost", "signed.example", b"body")]
    assert ask("PUT", "/lost", b"again") == (200, b"applied again")


def test_a_garbled_body_keeps_the_status(proxy, upstream, ask):
    proxy.add(Rule("PUT", reply="garble-body"))
    status, body = ask("PUT", "/x", b"body")
    assert status == 200
    assert b"garbled" in body
    assert len(upstream.applied) == 1


def test_a_connection_outlives_a_garbled_body(proxy, upstream):
    """Its end would be a second loss, at a moment of its own."""
    proxy.add(Rule("PUT", reply="garble-body"))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
    try:
        connection.request("PUT", "/x", b"body")
        connection.getresponse().read()
        used = connection.sock
        time.sleep(0.05)
        connection.request("PUT", "/y", b"body")
        assert connection.getresponse().read() == b"applied body"
        assert connection.sock is used
    finally:
        connection.close()


@pytest.mark.parametrize(("forward", "applied"), [("now", 1), ("never", 0), ("later", 0)])
def test_an_answer_of_its_own(proxy, upstream, ask, forward, applied):
    proxy.add(Rule("PUT", forward=forward, reply=Answer(503, b"<Error/>", {"Retry-After": "1"})))
    assert ask("PUT", "/x", b"body") == (503, b"<Error/>")
    assert len(upstream.applied) == applied


def test_a_held_request_lands_when_it_is_released(proxy, upstream, ask):
    proxy.add(Rule("PUT", "zombie", forward="later", reply="reset"))
    with pytest.raises(ConnectionResetError):
        ask("PUT", "/zombie", b"late")
    assert ask("PUT", "/zombie", b"early") == (200, b"applied early")
    assert proxy.release() == [200]
    assert [call[3] for call in upstream.applied] == [b"early", b"late"]
    assert proxy.release() == []


def test_skip_times_and_header_choose_the_requests(proxy, upstream, ask):
    proxy.add(Rule("PUT", "^/a", reply=Answer(500), forward="never", skip=1, times=2, header="if-none-match"))
    assert [ask("PUT", "/a", b"x", **{"If-None-Match": "*"})[0] for _ in range(5)] == [200, 500, 500, 200, 200]
    assert [ask("PUT", "/a", b"x")[0] for _ in range(2)] == [200, 200]
    assert proxy.count("PUT", "^/a") == 7
    assert proxy.count("GET") == 0
    proxy.clear()
    proxy.add(Rule("GET", reply=Answer(500), times=None))
    assert [ask("GET", "/a")[0] for _ in range(3)] == [500, 500, 500]
    assert proxy.count() == 3


def test_a_body_can_choose_and_a_call_happens_after_the_request(proxy, upstream, ask):
    seen = []
    proxy.add(Rule("PUT", body="se+cret", reply=Answer(418), call=lambda: seen.append(list(upstream.applied))))
    assert ask("PUT", "/a", b"open")[0] == 200
    assert ask("PUT", "/a", b"a secret")[0] == 418
    assert [call[3] for call in seen[0]] == [b"open", b"a secret"]
    assert proxy.count("PUT", body="secret") == 1


def test_closing_ends_stalled_clients(upstream):
    proxy = LostReplyProxy(f"http://127.0.0.1:{upstream.server_address[1]}")
    proxy.add(Rule(reply="stall"))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    connection.request("GET", "/x")
    while not proxy.count():
        pass
    proxy.close()
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        connection.getresponse()
    connection.close()


def test_a_dead_server_is_a_bad_gateway(upstream):
    with LostReplyProxy("http://127.0.0.1:9") as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
        connection.request("GET", "/x")
        assert connection.getresponse().status == 502
        connection.close()
