"""URLs and options of an S3 store."""

import logging

import pytest

from txstore.errors import ConfigError
from txstore.registry import open_store as open_any
from txstore_s3 import S3Config, S3Store, open_store


@pytest.mark.parametrize(
    ("url", "bucket", "prefix", "canonical"),
    [
        ("s3://bucket", "bucket", "", "s3://bucket"),
        ("s3://bucket/", "bucket", "", "s3://bucket"),
        ("S3://bucket/run", "bucket", "run", "s3://bucket/run"),
        ("s3://bucket//runs///1//", "bucket", "runs/1", "s3://bucket/runs/1"),
        ("s3://my.bucket-1/run 1", "my.bucket-1", "run 1", "s3://my.bucket-1/run%201"),
        ("s3://bucket/run%201", "bucket", "run 1", "s3://bucket/run%201"),
        ("s3://bucket/a+b", "bucket", "a+b", "s3://bucket/a+b"),
        ("s3://bucket/100%25", "bucket", "100%", "s3://bucket/100%25"),
        ("s3://bucket/%D0%BF%D1%80%D0%BE%D0%B1%D0%B0", "bucket", "проба", "s3://bucket/%D0%BF%D1%80%D0%BE%D0%B1%D0%B0"),
        ("s3://bucket/проба", "bucket", "проба", "s3://bucket/%D0%BF%D1%80%D0%BE%D0%B1%D0%B0"),
        ("s3://bucket/a%3Fb%23c", "bucket", "a?b#c", "s3://bucket/a%3Fb%23c"),
    ],
)
def test_url_is_parsed(url, bucket, prefix, canonical):
    config = S3Config.from_url(url)
    assert (config.bucket, config.prefix, config.url) == (bucket, prefix, canonical)
    assert S3Config.from_url(config.url) == config


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://", "bucket"),
        ("s3:///run", "bucket"),
        ("s3:/bucket/run", "s3://"),
        ("http://bucket/run", "s3://"),
        ("s3://b", "bucket"),
        ("s3://-bucket/run", "bucket"),
        ("s3://bucket:9000/run", "bucket"),
        ("s3://bucket--usw2-az1--x-s3/run", "directory bucket"),
        ("s3://key:sesame@bucket/run", "options key and secret"),
        ("s3://bucket/run?versionId=sesame", "query"),
        ("s3://bucket/run#sesame", "fragment"),
        ("s3://bucket/a%2", "%25"),
        ("s3://bucket/a%zz", "%25"),
        ("s3://bucket/%ff", "UTF-8"),
        ("s3://bucket/a%00b", "control"),
        ("s3://bucket/a/../b", "segment"),
        ("s3://bucket/./b", "segment"),
        ("s3://bucket/" + "x" * 125, "longer"),
    ],
)
def test_a_wrong_url_says_what_is_wrong_and_no_secret(url, words):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert words in str(caught.value)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"key": "k"},
        {"secret": "sesame"},
        {"token": "sesame"},
        {"key": "k", "secret": "sesame", "anon": True},
        {"part_bytes": 4 << 20},
        {"part_bytes": (5 << 20) + 1},
        {"part_bytes": 6 << 30},
        {"part_workers": 0},
        {"connect_timeout_s": 0},
        {"read_timeout_s": float("inf")},
        {"addressing_style": "sesame"},
        {"checksum": "md5"},
        {"sign_payload": "no"},
        {"endpoint_url": "localhost:9000"},
        {"endpoint_url": "http://user:sesame@localhost:9000"},
        {"endpoint_url": "http://localhost:9000?x=sesame"},
        {"endpoint_url": "https://storage.googleapis.com"},
        {"key": "k", "secret": "sesame", "aws_access_key_id": "other"},
        {"client_kwargs": {"unknown": "sesame"}},
        {"client_kwargs": "sesame"},
        {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
    ],
    ids=",".join,
)
def test_an_impossible_option_is_refused_without_its_secret(options):
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/run", **options)
    if "addressing_style" not in options:
        assert "sesame" not in str(caught.value)


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown option .*: colour \(known are .*addressing_style.*client_kwargs.*key"
    ):
        open_store("s3://bucket/run", colour="blue")


