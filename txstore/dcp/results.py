"""The coordinator's check of the results: every planned item, once, in files of the rank that reports it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from txstore.dcp.metadata import Corner, Placed, Placements
from txstore.errors import PlanMismatch
from txstore.keys import parse_attempt
from txstore.transaction import Ticket

Items = frozenset[tuple[str, Corner]]
"""Items of a plan, by name and corner."""


def items_of(indices: Iterable[MetadataIndex]) -> Items:
    """The items that these name."""
    return frozenset((index.fqn, index.offset) for index in indices)


def match(ticket: Ticket, planned: Sequence[Items | None], results: Sequence[Sequence[WriteResult]]) -> Placements:
    """Results by item; each rank must have reported exactly its planned items, each once.

    Raises:
        PlanMismatch: A result is missing, doubled, foreign or of the wrong size.
    """
    if len(planned) != len(results):
        raise PlanMismatch(f"{len(planned)} ranks were planned, {len(results)} reported")
    attempt = (ticket.checkpoint, ticket.txn)
    placed: defaultdict[str, dict[Corner, Placed]] = defaultdict(dict)
    for rank, (items, reports) in enumerate(zip(planned, results, strict=True)):
        got = items_of(report.index for report in reports)
        if len(got) != len(reports) or (items is not None and got != items):
            missing = sorted(fqn for fqn, _ in (items or frozenset()) - got)
            raise PlanMismatch(
                f"rank {rank} reported {len(reports)} of {len(got if items is None else items)} planned items; "
                f"missing: {missing[:5]}",
                key=missing[0] if missing else "",
                rank=rank,
            )
        own: set[int] = set()  # shards that were looked at; the items of one file share one object
        for report in reports:
            fqn, at = report.index.fqn, report.storage_data
            if (
                not isinstance(at, Placed)
                or at.length != report.size_in_bytes
                or at.start < 0
                or at.start + at.length > at.shard.size
            ):
                raise PlanMismatch(f"rank {rank} reported a wrong size", key=fqn, rank=rank)
            if id(at.shard) not in own:
                if at.shard.rank != rank or parse_attempt(at.shard.key) != attempt:
                    raise PlanMismatch(f"rank {rank} reported a file that is not its own", key=at.shard.key, rank=rank)
                own.add(id(at.shard))
            places = placed[fqn]
            if report.index.offset in places:
                raise PlanMismatch(f"two ranks wrote {fqn!r}", key=fqn, rank=rank)
            places[report.index.offset] = at
    return placed
