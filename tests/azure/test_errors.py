"""The table of errors, and errors that travel."""

from __future__ import annotations

import pickle
import socket
import ssl
import time
from email.utils import formatdate

import pytest
from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    IncompleteReadError,
    ResourceNotFoundError,
    ServiceRequestError,
    ServiceResponseError,
    ServiceResponseTimeoutError,
)
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, ProtocolError, SSLError

from txstore.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CapabilityError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    TransientError,
)
from txstore.store import BytesSource
from txstore_azure import open_store
from txstore_azure.errors import Effect, translate_error, translate_status

SIGNED = "https://acct.blob.core.windows.net/box/key?sv=1&sig=s3cr3t"


def status(number, code="", effect=Effect.NONE, **headers):
    return translate_status(number, code, headers, key="k", doing="read", effect=effect)


@pytest.mark.parametrize(
    ("number", "code", "effect", "kind"),
    [
        (404, "BlobNotFound", Effect.NONE, NotFoundError),
        (404, "ContainerNotFound", Effect.NONE, ConfigError),
        (404, "", Effect.NONE, StoreError),
        (401, "", Effect.CREATE, AccessDeniedError),
        (403, "AuthenticationFailed", Effect.CREATE, AccessDeniedError),
        (400, "InvalidHeaderValue", Effect.CREATE, StoreError),
        (400, "Md5Mismatch", Effect.CREATE, TransientError),
        (400, "OutOfRangeInput", Effect.WRITE, ConfigError),
        (409, "BlobAlreadyExists", Effect.CREATE, AlreadyExistsError),
        (409, "BlobAlreadyExists", Effect.WRITE, StoreError),
        (412, "ConditionNotMet", Effect.CREATE, AlreadyExistsError),
        (412, "ConditionNotMet", Effect.NONE, TransientError),
        (413, "RequestBodyTooLarge", Effect.NONE, StoreError),
        (307, "", Effect.CREATE, ConfigError),
        (501, "", Effect.CREATE, CapabilityError),
        *((number, "", Effect.NONE, TransientError) for number in (408, 429, 500, 502, 503, 504)),
        *((number, "", Effect.WRITE, OutcomeUnknownError) for number in (408, 429, 500, 502, 503, 504)),
        *((number, "", Effect.CREATE, OutcomeUnknownError) for number in (200, 408, 429, 500, 502, 503, 504)),
    ],
)
def test_each_answer_has_its_class(number, code, effect, kind):
    error = status(number, code, effect)
    assert type(error) is kind
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    if isinstance(error, StoreError) and not isinstance(error, NotFoundError | AlreadyExistsError):
        assert error.cause == f"{number} {code}".strip()


def chained(outer, inner, **attributes):
    error = outer(message=SIGNED, error=inner)
    error.__cause__ = inner
    for name, value in attributes.items():
        setattr(inner, name, value)
    return error


REFUSED = NewConnectionError(None, SIGNED)
REFUSED.__cause__ = ConnectionRefusedError(111, "refused")
CONNECT_TIMEOUT = ConnectTimeoutError(None, SIGNED)


