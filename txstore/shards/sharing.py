"""Who reads what when several ranks need the same stored bytes: each byte once, and passed on. Pure.

Ranks say which blocks they need. Where two or more need the same ones, these are a `Segment`, which its members read
in turn, piece by piece: every member finds all pieces by arithmetic, so that a plan stays small however much is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from txstore.checksum import BLOCK_BYTES
from txstore.shards.reading import WINDOW_BYTES, Wanted

PIECE_BYTES = WINDOW_BYTES
"""Most bytes that are read and passed on at once."""

TURNS = 4
"""How often each rank's turn comes, at least, where there are blocks enough: pieces that end early then even out."""


class Run(NamedTuple):
    """Bytes `start` to `stop` of a shard file, on block boundaries but for the file's end."""

    file: int
    start: int
    stop: int


class Segment(NamedTuple):
    """A run that the ranks `members` need.

    Attributes:
        run: Where it lies.
        members: Ranks, ascending; at least two.
        piece_bytes: Length of its pieces, whole blocks; the last one may be shorter.
        first: Number of the first piece among all pieces of the load.
        turn: Place in `members` of the rank that reads the first piece; the next one reads the next piece.
    """

    run: Run
    members: tuple[int, ...]
    piece_bytes: int
    first: int
    turn: int


class Piece(NamedTuple):
    """One read: `reader` reads the run and sends it to the other members. Handled in order of `number`."""

    number: int
    run: Run
    reader: int
    members: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read and passed on."""
        return self.run.stop - self.run.start

    @property
    def receivers(self) -> tuple[int, ...]:
        """Who gets it."""
        return tuple(rank for rank in self.members if rank != self.reader)


def runs_of(ranges: Iterable[tuple[int, int, int]], sizes: Sequence[int]) -> list[Run]:
    """The whole blocks that hold some (file, start, stop), in order, joined where they touch.

    Args:
        ranges: Byte ranges; empty ones, and those beyond a file, count for nothing.
        sizes: Lengths of the files.
    """
    runs: list[Run] = []
    for file, start, stop in sorted(ranges):
        low = start // BLOCK_BYTES * BLOCK_BYTES
        high = min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, sizes[file])
        if start >= stop or low >= high:
            continue
        if runs and runs[-1].file == file and low <= runs[-1].stop:
            runs[-1] = Run(file, runs[-1].start, max(runs[-1].stop, high))
        else:
            runs.append(Run(file, low, high))
    return runs


def assign(needs: Sequence[Sequence[Run]]) -> list[tuple[Segment, ...]]:
    """For each rank the segments of which it is a member, in order; `needs` by rank, each as `runs_of` makes it."""
    mine: list[list[Segment]] = [[] for _ in needs]
    common = list(_common(needs))
    totals: Counter[tuple[int, ...]] = Counter()
    for run, members in common:
        totals[members] += run.stop - run.start
    turns: Counter[tuple[int, ...]] = Counter()
    number = 0
    for run, members in common:
        share = -(-totals[members] // (TURNS * len(members) * BLOCK_BYTES)) * BLOCK_BYTES
        segment = Segment(run, members, min(PIECE_BYTES, share), number, turns[members] % len(members))
        count = -(-(run.stop - run.start) // segment.piece_bytes)
        number += count
        turns[members] += count
        for rank in members:
            mine[rank].append(segment)
    return [tuple(segments) for segments in mine]


def _common(needs: Sequence[Sequence[Run]]) -> Iterator[tuple[Run, tuple[int, ...]]]:
    """The runs that two or more ranks need, each as long as these are the same ranks, in order."""
    changes = [(run.file, at, rank) for rank, runs in enumerate(needs) for run in runs for at in (run.start, run.stop)]
    changes.sort()
    members: set[int] = set()
    before = (0, 0)
    for file, at, rank in changes:
        if before != (file, at) and len(members) > 1:
            yield Run(file, before[1], at), tuple(sorted(members))
        before = (file, at)
        members ^= {rank}


def pieces_of(segments: Iterable[Segment]) -> Iterator[Piece]:
    """The pieces of segments, in order."""
    for run, members, step, first, turn in segments:
        for index, start in enumerate(range(run.start, run.stop, step)):
            reader = members[(turn + index) % len(members)]
            yield Piece(first + index, Run(run.file, start, min(start + step, run.stop)), reader, members)


def divide(wanted: Iterable[Wanted], pieces: Sequence[Piece]) -> tuple[list[list[Wanted]], list[Wanted]]:
    """Cut requests at the pieces: what each of them serves, and what is left to be read alone.

    Args:
        wanted: The requests of one rank.
        pieces: Those that it reads or receives, in order.
    """
    served: list[list[Wanted]] = [[] for _ in pieces]
    alone: list[Wanted] = []
    starts = [(piece.run.file, piece.run.start) for piece in pieces]
    for want in wanted:
        at = max(0, bisect_right(starts, (want.file, want.start)) - 1)
        parts: list[tuple[int, int, int]] = []  # piece, start, stop
        while at < len(pieces) and starts[at] < (want.file, want.stop):
            low, high = max(want.start, pieces[at].run.start), min(want.stop, pieces[at].run.stop)
            if pieces[at].run.file == want.file and low < high:
                parts.append((at, low, high))
            at += 1
        if want.into is None:
            _divide_delivery(want, parts, served, alone)
            continue
        position = want.start
        for number, low, high in parts:
            if position < low:
                alone.append(_part(want, want.into, position, low))
            served[number].append(_part(want, want.into, low, high))
            position = high
        if position < want.stop:
            alone.append(_part(want, want.into, position, want.stop))
    return served, alone


def _part(want: Wanted, into: memoryview, start: int, stop: int) -> Wanted:
    return Wanted(want.file, start, stop, into[start - want.start : stop - want.start])


def _divide_delivery(
    want: Wanted, parts: list[tuple[int, int, int]], served: list[list[Wanted]], alone: list[Wanted]
) -> None:
    """A request that is delivered as a whole is read alone unless the pieces hold all of it."""
    if sum(high - low for _, low, high in parts) < want.stop - want.start:
        alone.append(want)
    elif len(parts) == 1:
        served[parts[0][0]].append(want)
    else:
        # Pieces are handled in the file's order, so few of these are open at a time.
        whole = _Assembly(want)
        for number, low, high in parts:
            served[number].append(Wanted(want.file, low, high, deliver=whole.taker(low)))


class _Assembly:
    """A request whose bytes come in several pieces. Used by one thread."""

    def __init__(self, want: Wanted) -> None:
        self._want = want
        self._left = want.stop - want.start
        self._data = bytearray()

    def taker(self, start: int) -> Callable[[memoryview], None]:
        """What delivers the bytes from `start` to here."""

        def take(data: memoryview) -> None:
            if not self._data:
                self._data = bytearray(self._want.stop - self._want.start)
            at = start - self._want.start
            self._data[at : at + data.nbytes] = data
            self._left -= data.nbytes
            if self._left == 0 and self._want.deliver is not None:
                self._want.deliver(memoryview(self._data))
                self._data = bytearray()

        return take
