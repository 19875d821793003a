"""Stores of every released format version are read as on the day they were written."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from txstore import manifest, open_store
from txstore.catalog import entries, find, newest
from txstore.dcp import StorageReader
from txstore.decisions import read_index, read_manifest, read_store_format
from txstore.index import GridRecord, encode_index
from txstore.keys import parse_decision_key, parse_retired_key
from txstore.manifest import Description, Progress, encode
from txstore.ops.verify import verify_store
from txstore.store import Store

VERSIONS = sorted(path for path in Path(__file__).parent.iterdir() if (path / "txstore.json").exists())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def root(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def store(root: Path) -> Store:
    return open_store(f"file://{root}")


def expected(seed: int) -> dict[str, object]:
    """Written out again, not imported: `make.py` may change, the files may not."""
    whole = torch.arange(12) + seed
    return {
        "model": {"weight": whole.float().reshape(3, 4), "half": whole.bfloat16(), "mask": whole % 2 == 0},
        "complex": torch.complex(whole.double(), -whole.double()),
        "scalar": torch.tensor(7 + seed),
        "empty": torch.zeros(0, 5),
        "object": {"lr": 0.5, "names": ["a", "b"], "seed": seed},
        "__metadata__": torch.ones(1),
        'naïve/名 \n"': torch.full((2,), float(seed)),
    }


def blank(value: object) -> object:
    if isinstance(value, dict):
        return {name: blank(one) for name, one in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


def same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    return one == other


def test_there_is_one_for_each_version() -> None:
    assert [path.name for path in VERSIONS] == [f"v{number + 1}" for number in range(manifest.SPREAD_VERSION)]


def test_each_has_what_its_version_brought() -> None:
    stores = [open_store(f"file://{path}") for path in VERSIONS]
    assert [manifest.spread_of(read_store_format(store)) for store in stores] == [0, 3]
    indexes = [read_index(store, found, read_manifest(store, found)) for store in stores if (found := newest(store))]
    assert [index.version for index in indexes] == [1, 2]
    assert {item.name for item in indexes[1].items if isinstance(item, GridRecord)} == {
        "model.weight",
        "model.half",
        "model.mask",
    }


@pytest.mark.parametrize(("name", "seed"), [(None, 5), ("step-2", 22), ("step-5", 5)])
def test_loads_the_values_that_were_saved(root: Path, name: str | None, seed: int) -> None:
    target = blank(expected(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=name, storage_reader=StorageReader(f"file://{root}"), no_dist=True)
    assert same(target, expected(seed))


def test_a_name_that_is_no_unicode_is_loaded(root: Path) -> None:
    target = {"\ud800name": torch.zeros(2), "plain": torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id="surrogate-4", storage_reader=StorageReader(f"file://{root}"), no_dist=True)
    assert same(target, {"\ud800name": torch.ones(2), "plain": torch.zeros(2)})


def test_every_decision_means_what_it_meant(store: Store) -> None:
    assert [(one.decision.checkpoint, one.decision.slot, one.state) for one in entries(store)] == [
        ("step-1", 0, "retired"),
        ("step-2", 0, "superseded"),
        ("step-2", 1, "committed"),
        ("step-3", 0, "aborted"),
        ("surrogate-4", 0, "committed"),
        ("step-5", 0, "committed"),
    ]


def test_every_byte_verifies(store: Store) -> None:
    report = verify_store(store, depth="full")
    assert (report.state, len(report.reports)) == ("sound", 4)


def test_the_description_is_read(store: Store) -> None:
    assert read_manifest(store, newest(store)).description == Description(
        Progress(3, 1, 2, 96), {"dp": 1}, {"config": "c0ffee"}
    )


def test_documents_are_encoded_as_they_were(store: Store) -> None:
    """One document has one encoding: read-back compares bytes, and another release may be the one that reads."""
    known = {"txstore.json": manifest.StoreFormat, "latest.json": manifest.Pointer}
    seen = set()
    for info in store.list(""):
        data = store.read(info.key)
        kind = known.get(info.key)
        if parse_decision_key(info.key):
            kind = manifest.Decision
        elif parse_retired_key(info.key):
            kind = manifest.Tombstone
        elif info.key.endswith("begin.json"):
            kind = manifest.Begin
        elif info.key.endswith("manifest.json"):
            kind = manifest.Manifest
        if kind is not None:
            assert encode(msgspec.json.decode(data, type=kind)) == data, info.key
            seen.add(kind)
    assert len(seen) == 6
    decision = find(store, "step-2")
    index = read_index(store, decision, read_manifest(store, decision))
    assert encode_index(index) == store.read(read_manifest(store, decision).index.key)


def test_the_safetensors_library_reads_the_shards(root: Path, store: Store) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for shard in read_manifest(store, newest(store)).shards:
        with safe_open(root / shard.key, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118 - not a mapping
                found.setdefault(name, []).append(file.get_tensor(name))
                if name == "complex":
                    assert file.get_slice(name).get_dtype() == "U8"
                    assert file.get_slice(name).get_shape() == [12, 16]
    assert torch.equal(torch.cat(found["model.weight"]), (torch.arange(12) + 5).float().reshape(3, 4))
    assert len(found["complex"]) == 1
    assert torch.equal(found["__metadata__.value"][0], torch.ones(1))