@pytest.mark.parametrize(
    ("error", "read", "create"),
    [
        (chained(ServiceRequestError, REFUSED), TransientError, TransientError),
        (chained(ServiceRequestError, CONNECT_TIMEOUT), TransientError, TransientError),
        (
            chained(ServiceResponseError, ProtocolError(SIGNED, ConnectionResetError())),
            TransientError,
            OutcomeUnknownError,
        ),
        (chained(ServiceResponseTimeoutError, TimeoutError()), TransientError, OutcomeUnknownError),
        (chained(IncompleteReadError, ProtocolError(SIGNED)), TransientError, OutcomeUnknownError),
        # The SDK calls it a failed connection; it may as well come after the request was sent.
        (chained(ServiceRequestError, SSLError(ssl.SSLEOFError(8, SIGNED))), TransientError, OutcomeUnknownError),
        (chained(ServiceRequestError, SSLError(ssl.SSLCertVerificationError(1, SIGNED))), ConfigError, ConfigError),
        (chained(ServiceRequestError, SSLError(ssl.SSLError(1, SIGNED))), TransientError, OutcomeUnknownError),
        (ClientAuthenticationError(SIGNED), AccessDeniedError, AccessDeniedError),
        (HttpResponseError(SIGNED), TransientError, OutcomeUnknownError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_each_exception_has_its_class_and_tells_no_secret(error, read, create):
    for effect, kind in ((Effect.NONE, read), (Effect.CREATE, create)):
        mine = translate_error(error, key="k", doing="create", effect=effect)
        assert type(mine) is kind
        assert "s3cr3t" not in str(mine)
        assert type(error).__name__ in str(mine)
        assert str(pickle.loads(pickle.dumps(mine))) == str(mine)


def test_what_is_made_of_a_live_error_of_the_sdk_can_be_pickled(azure_server):
    with azure_server.container("checkpoints") as container, pytest.raises(ResourceNotFoundError) as caught:
        container.get_blob_client("absent").get_blob_properties()
    assert caught.value.response is not None  # it holds the connection, a lock, and the signed request
    try:
        raise translate_error(caught.value, key="absent", doing="head", effect=Effect.NONE) from caught.value
    except StoreError as error:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.key) == (type(error), str(error), "absent")


@pytest.mark.parametrize(("ahead_s", "words"), [(3600, "3600 s ahead"), (-3600, "3600 s behind")])
def test_a_wrong_clock_is_named(ahead_s, words):
    date = formatdate(time.time() - ahead_s, usegmt=True)
    error = status(403, "AuthenticationFailed", Date=date)
    assert "clock" in error.next_step
    assert abs(int(error.next_step.split(" s ")[0].split()[-1]) - 3600) <= 2
    assert words.split()[-1] in error.next_step
    assert "clock" not in status(403, "AuthenticationFailed", Date=formatdate(usegmt=True)).next_step


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"x-ms-retry-after-ms": "1500", "Retry-After": "7"}, 1.5),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, 0.0),
        ({"Retry-After": "-5"}, 0.0),
        ({"Retry-After": "99999"}, 300.0),
        ({}, 0.0),
    ],
)
def test_the_services_wish_to_wait_is_read(headers, wait_s):
    assert status(503, "ServerBusy", **headers).retry_after_s == wait_s


def test_nobody_listens():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/acct"
        with open_store("az://box/x", account_url=url, account_key="AAAA") as store:
            for call in (lambda: store.create("k", b"x"), lambda: store.head("k"), lambda: list(store.list(""))):
                with pytest.raises(TransientError, match=r"ConnectionRefused|NewConnection") as caught:
                    call()  # never "unknown": nothing was sent
                assert "endpoint" in caught.value.next_step


def test_a_host_without_address():
    with open_store("az://box/x", account_url="http://no-such-host.invalid", account_key="AAAA") as store:
        with pytest.raises(TransientError, match="NameResolutionError") as caught:
            store.create("k", b"x")
        assert "name or endpoint" in caught.value.next_step


def test_a_server_that_speaks_no_tls(azure_server):
    url = azure_server.account_url.replace("http://", "https://")
    store = open_store("az://box/x", account_url=url, account_key="AAAA")
    with store, pytest.raises(ConfigError, match="speaks no TLS"):
        store.create("k", b"x")


def test_a_server_that_takes_no_bytes_is_given_up():
    # A listener that never accepts: the kernel completes the connection, and its buffers fill.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/acct"
        options = {"account_key": "AAAA", "connect_timeout_s": 0.3, "part_bytes": 32 << 20}
        with open_store("az://box/x", account_url=url, **options) as store, pytest.raises(TransientError):
            store.put("k", BytesSource(bytes(32 << 20)))


def test_wrong_credentials_are_denied(azure_server):
    for secret in ({"account_key": "AAAA"}, {"sas_token": "sv=2021-12-02&sp=rcwdl&sig=AAAA"}):
        with open_store("az://checkpoints/x", account_url=azure_server.account_url, **secret) as store:
            for call in (lambda: store.create("k", b"x"), lambda: store.head("k"), lambda: list(store.list(""))):
                with pytest.raises(AccessDeniedError) as caught:
                    call()
                assert caught.value.next_step
