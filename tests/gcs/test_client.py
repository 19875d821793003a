"""How requests are signed, sent, capped, and what survives pickling and fork."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
from google.auth import exceptions as auth_errors
from google.auth.credentials import Credentials, CredentialsWithQuotaProject

from tests.servers.fake_gcs import FakeGcs
from txstore.checksum import BLOCK_BYTES, crc32c
from txstore.errors import AccessDeniedError, ConfigError, NotFoundError, OutcomeUnknownError, TransientError
from txstore.registry import open_store as open_any
from txstore.store import BytesSource
from txstore.testing.proxy import Answer, LostReplyProxy, Rule
from txstore_gcs import GcsStore, open_store
from txstore_gcs.upload import encode_crc32c

Opened = Callable[..., GcsStore]
SECRET = "tok-5ecret"


class Rolling(CredentialsWithQuotaProject):
    """Credentials whose token is another one after each refresh."""

    def __init__(self, refusals: int = 10**9) -> None:
        super().__init__()
        self.refreshed = 0
        self.refusals = refusals

    def refresh(self, request: object) -> None:
        self.refreshed += 1
        if self.refreshed > self.refusals:
            raise auth_errors.RefreshError(f"invalid_grant {SECRET}", {"error": SECRET})
        self.token = f"{SECRET}-{self.refreshed}"

    def with_quota_project(self, quota_project_id: str) -> Credentials:
        made = Rolling(self.refusals)
        made._quota_project_id = quota_project_id
        return made


def signatures(proxy: LostReplyProxy) -> list[str]:
    return [request.headers.get("authorization", "") for request in proxy.requests]


# credentials


@pytest.mark.parametrize("size", [5, 17 * BLOCK_BYTES])
def test_a_token_that_expires_is_renewed_once_and_the_request_signed_again(size, proxy, opened: Opened) -> None:
    store = opened(token=Rolling())
    proxy.add(Rule("POST", forward="never", reply=Answer(401)))
    data = os.urandom(size)
    store.put("data/x", BytesSource(data))
    assert signatures(proxy) == [f"Bearer {SECRET}-1", f"Bearer {SECRET}-2"]
    assert store.read("data/x") == data
    proxy.add(Rule("GET", "alt=media", forward="never", reply=Answer(401)))
    assert store.read("data/x") == data
    assert signatures(proxy)[-1] == f"Bearer {SECRET}-3"


def test_a_token_that_is_refused_twice_is_not_renewed_for_ever(proxy, opened: Opened) -> None:
    store = opened(token=Rolling())
    proxy.add(Rule(forward="never", reply=Answer(401), times=None))
    with pytest.raises(AccessDeniedError, match="clock") as caught:
        store.create("commits/x", b"x")
    assert proxy.count() == 2
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("refusals", [0, 1], ids=["at first", "on renewal"])
def test_credentials_that_cannot_be_renewed(refusals, proxy, opened: Opened, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    store = opened(token=Rolling(refusals))
    proxy.add(Rule(forward="never", reply=Answer(401), times=None))
    with pytest.raises(AccessDeniedError) as caught:
        store.create("commits/x", b"x")
    assert proxy.count() == refusals
    assert SECRET not in str(caught.value)
    assert SECRET not in "".join(record.getMessage() for record in caplog.records)


def test_nothing_that_is_logged_holds_a_token(opened: Opened, caplog, monkeypatch) -> None:
    monkeypatch.setenv("GOOGLE_SDK_PYTHON_LOGGING_SCOPE", "google")
    for name in ("", "google", "google.auth.transport.requests", "urllib3", "txstore_gcs"):
        caplog.set_level(logging.DEBUG, name)
    store = opened(token=Rolling())
    store.put("x", BytesSource(bytes(9 * BLOCK_BYTES)))
    store.read("x")
    assert caplog.records
    for record in caplog.records:
        assert SECRET not in repr(vars(record)) + record.getMessage()


def test_without_credentials_it_is_said_how_to_get_some(opened: Opened, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(ConfigError, match="application-default login"):
        opened(token=None).head("x")


def test_a_key_file_that_cannot_be_read_is_no_network_fault(opened: Opened, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))  # a directory
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(token=None).head("x")


def test_application_default_credentials_are_used(opened: Opened, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "adc.json"
    user = {"type": "authorized_user", "client_id": "c", "client_secret": SECRET, "refresh_token": SECRET}
    file.write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setattr("google.oauth2.credentials.Credentials.refresh", _found)
    for token in (None, "google_default", str(file), user):
        with pytest.raises(AccessDeniedError, match="not accepted: RefreshError") as caught:
            opened(token=token).head("x")
        assert SECRET not in str(caught.value)


def _found(*_args: object) -> None:
    raise auth_errors.RefreshError("asked for a token")


def test_the_emulator_needs_no_credentials(proxy, gcs_prefix, monkeypatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    for host in (proxy.url, proxy.url.removeprefix("http://")):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        with open_any(f"gs://bucket/{gcs_prefix}") as store:
            store.put("x", BytesSource(b"1"))
            assert store.read("x") == b"1"
    assert set(signatures(proxy)) == {""}


def test_who_is_billed_is_said_in_each_request(proxy, opened: Opened) -> None:
    store = opened(token=Rolling(), quota_project="quota", requester_pays="payer")
    store.put("x", BytesSource(b"1"))
    store.read("x")
    list(store.list(""))
    assert {request.headers["x-goog-user-project"] for request in proxy.requests} == {"quota"}
    assert all("userProject=payer" in request.target for request in proxy.requests)


def test_a_netrc_entry_does_not_replace_the_signature(proxy, opened: Opened, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("default login somebody password else\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    opened(token=Rolling()).put("x", BytesSource(b"1"))
    assert signatures(proxy) == [f"Bearer {SECRET}-1"]


# requests


def test_a_commit_is_one_request(proxy, opened: Opened) -> None:
    opened().create("commits/x", b"x")
    assert [(request.method, "ifGenerationMatch=0" in request.target) for request in proxy.requests] == [("POST", True)]
    assert f'"crc32c": "{encode_crc32c(crc32c(b"x"))}"'.encode() in proxy.requests[0].body


def test_a_name_is_one_segment_of_the_path(proxy, gcs_prefix) -> None:
    name = f"{gcs_prefix}/a b+%?#/ü/data/x=1+2"
    with open_store(f"gs://bucket/{quote(name[:-11])}", endpoint_url=proxy.url, token="anon") as store:
        store.put("data/x=1+2", BytesSource(b"1"))
        for call in (store.head, store.read, store.delete):
            call("data/x=1+2")
    paths = {request.target.partition("?")[0] for request in proxy.requests if request.method != "POST"}
    assert paths == {f"/storage/v1/b/bucket/o/{quote(name, safe='')}"}


def test_a_redirect_is_not_followed(proxy, opened: Opened) -> None:
    proxy.add(Rule(forward="never", reply=Answer(302, headers={"Location": f"{proxy.url}/elsewhere"}), times=None))
    with pytest.raises(ConfigError, match="redirects"):
        opened().create("commits/x", b"x")
    assert proxy.count() == 1


def test_nobody_listens(gcs_prefix) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with open_store("gs://bucket/x", endpoint_url=url, token="anon") as store:
            for call in (lambda: store.create("k", b"x"), lambda: store.head("k"), lambda: list(store.list(""))):
                with pytest.raises(TransientError) as caught:  # never "unknown": nothing was sent
                    call()
                assert caught.value.cause == "refused"


def test_a_host_without_address(gcs_prefix) -> None:
    with open_store("gs://bucket/x", endpoint_url="http://no-such-host.invalid", token="anon") as store:
        with pytest.raises(TransientError) as caught:
            store.create("k", b"x")
        assert caught.value.cause == "dns"


def test_a_server_that_wants_tls_or_speaks_none(gcs_server: FakeGcs) -> None:
    url = gcs_server.url.replace("http://", "https://")
    with open_store("gs://bucket/x", endpoint_url=url, token="anon") as store:
        with pytest.raises(TransientError) as caught:  # the handshake failed: nothing was sent
            store.create("k", b"x")
        assert caught.value.cause == "tls"


def test_a_server_that_takes_no_bytes_is_given_up(gcs_prefix) -> None:
    # A listener that never accepts: the kernel completes the connection, and its buffers fill.
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with open_store("gs://bucket/x", endpoint_url=url, token="anon", connect_timeout_s=0.3) as store:
            with pytest.raises(OutcomeUnknownError) as caught:
                store.put("k", BytesSource(bytes(32 * BLOCK_BYTES)))
            assert caught.value.cause == "timeout"


def test_a_source_error_is_raised_as_it_is(opened: Opened) -> None:
    class Broken(BytesSource):
        def read(self, start, stop):
            if start:
                raise ConnectionResetError("the source's own")  # would look like the network's
            return super().read(start, stop)

    store = opened()
    with pytest.raises(ConnectionResetError, match="the source's own"):
        store.put("x", Broken(bytes(20 * BLOCK_BYTES)))
    with pytest.raises(NotFoundError):
        store.head("x")


@pytest.mark.parametrize("size", [10, 20 * BLOCK_BYTES])
def test_a_source_that_gives_too_little_is_a_bug_and_not_a_wait(size, opened: Opened, gcs_server: FakeGcs) -> None:
    class Short(BytesSource):
        def read(self, start, stop):
            return super().read(start, stop - 1)

    with pytest.raises(ValueError, match="the source gave"):
        opened(endpoint_url=gcs_server.url).put("x", Short(bytes(size)))


def test_memory_is_bounded_by_the_window(opened: Opened) -> None:
    longest = 0

    class Watched(BytesSource):
        def read(self, start, stop):
            nonlocal longest
            longest = max(longest, stop - start)
            return super().read(start, stop)

    opened(window_bytes=2 * BLOCK_BYTES).put("x", Watched(bytes(9 * BLOCK_BYTES + 1)))
    assert longest == 2 * BLOCK_BYTES


# names


def test_names_that_are_no_keys_are_passed_over(opened: Opened, gcs_server: FakeGcs, gcs_prefix) -> None:
    for name in ("data/", "data/.hidden", "data//x", "data/a b", "data/good", ""):
        gcs_server.write("bucket", f"{gcs_prefix}/{name}", b"x")
    assert [info.key for info in opened().list("")] == ["data/good"]


def test_a_name_that_would_be_too_long_is_refused() -> None:
    store = open_store("gs://bucket/" + "p" * 200, token="anon", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="shorter prefix"):
        store.create("k" * 900, b"x")


def test_a_whole_bucket_is_a_store(gcs_server: FakeGcs) -> None:
    gcs_server.make_bucket("whole")
    with open_store("gs://whole", endpoint_url=gcs_server.url, token="anon") as store:
        store.create("commits/x", b"x")
        assert [info.key for info in store.list("commits/")] == ["commits/x"]
        assert gcs_server.read("whole", "commits/x") == b"x"
