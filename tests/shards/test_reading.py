"""How reads are cut: whole blocks, bounded windows, and no block twice."""

from __future__ import annotations

from itertools import pairwise

from txstore.checksum import BLOCK_BYTES
from txstore.shards.reading import WINDOW_BYTES, Wanted, plan_reads


def test_a_block_that_two_windows_share_is_read_once():
    """Small tensors back to back over many windows: bytes read stay the bytes of the blocks."""
    size, width = 40 * BLOCK_BYTES, BLOCK_BYTES * 5 // 7
    targets = [memoryview(bytearray(min(width, size - start))) for start in range(0, size, width)]
    wanted = [
        Wanted(0, start, start + len(target), into=target)
        for start, target in zip(range(0, size, width), targets, strict=True)
    ]
    jobs = plan_reads(wanted, [size])
    assert sum(job.stop - job.start for job in jobs) == size
    assert all(job.stop - job.start <= WINDOW_BYTES for job in jobs)
    covered = sorted((part.start, part.stop) for job in jobs for part in job.parts or [Wanted(0, job.start, job.stop)])
    assert covered[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(covered))


def test_a_range_that_overlaps_one_that_was_cut_is_read_whole():
    """Two targets of the same bytes: the second one's start lies before the read that the cut has begun."""
    half, quarter = BLOCK_BYTES // 2, BLOCK_BYTES // 4
    first = Wanted(0, 0, WINDOW_BYTES - half, deliver=bytes)
    cut, inside = (WINDOW_BYTES - half, WINDOW_BYTES + half), (WINDOW_BYTES - quarter, WINDOW_BYTES - quarter + 9)
    others = [Wanted(0, start, stop, into=memoryview(bytearray(stop - start))) for start, stop in (cut, inside)]
    jobs = plan_reads([first, *others], [20 * BLOCK_BYTES])
    assert all(job.start <= part.start and part.stop <= job.stop for job in jobs for part in job.parts)
    read = sum(part.stop - part.start for job in jobs for part in job.parts)
    assert read == sum(want.stop - want.start for want in [first, *others])


def test_only_reads_straight_to_their_place_may_be_longer_than_a_window():
    size, cut = 40 * BLOCK_BYTES, BLOCK_BYTES // 2
    direct = Wanted(0, cut, size - cut, into=memoryview(bytearray(size - 2 * cut)))
    scratch = [Wanted(0, start, start + 9, deliver=bytes) for start in range(0, size, cut)]
    jobs = plan_reads([direct, *scratch], [size], 3 * WINDOW_BYTES)
    straight = [job.stop - job.start for job in jobs if job.into is not None]
    assert straight == [3 * WINDOW_BYTES, size - 2 * BLOCK_BYTES - 3 * WINDOW_BYTES]
    assert max(job.stop - job.start for job in jobs if job.into is None) == WINDOW_BYTES
