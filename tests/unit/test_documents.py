"""Golden files of all format versions, and documents that must be refused."""

from __future__ import annotations

import json
import math
import os
import pathlib
import pickle
import time
from itertools import pairwise, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore.checksum import BLOCK_BYTES, crc32c, sha256_hex
from txstore.columns import column_bytes
from txstore.errors import ConfigError, FormatError, IntegrityError, TxStoreError
from txstore.grid import arrange
from txstore.index import (
    ChunkRecord,
    FileRecord,
    GridRecord,
    Index,
    ObjectRecord,
    TensorRecord,
    decode_index,
    encode_index,
    version_of,
)
from txstore.manifest import (
    Begin,
    Decision,
    Description,
    FileRef,
    Manifest,
    Pointer,
    Progress,
    ShardRef,
    StoreFormat,
    Tombstone,
    Totals,
    checked_description,
    decode_begin,
    decode_decision,
    decode_manifest,
    decode_pointer,
    decode_store_format,
    encode,
    seal,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TXN, OTHER = "0123456789abcdef" * 2, "f" * 32
PREFIX = f"data/step-1000/{TXN}/"
KEY = "commits/step-1000.3.json"


def tensor(name, dtype, itemsize, shape, chunks, *, memory_format="contiguous"):
    return TensorRecord(name, dtype, itemsize, shape, True, False, memory_format, chunks)


FILES = (
    FileRecord(PREFIX + "rank-00000-00000.safetensors", 3 * BLOCK_BYTES + 1, bytes(range(16))),
    FileRecord(PREFIX + "rank-00001-00000.safetensors", 512, b"\x01\x02\x03\x04"),
)
INDEX = Index(
    escaped=True,
    files=FILES,
    items=(
        tensor(
            "model.w",
            "float32",
            4,
            (4, 6),
            (ChunkRecord((0, 0), (2, 6), 0, 4096, 48), ChunkRecord((2, 0), (2, 6), 1, 0, 48)),
        ),
        tensor("model.b", "bfloat16", 2, (3,), (ChunkRecord((0,), (3,), 0, 4144, 6),)),
        tensor(
            "image",
            "uint8",
            1,
            (1, 2, 2, 2),
            (ChunkRecord((0,) * 4, (1, 2, 2, 2), 0, 0, 8),),
            memory_format="channels_last",
        ),
        tensor("scalar", "complex128", 16, (), (ChunkRecord((), (), 1, 48, 16),)),
        tensor("empty", "int64", 8, (0, 5), ()),
        tensor("quantized", "qint8", 1, (2,), (ChunkRecord((0,), (2,), 1, 64, 300, 1),)),
        ObjectRecord("optimizer.param_groups", 1, 364, 100),
        ObjectRecord("na\\xefve \\ud800", 1, 464, 0),
    ),
    paths={"model.w": ("model", "w"), "list.0": ("list", 0)},
    planner=msgspec.Raw(msgspec.msgpack.encode({"kind": "dcp"})),
)
INDEX_BYTES = encode_index(INDEX)
GRID = GridRecord(
    "model.w",
    "float32",
    4,
    (4, 6),
    True,
    False,
    "contiguous",
    bounds=((0, 3, 4, 4), (0, 2, 6)),  # the last rank has nothing
    files=column_bytes("I", [0, 0, 1, 1, 1, 1]),
    starts=column_bytes("Q", [4096, 4120, 0, 8, 24, 24]),
)
GRID_INDEX = msgspec.structs.replace(INDEX, version=2, items=(GRID, *INDEX.items[1:]))
TOTALS = Totals(3 * BLOCK_BYTES + 513, 2, 6, 2, 2)
MANIFEST = Manifest(
    checkpoint="step-1000",
    step=1000,
    txn=TXN,
    writer="host:1",
    created_at="2026-01-02T03:04:05.678+00:00",
    software={"torch": "2.13.0", "txstore": "0.1.0"},
    totals=TOTALS,
    index=FileRef(PREFIX + "index.msgpack", len(INDEX_BYTES), sha256_hex(INDEX_BYTES)),
    shards=tuple(ShardRef(file.key, rank, file.size, 0xDEADBEEF) for rank, file in enumerate(FILES)),
    description=Description(Progress(1000, 2, 3, 4096), {"dp": 8, "tp": 2}, {"tokenizer": "sha256:00"}),
)
MANIFEST_BYTES = encode(MANIFEST)
FIELDS = {"checkpoint": "step-1000", "slot": 3, "step": 1000, "writer": "host:1", "decided_at": "2026-01-02T03:04:06.000+00:00"}  # fmt: skip
COMMIT = seal(
    Decision(
        kind="commit",
        txn=TXN,
        manifest=FileRef(PREFIX + "manifest.json", len(MANIFEST_BYTES), sha256_hex(MANIFEST_BYTES)),
        totals=TOTALS,
        **FIELDS,
    )
)
ABORT = seal(Decision(kind="abort", txn=OTHER, **FIELDS))
BEGIN = Begin(
    checkpoint="step-1000",
    step=1000,
    txn=TXN,
    world_size=2,
    overwrite=False,
    writer="host:1",
    started_at_s=1767323045.5,
)


def decide(data):
    return decode_decision(data, KEY, checkpoint="step-1000", slot=3)


def decode_tombstone(data):
    return msgspec.json.decode(data, type=Tombstone)


DOCUMENTS = {
    "store.json": (StoreFormat(), lambda data: decode_store_format(data, "txstore.json")),
    "commit.json": (COMMIT, decide),
    "abort.json": (ABORT, decide),
    "begin.json": (BEGIN, lambda data: decode_begin(data, PREFIX + "begin.json")),
    "tombstone.json": (Tombstone(checkpoint="step-1000", slot=3, txn=TXN, reason="retention"), decode_tombstone),
    "pointer.json": (
        Pointer(checkpoint="step-1000", slot=3, txn=TXN),
        lambda data: decode_pointer(data, "latest.json"),
    ),
    "manifest.json": (MANIFEST, lambda data: decode_manifest(data, COMMIT)),
    "index.msgpack": (INDEX, lambda data: decode_index(data, MANIFEST)),
    "index-2.msgpack": (GRID_INDEX, lambda data: read_index_of(data)),  # noqa: PLW0108 - defined below
}
PACKED = {"index.msgpack", "index-2.msgpack"}


def golden(name):
    path = GOLDEN / ("documents-v2" if name.partition(".")[0].endswith("-2") else "documents-v1") / name
    if os.environ.get("TXSTORE_WRITE_GOLDEN"):  # only for a new format version: version 1 is written
        path.parent.mkdir(exist_ok=True)
        document = DOCUMENTS[name][0]
        path.write_bytes(encode_index(document) if name in PACKED else encode(document))
    return path.read_bytes()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_golden_files_are_read_and_written_unchanged(name):
    document, decode = DOCUMENTS[name]
    data = golden(name)
    assert decode(data) == document
    assert (encode_index(document) if name in PACKED else encode(document)) == data


def test_the_golden_index_keeps_its_planner_data():
    assert msgspec.msgpack.decode(DOCUMENTS["index.msgpack"][1](golden("index.msgpack")).planner) == {"kind": "dcp"}


FULL = Description(
    topology={"dp": 8, "fsdp": "full_shard"},
    settings={
        "batch_size": 8,
        "lr": 0.1,
        "seed": 1 << 80,
        "ratio": 1.0,
        "tiny": 5e-324,
        "sampler": "random",
        "shuffle": True,
    },
    accepted=("setting batch_size: saved 4, now 8", "migration grow-vocab-v2"),
)


def test_a_description_is_read_as_it_was_written():
    written = encode(msgspec.structs.replace(MANIFEST, description=FULL))
    described = read_manifest_of(written).description
    assert described == FULL
    assert {name: type(value) for name, value in described.settings.items()} == {
        name: type(value) for name, value in FULL.settings.items()
    }
    assert encode(msgspec.structs.replace(MANIFEST, description=described)) == written


@pytest.mark.parametrize("field", ["settings", "accepted"])
def test_fields_that_came_later_are_left_out_while_they_are_empty(field):
    """A document that was written before they came keeps its bytes, whichever release writes it again."""
    empty = msgspec.structs.replace(FULL, **{field: type(getattr(FULL, field))()})
    described = json.loads(encode(msgspec.structs.replace(MANIFEST, description=empty)))["description"]
    assert field not in described
    assert described.keys() == {"progress", "topology", "fingerprints", "settings", "accepted"} - {field}
    assert json.loads(MANIFEST_BYTES)["description"].keys() == {"progress", "topology", "fingerprints"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": {"lr": float("nan")}},
        {"settings": {"lr": float("inf")}},
        {"settings": {"lr": None}},
        {"settings": {"betas": [0.9]}},
        {"settings": {1: 1}},
        {"topology": {"dp": 1.5}},
        {"topology": {"dp": True}},
        {"accepted": "migration x"},
        {"accepted": (1,)},
    ],
)
def test_a_description_that_a_manifest_cannot_hold_is_refused(wrong):
    with pytest.raises(ConfigError, match="not a description"):
        checked_description(Description(**wrong))


