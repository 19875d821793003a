"""The ticket's way from the coordinator to the ranks: inside the plans that DCP scatters."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import SavePlan

from txstore.transaction import Ticket


class _Arrived(threading.local):
    """The ticket that the latest scatter brought to this thread."""

    ticket: Ticket | None = None


arrived = _Arrived()


@dataclass(frozen=True, slots=True)
class Carrier:
    """The ticket on its way in `SavePlan.storage_data`; leaves it at its destination when unpickled.

    A caching planner drops the plan that the coordinator sends and returns the one of an earlier save,
    with the ticket of a transaction that has ended. What the scatter brought is the truth.
    """

    ticket: Ticket

    def __reduce__(self) -> tuple[object, ...]:
        return _deliver, (self.ticket,)


def _deliver(ticket: Ticket) -> Carrier:
    # The first to arrive after `prepare_local_plan`: a planner may go on to copy plans of earlier saves.
    if arrived.ticket is None:
        arrived.ticket = ticket
    return Carrier(ticket)


def with_carrier(plan: SavePlan, carrier: Carrier) -> SavePlan:
    """The plan with the ticket on it."""
    return SavePlan(plan.items, storage_data=carrier, planner_data=plan.planner_data, usable=plan.usable)
