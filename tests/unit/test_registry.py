"""From a URL to a backend, through entry points."""

import pathlib
from importlib.metadata import EntryPoint

import pytest

from txstore import registry
from txstore.errors import ConfigError


@pytest.fixture
def installed(monkeypatch):
    """Replace the installed backends."""

    def install(*entries):
        monkeypatch.setattr(registry, "entry_points", lambda group: list(entries) if group == registry.GROUP else [])
        registry._backends.cache_clear()

    yield install
    monkeypatch.undo()
    registry._backends.cache_clear()


def entry(name, value):
    return EntryPoint(name, value, registry.GROUP)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("/a/b", "file"),
        ("a/b", "file"),
        ("file:///a", "file"),
        ("S3://b/k", "s3"),
        ("a:b", "file"),
        ("gs:/x", "gs"),
        ("c+d.e-f://x", "c+d.e-f"),
    ],
)
def test_the_scheme_decides(url, scheme):
    assert registry.scheme_of(url) == scheme


def test_the_factory_gets_url_and_options(installed):
    installed(entry("demo", "builtins:dict"))
    with pytest.raises(ValueError):  # dict("demo://x") is not a mapping: the URL arrived as it was
        registry.open_store("demo://x")
    installed(entry("file", "builtins:str"))
    assert registry.open_store(pathlib.Path("/a/b")) == "/a/b"
    with pytest.raises(TypeError, match="colour"):
        registry.open_store("/a/b", colour="red")


@pytest.mark.parametrize(
    ("url", "says"),
    [("", "empty"), ("zz://x", "no backend for scheme 'zz'"), ("s3:/bucket/x", "single slash after s3:")],
)
def test_a_wrong_url_says_what_to_do(installed, url, says):
    installed(entry("file", "builtins:str"), entry("s3", "builtins:str"))
    with pytest.raises(ConfigError, match=says) as caught:
        registry.open_store(url)
    assert caught.value.next_step


def test_two_backends_for_one_scheme_are_refused(installed):
    installed(entry("file", "builtins:str"), entry("file", "builtins:bytes"))
    with pytest.raises(ConfigError, match="two backends claim scheme 'file'"):
        registry.open_store("/a")
    installed(entry("file", "builtins:str"), entry("file", "builtins:str"))  # the same one, installed twice
    assert registry.open_store("/a") == "/a"


def test_a_missing_sdk_names_its_extra(installed, monkeypatch):
    installed(entry("s3", "boto3.nowhere:open_store"))
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(ConfigError, match="boto3") as caught:
        registry.open_store("s3://bucket")
    assert caught.value.next_step == "pip install '.[s3]' in txstore's checkout"


def test_any_other_import_error_propagates(installed):
    installed(entry("odd", "txstore_no_such_module:open_store"))
    with pytest.raises(ModuleNotFoundError):
        registry.open_store("odd://x")
