"""Who reads what when ranks share: against brute force over blocks. No torch, no process group."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txstore.shards import sharing
from txstore.shards.reading import Wanted, serve
from txstore.shards.sharing import Run, assign, divide, pieces_of, runs_of

BLOCK, PIECE = 16, 48

quick = settings(max_examples=200, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def _small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "BLOCK_BYTES", BLOCK)
        patch.setattr(sharing, "PIECE_BYTES", PIECE)
        yield


sizes = st.lists(st.integers(1, 400), min_size=1, max_size=3)


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Lengths of the files, and for each rank the ranges that it wants."""
    lengths = draw(sizes)
    ranks = []
    for _ in range(draw(st.integers(1, 5))):
        ranges = []
        for _ in range(draw(st.integers(0, 5))):
            file = draw(st.integers(0, len(lengths) - 1))
            start = draw(st.integers(0, lengths[file]))
            ranges.append((file, start, draw(st.integers(start, lengths[file]))))
        ranks.append(ranges)
    return lengths, ranks


def blocks(ranges: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
    return {(file, at // BLOCK) for file, start, stop in ranges for at in range(start, stop)}


@quick
@given(asked())
def test_runs_are_the_needed_blocks_in_order(case: tuple[list[int], list[list[tuple[int, int, int]]]]) -> None:
    lengths, ranks = case
    for ranges in ranks:
        runs = runs_of(ranges, lengths)
        assert blocks(runs) == blocks(ranges)
        for run in runs:
            assert run.start % BLOCK == 0
            assert run.stop % BLOCK == 0 or run.stop == lengths[run.file]
        assert all(a.file < b.file or a.stop < b.start for a, b in pairwise(runs)), "joined where they touch"


@quick
@given(asked())
def test_every_common_block_has_one_reader_and_comes_to_all_who_need_it(
    case: tuple[list[int], list[list[tuple[int, int, int]]]],
) -> None:
    lengths, ranks = case
    needs = [runs_of(ranges, lengths) for ranges in ranks]
    times = Counter(block for ranges in ranks for block in blocks(ranges))
    common = {block for block, count in times.items() if count > 1}
    assigned = assign(needs)
    everything = {}
    for rank, segments in enumerate(assigned):
        pieces = list(pieces_of(segments))
        assert [piece.number for piece in pieces] == sorted({piece.number for piece in pieces})
        assert [piece.run for piece in pieces] == sorted(piece.run for piece in pieces), "in the order of the files"
        held = [block for piece in pieces for block in blocks([piece.run])]
        assert len(held) == len(set(held))
        assert set(held) == common & blocks(ranks[rank])
        for piece in pieces:
            assert piece.nbytes <= PIECE
            assert rank in piece.members
            assert everything.setdefault(piece.number, piece) == piece, "all members have the same idea of a piece"
    for piece in everything.values():
        assert all(piece in pieces_of(assigned[rank]) for rank in (piece.reader, *piece.receivers))
        assert piece.reader not in piece.receivers


@quick
@given(st.integers(2, 6), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_the_work_is_shared_evenly(ranks: int, files: list[int]) -> None:
    """Replicas: nobody reads more than a piece above the others' mean in any file."""
    lengths = [count * BLOCK for count in files]
    needs = [[Run(file, 0, length) for file, length in enumerate(lengths)]] * ranks
    read = Counter(dict.fromkeys(range(ranks), 0))
    for piece in pieces_of(assign(needs)[0]):
        read[piece.reader] += piece.nbytes
    assert sum(read.values()) == sum(lengths)
    assert max(read.values()) - min(read.values()) <= PIECE + len(files) * BLOCK * ranks
    if len(files) == 1:
        assert max(read.values()) <= -(-files[0] // ranks) * BLOCK + PIECE


@quick
@given(asked(), st.data())
def test_what_is_divided_is_served_once(
    case: tuple[list[int], list[list[tuple[int, int, int]]]], data: st.DataObject
) -> None:
    """Every byte of every request comes from one piece or is read alone; what is delivered comes whole."""
    lengths, ranks = case
    files = [bytes((index * 7 + index // 256 + number) % 256 for index in range(n)) for number, n in enumerate(lengths)]
    rank = data.draw(st.integers(0, len(ranks) - 1))
    pieces = list(pieces_of(assign([runs_of(ranges, lengths) for ranges in ranks])[rank]))
    # Not only what was announced: a planner may ask for something else in the end.
    ranges = [one for one in data.draw(st.sampled_from(ranks)) if one[1] < one[2]]
    got: list[bytes] = [b""] * len(ranges)
    wanted, buffers = [], {}
    for number, (file, start, stop) in enumerate(ranges):
        if data.draw(st.booleans()):
            buffers[number] = bytearray(stop - start)
            wanted.append(Wanted(file, start, stop, into=memoryview(buffers[number])))
        else:

            def deliver(view: memoryview, number: int = number) -> None:
                assert got[number] == b"", "delivered twice"
                got[number] = bytes(view)

            wanted.append(Wanted(file, start, stop, deliver=deliver))
    served, alone = divide(wanted, pieces)
    seen = sum(part.stop - part.start for parts in [*served, alone] for part in parts)
    assert seen == sum(stop - start for _, start, stop in ranges)
    for piece, parts in zip(pieces, served, strict=True):
        serve(parts, piece.run.start, memoryview(files[piece.run.file][piece.run.start : piece.run.stop]))
    for part in alone:
        serve([part], part.start, memoryview(files[part.file][part.start : part.stop]))
    for number, (file, start, stop) in enumerate(ranges):
        assert (bytes(buffers[number]) if number in buffers else got[number]) == files[file][start:stop]
    if ranges == [one for one in ranks[rank] if one[1] < one[2]]:
        common = {block for piece in pieces for block in blocks([piece.run])}
        into = [part for part in alone if part.into is not None]
        assert not common & blocks([(part.file, part.start, part.stop) for part in into]), "read although it is sent"
