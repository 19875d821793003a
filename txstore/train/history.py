"""The last steps before a save: losses, gradient norms and batch ids, kept for the proof after a resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from msgspec import Struct

from txstore.errors import ConfigError, FormatError, PlanMismatch, describe
from txstore.field_types import check
from txstore.train.progress import TrainProgress

WINDOW = 32
"""Steps that a checkpoint remembers."""


class StepRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one optimizer step showed. All ranks record the same: means over the ranks, not a rank's own values.

    Attributes:
        step: The global step that it completed.
        loss: The loss.
        grad_norm: Norm of the gradient, before clipping; None if unknown.
        update_norm: Norm of the parameters' change; None if unknown.
        batch_id: Names the batch it was trained on; None if unknown.
        consumed_samples: Samples consumed so far, this step's included.
    """

    step: int
    loss: float
    grad_norm: float | None = None
    update_norm: float | None = None
    batch_id: str | None = None
    consumed_samples: int = 0


def record_of(
    progress: TrainProgress, *, loss: Any, grad_norm: Any = None, update_norm: Any = None, batch_id: str | None = None
) -> StepRecord:
    """What a loop tells of the step that it has counted, as plain numbers.

    Raises:
        ConfigError: A value is none. Here, where it happens, and not at a save a hundred steps later.
    """
    try:
        check("batch_id", batch_id, str | None)
        return StepRecord(
            step=progress.global_step,
            loss=_number(loss),
            grad_norm=None if grad_norm is None else _number(grad_norm),
            update_norm=None if update_norm is None else _number(update_norm),
            batch_id=None if batch_id is None else batch_id.encode().decode(),
            consumed_samples=progress.consumed_samples,
        )
    except (TypeError, ValueError, OverflowError) as error:
        what = error.message if isinstance(error, ConfigError) else describe(error)
        raise ConfigError(f"not a record of step {progress.global_step}: {what}") from error


def refuse_unequal_records(histories: Sequence[Sequence[StepRecord]]) -> None:
    """Each rank's records, by rank: rank 0's are saved for all.

    Raises:
        PlanMismatch: Names the first value that differs.
    """
    first = {record.step: record for record in histories[0]}
    for rank, history in enumerate(histories):
        theirs = {record.step: record for record in history}
        for step in sorted(first.keys() | theirs.keys()):
            one, other = first.get(step), theirs.get(step)
            for name in StepRecord.__struct_fields__:
                values = [repr(getattr(record, name)) if record else "nothing" for record in (one, other)]
                if values[0] != values[1]:
                    raise PlanMismatch(
                        f"step {step}: rank 0 recorded {name}={values[0]}, rank {rank} {values[1]}",
                        key=f"proof.history.{name}",
                        rank=rank,
                        next_step="call record() on every rank with the same values: all_reduce a rank's own loss or "
                        "norm to the mean of all before",
                    )


def _number(value: Any) -> float:
    # A loss that still has its graph is what loops hand over; torch warns of turning one into a number.
    return float(value.detach() if isinstance(value, torch.Tensor) else value)


class History:
    """A window of records; a piece of a training state.

    Args:
        window: Steps to keep.
    """

    def __init__(self, window: int = WINDOW) -> None:
        if window < 1:
            raise ConfigError(f"window={window} must be positive")
        self._records: deque[StepRecord] = deque(maxlen=window)

    def add(self, record: StepRecord) -> None:
        """Append a record.

        Raises:
            ConfigError: It is not of a later step than the last one.
        """
        if self._records and record.step <= self._records[-1].step:
            raise ConfigError(
                f"step {record.step} was recorded after step {self._records[-1].step}",
                next_step="record each step once, after it was counted in state.progress",
            )
        self._records.append(record)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def state_dict(self) -> dict[str, Any]:
        """The records as plain data."""
        return {"records": msgspec.to_builtins(list(self._records))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the records by saved ones.

        Raises:
            FormatError: They are not records.
        """
        try:
            records = msgspec.convert(state, dict[str, list[StepRecord]])["records"]
        except (msgspec.ValidationError, KeyError) as error:
            raise FormatError(f"not a history: {error}") from error
        self._records.clear()
        self._records.extend(records)