@pytest.mark.parametrize("name", ["commit.json", "abort.json"])
def test_no_flipped_bit_of_a_decision_goes_unnoticed(name):
    data = golden(name)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            decide(bytes(damaged))


# Hostile documents. Manifest and index are reached through digests that match, as a hostile writer's would.


def read_manifest_of(data):
    decision = msgspec.structs.replace(COMMIT, manifest=FileRef(PREFIX + "manifest.json", len(data), sha256_hex(data)))
    return decode_manifest(data, decision)


def read_index_of(data):
    manifest = msgspec.structs.replace(MANIFEST, index=FileRef(PREFIX + "index.msgpack", len(data), sha256_hex(data)))
    return decode_index(data, manifest)


READERS = {
    "store.json": DOCUMENTS["store.json"][1],
    "commit.json": decide,
    "abort.json": decide,
    "begin.json": DOCUMENTS["begin.json"][1],
    "pointer.json": DOCUMENTS["pointer.json"][1],
    "manifest.json": read_manifest_of,
    "index.msgpack": read_index_of,
    "index-2.msgpack": read_index_of,
}


def pack(name, value):
    if name in {"commit.json", "abort.json"} and "check" in value:
        # A hostile writer seals what it forges: each document must be refused for what it says.
        body = json.dumps(value | {"check": 0}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        value = value | {"check": crc32c(body.encode())}
    return msgspec.msgpack.encode(value) if name in PACKED else json.dumps(value).encode()


def unpack(name):
    data = golden(name)
    return msgspec.msgpack.decode(data) if name in PACKED else json.loads(data)


def changed(name, where, value):
    """The golden document with one place changed, such as ``manifest.key`` or ``items.0.4``."""
    document = unpack(name)
    *way, last = (int(part) if part.isdigit() else part for part in where.split("."))
    inner = document
    for part in way:
        inner = inner[part]
    inner[last] = value
    return pack(name, document)


HUGE = (1 << 63) - 1
IMPOSSIBLE_BOUNDS = [
    [],
    [[0, 3, 4, 4]],
    [[0, 3, 4, 4], [0, 2, 6], [0, 1]],
    [[0, 3, 4, 4], []],
    [[0, 3, 4, 4], [0]],
    [[0, 3, 4, 4], [6]],
    [[0, 3, 4, 4], [0, 2, 5]],
    [[0, 3, 4, 4], [0, 2, 7]],
    [[0, 3, 4, 4], [1, 2, 6]],
    [[0, 4, 3, 4], [0, 2, 6]],  # a hole that an overlap pays for
    [[0, 3, 5, 4], [0, 2, 6]],
    [[0, 3, 4, 4], [0, 2, 3, 6]],
    [[0, -3, 4, 4], [0, 2, 6]],
    [[0, 3.0, 4, 4], [0, 2, 6]],
    [[0, 3, 4, 4], [0, HUGE, 6]],
    [[0, 3, 4, 4], "026"],
    [[0, 3, 4, 4], None],
    [[0, 1]] * 65,
    {},
    None,
]
CHANGES = [
    # other checkpoint, slot, step or txn than the key and the record that leads here
    ("commit.json", "checkpoint", "step-1001"),
    ("commit.json", "checkpoint", "../step-1000"),
    ("commit.json", "checkpoint", ".hidden"),
    ("commit.json", "slot", 4),
    ("commit.json", "step", 999),
    ("commit.json", "step", None),
    ("commit.json", "txn", "../../etc"),
    ("commit.json", "txn", TXN.upper()),
    ("commit.json", "txn", TXN + "\n"),
    ("commit.json", "kind", "maybe"),
    ("commit.json", "manifest", None),
    ("commit.json", "totals", None),
    ("manifest.json", "checkpoint", "step-1001"),
    ("manifest.json", "step", 1001),
    ("manifest.json", "txn", OTHER),
    ("manifest.json", "totals.bytes", 1),
    ("manifest.json", "shards", []),
    ("manifest.json", "totals.shards", 1),
    ("manifest.json", "description.settings", {"batch_size": [8]}),
    ("manifest.json", "description.settings", {"batch_size": None}),
    ("manifest.json", "description.topology", {"dp": 1.5}),
    ("manifest.json", "description.accepted", [1]),
    ("manifest.json", "description.later", 1),
    ("manifest.json", "shards.1.key", FILES[0].key),
    *((name, "checkpoint", value) for name in ("begin.json", "pointer.json") for value in ("../x", "", "a/b")),
    *((name, "txn", value) for name in ("begin.json", "pointer.json") for value in ("../x", "", TXN[:-1])),
    ("begin.json", "checkpoint", "step-1001"),
    ("begin.json", "txn", OTHER),
    ("begin.json", "step", 1),
    # keys that escape the root
    *(
        (name, where, key)
        for name, where in (
            ("commit.json", "manifest.key"),
            ("manifest.json", "index.key"),
            ("manifest.json", "shards.0.key"),
        )
        for key in (
            "../x",
            "/etc/passwd",
            "data/../../x",
            "a//b",
            "",
            ".",
            "data/.tmp",
            "a\\b",
            "a\0b",
            "C:x",
            "x" * 901,
            "ä",
        )
    ),
    # sizes and counts
    *(
        (name, where, value)
        for name, where in (
            ("commit.json", "slot"),
            ("commit.json", "manifest.size"),
            ("commit.json", "totals.world_size"),
            ("manifest.json", "index.size"),
            ("manifest.json", "shards.1.size"),
            ("manifest.json", "shards.1.crc32c"),
            ("begin.json", "world_size"),
            ("index.msgpack", "files.0.1"),
            ("index.msgpack", "items.0.8.0.2"),
            ("index.msgpack", "items.0.8.0.3"),
            ("index.msgpack", "items.0.8.0.4"),
        )
        for value in (-1, HUGE, 1 << 63, 1.5, "1", None, True, [], {})
        if not (value == HUGE and where.endswith("world_size"))
    ),
    ("commit.json", "manifest.sha256", "0" * 63),
    ("commit.json", "manifest.sha256", "0" * 64 + "\n"),
    ("commit.json", "writer", "x" * 513),
    # versions and unknown fields
    *((name, "version", value) for name in READERS for value in (0, 3, -1, "1", None, 1.5)),
    *((name, "version", 1 if name.partition(".")[0].endswith("-2") else 2) for name in READERS),
    *((name, "surprise", 1) for name in READERS),
    ("manifest.json", "totals.surprise", 1),
    ("manifest.json", "description.surprise", 1),
    # an index whose numbers are impossible
    ("index.msgpack", "block_bytes", 4096),
    ("index.msgpack", "files.0.0", FILES[1].key),
    ("index.msgpack", "files.0.2", b"\0" * 12),
    ("index.msgpack", "items.1.1", "model.w"),
    ("index.msgpack", "items.6.1", "model.w"),
    ("index.msgpack", "items.0.3", 0),
    ("index.msgpack", "items.0.3", 65),
    ("index.msgpack", "items.0.4", [4, 7]),
    ("index.msgpack", "items.0.4", [24]),
    ("index.msgpack", "items.0.4", [1] * 65),
    ("index.msgpack", "items.0.8", []),
    ("index.msgpack", "items.0.8.1.0", [0, 0]),  # overlap, and a hole: the volumes agree
    ("index.msgpack", "items.0.8.1.0", [3, 0]),
    ("index.msgpack", "items.0.8.1.0", [2]),
    ("index.msgpack", "items.0.8.0.1", [HUGE, HUGE]),
    ("index.msgpack", "items.0.8.0.2", 2),
    ("index.msgpack", "items.0.8.0.3", FILES[0].size - 47),
    ("index.msgpack", "items.0.8.0.4", 47),
    ("index.msgpack", "items.0.8.0.5", 2),
    ("index.msgpack", "items.0.0", "x"),
    ("index.msgpack", "items.6.3", 500),
    ("index.msgpack", "items.6.2", 9),
    # a grid whose numbers are impossible
    *(("index-2.msgpack", "items.0.8", value) for value in IMPOSSIBLE_BOUNDS),
    *(
        ("index-2.msgpack", "items.0.9", column_bytes("I", value))
        for value in ([0] * 5, [0] * 7, [], [0, 0, 2, 1, 1, 1], [0, 0, 1, 1, 1, 1 << 31])
    ),
    ("index-2.msgpack", "items.0.9", GRID.files[:-1]),
    ("index-2.msgpack", "items.0.9", "x" * 24),
    *(
        ("index-2.msgpack", "items.0.10", column_bytes("Q", value))
        for value in (
            [0] * 5,
            [0] * 7,
            [],
            [0, 0, 0, 0, 0, 513],
            [0, 0, 505, 0, 0, 0],
            [FILES[0].size - 23, 0, 0, 0, 0, 0],
            [(1 << 64) - 1] * 6,
        )
    ),
    ("index-2.msgpack", "items.0.10", GRID.starts[:-1]),
    ("index-2.msgpack", "items.0.3", 65),
    ("index-2.msgpack", "items.0.3", 0),
    ("index-2.msgpack", "items.0.4", [4, 7]),
    ("index-2.msgpack", "items.0.4", [24]),
    ("index-2.msgpack", "items.0.4", [4, 6, 1]),
    ("index-2.msgpack", "items.1.1", "model.w"),
]


@pytest.mark.parametrize(("name", "where", "value"), CHANGES, ids=lambda value: str(value)[:30])
def test_a_hostile_change_is_refused(name, where, value):
    data = changed(name, where, value)
    with pytest.raises((FormatError, IntegrityError)) as caught:
        READERS[name](data)
    assert caught.value.key, "the error must name the object"


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a document was unpickled",))


def nested(name, depth):
    if name in PACKED:
        return b"\x82\xa7version\x01\xa1x" + b"\x91" * depth + b"\xc0"
    return b'{"version":1,"x":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda name: b"",
        lambda name: golden(name)[:-1],
        lambda name: golden(name) + b"{}",
        lambda name: b"\xff\xfe" + golden(name),
        lambda name: golden(name).replace(b"version", b"versi\xffn"),
        lambda name: pickle.dumps(Bomb()),
        lambda name: b"null",
        lambda name: b"[]",
        lambda name: b'{"version":NaN}',
        lambda name: b'{"version":1e999}',
        lambda name: nested(name, 100),
        lambda name: nested(name, 100_000),
    ],
    ids=[
        "empty",
        "truncated",
        "trailing",
        "bom",
        "not utf-8",
        "pickle",
        "null",
        "list",
        "nan",
        "infinity",
        "deep",
        "deeper",
    ],
)
def test_malformed_bytes_are_refused(name, make):
    with pytest.raises((FormatError, IntegrityError)) as caught:
        READERS[name](make(name))
    assert caught.value.key


