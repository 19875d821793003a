import os
import subprocess
import sys
from pathlib import Path

import pytest

from txstore.errors import ConfigError
from txstore.registry import open_store as open_any
from txstore_posix import PosixConfig, open_store


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("file:///scratch/run", "/scratch/run"),
        ("file:///scratch/run/", "/scratch/run"),
        ("file:///scratch//run///", "/scratch/run"),
        ("file:////scratch/run", "/scratch/run"),
        ("file://localhost/scratch/run", "/scratch/run"),
        ("file://LOCALHOST/scratch/run", "/scratch/run"),
        ("FILE:///scratch/run", "/scratch/run"),
        ("file:/scratch/run", "/scratch/run"),
        ("file:///scratch/./a/../run", "/scratch/run"),
        ("file:///scratch/run%201", "/scratch/run 1"),
        ("file:///scratch/100%25", "/scratch/100%"),
        ("file:///scratch/a%3Fb%23c", "/scratch/a?b#c"),
        ("file:///scratch/%C3%A9", "/scratch/é"),
        ("file:///~/run", "/~/run"),
        ("/scratch/run", "/scratch/run"),
        ("//scratch/run//", "/scratch/run"),
        ("/scratch/a?b#c%20d", "/scratch/a?b#c%20d"),
    ],
)
def test_url_is_parsed(url, root):
    config = PosixConfig.from_url(url)
    assert config.root == root
    assert PosixConfig.from_url(config.url) == config


@pytest.mark.parametrize("path", ["run", "./run", "run/", "a/../run", ".//run"])
def test_a_relative_path_counts_from_the_working_directory(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert PosixConfig.from_url(path).root == f"{tmp_path}/run"


def test_a_tilde_is_not_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert PosixConfig.from_url("~/run").root == f"{tmp_path}/~/run"


def test_two_spellings_of_one_directory_have_one_url():
    spellings = ["file:///a/b%20c", "/a/b c", "/a//b c/", "file://localhost/a/x/../b%20c", "file:/a/%62 c"]
    assert {open_store(url).url for url in spellings} == {"file:///a/b%20c"}


def test_a_symbolic_link_stays_in_the_url(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert open_store(str(tmp_path / "link")).url == f"file://{tmp_path}/link"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file://server/share", "file:///server/share"),
        ("file://run", "file:///run"),
        ("file:///a?x=1", "query"),
        ("file:///a#x", "fragment"),
        ("file:///a%2", "%25"),
        ("file:///a%zz", "%25"),
        ("file:///a%00b", "NUL"),
        ("/a\0b", "NUL"),
        ("file://", "no path"),
        ("file:///", "root of the file system"),
        ("/", "root of the file system"),
        ("//", "root of the file system"),
    ],
)
def test_a_wrong_url_says_what_to_do(url, words):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert words in str(caught.value)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="profile, region"):
        open_store("/a", region="eu", profile="x")


def test_a_config_made_by_hand_is_validated():
    for root in ("relative", "/a/", "/a//b", "//a", "", "/a/../b"):
        with pytest.raises(ConfigError):
            PosixConfig(root=root)


def test_a_removed_working_directory_is_a_config_error(tmp_path):
    code = (
        "import os, sys; os.rmdir(os.getcwd())\n"
        "from txstore_posix import open_store\nfrom txstore.errors import ConfigError\n"
        "try: open_store('run')\nexcept ConfigError as e: print('refused', e)\n"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "refused" in done.stdout


def test_opening_touches_nothing(tmp_path):
    store = open_store(f"{tmp_path}/not/yet")
    assert list(store.list("")) == []
    assert list(Path(tmp_path).iterdir()) == []


def test_the_registry_finds_the_backend(tmp_path):
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        assert open_any(url).url == f"file://{tmp_path}"


@pytest.mark.parametrize(
    "url",
    [
        "file://user:hunter22@host/x",
        "file://hunter22@host/x",
        "file:///x?token=hunter22",
        "file:///x?hunter22",
        "file:///x#hunter22",
        "file://user:hunter22%@host/x",
    ],
)
def test_an_error_hides_what_may_be_secret(url):
    for call in (open_store, open_any, PosixConfig.from_url):
        with pytest.raises(ConfigError) as caught:
            call(url)
        assert "hunter22" not in f"{caught.value} {caught.value!r}"
        assert "file://" in caught.value.message
