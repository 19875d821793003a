"""The coordinator's check of the results: every planned item, once, in files of the rank that reports it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from txstore.dcp.metadata import Placed
from txstore.errors import PlanMismatch
from txstore.keys import attempt_prefix
from txstore.transaction import Ticket


def match(
    ticket: Ticket, planned: Sequence[frozenset[MetadataIndex] | None], results: Sequence[Sequence[WriteResult]]
) -> dict[MetadataIndex, Placed]:
    """Results by item; each rank must have reported exactly its planned items, each once.

    Raises:
        PlanMismatch: A result is missing, doubled, foreign or of the wrong size.
    """
    if len(planned) != len(results):
        raise PlanMismatch(f"{len(planned)} ranks were planned, {len(results)} reported")
    prefix = attempt_prefix(ticket.checkpoint, ticket.txn)
    placed: dict[MetadataIndex, Placed] = {}
    for rank, (items, reports) in enumerate(zip(planned, results, strict=True)):
        got = [report.index for report in reports]
        if len(set(got)) != len(got) or (items is not None and set(got) != items):
            missing = sorted(str(index.fqn) for index in (items or frozenset()) - set(got))
            raise PlanMismatch(
                f"rank {rank} reported {len(got)} of {len(items or got)} planned items; missing: {missing[:5]}",
                key=missing[0] if missing else "",
                rank=rank,
            )
        for report in reports:
            at = report.storage_data
            if (
                not isinstance(at, Placed)
                or at.length != report.size_in_bytes
                or at.start < 0
                or at.start + at.length > at.shard.size
            ):
                raise PlanMismatch(f"rank {rank} reported a wrong size", key=report.index.fqn, rank=rank)
            if at.shard.rank != rank or not at.shard.key.startswith(prefix):
                raise PlanMismatch(f"rank {rank} reported a file that is not its own", key=at.shard.key, rank=rank)
            if report.index in placed:
                raise PlanMismatch(f"two ranks wrote {report.index.fqn!r}", key=report.index.fqn, rank=rank)
            placed[report.index] = at
    return placed
