"""Fingerprints change with content, and with nothing else."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
from collections import OrderedDict, UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE

from txstore.compat import (
    DatasetFile,
    chat_template_fingerprint,
    code_version,
    config_fingerprint,
    dataset_files,
    dataset_fingerprint,
    packages_fingerprint,
    tokenizer_fingerprint,
)
from txstore.errors import ConfigError


@dataclass
class Optim:
    lr: float
    betas: tuple[float, ...]


@dataclass
class Config:
    optim: Optim
    layers: int = 2
    names: list[str] = field(default_factory=lambda: ["a"])


class StructConfig(msgspec.Struct):
    layers: int
    names: list[str]
    optim: dict


class Kind(Enum):
    A = "a"


class Level(IntEnum):
    LOW = 1


class MappingConfig(Mapping):
    """As OmegaConf's DictConfig: a mapping that is no dict."""

    def __init__(self, **values) -> None:
        self.values_ = values

    def __getitem__(self, key):
        return self.values_[key]

    def __iter__(self):
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


PLAIN = {"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "layers": 2, "names": ["a"]}
SAME = {
    "dataclass": Config(Optim(0.1, (0.9, 0.95))),
    "struct": StructConfig(2, ["a"], {"betas": (0.9, 0.95), "lr": 0.1}),
    "namespace": argparse.Namespace(names=["a"], layers=2, optim=argparse.Namespace(lr=0.1, betas=[0.9, 0.95])),
    "other-order": OrderedDict(reversed(list(PLAIN.items()))),
    "mapping": MappingConfig(layers=2, names=("a",), optim=MappingConfig(lr=0.1, betas=[0.9, 0.95])),
    "user-dict": UserDict(PLAIN),
    "read-only": MappingProxyType(PLAIN),
    "json": json.loads(json.dumps(PLAIN)),
    "numpy-float": {**PLAIN, "optim": {"lr": np.float64(0.1), "betas": [0.9, 0.95]}},
}


@pytest.mark.parametrize("name", SAME)
def test_equal_configurations_have_one_fingerprint(name: str) -> None:
    assert config_fingerprint(SAME[name]) == config_fingerprint(PLAIN)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", config_fingerprint(PLAIN))


def test_the_fingerprint_is_the_same_in_every_release() -> None:
    # Written down once: checkpoints hold such values.
    print_of_old = "sha256:e8cbee36f178b1233c56a0abf6a40983601013885f6f16a233802d39dce09720"
    assert config_fingerprint({"b": [1, 2.5, None, True], "a": "é"}) == print_of_old


DIFFERENT = [
    {}, [], "", None, 0, 1, "1", 1.0, True, False, [1], [[1]], {"a": 1}, {"a": 1.0}, {"a": "1"}, {"a": True}, {"a": None},
    {"a": [1]}, {1: 1}, {"1": 1}, {1.0: 1}, {True: 1}, {None: 1}, {"null": 1}, {"a": {"b": 1}}, {"a.b": 1}, [1, 2], [2, 1],
    {1, 2}, {"set": [1, 2]}, 0.1, 0.1 + 2**-55, 1e308, 5e-324, -0.0, 0.0, 2**70, 2.0**70, "\ud800", "\\ud800", [{}], [[], []],
]  # fmt: skip


def test_different_configurations_have_different_fingerprints() -> None:
    prints = [config_fingerprint(value) for value in DIFFERENT]
    assert len(set(prints)) == len(DIFFERENT)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=4)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(values, values)
def test_fingerprints_are_equal_exactly_if_json_is(one: object, other: object) -> None:
    texts = [json.dumps(value, sort_keys=True) for value in (one, other)]
    assert (config_fingerprint(one) == config_fingerprint(other)) == (texts[0] == texts[1])


@given(st.dictionaries(st.text(max_size=3), scalars, min_size=2), st.randoms())
def test_the_order_of_names_does_not_count(config: dict, random) -> None:
    names = list(config)
    random.shuffle(names)
    assert config_fingerprint({name: config[name] for name in names}) == config_fingerprint(config)


