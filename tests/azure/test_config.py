"""URLs, options, environment: which account, and what is never shown."""

from __future__ import annotations

import pickle
import traceback
from importlib.metadata import entry_points

import pytest

from txstore.errors import ConfigError
from txstore.redact import redact
from txstore.registry import open_store as open_any
from txstore_azure import AzureConfig, open_store

KEY = "c2VjcmV0LWtleQ=="
SAS = "sv=2021-12-02&sp=rcwdl&sig=s3cr3t%2Fs1gnature%3D"
STRING = f"DefaultEndpointsProtocol=https;AccountName=acct;AccountKey={KEY};EndpointSuffix=core.windows.net"


def config(url: str, **options: object) -> AzureConfig:
    return AzureConfig.from_url(url, {"account_key": KEY, **options} if "anon" not in options else options)


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("az://box@acct", "az://box@acct"),
        ("az://box@acct/", "az://box@acct"),
        ("az://box@acct//a//b/", "az://box@acct/a/b"),
        ("AZ://box@ACCT/Run", "az://box@acct/Run"),
        ("az://box@acct.blob.core.windows.net/a", "az://box@acct/a"),
        ("abfs://box@acct.dfs.core.windows.net/a", "az://box@acct/a"),
        ("abfss://box@acct.dfs.core.windows.net/a", "az://box@acct/a"),
        ("az://box@acct.blob.core.chinacloudapi.cn/a", "az://box@acct.blob.core.chinacloudapi.cn/a"),
        ("abfss://box@acct.dfs.core.chinacloudapi.cn/a", "az://box@acct.blob.core.chinacloudapi.cn/a"),
        ("az://box@acct/a b", "az://box@acct/a%20b"),
        ("az://box@acct/a%20b", "az://box@acct/a%20b"),
        ("az://box@acct/a+b", "az://box@acct/a+b"),
        ("az://box@acct/100%25", "az://box@acct/100%25"),
        ("az://box@acct/é", "az://box@acct/%C3%A9"),
        ("az://box@acct/%C3%A9", "az://box@acct/%C3%A9"),
        ("az://$root@acct/a", "az://$root@acct/a"),
    ],
)
def test_one_place_has_one_canonical_url(url, canonical):
    one = config(url)
    assert one.url == canonical
    assert config(canonical) == one
    assert one.account.endpoint.startswith("https://acct.blob.core.")


@pytest.mark.parametrize(
    "url",
    [
        "az://",
        "az:///a",
        "az://Box@acct/a",
        "az://a@acct",
        "az://-box@acct",
        "az://bo--x@acct",
        f"az://{'b' * 64}@acct",
        "az://box:password@acct/a",
        "az://box@acct/a?sig=s3cr3t",
        "az://box@acct/a#s3cr3t",
        "az://box@acct/../b",
        "az://box@acct/./b",
        "az://box@acct/%2E%2E/b",
        "az://box@acct/a%0Ab",
        "az://box@acct/a%",
        "az://box@acct/%ff",
        "az://box@x",
        "az://box@acct_1",
        f"az://box@acct/{'p' * 600}",
        "s3://box/a",
    ],
)
def test_a_malformed_url_is_refused_without_being_quoted(url):
    with pytest.raises(ConfigError) as caught:
        config(url)
    for secret in ("s3cr3t", "password"):
        assert secret not in str(caught.value)


def test_a_path_that_pathlib_has_mangled_is_refused():
    with pytest.raises(ConfigError, match="pass a str, not pathlib"):
        open_any("az:/box/a")


@pytest.mark.parametrize(
    ("options", "env", "endpoint", "name", "secret"),
    [
        ({"connection_string": STRING}, {}, "https://acct.blob.core.windows.net", "acct", ("key", KEY)),
        ({}, {"AZURE_STORAGE_CONNECTION_STRING": STRING}, "https://acct.blob.core.windows.net", "acct", ("key", KEY)),
        ({"account_name": "acct", "account_key": KEY}, {}, "https://acct.blob.core.windows.net", "acct", ("key", KEY)),
        (
            {"account_name": "acct", "sas_token": "?" + SAS},
            {},
            "https://acct.blob.core.windows.net",
            "acct",
            ("sas_token", SAS),
        ),
        (
            {},
            {"AZURE_STORAGE_ACCOUNT": "acct", "AZURE_STORAGE_KEY": KEY},
            "https://acct.blob.core.windows.net",
            "acct",
            ("key", KEY),
        ),
        (
            {},
            {"AZURE_STORAGE_ACCOUNT_NAME": "acct", "AZURE_STORAGE_SAS_TOKEN": SAS},
            "https://acct.blob.core.windows.net",
            "acct",
            ("sas_token", SAS),
        ),
        (
            {"account_url": f"https://acct.dfs.core.windows.net/?{SAS}"},
            {"AZURE_STORAGE_CONNECTION_STRING": STRING.replace("acct", "other")},
            "https://acct.blob.core.windows.net",
            "acct",
            ("sas_token", SAS),
        ),
        (
            {"account_host": "acct.blob.core.usgovcloudapi.net", "account_name": "acct", "credential": KEY},
            {},
            "https://acct.blob.core.usgovcloudapi.net",
            "acct",
            ("key", KEY),
        ),
        (
            {"connection_string": f"BlobEndpoint=https://acct.blob.core.windows.net/;SharedAccessSignature={SAS}"},
            {},
            "https://acct.blob.core.windows.net",
            "acct",
            ("sas_token", SAS),
        ),
        (
            {"connection_string": "UseDevelopmentStorage=true"},
            {},
            "http://127.0.0.1:10000/devstoreaccount1",
            "devstoreaccount1",
            None,
        ),
        ({"account_name": "acct", "anon": True}, {"AZURE_STORAGE_KEY": KEY}, None, "acct", ("anonymous", True)),
    ],
)
def test_the_account_comes_from_options_and_environment(options, env, endpoint, name, secret, monkeypatch):
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    account = AzureConfig.from_url("az://box/a", options).account
    assert account.name == name
    assert endpoint in {None, account.endpoint}
    if secret:
        assert getattr(account, secret[0]) == secret[1]
        others = {"key": "", "sas_token": "", "anonymous": False}
        del others[secret[0]]
        assert {one: getattr(account, one) for one in others} == others


