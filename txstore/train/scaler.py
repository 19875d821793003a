"""The gradient scaler: its scale and growth, saved between two uses of it."""

from __future__ import annotations

from typing import Any

from torch.amp.grad_scaler import OptState

from txstore.errors import UnsupportedValue
from txstore.train.built import settings_of
from txstore.train.piece import Loaded, PieceState, Place
from txstore.train.stateful import Stateful, StatefulPiece, scoped


class ScalerPiece(StatefulPiece):
    """The piece of state that holds a ``torch.amp.GradScaler``."""

    def __init__(self, scaler: Any) -> None:
        items = scoped(scaler, "scaler", is_shared=True)
        super().__init__("scaler", items, verify=True)
        self._scalers = [one.item for one in items.values()]

    def settings(self, item: Stateful) -> dict[str, str]:
        """Its settings as the code chose them."""
        return settings_of(item.state_dict())

    def capture(self, place: Place) -> PieceState:
        """The scaler's state.

        Raises:
            UnsupportedValue: Gradients are unscaled and not stepped with, or stepped with and the scale not updated:
                its state tells neither, nor whether they were finite.
        """
        for scaler in self._scalers:
            states = getattr(scaler, "_per_optimizer_states", {})
            stages = {state["stage"] for state in states.values()}
            if stages - {OptState.READY}:
                is_used = OptState.UNSCALED not in stages
                raise UnsupportedValue(
                    "the scaler has unscaled gradients that "
                    + ("a step has used, and no update has followed" if is_used else "no step has used"),
                    key="scaler",
                    next_step="save after scaler.step and scaler.update, or before unscale_",
                )
        return super().capture(place)

    def problems(self, loaded: Loaded) -> list[str]:
        """As for all objects; and one of the two scalers is not enabled."""
        problems = super().problems(loaded)
        for name, now in super().capture(loaded.place).shared.items():
            if (
                name in loaded.shared
                and name not in loaded.fresh
                and loaded.shared[name]["state"].keys() != now["state"].keys()
            ):
                problems.append("the scaler is enabled on one side only")
        return problems