def test_enums_paths_and_sets() -> None:
    assert config_fingerprint([Kind.A, Level.LOW, Path("/x/y")]) == config_fingerprint(["a", 1, "/x/y"])
    assert config_fingerprint({"b", "a", "c"}) == config_fingerprint(frozenset(["c", "a", "b"]))


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"optim": {"lr": float("nan")}}, r"config\.optim\.lr cannot be fingerprinted: nan"),
        ({"clip": [1, float("inf")]}, r"config\.clip\[1\] cannot"),
        ({"data": b"x"}, r"config\.data .*bytes"),
        ({"fn": len}, r"config\.fn"),
        ({"type": Optim}, r"config\.type"),
        ({"a": [{"b": np.zeros(2)}]}, r"config\.a\[0\]\.b .*ndarray"),
        ({"a": np.int64(2)}, r"config\.a .*int64"),
        ({"a": object()}, r"config\.a .*object"),
        ({(1, 2): 1}, "a name is of type tuple"),
        ({float("nan"): 1}, "nan"),
        ({"a": LOOP}, "contains itself"),
    ],
)
def test_what_has_no_exact_form_is_refused_with_its_path(config: object, path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        config_fingerprint(config)


def test_excluded_names_do_not_count_and_must_exist() -> None:
    assert config_fingerprint({**PLAIN, "output_dir": "/x"}, exclude=["output_dir"]) == config_fingerprint(PLAIN)
    assert config_fingerprint(SAME["dataclass"], exclude=["layers"]) == config_fingerprint(
        {k: PLAIN[k] for k in ("optim", "names")}
    )
    for wrong in (["outptu_dir"], ["optim.lr"], "layers"):
        with pytest.raises(ConfigError):
            config_fingerprint(PLAIN, exclude=wrong)
    with pytest.raises(ConfigError):
        config_fingerprint([1], exclude=["a"])


# -- tokenizer and chat template ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As `save_pretrained` leaves it, with a real tokenizer.json."""
    made = tmp_path / "tokenizer"
    made.mkdir()
    Tokenizer(BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])).save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8, "chat_template": "{{ x }}"}))
    (made / "special_tokens_map.json").write_text("{}")
    return made


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in sorted(folder.iterdir(), reverse=True):
        (to / path.name).write_bytes(path.read_bytes())
        os.utime(to / path.name, (1, 1))
    return to


def test_a_tokenizer_is_its_content(folder: Path, tmp_path: Path) -> None:
    before = tokenizer_fingerprint(folder)
    assert tokenizer_fingerprint(copy(folder, tmp_path / "elsewhere")) == before
    assert tokenizer_fingerprint(str(folder)) == before
    assert tokenizer_fingerprint(sorted(folder.iterdir(), reverse=True)) == before
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert tokenizer_fingerprint(linked) == before
    (folder / ".cache").mkdir()
    (folder / ".cache" / "tokenizer.json.metadata").write_text("1700000000")
    assert tokenizer_fingerprint(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda f: Tokenizer(BPE(vocab={"a": 0, "b": 1, "ba": 2}, merges=[("b", "a")])).save(str(f / "tokenizer.json")),
        lambda f: (f / "tokenizer_config.json").write_text(
            json.dumps({"model_max_length": 9, "chat_template": "{{ x }}"})
        ),
        lambda f: (f / "tokenizer_config.json").write_text("no json"),
        lambda f: (f / "special_tokens_map.json").write_text("{ }"),
        lambda f: (f / "special_tokens_map.json").rename(f / "special_tokens.json"),
        lambda f: (f / "special_tokens_map.json").unlink(),
        lambda f: (f / "added_tokens.json").write_text("{}"),
        lambda f: ((f / "sub").mkdir(), (f / "special_tokens_map.json").rename(f / "sub" / "special_tokens_map.json")),
    ],
)
def test_any_change_of_a_tokenizer_counts(folder: Path, change) -> None:
    before = tokenizer_fingerprint(folder)
    change(folder)
    assert tokenizer_fingerprint(folder) != before


def test_the_chat_template_has_a_fingerprint_of_its_own(folder: Path) -> None:
    before = tokenizer_fingerprint(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8}))
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}\r\n")
    assert tokenizer_fingerprint(folder) == before
    assert chat_template_fingerprint(folder / "chat_template.jinja") == chat_template_fingerprint("{{ x }}\r\n")
    several = {"{{ x }}", "{{ x }}\n"}
    prints = {chat_template_fingerprint(text) for text in several} | {chat_template_fingerprint({"default": "{{ x }}"})}
    assert len(prints) == 3


def test_what_is_no_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (folder / "broken.json").symlink_to("nowhere")
    for wrong in (tmp_path / "none", tmp_path / "empty", [], [folder / "none.json"], [folder], folder):
        with pytest.raises(ConfigError):
            tokenizer_fingerprint(wrong)
    (folder / "broken.json").unlink()
    with pytest.raises(ConfigError, match="two files are called"):
        tokenizer_fingerprint([folder / "tokenizer.json", copy(folder, tmp_path / "b") / "tokenizer.json"])
    (folder / "model.safetensors").write_text("")
    with pytest.raises(ConfigError, match=r"holds weights: model\.safetensors"):
        tokenizer_fingerprint(folder)