def test_two_accounts_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"names the account 'other'.*for 'acct'"):
        AzureConfig.from_url("az://box@other/a", {"connection_string": STRING})
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", STRING)
    with pytest.raises(ConfigError, match="names the account 'other'"):
        AzureConfig.from_url("az://box@other/a")
    assert AzureConfig.from_url("az://box@acct/a").account.key == KEY


def test_the_key_of_one_account_is_not_used_for_another(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acct")
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    assert AzureConfig.from_url("az://box@other/a").account.key == ""
    assert AzureConfig.from_url("az://box@acct/a").account.key == KEY
    assert AzureConfig.from_url("az://box/a").account.key == KEY


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "no storage account is named"),
        ({"account_name": "acct", "acount_key": KEY}, "unknown option.*acount_key"),
        ({"account_name": "acct", "account_key": 5}, "account_key is not a string"),
        ({"account_name": "acct", "account_key": "not base64: s3cr3t!"}, "not valid base64"),
        ({"account_name": "acct", "sas_token": "s3cr3t"}, "no signature"),
        ({"account_name": "Not_An_Account"}, "not the name of a storage account"),
        ({"account_url": "acct.blob.core.windows.net"}, "not an account URL"),
        ({"account_url": "https://user:s3cr3t@acct.blob.core.windows.net"}, "not an account URL"),
        ({"connection_string": "s3cr3t"}, "malformed"),
        ({"connection_string": "AccountKey=s3cr3tw=="}, "names no account"),
        ({"account_name": "acct", "part_bytes": "many"}, "not a number"),
        ({"account_name": "acct", "part_bytes": 1000}, "part_bytes"),
        ({"account_name": "acct", "workers": 0}, "positive"),
        ({"account_name": "acct", "read_timeout_s": 0}, "positive"),
        ({"account_name": "acct", "page_objects": 5001}, "page_objects"),
    ],
)
def test_a_wrong_option_is_refused_without_its_secret(options, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        AzureConfig.from_url("az://box/a", options)
    shown = "".join(traceback.format_exception(caught.value))
    assert "s3cr3t" not in shown
    assert KEY not in shown


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"account_key.*connection_string.*part_bytes"):
        AzureConfig.from_url("az://box/a", {"nonsense": 1})


def test_numbers_may_come_as_text():
    options = {"account_name": "acct", "part_bytes": str(1 << 21), "read_timeout_s": "2.5", "block_md5": "true"}
    one = AzureConfig.from_url("az://box/a", options)
    assert (one.part_bytes, one.read_timeout_s, one.block_md5) == (1 << 21, 2.5, True)


@pytest.mark.parametrize("secret", [{"account_key": KEY}, {"sas_token": SAS}, {"connection_string": STRING}])
def test_secrets_are_in_no_text_and_survive_pickling(secret):
    store = open_store("az://box@acct/a", **secret)
    shown = f"{store!r} {store} {store.url} {store.config!r} {store.config} {vars(store)!r}"
    for part in (KEY, "s3cr3t", SAS):
        assert part not in shown
    assert pickle.loads(pickle.dumps(store)).config == store.config


def test_the_container_in_a_url_is_not_taken_for_a_password():
    assert redact("az://box@acct/a") == "az://box@acct/a"
    assert (
        redact("abfss://my-box@acct.dfs.core.windows.net/a?sig=x")
        == "abfss://my-box@acct.dfs.core.windows.net/a?sig=***"
    )
    assert redact("az://box:pw@acct/a") == "az://***@acct/a"
    assert redact("s3://box@acct/a") == "s3://***@acct/a"


@pytest.mark.parametrize("scheme", ["az", "abfs", "abfss"])
def test_the_schemes_are_registered(scheme):
    found = {entry.name: entry.value for entry in entry_points(group="txstore.backends")}
    assert found[scheme] == "txstore_azure:open_store"
