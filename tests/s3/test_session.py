"""boto3 sessions: the one of the option, the default one, and none."""

import pickle
import subprocess
import sys
import threading

import boto3
import pytest
from boto3.session import Session

from tests.servers.seaweed import ACCESS_KEY, READER_KEY, READER_SECRET, SECRET_KEY
from txstore import open_store
from txstore.dcp import StorageReader, StorageWriter
from txstore.errors import AccessDeniedError, ConfigError
from txstore.retry import Retrier
from txstore.store import BytesSource
from txstore.testing.proxy import Rule
from txstore.testing.saves import load, save
from txstore_s3 import S3Config, S3Store


@pytest.fixture
def default(monkeypatch):
    """Function: what `boto3.setup_default_session` gets; undone after the test."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    return boto3.setup_default_session


@pytest.fixture
def bare(s3_bucket, place, proxy):
    """Function: a store of the place with no credentials but those that it finds."""
    made = []

    def bare(**options):
        config = S3Config.from_url(place, {"endpoint_url": proxy.url, **options})
        made.append(S3Store(config, Retrier()))
        return made[-1]

    yield bare
    for store in made:
        store.close()


def session(key=ACCESS_KEY, secret=SECRET_KEY, **more):
    return Session(aws_access_key_id=key, aws_secret_access_key=secret, **more)


def signed_by(proxy):
    return {
        request.headers["Authorization"].partition("Credential=")[2].partition("/")[0] for request in proxy.requests
    }


def test_a_checkpoint_is_saved_with_the_session_that_is_given(bare, proxy, default):
    default(aws_access_key_id="nobody", aws_secret_access_key="x")
    store = bare(session=session(region_name="eu-north-1"))
    assert load(store, save(store, "step-1", [b"x"])) == [b"x"]
    assert signed_by(proxy) == {ACCESS_KEY}
    assert {"eu-north-1" in request.headers["Authorization"] for request in proxy.requests} == {True}


def test_the_default_session_is_used_unless_key_or_profile_say_otherwise(bare, proxy, default, monkeypatch, tmp_path):
    default(aws_access_key_id=READER_KEY, aws_secret_access_key=READER_SECRET)
    reader = bare()
    assert list(reader.list("")) == []
    with pytest.raises(AccessDeniedError):
        reader.create("x", b"x")
    assert signed_by(proxy) == {READER_KEY}
    proxy.clear()
    file = tmp_path / "credentials"
    file.write_text(f"[lab]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for options in ({"key": ACCESS_KEY, "secret": SECRET_KEY}, {"profile": "lab"}):
        bare(**options).put("x", BytesSource(b"x"))
    assert signed_by(proxy) == {ACCESS_KEY}


def test_handlers_of_the_session_see_our_requests(bare):
    seen = []
    given = session()
    given.events.register("before-send.s3.PutObject", lambda request, **_: seen.append(request.method))
    bare(session=given).create("x", b"x")
    assert seen == ["PUT"]


def test_one_session_serves_many_stores_at_once(bare):
    given = session()
    stores = [bare(session=given) for _ in range(8)]
    threads = [threading.Thread(target=store.create, args=(f"k{n}", b"x")) for n, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(stores[0].list(""))) == 8


def test_a_session_whose_credentials_expired_is_denied_at_once(bare, proxy, answer):
    proxy.add(Rule(forward="never", reply=answer(400, "ExpiredToken"), times=None))
    with pytest.raises(AccessDeniedError, match="expired"):
        bare(session=session()).create("x", b"x")
    assert proxy.count() == 1


def test_a_store_with_a_session_stays_in_its_process(bare):
    with pytest.raises(TypeError, match="profile="):
        pickle.dumps(bare(session=session()))
    pickle.dumps(bare())


@pytest.mark.parametrize(
    "options",
    [
        {"session": "sesame"},
        {"session": session(), "profile": "lab"},
        {"session": session(), "key": "k", "secret": "s"},
    ],
    ids=["a string", "profile", "key"],
)
def test_what_is_no_session_or_too_much_is_refused(options):
    with pytest.raises(ConfigError) as caught:
        S3Config.from_url("s3://bucket/run", options)
    assert caught.value.next_step
    assert "sesame" not in str(caught.value)


def test_the_session_passes_through_writer_and_reader(s3_bucket, place):
    import torch
    import torch.distributed.checkpoint as dcp

    options = {"session": session(), "endpoint_url": s3_bucket.endpoint.url}
    dcp.save({"w": torch.ones(3)}, checkpoint_id="step-1", storage_writer=StorageWriter(place, **options), no_dist=True)
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=StorageReader(place, **options), no_dist=True)
    assert torch.equal(target["w"], torch.ones(3))


def test_without_boto3_it_is_said_what_to_install():
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from txstore import open_store\n"
        "try: open_store('s3://bucket/run')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("ConfigError the backend for s3:// needs a package that is not installed: boto3"), (
        done
    )
    assert "pip install '.[s3]' in txstore's checkout" in done.stdout


def test_open_store_takes_a_session(s3_bucket, place):
    with open_store(place, session=session(), endpoint_url=s3_bucket.endpoint.url) as store:
        store.create("x", b"x")
        assert store.read("x") == b"x"
