"""`SavePolicy`: how many saves may be on their way, and what happens when storage is slower than training."""

from __future__ import annotations

from dataclasses import dataclass

from txstore.errors import ConfigError, SnapshotTooLarge
from txstore.events import WhenBusy
from txstore.field_types import check_fields
from txstore.ops.report import Depth

MOST_IN_FLIGHT = 64
"""Each save on its way holds a copy of the state: more is a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """Limits of background saves (mission, "Back-pressure").

    Attributes:
        max_in_flight: Saves that are staged and not yet committed. Each holds a snapshot of its own in memory.
        when_busy: What `save` does at that limit, on all ranks alike: wait for the oldest save, skip this one, or
            raise `SaveBusy`.
        max_staging_bytes: Most bytes of one rank's memory for all snapshots together; None for no limit.
        max_commit_lag_s: `save` treats the limit as reached while an earlier save has been on its way for longer;
            None for no limit.
        verify: How deep the coordinator reads each checkpoint back when it is committed, in the background: see
            `txstore.ops.verify`. None for not at all. Damage is raised like a failed save.
        max_failed_in_a_row: So many failed saves, one after another, are warned about and not raised.
        deadline_s: The longest that a save may be on its way, that its verification may take, and that one phase of a
            resume may take, in seconds. A rank waits for the others half as long again.
    """

    max_in_flight: int = 1
    when_busy: WhenBusy = "wait"
    max_staging_bytes: int | None = None
    max_commit_lag_s: float | None = None
    verify: Depth | None = None
    max_failed_in_a_row: int = 0
    deadline_s: float = 1800.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.max_in_flight <= MOST_IN_FLIGHT or self.max_failed_in_a_row < 0 or not self.deadline_s > 0:
            raise ConfigError(f"not a save policy: {self}")
        for limit in (self.max_staging_bytes, self.max_commit_lag_s):
            if limit is not None and not limit > 0:
                raise ConfigError(f"not a save policy: a limit of {limit}; None means no limit")

    def refuse_larger(self, snapshot_bytes: int) -> None:
        """Before the first copy: memory that is not there is found out now, not by the kernel in hour three.

        Raises:
            SnapshotTooLarge: Snapshots of this size take more than `max_staging_bytes`.
        """
        needed, allowed = snapshot_bytes * self.max_in_flight, self.max_staging_bytes
        if allowed is not None and needed > allowed:
            raise SnapshotTooLarge(
                f"{self.max_in_flight} snapshots of this rank's state take {needed / 2**20:.1f} MiB, "
                f"max_staging_bytes allows {allowed / 2**20:.1f} MiB",
                next_step="raise max_staging_bytes, lower max_in_flight, or shard the state over more ranks",
            )