def test_storage_options_as_fsspec_users_know_them():
    config = S3Config.from_url(
        "s3://bucket/run",
        {
            "key": "k",
            "secret": "s",
            "token": "t",
            "client_kwargs": {"endpoint_url": "http://localhost:1", "region_name": "eu-west-1", "verify": False},
            "config_kwargs": {"s3": {"addressing_style": "virtual"}},
        },
    )
    same = S3Config.from_url(
        "s3://bucket/run",
        {
            "aws_access_key_id": "k",
            "aws_secret_access_key": "s",
            "aws_session_token": "t",
            "endpoint_url": "http://localhost:1",
            "region": "eu-west-1",
            "verify": False,
            "addressing_style": "virtual",
        },
    )
    assert config == same


def test_secrets_are_in_no_repr_and_no_url():
    store = open_store("s3://bucket/run", key="open", secret="sesame-1", token="sesame-2")
    for text in (repr(store), repr(store._config), store.url, str(store._clients)):
        assert "sesame" not in text
        assert "open" not in text


def test_the_google_endpoint_is_refused_wherever_it_comes_from(monkeypatch):
    for endpoint in ("https://storage.googleapis.com", "https://bucket.storage.googleapis.com"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with open_store("s3://bucket/run", key="k", secret="s") as store, pytest.raises(ConfigError, match="gs://"):
            store.head("x")


def client_of(**options):
    with open_store("s3://bucket/run", **options) as store:
        return store._clients._get().client, store._clients.amazon


def test_amazon_is_asked_as_amazon_wants_it(monkeypatch):
    client, amazon = client_of(key="k", secret="s", region="eu-west-1")
    assert amazon
    config = client.meta.config
    assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    assert config.s3["addressing_style"] == "auto"
    assert config.s3["payload_signing_enabled"] is False
    assert config.retries["total_max_attempts"] == 1
    assert config.request_checksum_calculation == "when_required"


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_of_the_environment_is_used_with_paths_and_signed_bodies(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    client, amazon = client_of(key="k", secret="s")
    assert not amazon
    assert client.meta.endpoint_url == "http://127.0.0.1:9"
    assert client.meta.config.s3 == {"addressing_style": "path", "payload_signing_enabled": True}
    assert client.meta.region_name == "us-east-1"


def test_the_profile_is_used(monkeypatch, tmp_path):
    file = tmp_path / "config"
    file.write_text(
        "[profile lab]\nregion = eu-north-1\nendpoint_url = https://lab.example\ns3 =\n  addressing_style = virtual\n"
        "aws_access_key_id = fromprofile\naws_secret_access_key = x\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    for options in ({"profile": "lab"}, {}):
        monkeypatch.setenv("AWS_PROFILE", "lab")
        client, _ = client_of(**options)
        assert client.meta.endpoint_url == "https://lab.example"
        assert client.meta.region_name == "eu-north-1"
        assert client.meta.config.s3 == {"addressing_style": "virtual", "payload_signing_enabled": False}


def test_an_unknown_profile_is_a_config_error():
    with open_store("s3://bucket/run", profile="nobody") as store, pytest.raises(ConfigError, match="nobody"):
        store.head("x")


def test_opening_contacts_nobody(caplog):
    caplog.set_level(logging.DEBUG)
    store = open_any("s3://bucket/run", endpoint_url="http://127.0.0.1:9")
    assert isinstance(store, S3Store)
    assert caplog.records == []


def test_a_path_mangled_url_says_so(tmp_path):
    from pathlib import Path

    with pytest.raises(ConfigError, match="single slash"):
        open_any(Path("s3://bucket/run"))
