"""Object payloads: pickled by the planner, and gated before a planner may unpickle them.

DCP's default planner unpickles with ``weights_only=False``: a checkpoint could run any code. So a payload
must first load under torch's ``weights_only`` allow-list, which users extend with
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import torch

from txstore.errors import UnsafeObject, describe


def is_safe(payload: bytes) -> bool:
    """Whether the payload loads under the allow-list."""
    try:
        torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - no torch.save payload at all: a custom planner's own bytes
        return False
    return True


def gate(fqn: str, payload: bytes) -> Any:
    """Let a payload pass to the planner, or not; returns its value.

    Raises:
        UnsafeObject: It needs code outside the allow-list, or is not a ``torch.save`` payload at all.
    """
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = _reason(error)
        raise UnsafeObject(
            f"object {fqn!r} is outside the weights_only allow-list: {reason}",
            key=fqn,
            next_step="torch.serialization.add_safe_globals([...]), or StorageReader(..., trust_objects=True)",
        ) from error
    except Exception as error:
        # The blocks have passed their checksums: this is what was saved, by a planner with an encoding of its own.
        raise UnsafeObject(
            f"object {fqn!r} is not a torch.save payload: {describe(error)}",
            key=fqn,
            next_step="StorageReader(..., trust_objects=True) hands the bytes to the planner as they are",
        ) from error


def _reason(error: Exception) -> str:
    """What was refused, without torch's advice to load it all the same."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"it needs {found[1]}" if found else describe(error)[:200]
