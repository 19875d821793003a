"""DCP's metadata from an index: the same as if every chunk had been made at once, and not made before it is asked for."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from txstore.dcp import StorageReader, StorageWriter, StrictLoadPlanner, saved
from txstore.dcp.metadata import Placed, build_index, build_metadata
from txstore.dcp.saved import LazyTensorMetadata, Locations, StoredItems
from txstore.errors import PlanMismatch
from txstore.grid import count_of
from txstore.index import GridRecord, Index, ObjectRecord, TensorRecord
from txstore.transaction import Shard


def of(shape, boxes):
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), chunks)


GRID = [((row, col), (rows, cols)) for col, cols in ((0, 2), (2, 4)) for row, rows in ((0, 3), (3, 1), (4, 0))]
PLANNED = Metadata(
    {
        "grid": of((4, 6), GRID),
        "uneven": of((4,), [((0,), (4,)), ((4,), (0,))]),
        "no grid": of((4, 4), [((0, 0), (4, 1)), ((0, 1), (2, 3)), ((2, 1), (2, 3))]),
        "whole": of((3,), [((0,), (3,))]),
        "scalar": of((), [((), ())]),
        "nothing": of((0, 5), [((0, 0), (0, 5))]),
        "object": BytesStorageMetadata(),
    },
    planner_data={"grid": ("grid",)},
)


def placements() -> dict:
    """Every chunk in one of three files, at a place of its own."""
    shards = [Shard(f"data/s-1/{'0' * 32}/{number}", number, 1 << 20, 0, (number,)) for number in range(3)]
    place = random.Random(0)
    found: dict = {"object": {None: Placed(shards[0], 7, 9, 0)}}
    for fqn, stored in PLANNED.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            found[fqn] = {
                chunk.offsets: Placed(place.choice(shards), place.randrange(1000), 4 * chunk.sizes.numel(), 0)
                for chunk in stored.chunks
            }
    return found


@pytest.fixture
def index() -> Index:
    return build_index(PLANNED, placements())[0]


def test_chunks_that_are_cells_of_a_grid_are_written_in_columns(index: Index) -> None:
    kinds = {item.name: type(item) for item in index.items}
    assert {name for name, kind in kinds.items() if kind is GridRecord} == {"grid", "uneven"}
    assert {name for name, kind in kinds.items() if kind is TensorRecord} == {"no grid", "whole", "scalar", "nothing"}
    assert kinds["object"] is ObjectRecord
    assert index.version == 2


def test_an_index_without_a_grid_is_of_the_version_that_older_releases_read() -> None:
    whole = Metadata({"whole": PLANNED.state_dict_metadata["whole"]})
    assert build_index(whole, {"whole": placements()["whole"]})[0].version == 1


def test_every_item_is_found_where_it_was_placed(index: Index) -> None:
    stored = build_metadata(index, "k").storage_data
    assert isinstance(stored, StoredItems)
    wanted = {MetadataIndex(fqn, at): placed for fqn, places in placements().items() for at, placed in places.items()}
    assert set(stored) == set(wanted)
    assert len(stored) == len(wanted)
    names = list(PLANNED.state_dict_metadata)
    locations = pickle.loads(pickle.dumps(Locations(index, names)))
    for at, placed in wanted.items():
        where = stored[at].where
        assert (index.files[where.file].key, where.start, where.length) == (
            placed.shard.key,
            placed.start,
            placed.length,
        )
        assert locations[at] == (placed.shard.key, placed.start, placed.length)
    assert set(locations) == set(wanted)


@pytest.mark.parametrize(
    "absent",
    [
        MetadataIndex("grid", (1, 0)),
        MetadataIndex("grid", (0,)),
        MetadataIndex("grid"),
        MetadataIndex("no grid", (1, 1)),
        MetadataIndex("object", (0,)),
        MetadataIndex("absent", (0,)),
    ],
)
def test_what_was_not_saved_is_not_found(index: Index, absent: MetadataIndex) -> None:
    assert build_metadata(index, "k").storage_data.get(absent) is None


def test_the_metadata_says_what_the_planner_said(index: Index) -> None:
    found = build_metadata(index, "k").state_dict_metadata
    assert list(found) == list(PLANNED.state_dict_metadata)
    for name, planned in PLANNED.state_dict_metadata.items():
        if not isinstance(planned, TensorStorageMetadata):
            assert found[name] == planned
            continue
        ordered = sorted(planned.chunks, key=lambda chunk: (chunk.offsets, chunk.sizes))
        wanted = TensorStorageMetadata(planned.properties, planned.size, ordered)
        mine = found[name]
        assert isinstance(mine, LazyTensorMetadata)
        for one in (mine, copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
            one.chunks.sort(key=lambda chunk: (chunk.offsets, chunk.sizes))
            assert one == wanted
            assert wanted == one
        assert type(pickle.loads(pickle.dumps(mine))) is TensorStorageMetadata


def test_reports_that_differ_from_the_plan_are_refused() -> None:
    for name, corner in (("grid", torch.Size((1, 1))), ("object", torch.Size(())), ("absent", None)):
        foreign = placements()
        foreign.setdefault(name, {})[corner] = foreign["object"][None]
        with pytest.raises(PlanMismatch, match=f"a result for '{name}' that the plan does not know"):
            build_index(PLANNED, foreign)
    for name in ("grid", "no grid", "object"):
        missing = placements()
        missing[name].popitem()
        with pytest.raises(PlanMismatch, match=f"no rank reported '{name}'"):
            build_index(PLANNED, missing)


def test_a_chunk_of_a_wrong_length_is_not_hidden_by_the_grid() -> None:
    """A grid has no lengths: written as one, the wrong length would never be seen again."""
    wrong = placements()
    corner, placed = next(iter(wrong["grid"].items()))
    wrong["grid"][corner] = Placed(placed.shard, placed.start, placed.length + 1, 0)
    index, _ = build_index(PLANNED, wrong)
    assert type(index.items[0]) is TensorRecord
    assert placed.length + 1 in {chunk.length for chunk in index.items[0].chunks}


bounds = st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=3).map(
    lambda axes: tuple((0, *sorted(axis), 6) for axis in axes)
)


@given(bounds, st.data())
def test_the_chunks_near_a_rank_give_the_reads_that_all_chunks_give(grid, data) -> None:
    count = count_of(grid)
    shape = tuple(axis[-1] for axis in grid)
    record = GridRecord(
        "x", "int8", 1, shape, False, False, "contiguous_format", grid, bytes(4 * count), bytes(8 * count)
    )
    mine = LazyTensorMetadata(TensorProperties(torch.int8), record)
    corners = st.tuples(*(st.integers(0, extent) for extent in shape))
    local = []
    for _ in range(data.draw(st.integers(0, 3))):
        low, high = data.draw(corners), data.draw(corners)
        pairs = [sorted(pair) for pair in zip(low, high, strict=True)]
        offsets, sizes = [first for first, _ in pairs], [last - first for first, last in pairs]
        local.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))

    def reads(saved: TensorStorageMetadata) -> list:
        found = create_read_items_for_chunk_list("x", saved, local)
        return sorted(
            (item.dest_index.index, item.dest_offsets, item.storage_index.offset, item.storage_offsets, item.lengths)
            for item in found
            if 0 not in item.lengths
        )

    near = mine.near(local)
    assert reads(near) == reads(mine)
    if not any(0 in part.sizes for part in local):
        wanted = {at for part in local for at in _meeting(mine, part)}
        assert {chunk.offsets for chunk in near.chunks if 0 not in chunk.sizes} == wanted, "and no other chunk is made"


def _meeting(saved: TensorStorageMetadata, part: ChunkStorageMetadata) -> set:
    def meets(chunk: ChunkStorageMetadata) -> bool:
        spans = zip(chunk.offsets, chunk.sizes, part.offsets, part.sizes, strict=True)
        return all(max(a, b) < min(a + m, b + n) for a, m, b, n in spans)

    return {chunk.offsets for chunk in saved.chunks if meets(chunk)}


def test_chunks_of_other_dimensions_are_left_to_the_planner() -> None:
    record = GridRecord("x", "int8", 1, (2,), False, False, "contiguous_format", ((0, 1, 2),), bytes(8), bytes(16))
    mine = LazyTensorMetadata(TensorProperties(torch.int8), record)
    assert mine.near([ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 2)))]) is mine


@pytest.mark.parametrize("planner", [DefaultLoadPlanner(allow_partial_load=True), StrictLoadPlanner()])
def test_chunks_are_made_for_what_is_loaded_and_nothing_else(tmp_path: Path, monkeypatch, planner) -> None:
    values = {name: torch.arange(6.0) + number for number, name in enumerate("abc")}
    url = f"file://{tmp_path}"
    dcp.save(values, checkpoint_id="step-1", storage_writer=StorageWriter(url), no_dist=True)
    made = []
    chunks_of = saved._chunks_of
    monkeypatch.setattr(saved, "_chunks_of", lambda boxes: made.append(len(boxes := list(boxes))) or chunks_of(boxes))
    target = {"b": torch.zeros(6)}
    dcp.load(target, storage_reader=StorageReader(url, strict=False), planner=planner, no_dist=True)
    assert torch.equal(target["b"], values["b"])
    assert made == [1]


def test_the_strict_planner_makes_the_chunks_of_its_own_part_alone(index: Index, monkeypatch) -> None:
    made = []
    chunks_of = saved._chunks_of
    monkeypatch.setattr(saved, "_chunks_of", lambda boxes: made.append(len(boxes := list(boxes))) or chunks_of(boxes))
    value = torch.zeros(4, 6)
    value.__create_chunk_list__ = lambda: [ChunkStorageMetadata(torch.Size((1, 1)), torch.Size((2, 1)))]  # type: ignore[attr-defined]
    plans = []
    for planner in (StrictLoadPlanner(), DefaultLoadPlanner(allow_partial_load=True)):
        metadata = build_metadata(index, "k")
        planner.set_up_planner({"grid": value}, metadata, is_coordinator=True)
        plan = planner.create_local_plan()
        assert planner.metadata is metadata
        plans.append([item for item in plan.items if 0 not in item.lengths])
    assert plans[0] == plans[1]
    assert len(plans[0]) == 1
    assert made == [1, 6]
