"""The documents name what exists: files, tests, fields, exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from txstore import index, manifest
from txstore.cli import outcome
from txstore.cli.app import EXIT_CODES
from txstore.ops.report import Depth, Kind, State

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:tests|txstore|backends|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_named_tests_exist() -> None:
    sources = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "txstore" / "testing").glob("*.py")]
    known = set(re.findall(r"def (test_\w+)", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
        assert named <= known, page


def test_every_fault_scenario_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", text_of("design/fault-scenarios.md"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 39))
    for number, row in rows:
        named = re.findall(r"`([\w./-]+)::(test_\w+)`", row)
        assert named, number
        for file, test in named:
            assert re.search(rf"def {test}\(", (ROOT / file).read_text(encoding="utf-8")), f"{number}: {file}::{test}"


@pytest.mark.parametrize(
    "document",
    [
        manifest.StoreFormat,
        manifest.Decision,
        manifest.Totals,
        manifest.FileRef,
        manifest.Begin,
        manifest.Manifest,
        manifest.ShardRef,
        manifest.Description,
        manifest.Progress,
        index.Index,
        index.FileRecord,
        index.TensorRecord,
        index.GridRecord,
        index.ChunkRecord,
        index.ObjectRecord,
        manifest.Tombstone,
        manifest.Pointer,
    ],
)
def test_every_field_of_the_format_is_described(document: type[msgspec.Struct]) -> None:
    code = " ".join(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text_of("design/format.md"), flags=re.DOTALL)))
    missing = [name for name in document.__struct_fields__ if not re.search(rf"\b{name}\b", code)]
    assert missing == []


def test_limits_in_the_format_are_those_of_the_code() -> None:
    text = text_of("design/format.md")
    assert f"At most {manifest.DECISION_MAX_BYTES} bytes" in text
    assert f"At most {manifest.MANIFEST_MAX_BYTES >> 20} MiB" in text
    assert f"at most {manifest.INDEX_MAX_BYTES >> 30} GiB" in text
    assert f"{index.BLOCK_BYTES}" in text


def test_exit_codes_are_the_same_in_code_help_and_docs() -> None:
    codes = {
        outcome.OK,
        outcome.UNEXPECTED,
        outcome.USAGE,
        outcome.NOT_FOUND,
        outcome.DAMAGED,
        outcome.STORE,
        outcome.INTERRUPTED,
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text_of("cli.md"), re.MULTILINE)} == codes
    assert {int(code) for code in re.findall(r"^  (\d+)  ", EXIT_CODES, re.MULTILINE)} == codes


def test_words_of_verify_are_explained() -> None:
    text = text_of("cli.md")
    for word in (*get_args(Depth), *get_args(Kind), *get_args(State)):
        assert f"`{word}`" in text, word
