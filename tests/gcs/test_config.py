"""URLs and options of a gs:// store."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from txstore.errors import ConfigError
from txstore.registry import open_store as open_any
from txstore_gcs import GcsConfig, open_store

SECRET = "s3cr3t-vaLue"


@pytest.mark.parametrize(
    ("url", "prefix", "canonical"),
    [
        ("gs://my-bucket", "", "gs://my-bucket"),
        ("gs://my-bucket/", "", "gs://my-bucket"),
        ("gcs://my-bucket/runs/7", "runs/7", "gs://my-bucket/runs/7"),
        ("GS://my-bucket//runs///7//", "runs/7", "gs://my-bucket/runs/7"),
        ("gs://my-bucket/a b", "a b", "gs://my-bucket/a%20b"),
        ("gs://my-bucket/a%20b", "a b", "gs://my-bucket/a%20b"),
        ("gs://my-bucket/a+b", "a+b", "gs://my-bucket/a+b"),
        ("gs://my-bucket/50%25", "50%", "gs://my-bucket/50%25"),
        ("gs://my-bucket/a%3Fb%23c", "a?b#c", "gs://my-bucket/a%3Fb%23c"),
        ("gs://my-bucket/ключ", "ключ", "gs://my-bucket/%D0%BA%D0%BB%D1%8E%D1%87"),
        ("gs://my_bucket.example.com/x", "x", "gs://my_bucket.example.com/x"),
    ],
)
def test_url(url: str, prefix: str, canonical: str) -> None:
    config = GcsConfig.from_url(url)
    assert (config.prefix, config.url) == (prefix, canonical)
    assert GcsConfig.from_url(config.url) == config
    assert open_any(url).url == canonical


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://", "bucket name"),
        ("gs:///runs", "bucket name"),
        ("gs://Bucket/x", "bucket name"),
        ("gs://a/x", "bucket name"),
        ("gs://-ab/x", "bucket name"),
        ("gs://bucket:9000/x", "bucket name"),
        ("gs://бакет/x", "bucket name"),
        ("gs://bucket/a?b", "a query"),
        ("gs://bucket?b", "a query"),
        ("gs://bucket/a#b", "a fragment"),
        ("gs://bucket/100%", "percent escape"),
        ("gs://bucket/%zz", "percent escape"),
        ("gs://bucket/%ff", "not UTF-8"),
        ("gs://bucket/a/../b", "normalised"),
        ("gs://bucket/./b", "normalised"),
        ("gs://bucket/a%0Ab", "control character"),
        ("gs://bucket/a%00b", "control character"),
        ("gs://bucket/.well-known/acme-challenge/x", "for itself"),
        ("s3://bucket/x", "not a gs:// URL"),
    ],
)
def test_bad_url(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url)


def test_a_url_that_pathlib_mangled_is_told_so() -> None:
    with pytest.raises(ConfigError, match="single slash"):
        open_any(Path("gs://bucket/runs"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokn": SECRET, "key": SECRET}, "unknown option for a gs:// store: key, tokn"),
        ({"bucket": "other"}, "unknown option"),
        ({"prefix": "other"}, "unknown option"),
        ({"endpoint_url": "127.0.0.1:4443"}, "not an endpoint"),
        ({"endpoint_url": "ftp://127.0.0.1"}, "not an endpoint"),
        ({"endpoint_url": f"http://user:{SECRET}@host"}, "not an endpoint"),
        ({"endpoint_url": 7}, "not an endpoint"),
        ({"endpoint_url": "http://host/?a=b"}, "neither query nor fragment"),
        ({"connect_timeout_s": 0}, "connect_timeout_s is 0"),
        ({"read_timeout_s": "60"}, "read_timeout_s is '60'"),
        ({"read_timeout_s": float("nan")}, "read_timeout_s is nan"),
        ({"window_bytes": 1000}, "window_bytes is 1000"),
        ({"project": ""}, "project is not"),
        ({"quota_project": "a\r\nb"}, "quota_project is not"),
        ({"requester_pays": True}, "who pays"),
    ],
)
def test_bad_option(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_store("gs://bucket/x", **options)
    assert SECRET not in str(caught.value)


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known are .*endpoint_url.*quota_project.*requester_pays.*token"):
        open_store("gs://bucket", storage_class="NEARLINE")


@pytest.mark.parametrize(
    ("options", "payer"),
    [
        ({"requester_pays": True, "project": "p"}, "p"),
        ({"requester_pays": "q", "project": "p"}, "q"),
        ({"requester_pays": False, "project": "p"}, None),
        ({"user_project": "u"}, "u"),
    ],
)
def test_who_pays(options: dict[str, object], payer: str | None) -> None:
    assert GcsConfig.from_url("gs://bucket", options).user_project == payer


def test_user_information_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="user information") as caught:
        open_store(f"gs://user:{SECRET}@bucket/x")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("token", [SECRET, {"type": "service_account", "private_key": SECRET}, {"type": SECRET}])
def test_a_token_is_never_shown(token: object, tmp_path: Path) -> None:
    config = GcsConfig.from_url("gs://bucket/x", {"token": token, "endpoint_url": "http://127.0.0.1:9"})
    store = open_store("gs://bucket/x", token=token, endpoint_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="token") as caught:
        store.head("x")
    for shown in (repr(config), repr(store), store.url, str(caught.value), repr(caught.value.__cause__)):
        assert SECRET not in shown
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message


def test_a_key_file_that_is_no_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key.json"
    file.write_text(json.dumps({"type": "service_account", "private_key": SECRET}))
    store = open_store("gs://bucket/x", token=str(file), endpoint_url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="not a valid service_account key") as caught:
        store.head("x")
    assert SECRET not in str(caught.value)
