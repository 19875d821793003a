"""Bytes that several ranks need, read by one of them and passed on to the others.

Every rank handles its pieces in the order of their numbers, which is the same on all ranks, so no two ranks wait for
one another. A rank that fails goes on to the end: instead of bytes it sends its error, and takes what it is sent, so
that nobody waits for it. Only a rank that is gone, or late by more than the group's timeout, ends the others' waiting
by force.

A receiver verifies the blocks again: its bytes came over a network.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from txstore.dcp.boundary import travelling
from txstore.dcp.tensors import as_bytes
from txstore.errors import ConfigError, DeadlineExceeded, IntegrityError, LoadError, TxStoreError, describe
from txstore.shards.reading import BlockReader, Wanted, serve
from txstore.shards.sharing import PIECE_BYTES, Piece, Run, Segment, assign

VERDICT_BYTES = 4096
"""What goes ahead of each piece: eight bytes of length, then an error of that length, pickled. No length: all well."""

SENDING_MAX = 2
"""Pieces whose sending may not have ended. With those read ahead and the one being received they bound the memory."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank needs, in `LoadPlan.storage_data` on its way to the coordinator.

    Attributes:
        members: Global ranks of the group over which it would share.
        rank: Its rank in that group.
        commit: Names the commit that it found.
        runs: The blocks it needs.
    """

    members: tuple[int, ...]
    rank: int
    commit: object
    runs: tuple[Run, ...]


def directions(offers: Sequence[object]) -> tuple[list[tuple[Segment, ...]], str]:
    """For each rank what to share, from what the ranks offer, by place in `offers`; and if it is nothing, why.

    Sharing is never needed for a load to be right: where the offers do not fit, each rank reads by itself.
    """
    alone: list[tuple[Segment, ...]] = [() for _ in offers]
    found = [offer for offer in offers if isinstance(offer, Offer)]
    if not found:
        return alone, ""
    if len(found) < len(offers):
        return alone, f"{len(offers) - len(found)} of {len(offers)} ranks offer nothing"
    if any(offer.members != found[0].members for offer in found):
        return alone, "the ranks name different groups"
    if sorted(offer.rank for offer in found) != list(range(len(found[0].members))):
        return alone, f"{len(found)} ranks load, the group has {len(found[0].members)}"
    if any(offer.commit != found[0].commit for offer in found):
        return alone, "the ranks found different checkpoints"
    needs: list[Sequence[Run]] = [()] * len(found)
    for offer in found:
        needs[offer.rank] = offer.runs
    segments = assign(needs)
    return [segments[offer.rank] for offer in found], ""


def check_group(group: dist.ProcessGroup) -> None:
    """Refuse a group that cannot carry bytes of the host.

    Raises:
        ConfigError: It is no process group of this rank, or has no backend for the CPU.
    """
    try:
        kind = group._get_backend(torch.device("cpu")).name()  # noqa: SLF001 - no public way to ask
    except Exception as error:
        raise ConfigError(
            f"share={group!r} cannot pass on bytes of the host: {describe(error)}",
            next_step="pass dist.new_group(ranks, backend='gloo'), of the ranks that load",
        ) from error
    if kind != "gloo":
        raise ConfigError(f"share is a group of {kind}", next_step="pass dist.new_group(ranks, backend='gloo')")


class Prepared(Protocol):
    """Who reads the store, and for each piece what it serves."""

    @property
    def blocks(self) -> BlockReader:
        """Reads and verifies."""

    @property
    def served(self) -> Sequence[Sequence[Wanted]]:
        """As `divide` returns it."""


P = TypeVar("P", bound=Prepared)
T = TypeVar("T")


class Passing:
    """One load's sharing on one rank. `run` is collective among the ranks that have pieces in common.

    Args:
        group: A gloo group that nothing else uses meanwhile.
        pieces: Those that this rank reads or receives, in order.
        threads: Reads at once.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: Sequence[Piece], *, threads: int) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._pieces = pieces
        self._threads = threads
        self._error: TxStoreError | None = None
        self._free: list[torch.Tensor] = []
        self._sending: deque[tuple[list[_Transfer], torch.Tensor | None]] = deque()

    def run(self, prepare: Callable[[], P]) -> P:
        """Read, pass on, receive; on return every piece has served what it is for.

        Args:
            prepare: What comes before, such as a look at the targets. It may fail: the other ranks are told.

        Returns:
            What `prepare` returned.

        Raises:
            TxStoreError: What failed here; or else what failed on the rank that reads for this one.
            DeadlineExceeded: A rank is gone, or did not answer within the group's timeout. The group is unusable then.
        """
        prepared = self._attempt(prepare)
        blocks = prepared.blocks if prepared is not None else None
        served = prepared.served if prepared is not None else [()] * len(self._pieces)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="txstore-read") as pool:
            own = _ReadAhead(self._own_reads(pool, blocks), depth=self._threads + 1)
            try:
                for piece, parts in zip(self._pieces, served, strict=True):
                    self._handle(piece, parts, blocks, own)
                self._settle(0)
            except DeadlineExceeded as lost:
                raise self._error or lost  # noqa: B904 - the chain is Python's own
        if self._error is not None:
            raise self._error
        assert prepared is not None
        return prepared

    def _handle(self, piece: Piece, parts: Sequence[Wanted], blocks: BlockReader | None, own: _ReadAhead) -> None:
        data = self._send(piece, own) if piece.reader == self._rank else self._receive(piece, blocks)
        if data is None:
            return
        if self._error is None:
            self._attempt(partial(serve, parts, piece.run.start, as_bytes(data)))
        if piece.reader != self._rank:
            self._free.append(data)

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if it fails: the first error is kept for the end, lest it strand the others."""
        try:
            return work()
        except TxStoreError as error:
            self._error = self._error or error.at_rank(self._rank)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a store or a target does
            if self._error is None:
                self._error = LoadError(describe(error), rank=self._rank)
                self._error.__cause__ = error
        return None

    def _own_reads(self, pool: ThreadPoolExecutor, blocks: BlockReader | None) -> Iterator[Future[torch.Tensor]]:
        """The reads of this rank's own pieces, in order, each begun when it is asked for."""
        for piece in self._pieces:
            if piece.reader == self._rank and blocks is not None:
                yield pool.submit(_read, blocks, piece, self._take(piece))

    def _send(self, piece: Piece, own: _ReadAhead) -> torch.Tensor | None:
        """Begin to send what this rank has read to all receivers, or its error; None if it has failed."""
        data: torch.Tensor | None = None
        if self._error is None:
            data = self._attempt(own.take().result)
        verdict = _verdict(self._error)
        transfers = [self._transfer(dist.isend, verdict, rank, 2 * piece.number) for rank in piece.receivers]
        if data is not None:
            transfers += [self._transfer(dist.isend, data, rank, 2 * piece.number + 1) for rank in piece.receivers]
        self._sending.append((transfers, data))
        self._settle(SENDING_MAX)
        return data

    def _receive(self, piece: Piece, blocks: BlockReader | None) -> torch.Tensor | None:
        """The bytes of a piece, verified; None if its reader has failed."""
        verdict = torch.empty(VERDICT_BYTES, dtype=torch.uint8, device="cpu")
        self._transfer(dist.irecv, verdict, piece.reader, 2 * piece.number).wait()
        error = _error_in(verdict, piece.reader)
        if error is not None:
            self._error = self._error or error
            return None
        data = self._take(piece)
        self._transfer(dist.irecv, data, piece.reader, 2 * piece.number + 1).wait()
        if self._error is None and blocks is not None:
            self._attempt(partial(_verify, piece, blocks, data))
        return data

    def _transfer(self, begin: Callable[..., dist.Work | None], data: torch.Tensor, rank: int, tag: int) -> _Transfer:
        place = {"group_dst" if begin is dist.isend else "group_src": rank}
        try:
            return _Transfer(begin(data, group=self._group, tag=tag, **place), rank, self._rank)
        except Exception as error:
            raise _lost(rank, self._rank, error) from error

    def _settle(self, left: int) -> None:
        """Wait until at most `left` pieces are being sent; what they lie in is used again."""
        while len(self._sending) > left:
            transfers, data = self._sending.popleft()
            for transfer in transfers:
                transfer.wait()
            if data is not None:
                self._free.append(data)

    def _take(self, piece: Piece) -> torch.Tensor:
        # Memory that was used before: fresh pages would cost as much as the copy into them.
        whole = self._free.pop() if self._free else torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        return whole.as_strided((piece.nbytes,), (1,))


