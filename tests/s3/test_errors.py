"""What goes wrong on S3, as the errors of the contract: from the real server where it can, else scripted."""

import os
import pickle
import subprocess
import time
from email.utils import formatdate

import botocore.auth
import pytest
from botocore.exceptions import ClientError

from tests.servers.base import free_port
from tests.servers.seaweed import READER_KEY, READER_SECRET
from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    TransientError,
)
from txstore.store import BytesSource
from txstore.testing.proxy import Answer, Rule
from txstore_s3 import open_store
from txstore_s3.errors import Call, UploadGoneError, translate

READ, WRITE, CREATE = (Call("GetObject", "k"), Call("PutObject", "k", "write"), Call("PutObject", "k", "create"))


def verbs(store):
    return {
        "head": lambda: store.head("x"),
        "read": lambda: store.read("x"),
        "read nothing": lambda: store.read("x", 0, 0),
        "read_into": lambda: store.read_into("x", 0, memoryview(bytearray(1))),
        "list": lambda: list(store.list("")),
        "put": lambda: store.put("x", BytesSource(b"x")),
        "put large": lambda: store.put("x", BytesSource(bytes(17 << 20))),
        "create": lambda: store.create("x", b"x"),
        "delete": lambda: store.delete("x"),
        "unfinished": lambda: list(store.unfinished("")),
    }


VERBS = list(verbs(None))


@pytest.fixture
def opened(s3_bucket, place):
    made = []

    def opened(url=place, **options):
        made.append(open_store(url, **{**s3_bucket.options, **options}))
        return made[-1]

    yield opened
    for store in made:
        store.close()


@pytest.mark.parametrize("verb", VERBS)
def test_a_missing_bucket_is_never_a_missing_object_or_an_empty_listing(opened, verb):
    store = opened("s3://txstore-nobody/run")
    if verb == "unfinished":  # SeaweedFS lists the uploads of a bucket that does not exist as none
        return
    with pytest.raises(ConfigError) as caught:
        verbs(store)[verb]()
    assert "never creates" in caught.value.next_step


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("wrong", [{"secret": "sesame"}, {"key": "nobody-we-know"}], ids=["secret", "key"])
def test_wrong_credentials_are_access_denied_without_a_secret(opened, verb, wrong, caplog):
    caplog.set_level("DEBUG", "txstore")
    with pytest.raises(AccessDeniedError) as caught:
        verbs(opened(**wrong))[verb]()
    for text in (str(caught.value), repr(caught.value), caplog.text):
        assert "sesame" not in text
    assert caught.value.next_step


@pytest.mark.parametrize("verb", ["put", "put large", "create", "delete"])
def test_a_reader_cannot_write(opened, verb):
    with pytest.raises(AccessDeniedError, match=r"grant s3:.*ListBucket"):
        verbs(opened(key=READER_KEY, secret=READER_SECRET))[verb]()


def test_no_credentials_at_all(opened, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for verb in ("head", "create"):
        with pytest.raises(AccessDeniedError, match="AWS_PROFILE"):
            verbs(opened(key=None, secret=None))[verb]()


@pytest.mark.parametrize("verb", VERBS)
def test_an_unreachable_endpoint_is_transient_since_nothing_was_sent(opened, verb):
    store = opened(endpoint_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TransientError) as caught:
        verbs(store)[verb]()
    assert "endpoint_url" in caught.value.next_step
    assert caught.value.cause == "EndpointConnectionError"


def test_a_wrong_clock_is_named(opened, monkeypatch):
    real = botocore.auth.get_current_datetime
    from datetime import timedelta

    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *a, **k: real(*a, **k) - timedelta(hours=1))
    monkeypatch.setattr(time, "time", lambda now=time.time: now() - 3600)
    with pytest.raises(AccessDeniedError, match="clock"):
        opened().read("x")


@pytest.mark.parametrize(("late_s", "kind"), [(0, TransientError), (3600, AccessDeniedError)])
def test_an_old_signature_is_repeated_and_a_wrong_clock_is_not(remote, proxy, answer, late_s, kind):
    skewed = answer(403, "RequestTimeTooSkewed", Date=formatdate(time.time() - late_s, usegmt=True))
    proxy.add(Rule("PUT", forward="never", reply=skewed))
    with pytest.raises(kind, match="clock"):
        remote.put("x", BytesSource(b"x"))
    assert proxy.count() == 1


def client_error(status, code, operation="GetObject", **headers):
    meta = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ClientError({"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": meta}, operation)


