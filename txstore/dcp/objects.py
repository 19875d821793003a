"""Object payloads: pickled by the planner, and gated before a planner may unpickle them.

DCP's default planner unpickles with ``weights_only=False``: a checkpoint could run any code. So a payload
must first load under torch's ``weights_only`` allow-list, which users extend with
``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
import pickle

import torch

from txstore.errors import IntegrityError, UnsafeObject


def is_safe(payload: bytes) -> bool:
    """Whether the payload loads under the allow-list."""
    try:
        torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def gate(fqn: str, payload: bytes) -> None:
    """Let a payload pass to the planner, or not.

    Raises:
        UnsafeObject: It needs code outside the allow-list.
        IntegrityError: It is not a ``torch.save`` payload at all.
    """
    try:
        torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0][:300]
        raise UnsafeObject(
            f"object {fqn!r} is outside the weights_only allow-list: {reason}",
            key=fqn,
            next_step="torch.serialization.add_safe_globals([...]), or StorageReader(..., trust_objects=True)",
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise IntegrityError(f"object {fqn!r} is not a torch.save payload", key=fqn) from error