@pytest.mark.parametrize("name", READERS)
def test_a_pickle_in_any_field_is_never_run(name):
    payload = pickle.dumps(Bomb())
    text = payload.decode("latin-1")
    document = unpack(name)
    for where in document.keys() - {"check"}:
        value = payload if name in PACKED else text
        data = changed(name, where, value)
        if where in ("planner", "paths", "writer", "decided_at", "created_at"):
            try:
                READERS[name](data)  # plain text or raw data, kept and not interpreted
            except TxStoreError:
                pass
            continue
        with pytest.raises((FormatError, IntegrityError)):
            READERS[name](data)


def test_a_decision_of_more_than_4_kib_is_neither_written_nor_read():
    with pytest.raises(FormatError):
        decide(encode(COMMIT) + b" " * 4096)
    with pytest.raises(FormatError):
        encode(msgspec.structs.replace(COMMIT, writer="x" * 5000))


def test_a_value_without_json_form_is_a_format_error():
    with pytest.raises(FormatError):
        encode(msgspec.structs.replace(MANIFEST, software={"a": "\ud800"}))


def test_bytes_that_were_not_committed_are_an_integrity_error_with_the_key():
    for data in (MANIFEST_BYTES[:-1], MANIFEST_BYTES.replace(b"host:1", b"host:2")):
        with pytest.raises(IntegrityError) as caught:
            decode_manifest(data, COMMIT)
        assert caught.value.key == PREFIX + "manifest.json"
    for data in (INDEX_BYTES[:-1], INDEX_BYTES.replace(b"model.w", b"model.x")):
        with pytest.raises(IntegrityError) as caught:
            decode_index(data, MANIFEST)
        assert caught.value.key == PREFIX + "index.msgpack"


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_random_damage_raises_only_typed_errors(name, data):
    document = bytearray(golden(name))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(document) - 1))
        document[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    error = refusal(name, bytes(document))
    assert error is None or error.key


def refusal(name, data):
    try:
        READERS[name](data)
    except TxStoreError as error:
        return error
    return None


# Tiling: the chunks of a tensor cover it exactly once.


@st.composite
def tilings(draw):
    """A tensor's shape and boxes that tile it, made by cutting boxes in two."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(boxes) - 1))
        axis = draw(st.integers(0, len(shape) - 1))
        offsets, sizes = boxes[number]
        if sizes[axis] < 2:
            continue
        cut = draw(st.integers(1, sizes[axis] - 1))
        low = (offsets, (*sizes[:axis], cut, *sizes[axis + 1 :]))
        high = (
            (*offsets[:axis], offsets[axis] + cut, *offsets[axis + 1 :]),
            (*sizes[:axis], sizes[axis] - cut, *sizes[axis + 1 :]),
        )
        boxes[number : number + 1] = [low, high]
    return shape, draw(st.permutations(boxes))


def index_with(shape, boxes):
    def volume(sizes):
        total = 1
        for size in sizes:
            total *= size
        return total

    chunks = tuple(ChunkRecord(offsets, sizes, 0, 0, volume(sizes)) for offsets, sizes in boxes)
    listed = tensor("x", "uint8", 1, shape, chunks)
    grid = arrange(shape, *zip(*boxes, strict=True)) if boxes else None
    if grid is not None:
        listed = GridRecord(
            *(getattr(listed, field) for field in listed.__struct_fields__[:-1]),
            bounds=grid.bounds,
            files=bytes(4 * len(boxes)),
            starts=bytes(8 * len(boxes)),
        )
    return encode_index(Index(version=version_of([listed]), files=FILES, items=(listed,)))


def boxes_of(bounds):
    """The boxes of a grid, by the definition: one for each choice of a cell along each dimension."""
    spans = [[(low, high - low) for low, high in pairwise(axis)] for axis in bounds]
    return [tuple(zip(*cell, strict=True)) or ((), ()) for cell in product(*spans)]


bounds_of_grids = st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=3).map(
    lambda axes: tuple((0, *sorted(axis), 6) for axis in axes)
)


@given(bounds_of_grids, st.data())
def test_boxes_in_any_order_are_found_to_be_a_grid(bounds, data):
    boxes = boxes_of(bounds)
    mixed = data.draw(st.permutations(boxes))
    found = arrange(tuple(axis[-1] for axis in bounds), *zip(*mixed, strict=True))
    if len(set(boxes)) < len(boxes):
        assert found is None, "two boxes are the same: nobody can tell their places apart"
    else:
        assert [mixed[box] for box in found.order] == boxes
        assert boxes_of(found.bounds) == boxes


def test_a_box_that_is_there_twice_does_not_pay_for_a_hole():
    assert arrange((2, 2), [(0, 0), (0, 1), (1, 0), (1, 0)], [(1, 1)] * 4) is None


def test_of_two_listed_chunks_at_one_corner_the_one_that_holds_something_counts():
    empty, real = ChunkRecord((1,), (0,), 0, 0, 0), ChunkRecord((1,), (2,), 0, 1, 2)
    for chunks in ((empty, real), (real, empty)):
        assert tensor("x", "uint8", 1, (3,), (ChunkRecord((0,), (1,), 0, 0, 1), *chunks)).by_corner()[1,] == real


@given(bounds_of_grids)
def test_a_grid_says_what_its_cells_are(bounds):
    shape = tuple(axis[-1] for axis in bounds)
    boxes = boxes_of(bounds)
    record = GridRecord(
        "x", "int16", 2, shape, False, False, "contiguous",
        bounds=bounds, files=column_bytes("I", range(len(boxes))), starts=column_bytes("Q", range(7, 7 + len(boxes))),
    )  # fmt: skip
    said = [(chunk.offsets, chunk.sizes, chunk.file, chunk.start, chunk.length) for chunk in record.chunks]
    assert said == [(*box, at, 7 + at, 2 * math.prod(box[1])) for at, box in enumerate(boxes)]
    by_corner = {}
    for chunk in sorted(record.chunks, key=lambda chunk: 0 not in chunk.sizes):
        by_corner[chunk.offsets] = chunk
    for corner in product(range(-1, 8), repeat=len(shape)):
        found, wanted = record.chunk_at(corner), by_corner.get(corner)
        assert found == wanted or (0 in found.sizes and found.sizes == wanted.sizes)
    assert record.chunk_at((0,) * (len(shape) + 1)) is None


def test_a_large_grid_is_checked_in_bulk():
    """A million chunks are read by every rank: one by one they would take seconds each time."""

    def index_of(record):
        data = encode_index(Index(version=version_of([record]), files=FILES, items=(record,)))
        read_index_of(data)
        began = time.process_time()
        read_index_of(data)
        return time.process_time() - began

    count = 100_000
    bounds = (tuple(range(count + 1)), (0, 1))
    grid = GridRecord("x", "uint8", 1, (count, 1), False, False, "c", bounds, bytes(4 * count), bytes(8 * count))
    listed = tensor("x", "uint8", 1, (count, 1), grid.chunks)
    assert index_of(grid) < index_of(listed) / 3


@given(tilings())
def test_every_tiling_is_accepted(tiling):
    read_index_of(index_with(*tiling))


@given(tilings(), st.data())
def test_every_set_that_does_not_cover_each_element_once_is_refused(tiling, data):
    shape, boxes = tiling
    boxes = list(boxes)
    number = data.draw(st.integers(0, len(boxes) - 1))
    offsets, sizes = boxes[number]
    moved = tuple(data.draw(st.integers(0, extent - size)) for extent, size in zip(shape, sizes, strict=True))
    how = data.draw(st.sampled_from(["moved", "dropped", "doubled"]))
    if how == "moved" and moved == offsets:
        how = "dropped"
    boxes[number : number + 1] = {"moved": [(moved, sizes)], "dropped": [], "doubled": [(offsets, sizes)] * 2}[how]
    with pytest.raises(FormatError):
        read_index_of(index_with(shape, boxes))