def test_a_link_that_leads_back_ends(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    with pytest.raises(ConfigError):
        tokenizer_fingerprint(folder)


def test_a_pipe_does_not_hang(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        tokenizer_fingerprint(folder)


# -- data and packages -------------------------------------------------------------------------------


def test_a_dataset_is_its_list_or_its_manifest(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    for name in ("b.bin", "a.bin", "sub/c.bin"):
        (data / name).write_text(name)
    files = dataset_files(data, hashed=True)
    assert [(file.name, file.size_bytes) for file in files] == [("a.bin", 5), ("b.bin", 5), ("sub/c.bin", 9)]
    before = dataset_fingerprint(files)
    (data / "a.bin").write_text("other")
    assert dataset_fingerprint(dataset_files(data, hashed=True)) != before
    sizes = dataset_fingerprint(dataset_files(data))
    (data / "a.bin").write_text("rehto")
    assert dataset_fingerprint(dataset_files(data)) == sizes
    (data / "a.bin").write_text("longer")
    assert dataset_fingerprint(dataset_files(data)) != sizes
    assert dataset_fingerprint(reversed(files)) != before
    manifest = tmp_path / "manifest.txt"
    manifest.write_text("shard-0 10\n")
    one = dataset_fingerprint(manifest)
    manifest.write_text("shard-0 11\n")
    assert dataset_fingerprint(manifest) != one


@pytest.mark.parametrize(
    "wrong", [[], "manifest.txt", [DatasetFile("a", 1), DatasetFile("a", 2)], ["a"], Path("none.txt")]
)
def test_what_is_no_dataset_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        dataset_fingerprint(wrong)


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = packages_fingerprint(["msgspec", "rich"])
    assert packages_fingerprint(["rich", "msgspec"]) == before
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "rich" else real(name))
    assert packages_fingerprint(["rich", "msgspec"]) != before
    with pytest.raises(ConfigError, match="'no-such-package' is not installed"):
        packages_fingerprint(["no-such-package"])


# -- code --------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    (root / "pkg").mkdir(parents=True)
    git(root, "init", "-q")
    (root / "train.py").write_text("lr = 1\n")
    (root / "pkg" / "model.py").write_text("x = 1\n")
    (root / ".gitignore").write_text("*.log\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    return root


def test_a_clean_clone_is_its_commit(clone: Path) -> None:
    version = f"git:{git(clone, 'rev-parse', 'HEAD')}"
    assert code_version(clone) == version
    assert code_version(str(clone / "pkg")) == version
    (clone / "run.log").write_text("ignored")
    os.utime(clone / "train.py", (1, 1))
    assert code_version(clone / "pkg") == version
    git(clone, "commit", "-q", "--allow-empty", "-m", "two")
    assert code_version(clone) != version


CHANGES = {
    "edited": lambda root: (root / "train.py").write_text("lr = 2\n"),
    "edited-below": lambda root: (root / "pkg" / "model.py").write_text("x = 2\n"),
    "untracked": lambda root: (root / "new.py").write_text("y = 1\n"),
    "untracked-odd-name": lambda root: (root / 'é"\n.py').write_text("y = 1\n"),
    "untracked-other": lambda root: (root / "new.py").write_text("y = 2\n"),
    "deleted": lambda root: (root / "train.py").unlink(),
    "staged": lambda root: ((root / "train.py").write_text("lr = 3\n"), git(root, "add", "-A")),
    "renamed": lambda root: git(root, "mv", "train.py", "trainer.py"),
    "executable": lambda root: (root / "train.py").chmod(0o755),
    "edited-and-executable": lambda root: (
        (root / "train.py").write_text("lr = 2\n"),
        (root / "train.py").chmod(0o755),
    ),
    "link": lambda root: ((root / "train.py").unlink(), (root / "train.py").symlink_to("pkg/model.py")),
    "broken-link": lambda root: (root / "data").symlink_to("nowhere"),
}


def test_every_change_has_a_digest_of_its_own(clone: Path, tmp_path: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")
    seen = {}
    for name, change in CHANGES.items():
        change(clone)
        seen[name] = code_version(clone / "pkg")
        assert code_version(clone) == seen[name]
        git(clone, "reset", "-q", "--hard")
        git(clone, "clean", "-qfd")
        assert code_version(clone) == f"git:{commit}", name
    assert all(re.fullmatch(rf"git:{commit}\+sha256:[0-9a-f]{{64}}", version) for version in seen.values())
    assert len(set(seen.values())) == len(CHANGES)


def test_settings_of_the_user_and_staging_do_not_count(
    clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (clone / "train.py").write_text("lr = 2\n")
    (clone / "new.py").write_text("y = 1\n")
    before = code_version(clone)
    (tmp_path / "gitconfig").write_text(
        "[diff]\nnoprefix = true\nmnemonicPrefix = true\nrenames = copies\n[core]\nquotePath = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert code_version(clone) == before
    monkeypatch.delenv("GIT_DIR")
    git(clone, "add", "-A")
    assert code_version(clone) == before


def test_a_clone_inside_the_clone_counts(clone: Path) -> None:
    inner = clone / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "a.py").write_text("1")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    before = code_version(clone)
    (inner / "a.py").write_text("2")
    assert "+sha256:" in before
    assert code_version(clone) != before


def test_without_git_or_commit_it_is_refused_or_unknown_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    (tmp_path / "unborn").mkdir()
    git(tmp_path / "unborn", "init", "-q")
    for folder in ("plain", "unborn", "absent"):
        with pytest.raises(ConfigError, match="no code version"):
            code_version(tmp_path / folder)
        assert code_version(tmp_path / folder, unknown_ok=True) == "unknown"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no code version: FileNotFoundError"):
        code_version(tmp_path / "unborn")
    assert code_version(tmp_path / "unborn", unknown_ok=True) == "unknown"


def test_data_in_the_clone_is_not_hashed_for_hours(clone: Path) -> None:
    with open(clone / "checkpoint.bin", "wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(ConfigError, match=r"that is no code.*\.gitignore"):
        code_version(clone, unknown_ok=True)