@pytest.mark.parametrize(
    ("status", "code", "read", "write", "create"),
    [
        (301, "PermanentRedirect", ConfigError, ConfigError, ConfigError),
        (304, "304", StoreError, StoreError, AlreadyExistsError),
        (307, "TemporaryRedirect", ConfigError, ConfigError, ConfigError),
        (400, "AuthorizationHeaderMalformed", ConfigError, ConfigError, ConfigError),
        (400, "InvalidBucketName", ConfigError, ConfigError, ConfigError),
        (400, "InvalidRequest", StoreError, StoreError, CapabilityError),
        (400, "KMS.DisabledException", StoreError, StoreError, StoreError),
        (400, "RequestTimeout", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (400, "BadDigest", TransientError, TransientError, TransientError),
        (400, "ExpiredToken", AccessDeniedError, AccessDeniedError, AccessDeniedError),
        (400, "InvalidToken", AccessDeniedError, AccessDeniedError, AccessDeniedError),
        (401, "Unauthorized", AccessDeniedError, AccessDeniedError, AccessDeniedError),
        (403, "AccessDenied", AccessDeniedError, AccessDeniedError, AccessDeniedError),
        (403, "InvalidAccessKeyId", AccessDeniedError, AccessDeniedError, AccessDeniedError),
        (403, "QuotaExceeded", StoreFullError, StoreFullError, StoreFullError),
        (404, "NoSuchKey", NotFoundError, NotFoundError, NotFoundError),
        (404, "404", NotFoundError, NotFoundError, NotFoundError),
        (404, "NoSuchBucket", ConfigError, ConfigError, ConfigError),
        (404, "NoSuchUpload", UploadGoneError, UploadGoneError, UploadGoneError),
        (405, "MethodNotAllowed", StoreError, StoreError, CapabilityError),
        (408, "408", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (409, "ConditionalRequestConflict", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (409, "OperationAborted", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (412, "PreconditionFailed", AlreadyExistsError, AlreadyExistsError, AlreadyExistsError),
        (429, "TooManyRequests", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (500, "InternalError", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (500, "500", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (501, "NotImplemented", StoreError, StoreError, CapabilityError),
        (502, "502", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (503, "SlowDown", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (503, "503", TransientError, OutcomeUnknownError, OutcomeUnknownError),
        (507, "XMinioStorageFull", StoreFullError, StoreFullError, StoreFullError),
        (599, "599", TransientError, OutcomeUnknownError, OutcomeUnknownError),
    ],
)
def test_the_table(status, code, read, write, create):
    for call, kind in ((READ, read), (WRITE, write), (CREATE, create)):
        found = translate(client_error(status, code, call.operation), call)
        assert type(found) is kind
        assert found.key == "k"
        assert str(status) in found.message
        if isinstance(found, StoreError):
            assert found.cause.startswith(str(status))
        if kind is not CapabilityError:
            assert not isinstance(found, CapabilityError)


@pytest.mark.parametrize(("header", "wait_s"), [("7", 7.0), ("0.5", 0.5), ("9999", 300.0), ("soon", 0.0), ("-1", 0.0)])
def test_the_store_says_how_long_to_wait(header, wait_s):
    found = translate(client_error(503, "SlowDown", "PutObject", **{"retry-after": header}), CREATE)
    assert (found.cause, found.retry_after_s) == ("503 SlowDown", wait_s)


def test_a_failure_of_another_service_on_the_way_sent_nothing():
    for status, code, kind in [(503, "Throttling", TransientError), (403, "AccessDenied", AccessDeniedError)]:
        assert type(translate(client_error(status, code, "AssumeRole"), CREATE)) is kind


def test_a_live_error_of_the_sdk_can_be_pickled_after_translation(opened):
    with pytest.raises(AccessDeniedError) as caught:
        opened(secret="sesame").put("x", BytesSource(b"x"))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is AccessDeniedError
    assert (str(copy), copy.cause, copy.key) == (str(caught.value), caught.value.cause, "x")
    assert isinstance(caught.value.__cause__, ClientError)


def test_an_untrusted_certificate_is_no_network_trouble(opened, tls_server):
    store = opened(endpoint_url=tls_server)
    for verb in ("head", "create"):
        with pytest.raises(ConfigError, match="verify"):
            verbs(store)[verb]()


@pytest.fixture
def tls_server(tmp_path):
    """A TLS server with a certificate that nobody signed."""
    import ssl
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
        f" -addext subjectAltName=DNS:localhost -keyout {key} -out {cert}".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    class Quiet(HTTPServer):
        def handle_error(self, request, client_address):
            pass

    server = Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler, bind_and_activate=True)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"https://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_large_body_is_sent_again_to_the_region_that_the_service_names(make, proxy, direct, answer):
    # The SDK follows this by itself, with the same body; the answer is definite, so nothing was applied.
    store = make(endpoint_url=proxy.url, region="eu-west-1")
    moved = answer(301, "PermanentRedirect", **{"x-amz-bucket-region": "us-east-1"})
    proxy.add(Rule("PUT", forward="never", reply=moved))
    data = bytes(range(256)) * (16 << 10)
    store.put("data/x", BytesSource(data))
    assert direct.read("data/x") == data
    assert proxy.count("PUT") == 2


def test_unreadable_answers_are_lost_replies(remote, proxy):
    for target, call in (
        ("list-type=2", lambda: list(remote.list(""))),
        ("/x", lambda: remote.head("x")),
    ):
        proxy.add(Rule("", target, forward="never", reply=Answer(503, b"\x00\xff<not xml")))
        with pytest.raises(TransientError):
            call()
