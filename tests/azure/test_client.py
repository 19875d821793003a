"""How requests are signed, sent, capped, and what survives pickling and fork."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.storage.blob import ContainerSasPermissions, generate_container_sas

from tests.servers.azurite import ACCOUNT, KEY
from txstore.checksum import BLOCK_BYTES
from txstore.errors import AccessDeniedError, CapabilityError, ConfigError, NotFoundError, OutcomeUnknownError
from txstore.store import BytesSource
from txstore.testing.proxy import Answer, Rule
from txstore_azure.client import _credential
from txstore_azure.upload import BLOCK_BYTES_MAX, BLOCKS_MAX, new_block_ids, part_bytes_for


def sas(permission="rcwdl", hours=1):
    return generate_container_sas(
        ACCOUNT,
        "checkpoints",
        KEY,
        permission=ContainerSasPermissions.from_string(permission),
        expiry=datetime.now(UTC) + timedelta(hours=hours),
    )


# credentials


@pytest.mark.parametrize(
    "secret",
    [
        lambda: {"account_key": KEY},
        lambda: {"account_key": None, "sas_token": sas()},
        lambda: {"account_key": None, "credential": AzureSasCredential(sas())},
        lambda: {"account_key": None, "credential": AzureNamedKeyCredential(ACCOUNT, KEY)},
        lambda: {"account_key": None, "credential": KEY},
    ],
    ids=["key", "sas", "sas object", "key object", "key as credential"],
)
def test_every_verb_works_with_every_kind_of_credential(secret, opened):
    store = opened(**secret(), part_bytes=BLOCK_BYTES)
    store.create("commits/a", b"1")
    store.put("data/x", BytesSource(bytes(3 * BLOCK_BYTES)))
    assert store.read("data/x", 5, 3) == bytes(3)
    assert store.head("commits/a").size == 1
    assert [info.key for info in store.list("")] == ["commits/a", "data/x"]
    store.delete("data/x")


def test_a_sas_that_allows_too_little_or_has_expired_is_denied(opened):
    readable = opened(account_key=None, sas_token=sas("rl"))
    assert list(readable.list("")) == []
    with pytest.raises(AccessDeniedError, match=r"40[13]"):
        readable.create("x", b"1")
    with pytest.raises(AccessDeniedError) as caught:
        opened(account_key=None, sas_token=sas(hours=-1)).head("x")
    assert "expired" in caught.value.next_step or "SAS" in caught.value.next_step


class Token:
    """A token credential: another token after each request for one."""

    def __init__(self):
        self.given = 0

    def get_token(self, *_scopes, **_options):
        self.given += 1
        return SimpleNamespace(token=f"t0ken-{self.given}", expires_on=int(time.time()) + 3600)


def test_a_token_that_has_expired_is_renewed_once_and_the_request_signed_again(opened, proxy):
    token = Token()
    store = opened(account_key=None, credential=token, account_url=f"{proxy.url}/{ACCOUNT}")
    with pytest.raises(ConfigError, match="HTTPS"):  # the SDK sends no token in the clear
        store.head("x")


@pytest.fixture
def tokens(monkeypatch):
    """The SDK's rule that tokens go over TLS only, out of the way: the proxy has none."""
    from azure.core.pipeline.policies import _authentication
    from azure.storage.blob._shared import base_client

    monkeypatch.setattr(_authentication, "_enforce_https", lambda _request: None)
    original = base_client.StorageAccountHostsMixin.__init__

    def init(self, parsed_url, service, credential=None, **kwargs):
        original(
            self,
            SimpleNamespace(scheme="https", netloc=parsed_url.netloc, path=parsed_url.path),
            service,
            credential,
            **kwargs,
        )

    monkeypatch.setattr(base_client.StorageAccountHostsMixin, "__init__", init)
    return Token()


def test_a_token_that_is_refused_is_renewed_once(opened, proxy, tokens):
    store = opened(account_key=None, credential=tokens)
    created = {"x-ms-request-id": "1", "ETag": '"1"'}
    proxy.add(
        Rule("PUT", reply=Answer(401), forward="never"), Rule("PUT", reply=Answer(201, b"", created), forward="never")
    )
    store.create("x", b"1")
    assert [request.headers["Authorization"] for request in proxy.requests] == ["Bearer t0ken-1", "Bearer t0ken-2"]


