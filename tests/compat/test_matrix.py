"""The matrix file is decoded strictly: nothing is skipped, guessed or silently overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore.compat import Topology, entry_for, parse_matrix, read_matrix
from txstore.compat.topology import ROLES, without_derived_world
from txstore.errors import ConfigError

MISSION = """\
resume_compatibility:
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to:   {dp: 6, tp: 8, pp: 1, zero: 1}
    status: verified
  - from: {dp: 8, tp: 8, pp: 1, zero: 1}
    to:   {dp: 8, tp: 4, pp: 2, zero: 1}
    status: blocked_until_drill_passes
"""


def entry(saved: str = "dp: 8", today: str = "dp: 6", status: str = "verified") -> str:
    return f"  - {{from: {{{saved}}}, to: {{{today}}}, status: {status}}}\n"


def matrix(*entries: str) -> str:
    return "resume_compatibility:\n" + "".join(entries)


def test_the_matrix_of_the_mission(tmp_path: Path) -> None:
    (tmp_path / "matrix.yaml").write_text(MISSION)
    read = read_matrix(tmp_path / "matrix.yaml")
    assert read.source.endswith("matrix.yaml")
    assert [(one.number, one.saved["dp"], one.today, one.status) for one in read.entries] == [
        (1, 8, {"dp": 6, "tp": 8, "pp": 1, "zero": 1}, "verified"),
        (2, 8, {"dp": 8, "tp": 4, "pp": 2, "zero": 1}, "blocked_until_drill_passes"),
    ]


def test_every_field_can_be_named() -> None:
    everything = "dp: 2, tp: 3, pp: 4, zero: 0, fsdp: hybrid, world: 24"
    text = matrix(entry(everything, everything.replace("zero: 0", "zero: 3")))
    assert parse_matrix(text).entries[0].saved["fsdp"] == "hybrid"
    assert parse_matrix("resume_compatibility: []").entries == ()
    assert parse_matrix(matrix(entry("dp: 8, world: 16", "dp: 4, world: 8"))).entries[0].today["world"] == 8


REFUSED = {
    "empty-file": ("", "one key 'resume_compatibility'"),
    "null": ("resume_compatibility:", "a list of entries"),
    "mapping": ("resume_compatibility: {a: 1}", "a list of entries"),
    "other-root": ("compatibility: []", "one key"),
    "second-root": ("resume_compatibility: []\nmore: 1", "one key"),
    "list-root": ("- 1", "one key"),
    "root-twice": ("resume_compatibility: []\nresume_compatibility: []", "line 2 .*repeats the key"),
    "no-yaml": ("resume_compatibility: [", "no YAML in line"),
    "tab": ("resume_compatibility:\n\t- x", "no YAML in line 2"),
    "python-tag": ("resume_compatibility: !!python/object/apply:os.system [ls]", "no YAML in line 1"),
    "bad-date": ("resume_compatibility: 2001-99-99", "no YAML"),
    "two-documents": ("resume_compatibility: []\n---\nx: 1", "no YAML"),
    "entry-is-text": (matrix("  - verified\n"), "entry 1 must have exactly the keys"),
    "entry-unknown-key": (matrix("  - {from: {dp: 8}, to: {dp: 6}, status: verified, note: x}\n"), "'note'"),
    "entry-without-status": (matrix("  - {from: {dp: 8}, to: {dp: 6}}\n"), "must have exactly"),
    "key-twice": (matrix("  - from: {dp: 8}\n    to: {dp: 6}\n    status: verified\n    status: verified\n"), "line 5"),
    "size-twice": (matrix(entry("dp: 8, dp: 6", "dp: 4")), "line 2 .*repeats the key 'dp'"),
    "status-unknown": (matrix(entry(status="allowed")), "unknown status 'allowed'"),
    "status-case": (matrix(entry(status="Verified")), "unknown status"),
    "status-true": (matrix(entry(status="yes")), "unknown status True"),
    "status-list": (matrix(entry(status="[verified]")), "unknown status"),
    "field-unknown": (matrix(entry("dp: 8, ep: 2", "dp: 6, ep: 2")), "unknown field 'ep'"),
    "field-is-a-flag": (matrix(entry("on: 8", "on: 6")), "unknown field 'True'"),
    "field-is-null": (matrix(entry("~: 8", "~: 6")), "unknown field"),
    "sides-empty": (matrix(entry("", "")), "'from' must be a mapping"),
    "side-is-a-list": (matrix("  - {from: [8], to: {dp: 6}, status: verified}\n"), "'from' must be a mapping"),
    "size-text": (matrix(entry("dp: '8'")), "dp must be a positive integer, not '8'"),
    "size-float": (matrix(entry("dp: 8.0")), "not 8.0"),
    "size-flag": (matrix(entry("dp: true")), "not True"),
    "size-null": (matrix(entry("dp: ")), "not None"),
    "size-zero": (matrix(entry("dp: 0")), "not 0"),
    "size-negative": (matrix(entry("dp: -8")), "not -8"),
    "zero-four": (matrix(entry("zero: 4", "zero: 1")), "zero must be an integer from 0 to 3"),
    "fsdp-flag": (matrix(entry("fsdp: no", "fsdp: full")), "fsdp must be a text, not False"),
    "fsdp-empty": (matrix(entry("fsdp: ''", "fsdp: full")), "fsdp must be a text"),
    "same": (matrix(entry("dp: 8", "dp: 8")), "are the same"),
    "one-side-only": (matrix(entry("dp: 8, tp: 2", "dp: 6")), "only one of 'from' and 'to' names tp"),
    "repeats": (matrix(entry(), entry("dp: 7"), entry()), "entry 3 repeats entry 1"),
    "contradicts": (matrix(entry(), entry(status="blocked_until_drill_passes")), "entry 2 contradicts entry 1"),
    "contradicts-itself": (matrix(entry("dp: 2, tp: 2, pp: 1, world: 5", "dp: 2, tp: 1, pp: 1, world: 2")), "world is not dp x tp x pp"),
    "second-entry": (matrix(entry(), entry(status="x")), "entry 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    text, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        parse_matrix(text, source="matrix.yaml")


@given(st.one_of(st.text(max_size=40), st.text(max_size=20).map(lambda text: matrix(entry(status=text)))))
def test_any_text_is_a_matrix_or_a_config_error(text: str) -> None:
    try:
        parse_matrix(text)
    except ConfigError:
        pass


@pytest.mark.parametrize(
    "text", ["!!float ''", "!!int ''", "!!timestamp x", "? [1]\n: 2", "[" * 1200, "&a [*a]", "!!set {a, b}"]
)
def test_odd_yaml_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_matrix(text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the compatibility matrix"):
        read_matrix(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot read"):
        read_matrix(tmp_path / "latin.yaml")


def test_without_pyyaml_it_says_what_to_install_and_the_rest_works() -> None:
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from txstore.compat import judge, parse_matrix\nfrom txstore.manifest import Description\n"
        "assert judge(Description(), Description(), {}, {}).allowed\n"
        "try: parse_matrix('resume_compatibility: []')\nexcept Exception as error: print(type(error).__name__, error)\n"
        "print(sorted({'torch', 'numpy', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told, loaded = done.stdout.splitlines()
    assert told.startswith("ConfigError")
    assert "pip install '.[train]' in txstore's checkout" in told
    assert loaded == "[]"


sizes = st.integers(1, 4)
topologies = st.builds(
    lambda dp, tp, pp, zero, fsdp: Topology(world=dp * tp * pp, dp=dp, tp=tp, pp=pp, zero=zero, fsdp=fsdp).as_dict(),
    sizes, sizes, sizes, st.integers(0, 3), st.text(min_size=1, max_size=5),
)  # fmt: skip


@given(topologies, topologies)
def test_an_entry_to_paste_is_read_back_and_matches_that_pair_only(saved: dict, today: dict) -> None:
    if saved == today:
        return
    read = parse_matrix("resume_compatibility:\n" + entry_for(saved, today))
    assert len(read.matching(saved, today)) == 1
    assert read.matching(today, saved) == ()
    assert read.matching(saved, {**today, "zero": (today["zero"] + 1) % 4}) == ()


def test_the_entry_to_paste_reads_like_the_mission() -> None:
    saved = {"dp": 8, "tp": 8, "pp": 1, "zero": 1, "world": 64}
    today = {"dp": 8, "tp": 4, "pp": 2, "zero": 1, "world": 64}
    assert entry_for(saved, today) == "".join(MISSION.splitlines(keepends=True)[4:])


# -- topology ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"world": 7, "dp": 8},
        {"world": 8},
        {"world": 0, "dp": 0},
        {"world": 1, "zero": 4},
        {"world": 1, "zero": -1},
        {"world": True},
        {"world": 1, "fsdp": ""},
        {"world": 1, "fsdp": None},
        {"world": 2.0, "dp": 2},
    ],
)
def test_impossible_topologies_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Topology(**wrong)


def test_a_topology_of_a_mesh() -> None:
    assert Topology.from_mesh(["pp", "dp", "tp"], [2, 3, 4], zero=1).as_dict() == {
        "world": 24, "dp": 3, "tp": 4, "pp": 2, "zero": 1, "fsdp": "none"
    }  # fmt: skip
    assert Topology.from_mesh([], []) == Topology(world=1)
    folded = Topology.from_mesh(["dp", "cp"], [2, 2], roles={**ROLES, "cp": "dp"})
    assert (folded.dp, folded.world) == (4, 4)


def test_replicas_of_shards_are_not_shards() -> None:
    hybrid = Topology.from_mesh(["dp_replicate", "dp_shard"], [2, 4], fsdp="hybrid")
    assert (hybrid.dp, hybrid.fsdp) == (8, "hybrid (dp_replicate=2, dp_shard=4)")
    assert hybrid != Topology.from_mesh(["dp_replicate", "dp_shard"], [4, 2], fsdp="hybrid")
    assert Topology.from_mesh(["dp_replicate", "dp_shard"], [1, 8], fsdp="full").fsdp == "full"


@pytest.mark.parametrize(("names", "sizes"), [(["ep"], [2]), (["dp", "dp"], [2, 2]), (["dp"], [2, 2]), (["dp"], [0])])
def test_a_mesh_that_is_not_understood_is_refused(names: list[str], sizes: list[int]) -> None:
    with pytest.raises(ConfigError):
        Topology.from_mesh(names, sizes)


def test_a_world_that_contradicts_its_factors_is_kept() -> None:
    assert "world" in without_derived_world({"dp": 2, "tp": 1, "pp": 1, "world": 3})
    assert "world" in without_derived_world({"dp": 2, "world": 2})
    assert "world" not in without_derived_world({"dp": 2, "tp": 1, "pp": 1, "world": 2})
