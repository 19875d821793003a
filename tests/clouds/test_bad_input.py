"""What people get wrong, on each cloud backend: a typed error that says what to do, or it simply works."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.servers.base import free_port
from tests.servers.fixtures import Place
from txstore import catalog, open_store
from txstore.errors import AccessDeniedError, ConfigError, TransientError
from txstore.store import BytesSource
from txstore.testing import saves
from txstore.testing.proxy import Answer, LostReplyProxy, Rule

WRONG = base64.b64encode(b"not the key of this account").decode()


@pytest.fixture
def proxy(place: Place) -> Iterator[LostReplyProxy]:
    with LostReplyProxy(place.upstream) as proxy:
        yield proxy


def verbs(store):
    return {
        "create": lambda: store.create("commits/x", b"x"),
        "put": lambda: store.put("data/x", BytesSource(b"x")),
        "read": lambda: store.read("commits/x"),
        "head": lambda: store.head("commits/x"),
        "newest": lambda: catalog.newest(store),
    }


def test_a_url_that_pathlib_has_mangled(place: Place) -> None:
    with pytest.raises(ConfigError, match="single slash") as caught:
        open_store(Path(place.url), **place.options)
    assert "str" in caught.value.next_step


def test_double_and_trailing_slashes_mean_nothing(place: Place) -> None:
    scheme, _, rest = place.url.partition("://")
    with (
        open_store(place.url, **place.options) as plain,
        open_store(f"{scheme}://{rest.replace('/', '//')}//", **place.options) as odd,
    ):
        assert odd.url == plain.url
        decision = saves.save(odd, "step-1", [b"x"])
        assert saves.load(plain, catalog.newest(plain)) == [b"x"]
        assert catalog.newest(plain) == decision


def test_spaces_signs_and_letters_of_any_script_are_kept_apart(place: Place) -> None:
    names = ["a b", "a+b", "a%20b", "100%", "モデル", "é", "e\u0301", "x=1,y:2", "~tilde"]
    for number, name in enumerate(names):
        with open_store(f"{place.url}/{quote(name)}", **place.options) as store:
            saves.save(store, f"step-{number}", [name.encode()])
    for number, name in enumerate(names):
        for text in {quote(name), name if "%" not in name else quote(name)}:  # as an escape, and as it is
            with open_store(f"{place.url}/{text}", **place.options) as store:
                found = catalog.newest(store)
                assert (found.checkpoint, saves.load(store, found)) == (f"step-{number}", [name.encode()])
                assert len(list(store.list("commits/"))) == 1


def test_a_bucket_that_does_not_exist_is_never_an_empty_store(place: Place) -> None:
    scheme, _, rest = place.url.partition("://")
    with open_store(f"{scheme}://nobody-made-this/{rest.partition('/')[2]}", **place.options) as store:
        for name, call in verbs(store).items():
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.next_step, name


def test_no_permission_is_told_apart_from_nothing_there(place: Place, proxy: LostReplyProxy) -> None:
    proxy.add(Rule(forward="never", reply=Answer(403), times=None))
    with open_store(place.url, **place.options_by(proxy.url)) as store:
        for name, call in verbs(store).items():
            with pytest.raises(AccessDeniedError) as caught:
                call()
            assert caught.value.next_step, name


def test_wrong_credentials(place: Place, proxy: LostReplyProxy) -> None:
    options = place.options_by(proxy.url)
    if place.url.startswith("s3"):
        options["secret"] = WRONG
    elif place.url.startswith("az"):
        head, _, tail = options["connection_string"].partition("AccountKey=")
        options["connection_string"] = f"{head}AccountKey={WRONG};{tail.partition(';')[2]}"
    else:  # the emulator asks for none
        proxy.add(Rule(forward="never", reply=Answer(401), times=None))
    with open_store(place.url, **options) as store:
        for name, call in verbs(store).items():
            with pytest.raises(AccessDeniedError) as caught:
                call()
            assert caught.value.next_step, name
            assert WRONG not in str(caught.value)


def test_an_endpoint_that_nobody_listens_at(place: Place) -> None:
    with open_store(place.url, **place.options_by(f"http://127.0.0.1:{free_port()}")) as store:
        for call in verbs(store).values():
            with pytest.raises(TransientError):  # never "unknown": nothing was sent
                call()


ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}


@pytest.mark.parametrize(
    "endpoint", ["localhost:9000", "notaurl", "http://", "http://a b", "http://[::1", "http://h:99999", "http://h:x"]
)
@pytest.mark.parametrize("how", ["environment", "option"])
def test_an_endpoint_that_is_none(places: list[Place], endpoint: str, how: str, monkeypatch) -> None:
    for place in places:
        scheme = place.url.partition(":")[0]
        options = dict(place.options_by(endpoint))
        if how == "environment" and scheme == "az":
            options = {"connection_string": f"AccountName=a;AccountKey=eA==;BlobEndpoint={endpoint}"}
        elif how == "environment":
            monkeypatch.setenv(ENDPOINTS[scheme], endpoint)
            options.pop("endpoint_url", None)
        if scheme == "gs" and how == "environment" and "://" not in endpoint:
            continue  # the SDK takes host:port there
        with pytest.raises(ConfigError), open_store(place.url, **options) as store:
            store.head("x")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_an_endpoint_that_redirects_everything(proxy: LostReplyProxy, place: Place, status: int) -> None:
    where = {"Location": "https://sso.example.test/login"}
    proxy.add(Rule(forward="never", reply=Answer(status, headers=where), times=None))
    with open_store(place.url, **place.options_by(proxy.url)) as store:
        for name, verb in verbs(store).items():
            with pytest.raises(ConfigError) as caught:
                verb()
            assert "address" in caught.value.next_step or "endpoint" in caught.value.next_step, name
