"""What each command answers, to people and to machines, and its exit code."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from pathlib import Path

import pytest

from txstore.catalog import find, newest
from txstore.cli import outcome
from txstore.cli.outcome import DAMAGED, NOT_FOUND, OK, STORE, UNEXPECTED, USAGE
from txstore.decisions import read_manifest
from txstore.errors import IntegrityError, TransientError
from txstore.keys import decision_key
from txstore.manifest import Description, Progress
from txstore.memory import MemoryStore
from txstore.retry import RetryPolicy
from txstore.store import Store
from txstore.sweep import retire
from txstore.testing.samples import commit_sample
from txstore.transaction import begin

EVIL = "\x1b]0;pwned\x07\x9b31m\x7f\u202ename"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- ls ---------------------------------------------------------------------------------------------


def test_ls_is_in_order_of_steps_in_aligned_columns(cli, store: Store, url: str) -> None:
    for step in (10, 9, 100):
        commit_sample(store, f"step-{step}")
    answer = cli("ls", url)
    assert (answer.code, answer.err) == (OK, "")
    header, *rows = answer.out.splitlines()
    assert header.split() == ["CHECKPOINT", "STEP", "STATE", "SIZE", "SHARDS", "WORLD", "DECIDED", "WRITER"]
    assert [row.split()[0] for row in rows] == ["step-9", "step-10", "step-100"]
    assert {row.index("committed") for row in rows} == {header.index("STATE")}
    assert rows[0].split()[2:7] == ["committed", "16.0", "KiB", "2", "2"]
    assert cli("ls", url, "--json").names == ["step-9", "step-10", "step-100"]


def test_ls_all_shows_every_state(cli, store: Store, url: str) -> None:
    commit_sample(store, "step-1")
    commit_sample(store, "step-1", overwrite=True)
    second = commit_sample(store, "step-2")
    begin(store, "step-3", world_size=1, writer="sample:1").abort()
    commit_sample(store, "step-4")
    retire(store, second)
    assert cli("ls", url, "--json").names == ["step-1", "step-4"]
    shown = [
        (one["checkpoint"], one["slot"], one["state"]) for one in cli("ls", url, "--all", "--json").json["checkpoints"]
    ]
    assert shown == [
        ("step-1", 0, "superseded"),
        ("step-1", 1, "committed"),
        ("step-2", 0, "retired"),
        ("step-3", 0, "aborted"),
        ("step-4", 0, "committed"),
    ]
    table = cli("ls", url, "--all").out
    assert "SLOT" in table.splitlines()[0]
    assert second.txn in table
    assert table.splitlines()[4].split()[:4] == ["step-3", "3", "aborted", "-"]


def test_ls_of_no_store_is_not_an_empty_store(cli, store: Store, url: str) -> None:
    answer = cli("ls", url)
    assert (answer.code, answer.out) == (NOT_FOUND, "")
    assert "no store at" in answer.err
    document = cli("ls", url, "--json").json
    assert document["checkpoints"] == []
    assert document["error"] == {
        "type": "CheckpointNotFound",
        "message": f"no store at {url}: nothing was ever saved there",
        "key": url,
        "next_step": "check the URL, or save the first checkpoint",
        "exit_code": NOT_FOUND,
    }
    begin(store, "step-1", world_size=1)
    answer = cli("ls", url)
    assert (answer.code, answer.out) == (OK, "")
    assert "no committed checkpoint" in answer.err
    assert cli("ls", url, "--json").json["checkpoints"] == []


# -- latest -----------------------------------------------------------------------------------------


def test_latest_is_the_bare_name(cli, store: Store, url: str) -> None:
    for step in (900, 1000):
        commit_sample(store, f"step-{step}")
    answer = cli("latest", url)
    assert (answer.code, answer.out, answer.err) == (OK, "step-1000\n", "")


@pytest.mark.parametrize("command", ["latest", "show", "verify"])
def test_nothing_committed(cli, store: Store, url: str, command: str) -> None:
    begin(store, "step-1", world_size=1)
    answer = cli(command, url)
    assert (answer.code, answer.out) == (NOT_FOUND, "")
    assert answer.err.splitlines()[0].startswith("txstore: no committed checkpoint in file://")
    assert answer.err.splitlines()[1].startswith("txstore: next: ")


def test_two_newest_checkpoints_are_not_guessed_between(cli, store: Store, url: str) -> None:
    commit_sample(store, "a-5")
    commit_sample(store, "b-5")
    answer = cli("latest", url)
    assert (answer.code, answer.out) == (STORE, "")
    assert "a-5" in answer.err
    assert "b-5" in answer.err


# -- show -------------------------------------------------------------------------------------------


def test_show_tells_what_the_manifest_says(cli, store: Store, url: str) -> None:
    description = Description(
        progress=Progress(1000, epoch=2, micro_step=3, consumed_samples=64000),
        topology={"dp": 8, "tp": 2, "fsdp": "full_shard"},
        fingerprints={"tokenizer": "f00d"},
        settings={"batch_size": 8, "shuffle": True},
        accepted=("setting batch_size: saved 4, now 8", "migration grow-vocab-v2"),
    )
    decision = commit_sample(store, "step-1000", description=description)
    commit_sample(store, "step-2000")
    out = cli("show", url, "step-1000").out
    for text in (
        "step-1000 (slot 0)",
        "step 1000, epoch 2, micro step 3, 64000 samples",
        "dp=8, fsdp=full_shard, tp=2",
        "batch_size=8, shuffle=True",
        "setting batch_size: saved 4, now 8; migration grow-vocab-v2",
        "tokenizer=f00d",
        "txstore=test",
        "16.0 KiB in 2 shards of 2 ranks",
        decision.txn,
        *(shard.key for shard in read_manifest(store, decision).shards),
        *(f"{shard.crc32c:08x}" for shard in read_manifest(store, decision).shards),
    ):
        assert text in out
    told = cli("show", url, "step-1000", "--json").json["checkpoint"]
    assert told["settings"] == description.settings
    assert told["accepted"] == list(description.accepted)
    assert "step-2000" in cli("show", url).out


def test_show_limits_the_tensors(cli, store: Store, url: str) -> None:
    commit_sample(store, "step-1")
    names = {n: [item["name"] for item in cli("show", url, "--json", "--tensors", n).json["items"]] for n in "012"}
    assert names == {"0": [], "1": ["model.weight"], "2": ["model.weight", "scale"]}
    document = cli("show", url, "--json", "--tensors", "-1").json
    assert document["items"][0] == {
        "name": "model.weight",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [8, 256],
        "chunks": 2,
        "bytes": 8192,
    }
    assert document["items_left_out"] == 0
    assert "1 more; --tensors -1 shows all" in cli("show", url, "--tensors", "2").out
    assert "[8, 256]" in cli("show", url).out


def test_show_without_tensors_needs_no_index(cli, store: Store, root: Path, url: str) -> None:
    decision = commit_sample(store, "step-1")
    (root / read_manifest(store, decision).index.key).unlink()
    assert cli("show", url, "--tensors", "0").code == OK
    answer = cli("show", url)
    assert answer.code == DAMAGED
    assert "index.msgpack" in answer.err


# -- verify -----------------------------------------------------------------------------------------


def test_verify_takes_one_the_newest_or_all(cli, store: Store, url: str) -> None:
    for step in (1, 2, 3):
        commit_sample(store, f"step-{step}")
    assert cli("verify", url, "--json").names == ["step-3"]
    assert cli("verify", url, "step-1", "--json").names == ["step-1"]
    assert cli("verify", url, "--all", "--json").names == ["step-1", "step-2", "step-3"]
    answer = cli("verify", url, "step-2", "--depth", "full")
    assert answer.code == OK
    assert answer.out.startswith("step-2 (slot 0): sound; 2 shards, 2 blocks, 16.0 KiB read, every byte")


DAMAGE = {
    "bit-in-the-header": (lambda p, _: flip(p, 100), "checksum", "sample"),
    "bit-in-the-padding": (lambda p, _: flip(p, 4095), "checksum", "sample"),
    "bit-in-the-data": (lambda p, _: flip(p, 5000), "checksum", "sample"),
    "bit-in-the-last-byte": (lambda p, _: flip(p, -1), "checksum", "sample"),
    "truncated": (lambda p, _: os.truncate(p, p.stat().st_size - 1), "size", "documents"),
    "emptied": (lambda p, _: os.truncate(p, 0), "size", "documents"),
    "extended": (lambda p, _: os.truncate(p, p.stat().st_size + 1), "size", "documents"),
    "missing": (lambda p, _: p.unlink(), "missing", "documents"),
    "a-directory": (lambda p, _: (p.unlink(), p.mkdir()), "missing", "documents"),
    "swapped": (
        lambda p, q: (p.rename(q.with_suffix(".x")), q.rename(p), q.with_suffix(".x").rename(q)),
        "checksum",
        "sample",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_verify_names_damaged_shards_at_the_right_depth(cli, store: Store, root: Path, url: str, name: str) -> None:
    change, kind, found_from = DAMAGE[name]
    decision = commit_sample(store, "step-1", ranks=3)
    shards = [root / shard.key for shard in read_manifest(store, decision).shards]
    assert len({path.stat().st_size for path in shards[1:]}) == 1
    change(shards[1], shards[2])
    depths = ("documents", "sample", "full")
    for depth in depths:
        answer = cli("verify", url, "--depth", depth, "--json")
        problems = [(one["kind"], one["key"]) for one in answer.json["checkpoints"][0]["problems"]]
        if depths.index(depth) < depths.index(found_from):
            assert (answer.code, problems) == (OK, [])
        else:
            assert answer.code == DAMAGED
            assert (kind, decision_relative(root, shards[1])) in problems
            assert len(problems) == (2 if name == "swapped" else 1)
    text = cli("verify", url, "--depth", "full")
    assert text.code == DAMAGED
    assert kind in text.out
    assert shards[1].name in text.out
    assert "next: " in text.out


def decision_relative(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


@pytest.mark.parametrize("depth", ["documents", "sample", "full"])
@pytest.mark.parametrize("document", ["manifest", "index"])
def test_verify_names_damaged_documents_at_every_depth(cli, store, root: Path, url, document, depth) -> None:
    decision = commit_sample(store, "step-1")
    manifest = read_manifest(store, decision)
    key = decision.manifest.key if document == "manifest" else manifest.index.key
    intact = (root / key).read_bytes()
    for at in (0, len(intact) // 2, len(intact) - 1):
        flip(root / key, at)
        answer = cli("verify", url, "--depth", depth, "--json")
        assert answer.code == DAMAGED
        assert [(one["kind"], one["key"]) for one in answer.json["checkpoints"][0]["problems"]] == [("digest", key)]
        (root / key).write_bytes(intact)
    (root / key).unlink()
    answer = cli("verify", url, "--depth", depth, "--json")
    assert [one["kind"] for one in answer.json["checkpoints"][0]["problems"]] == ["missing"]
    assert cli("show", url).code == DAMAGED


def test_damaged_decision_is_named_by_every_command(cli, store: Store, root: Path, url: str) -> None:
    commit_sample(store, "step-1")
    commit_sample(store, "step-2")
    key = decision_key("step-2", 0)
    intact = (root / key).read_bytes()
    for at in (0, intact.index(b"commit"), len(intact) - 1):
        flip(root / key, at)
        for command in ("ls", "latest", "show"):
            answer = cli(command, url)
            assert answer.code == DAMAGED, command
            assert key in answer.err
            assert "next: " in answer.err
            assert answer.out == "" or command == "ls"
        answer = cli("verify", url, "--all", "--json")
        assert answer.code == DAMAGED
        assert [one["key"] for one in answer.json["problems"]] == [key]
        assert answer.names == ["step-1"]
        (root / key).write_bytes(intact)


def test_ls_lists_the_rest_beside_a_damaged_record(cli, store: Store, root: Path, url: str) -> None:
    for step in (1, 2):
        commit_sample(store, f"step-{step}")
    commit_sample(store, "step-2", overwrite=True)
    commit_sample(store, "step-3")
    (root / decision_key("step-2", 0)).write_bytes(b"{")
    answer = cli("ls", url)
    assert answer.code == OK, "nothing depends on a record below a slot that stands"
    assert [line.split()[:3] for line in answer.out.splitlines()[1:]] == [
        [f"step-{step}", str(step), "committed"] for step in (1, 2, 3)
    ]
    assert "commits/step-2.0.json" in answer.err
    assert "next: a later slot of step-2 stands" in answer.err
    assert cli("latest", url).out == "step-3\n"
    (root / decision_key("step-3", 0)).unlink()
    (root / decision_key("step-2", 1)).write_bytes(b"{")
    answer = cli("ls", url, "--json")
    assert (answer.code, answer.names) == (DAMAGED, ["step-1"])
    assert [(one["kind"], one["key"]) for one in answer.json["problems"]] == [
        ("format", "commits/step-2.0.json"),
        ("format", "commits/step-2.1.json"),
        ("missing", "commits/step-3.0.json"),
    ]
    assert all("overwrite=True" in one["next_step"] for one in answer.json["problems"][:2])


def test_what_is_superseded_by_a_sound_slot_is_told_and_pages_nobody(cli, store: Store, root: Path, url: str) -> None:
    """After a fallback the damaged slot stays until retention takes it: exit 4 for ever would hide the next damage."""
    damaged = commit_sample(store, "step-1")
    (root / read_manifest(store, damaged).shards[0].key).unlink()
    assert cli("verify", url, "--all").code == DAMAGED
    above = commit_sample(store, "step-1", overwrite=True)
    manifest = root / above.manifest.key
    manifest.rename(root / "aside")
    assert "superseded, damaged" not in cli("verify", url, "--all").out, "no slot is sound"
    (root / "aside").rename(manifest)
    answer = cli("verify", url, "--all")
    assert answer.code == OK
    assert answer.out.startswith("step-1 (slot 0): superseded, damaged; ")
    assert "next: a later slot of step-1 stands, and readers take that one; retention removes this one" in answer.out
    document = cli("verify", url, "step-1", "--json").json
    assert document["state"] == "sound"
    assert [(one["state"], one["superseded"]) for one in document["checkpoints"]] == [
        ("damaged", True),
        ("sound", False),
    ]
    flip(root / decision_key("step-1", 0), 10)  # nor does its record
    answer = cli("verify", url, "--all")
    assert (answer.code, cli("ls", url).code) == (OK, OK)
    assert "next: a later slot stands, and readers take that one; what this record named is kept" in answer.out
    third = commit_sample(store, "step-1", overwrite=True)
    (root / read_manifest(store, third).shards[0].key).unlink()
    assert cli("verify", url, "--all").code == DAMAGED, "slot 2 is what readers take"
    (root / decision_key("step-1", 0)).unlink()
    (root / decision_key("step-1", 2)).unlink()
    (root / "latest.json").unlink()
    assert cli("verify", url, "--all").code == DAMAGED, "a missing record stops the slot walk"
    assert cli("ls", url).code == DAMAGED


def test_ls_says_of_a_commit_below_a_damaged_record_that_it_does_not_know(cli, store, root: Path, url: str) -> None:
    commit_sample(store, "step-1")
    commit_sample(store, "step-1", overwrite=True)
    (root / decision_key("step-1", 1)).write_bytes(b"{")
    answer = cli("ls", url, "--json")
    assert answer.code == DAMAGED
    assert [(one["slot"], one["state"]) for one in answer.json["checkpoints"]] == [(0, "unknown")]
    (root / decision_key("step-1", 0)).unlink()
    answer = cli("ls", url, "--json")
    assert answer.json["checkpoints"] == []
    assert [(one["kind"], one["key"]) for one in answer.json["problems"]] == [
        ("missing", "commits/step-1.0.json"),
        ("format", "commits/step-1.1.json"),
    ]


def test_ls_says_what_a_missing_record_stops(cli, store: Store, root: Path, url: str) -> None:
    commit_sample(store, "step-1")
    decision = commit_sample(store, "step-1", overwrite=True)
    (root / decision_key("step-1", 0)).unlink()
    (problem,) = cli("ls", url, "--json").json["problems"]
    assert "loaded neither by name nor saved again; a load of the newest takes" in problem["next_step"]
    assert newest(store) == decision
    for refused in (lambda: find(store, "step-1"), lambda: commit_sample(store, "step-1", overwrite=True)):
        with pytest.raises(IntegrityError):
            refused()


def test_a_lost_record_is_told_by_every_command(cli, store: Store, root: Path, url: str) -> None:
    for step in (1, 2):
        commit_sample(store, f"step-{step}")
    (root / "commits/step-2.0.json").unlink()
    for command in (["ls"], ["latest"], ["show"], ["verify"], ["show", "step-2"], ["verify", "step-2"]):
        answer = cli(command[0], url, *command[1:])
        told = answer.err + answer.out
        assert answer.code == DAMAGED, command
        assert "the record of step-2.0 was lost: latest.json says that it was committed" in told
        assert "next: restore commits/step-2.0.json from a copy of the store, with all else that is gone" in told
        assert "; if it was deleted on purpose, delete latest.json too" in told
    answer = cli("verify", url, "--all", "--json")
    assert (answer.code, answer.names) == (DAMAGED, ["step-1"])
    assert [(one["kind"], one["key"]) for one in answer.json["problems"]] == [("missing", "commits/step-2.0.json")]
    assert cli("ls", url, "--json").names == ["step-1"]
    assert cli("verify", url, "step-1").code == OK
    (root / "latest.json").unlink()
    assert cli("latest", url).out == "step-1\n"


def test_records_that_are_all_gone_are_no_empty_store(cli, store: Store, root: Path, url: str) -> None:
    commit_sample(store, "step-1")
    shutil.rmtree(root / "commits")
    assert [cli(command, url).code for command in ("ls", "latest", "verify")] == [DAMAGED] * 3
    (root / "txstore.json").unlink()
    answer = cli("ls", url)
    assert answer.code == DAMAGED
    assert "txstore.json is gone, and so is the record of step-1.0" in answer.err
    (root / "latest.json").unlink()
    answer = cli("ls", url)
    assert answer.code == NOT_FOUND
    assert "data of 1 attempt, and no record says that any was ever committed" in answer.err
    assert "restore commits/ and txstore.json" in answer.err


def test_a_decision_that_flips_into_another_txn_is_found_by_its_manifest(cli, store, root: Path, url) -> None:
    decision = commit_sample(store, "step-1")
    path = root / decision_key("step-1", 0)
    other = ("0" if decision.txn[0] != "0" else "1") + decision.txn[1:]
    path.write_bytes(path.read_bytes().replace(f'"txn":"{decision.txn}"'.encode(), f'"txn":"{other}"'.encode()))
    assert cli("verify", url).code == DAMAGED


def test_retired_checkpoint(cli, store: Store, url: str) -> None:
    first = commit_sample(store, "step-1")
    commit_sample(store, "step-2")
    retire(store, first)
    for command in ("show", "verify"):
        answer = cli(command, url, "step-1")
        assert (answer.code, answer.out) == (NOT_FOUND, "")
        assert "removed by retention" in answer.err
    assert cli("verify", url, "--all", "--json").names == ["step-2"]


def test_unknown_checkpoint(cli, store: Store, url: str) -> None:
    commit_sample(store, "step-1")
    for command in ("show", "verify"):
        answer = cli(command, url, "step-7")
        assert (answer.code, answer.out) == (NOT_FOUND, "")
        assert "step-7" in answer.err


def test_sample_is_repeated_by_its_seed(cli, store: Store, url: str) -> None:
    commit_sample(store, "step-1", rows=20 * 1024, ranks=1)
    first = cli("verify", url, "--json", "--blocks", "3").json
    assert first["sample_blocks"] == 3
    again = cli("verify", url, "--json", "--blocks", "3", "--seed", str(first["seed"])).json
    assert again == first
    assert 3 <= first["checkpoints"][0]["blocks"] <= 5


# -- errors, secrets, hostile text ------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["ls"],
        ["ls", "x", "--nonsense"],
        ["show", "/x", "../../etc"],
        ["verify", "/x", "step-1", "--all"],
        ["verify", "/x", "--depth", "deep"],
        ["show", "/x", "--tensors", "-2"],
    ],
)
def test_wrong_usage(cli, args: list[str]) -> None:
    answer = cli(*args)
    assert (answer.code, answer.out) == (USAGE, "")
    assert "Traceback" not in answer.err


def test_help_documents_the_exit_codes(cli) -> None:
    for args in (["--help"], ["ls", "--help"], ["verify", "-h"]):
        answer = cli(*args)
        assert answer.code == OK
        for code in (OK, UNEXPECTED, USAGE, NOT_FOUND, DAMAGED, STORE):
            assert f"    {code}    " in answer.out
    assert cli("--version").out.startswith("txstore ")


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://AKIA:hunter22@bucket/run?sig=abcdef",
        "file:///x?token=hunter22",
        "file://user:hunter22@host/x",
        "file:///x#hunter22",
    ],
)
@pytest.mark.parametrize("command", ["ls", "latest", "show", "verify"])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_bad_url_is_refused_without_its_secrets(cli, url: str, command: str, as_json: bool) -> None:
    answer = cli(command, url, *(["--json"] if as_json else []))
    assert answer.code == STORE
    assert "hunter22" not in answer.out + answer.err
    assert "abcdef" not in answer.out + answer.err
    if as_json:
        assert answer.json["error"]["exit_code"] == STORE
        assert answer.json["error"]["type"] == "ConfigError"


@pytest.mark.parametrize("args", [["ls"], ["ls", "--all"], ["show"], ["show", "--json"], ["ls", "--json"]])
def test_control_characters_never_reach_the_terminal(cli, store: Store, url: str, args: list[str]) -> None:
    commit_sample(
        store,
        "step-1",
        names=(EVIL, "extra" + EVIL),
        writer=EVIL,
        description=Description(fingerprints={EVIL: EVIL}, settings={EVIL: EVIL}, accepted=(EVIL,)),
    )
    answer = cli(args[0], url, *args[1:])
    assert answer.code == OK
    assert answer.out.replace("\n", "").isprintable()
    assert "pwned" in answer.out


def test_verify_names_a_hostile_array_printably(cli, store: Store, url: str) -> None:
    def renamed(extent):
        return dataclasses.replace(extent, name=EVIL) if len(extent.shape) == 2 else extent

    commit_sample(store, "step-1", tamper=renamed)
    answer = cli("verify", url, "--depth", "full")
    assert answer.code == DAMAGED
    assert answer.out.replace("\n", "").isprintable()
    assert "pwned" in answer.out


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickled_payload_is_never_executed(cli, store: Store, url: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    commit_sample(store, "step-1", payload=payload)
    for args in (
        ["ls", url, "--all"],
        ["latest", url],
        ["show", url, "--tensors", "-1"],
        ["verify", url, "--depth", "full"],
    ):
        assert cli(*args).code == OK
        assert cli(*args, "--json").code == OK
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists(), "the canary cannot sing: this test proves nothing"


class SilentStore(MemoryStore):
    def list(self, prefix: str, start_after: str = ""):
        raise TransientError("connection reset by peer")


class BrokenStore(MemoryStore):
    def list(self, prefix: str, start_after: str = ""):
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("command", [["ls"], ["latest"], ["show"], ["verify"], ["verify", "--all"]])
def test_a_silent_store_is_not_an_empty_one(cli, monkeypatch, command: list[str]) -> None:
    monkeypatch.setattr(outcome, "open_store", lambda url: SilentStore())
    monkeypatch.setattr(outcome, "RETRY", RetryPolicy(attempts=2, first_wait_s=0))
    answer = cli(command[0], "memory://", *command[1:])
    assert (answer.code, answer.out) == (STORE, "")
    assert "connection reset" in answer.err


def test_a_bug_is_one_line_and_a_traceback_on_request(cli, monkeypatch) -> None:
    monkeypatch.setattr(outcome, "open_store", lambda url: BrokenStore())
    answer = cli("ls", "memory://")
    assert (answer.code, answer.out) == (UNEXPECTED, "")
    assert answer.err.splitlines()[0] == "txstore: unexpected error: ZeroDivisionError: a bug"
    assert "Traceback" not in answer.err
    monkeypatch.setenv("TXSTORE_DEBUG", "1")
    assert "Traceback" in cli("ls", "memory://").err


# -- the shape of the JSON documents: adding a field is fine once it is added here and in docs/cli.md ---

ENTRY = {
    "checkpoint": "str",
    "slot": "int",
    "step": "int",
    "state": "str",
    "bytes": "int",
    "shards": "int",
    "tensors": "int",
    "objects": "int",
    "world_size": "int",
    "decided_at": "str",
    "writer": "str",
    "txn": "str",
}
FILE = {"key": "str", "bytes": "int", "sha256": "str"}
PROBLEM = {"kind": "str", "key": "str", "what": "str", "next_step": "str"}
SCHEMAS = {
    "ls": {"version": "int", "url": "str", "checkpoints": [ENTRY]},
    "latest": {"version": "int", "url": "str", "checkpoint": ENTRY},
    "show": {
        "version": "int",
        "url": "str",
        "checkpoint": {
            **ENTRY,
            "created_at": "str",
            "software": {"txstore": "str"},
            "progress": {"global_step": "int", "epoch": "int", "micro_step": "int", "consumed_samples": "int"},
            "topology": {"dp": "int"},
            "fingerprints": {"config": "str"},
            "settings": {"seed": "int"},
            "accepted": ["str"],
            "manifest": FILE,
            "index": FILE,
        },
        "shards": [{"key": "str", "rank": "int", "bytes": "int", "crc32c": "str"}],
        "items": [{"name": "str", "kind": "str", "dtype": "str", "shape": ["int"], "chunks": "int", "bytes": "int"}],
        "items_left_out": "int",
    },
    "verify": {
        "version": "int",
        "url": "str",
        "state": "str",
        "depth": "str",
        "seed": "int",
        "sample_blocks": "int",
        "problems": [],
        "checkpoints": [
            {
                "checkpoint": "str",
                "slot": "int",
                "step": "int",
                "txn": "str",
                "state": "str",
                "superseded": "bool",
                "shards": "int",
                "blocks": "int",
                "bytes_read": "int",
                "problems": [PROBLEM],
            }
        ],
    },
}


def shape(value: object) -> object:
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


@pytest.mark.parametrize("command", SCHEMAS)
def test_json_schema(cli, store: Store, root: Path, url: str, command: str) -> None:
    description = Description(Progress(1), {"dp": 1}, {"config": "f00d"}, {"seed": 1}, ("migration x",))
    decision = commit_sample(store, "step-1", description=description)
    if command == "verify":
        flip(root / read_manifest(store, decision).shards[0].key, 0)
    document = cli(command, url, "--json").json
    assert shape(document) == SCHEMAS[command]
    assert document["version"] == outcome.JSON_VERSION


def test_json_schema_of_errors(cli, url: str) -> None:
    assert shape(cli("latest", url, "--json").json) == {
        "version": "int",
        "url": "str",
        "error": {"type": "str", "message": "str", "key": "str", "next_step": "str", "exit_code": "int"},
    }


def test_init_makes_a_store_once_and_tells_its_layout(cli, store: Store, url: str) -> None:
    assert cli("ls", url).code == NOT_FOUND
    made = cli("init", url, "--spread", "16", "--json")
    assert (made.code, made.json["format_version"], made.json["spread"]) == (OK, 2, 16)
    assert cli("ls", url).code == OK
    again = cli("init", url)
    assert (again.code, "spread over 16 prefixes" in again.out) == (OK, True)
    other = cli("init", url, "--spread", "0")
    assert other.code == STORE
    assert "a store keeps its layout" in other.err
    commit_sample(store, "step-1", ranks=3)
    assert {info.key.split("/")[1] for info in store.list("data/")} == {"_00", "_01", "_02", "step-1"}
    assert cli("ls", url, "--json").names == ["step-1"]
    assert cli("verify", url, "--depth", "full").code == OK


def test_init_without_a_spread_makes_the_store_that_a_save_would_make(cli, store: Store, url: str) -> None:
    assert cli("init", url, "--json").json["spread"] == 0
    assert store.read("txstore.json") == b'{"format":"txstore","version":1}'


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format":"txstore","version":2}', b"\0" * 40, None])
@pytest.mark.parametrize("options", [[], ["--spread", "4"]], ids=["plain", "spread"])
def test_the_next_step_for_a_damaged_format_document_repairs_the_store(
    cli, store: Store, root: Path, url: str, options: list[str], damage: bytes | None
) -> None:
    cli("init", url, *options)
    intact = store.read("txstore.json")
    first = commit_sample(store, "step-1", ranks=3)
    commit_sample(store, "step-2", ranks=3)
    store.delete("txstore.json")
    if damage is not None:
        (root / "txstore.json").write_bytes(damage)
    for command in (["ls"], ["latest"], ["verify", "--all"], ["show"]):
        answer = cli(command[0], url, *command[1:])
        assert answer.code == DAMAGED
        assert "`txstore init URL` writes txstore.json anew" in answer.out + answer.err, command
    assert cli("init", url, *options).code == (DAMAGED if damage is not None else OK)
    if damage is not None:
        (root / "txstore.json").rename(root / "txstore.json.damaged")  # "move it out of the store"
    if options:
        store.delete("txstore.json")
        for wrong in ([], ["--spread", "0"], ["--spread", "2"]):
            answer = cli("init", url, *wrong)
            assert answer.code == STORE
            assert "shards here are spread over prefixes up to data/_02" in answer.err
            assert "`txstore init URL --spread N` with the N of before, 3 or more" in answer.err
    assert cli("init", url, *options).code == OK
    assert store.read("txstore.json") == intact
    assert cli("verify", url, "--all", "--depth", "full").code == OK
    retire(store, first)
    assert [info.key for info in store.list("data/") if "step-1" in info.key] == []


@pytest.mark.parametrize("spread", ["1", "257", "-1", "x"])
def test_init_with_an_impossible_spread_is_wrong_usage(cli, root: Path, url: str, spread: str) -> None:
    assert cli("init", url, "--spread", spread).code == USAGE
    assert not root.exists()