class _ReadAhead:
    """Keeps `depth` reads begun before they are taken, from the start: a rank reads while it waits for others."""

    def __init__(self, reads: Iterator[Future[torch.Tensor]], depth: int) -> None:
        self._reads = reads
        self._begun = deque(islice(reads, depth))

    def take(self) -> Future[torch.Tensor]:
        read = self._begun.popleft()
        self._begun.extend(islice(self._reads, 1))
        return read


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A message on its way to or from `peer`."""

    work: dist.Work | None
    peer: int
    rank: int

    def wait(self) -> None:
        try:
            if self.work is not None:
                self.work.wait()
        except Exception as error:
            raise _lost(self.peer, self.rank, error) from error


def _lost(peer: int, rank: int, error: Exception) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"rank {peer}, with which this rank shares its reads, did not answer: {describe(error)}",
        rank=rank,
        next_step="look at the other ranks' errors: one of them has ended, or waits for the store longer than the "
        "timeout of the group that is passed as share",
    )


def _read(blocks: BlockReader, piece: Piece, data: torch.Tensor) -> torch.Tensor:
    blocks.read_blocks(piece.run.file, piece.run.start, as_bytes(data))
    return data


def _verify(piece: Piece, blocks: BlockReader, data: torch.Tensor) -> None:
    try:
        blocks.verify(piece.run.file, piece.run.start, as_bytes(data))
    except IntegrityError as error:
        raise LoadError(
            f"what rank {piece.reader} had read and verified arrived damaged: {error.message}",
            key=error.key,
            next_step="load again; if it happens again, look at the network between the ranks and at their memory",
        ) from error


def _verdict(error: TxStoreError | None) -> torch.Tensor:
    """The message ahead of a piece."""
    text = b"" if error is None else pickle.dumps(travelling(error))
    if len(text) > VERDICT_BYTES - 8:
        text = pickle.dumps(LoadError(describe(error or LoadError("")), rank=error.rank if error else None))
    verdict = torch.zeros(VERDICT_BYTES, dtype=torch.uint8, device="cpu")
    as_bytes(verdict)[: 8 + len(text)] = len(text).to_bytes(8, "little") + text
    return verdict


def _error_in(verdict: torch.Tensor, reader: int) -> TxStoreError | None:
    message = bytes(as_bytes(verdict))
    length = int.from_bytes(message[:8], "little")
    if not length:
        return None
    try:
        error = pickle.loads(message[8 : 8 + length])  # noqa: S301 - from a rank of this load, as DCP's own errors are
    except Exception as broken:  # noqa: BLE001 - a class that this rank cannot make
        return LoadError(f"rank {reader} failed: {describe(broken)}", rank=reader)
    return error if isinstance(error, TxStoreError) else LoadError(describe(error), rank=reader)