def test_a_token_that_is_refused_twice_is_not_renewed_for_ever(opened, proxy, tokens, caplog):
    caplog.set_level(logging.DEBUG)
    store = opened(account_key=None, credential=tokens)
    proxy.add(Rule(reply=Answer(401), forward="never", times=None))
    with pytest.raises(AccessDeniedError) as caught:
        store.create("x", b"1")
    assert proxy.count() == 2
    assert "t0ken" not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_without_credentials_it_is_said_how_to_get_some(opened, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "azure.identity", None)
    with pytest.raises(ConfigError, match=r"AZURE_STORAGE_KEY.*azure-identity"):
        opened(account_key=None).head("x")


def test_an_installed_azure_identity_is_used(opened, monkeypatch):
    import sys

    made = object()
    monkeypatch.setitem(sys.modules, "azure.identity", SimpleNamespace(DefaultAzureCredential=lambda: made))
    assert _credential(opened(account_key=None).config) is made


def test_a_netrc_entry_does_not_replace_the_signature(opened, proxy, monkeypatch, tmp_path):
    file = tmp_path / "netrc"
    file.write_text("default login somebody password else\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    opened().put("x", BytesSource(b"1"))
    assert proxy.requests[0].headers["Authorization"].startswith(f"SharedKey {ACCOUNT}:")


def test_no_secret_is_logged_or_told(opened, proxy, caplog):
    for name in ("", "azure", "azure.core.pipeline.policies.http_logging_policy", "urllib3", "txstore_azure"):
        caplog.set_level(logging.DEBUG, name)
    token = sas()
    signature = token.partition("sig=")[2].partition("&")[0]
    store = opened(account_key=None, sas_token=token)
    store.put("x", BytesSource(b"1"))
    told = ""
    for reply in (
        "reset",
        "stall",
        "garble",
        "truncate",
        Answer(500),
        Answer(403),
        Answer(307, headers={"Location": "http://127.0.0.1:9/"}),
    ):
        proxy.clear()
        proxy.add(Rule("PUT", reply=reply, times=None))
        timed = opened(account_key=None, sas_token=token, read_timeout_s=0.3)
        with pytest.raises(Exception) as caught:
            timed.create("y", b"1")
        told += "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value))
    assert signature not in told
    proxy.clear()
    opened().create("z", b"1")
    assert "urllib3.connectionpool" in {record.name for record in caplog.records}
    assert signature not in caplog.text
    assert KEY not in caplog.text


# requests


def test_a_redirect_is_not_followed(opened, proxy):
    proxy.add(Rule(reply=Answer(307, headers={"Location": f"{proxy.url}/elsewhere"}), forward="never", times=None))
    with pytest.raises(Exception, match="307"):
        opened().create("x", b"1")
    assert proxy.count() == 1


def test_connections_are_used_again(opened, proxy):
    accepted = []
    original = proxy._server.process_request
    proxy._server.process_request = lambda *arguments: (accepted.append(1), original(*arguments))
    store = opened(part_bytes=BLOCK_BYTES, workers=1)
    for number in range(5):
        store.create(f"commits/{number}", b"x")
        with pytest.raises(NotFoundError):
            store.read(f"absent/{number}")
        with pytest.raises(NotFoundError):
            store.head(f"absent/{number}")
        store.put("data/x", BytesSource(bytes(2 * BLOCK_BYTES)))
        store.read("data/x")
        list(store.list(""))
        store.delete(f"commits/{number}")
    assert len(accepted) == 1


def test_a_store_that_ignores_conditions_or_has_none_is_refused(opened, proxy):
    from txstore.probe import prove

    created = Answer(201, b"", {"x-ms-request-id": "1"})
    proxy.add(Rule("PUT", header="If-None-Match", skip=1, reply=created, forward="never", times=None))
    with pytest.raises(CapabilityError, match="a second create of one key succeeded"):
        prove(opened())
    proxy.clear()
    proxy.add(Rule("PUT", header="If-None-Match", reply=Answer(501), forward="never", times=None))
    with pytest.raises(CapabilityError):
        prove(opened())


# uploads


def test_a_source_error_is_raised_as_it_is(opened):
    class Broken(BytesSource):
        def read(self, start, stop):
            if start:
                raise ConnectionResetError("the source's own")  # would look like the network's
            return super().read(start, stop)

    store = opened(part_bytes=BLOCK_BYTES)
    with pytest.raises(ConnectionResetError, match="the source's own"):
        store.put("x", Broken(bytes(20 * BLOCK_BYTES)))
    with pytest.raises(NotFoundError):
        store.head("x")


@pytest.mark.parametrize("size", [10, 20 * BLOCK_BYTES])
def test_a_source_that_gives_too_little_is_a_bug_and_not_a_short_object(size, opened):
    class Short(BytesSource):
        def read(self, start, stop):
            return super().read(start, stop - 1)

    store = opened()
    with pytest.raises(ValueError, match="the source gave"):
        store.put("x", Short(bytes(size)))
    assert list(store.list("")) == []


def test_memory_is_bounded_by_parts_and_workers(opened):
    lock = threading.Lock()
    inside, most, longest = 0, 0, 0

    class Watched(BytesSource):
        def read(self, start, stop):
            nonlocal inside, most, longest
            with lock:
                inside += 1
                most, longest = max(most, inside), max(longest, stop - start)
            return super().read(start, stop)

    store = opened(part_bytes=2 * BLOCK_BYTES, workers=3)
    original = store._client.send

    def send(request):
        nonlocal inside
        reply = original(request)
        if request.query.get("comp") == "block":
            with lock:
                inside -= 1
        return reply

    store._client.send = send
    store.put("x", Watched(bytes(31 * BLOCK_BYTES)))
    assert longest == 2 * BLOCK_BYTES
    assert 1 < most <= 3


def test_parts_grow_so_that_there_are_never_too_many():
    mib = 1 << 20
    assert part_bytes_for(100, 8 * mib) == 8 * mib
    assert part_bytes_for(BLOCKS_MAX * 8 * mib, 8 * mib) == 8 * mib
    assert part_bytes_for(BLOCKS_MAX * 8 * mib + 1, 8 * mib) == 9 * mib
    assert part_bytes_for(BLOCKS_MAX * BLOCK_BYTES_MAX, 8 * mib) == BLOCK_BYTES_MAX
    with pytest.raises(ConfigError, match="larger than a blob"):
        part_bytes_for(BLOCKS_MAX * BLOCK_BYTES_MAX + 1, 8 * mib)


def test_block_ids_are_of_one_length_and_never_the_same():
    ids = [*new_block_ids(300), *new_block_ids(300)]
    assert len(set(ids)) == 600
    assert {len(one) for one in ids} == {24}


def test_a_body_damaged_on_its_way_is_refused_by_the_service(opened, proxy):
    original = proxy._forward

    def damage(request):
        request.body = b"y" + request.body[1:] if request.body else b""
        return original(request)

    proxy._forward = damage
    from txstore.errors import TransientError

    store = opened(part_bytes=BLOCK_BYTES, block_md5=True, workers=1)
    with pytest.raises(TransientError, match="Md5Mismatch"):
        store.create("commits/x", b"x" * 100)
    store._retrier = SimpleNamespace(call=lambda function: function())
    with pytest.raises(TransientError, match="Md5Mismatch"):
        store.put("data/x", BytesSource(bytes(2 * BLOCK_BYTES)))
    assert list(store.list("")) == []


# names


def test_names_that_are_no_keys_are_passed_over(opened, azure_server, azure_prefix):
    with azure_server.container("checkpoints") as container:
        for name in ("data/.hidden", "data//x", "data/a b", "data/good", "data/é"):
            container.upload_blob(f"{azure_prefix}/{name}", b"x")
        container.upload_blob(f"{azure_prefix}x/data/other", b"x")
    assert [info.key for info in opened().list("")] == ["data/good"]


def test_a_name_that_would_be_too_long_is_refused(opened):
    with pytest.raises(ConfigError, match="shorter prefix"):
        opened("az://checkpoints/" + "p" * 200).create("k" * 900, b"x")


def test_a_whole_container_is_a_store(opened, azure_server):
    azure_server.make_container("whole")
    store = opened("az://whole")
    store.create("commits/x", b"x")
    assert [info.key for info in store.list("commits/")] == ["commits/x"]


def test_a_size_that_the_head_does_not_tell_is_unclear_for_a_put(opened, proxy):
    proxy.add(Rule("HEAD", reply=Answer(200, b"", {"Content-Length": "1"}), times=None))
    with pytest.raises(OutcomeUnknownError):
        opened(part_bytes=BLOCK_BYTES).put("x", BytesSource(bytes(2 * BLOCK_BYTES)))
