"""Where training stands, as the training loop counts it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from txstore import manifest
from txstore.compat.differences import Difference
from txstore.errors import ConfigError
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets, anew


class _Watched:
    """Tells others before ``epoch`` is moved. Copies, also pickled ones, tell nobody."""

    __slots__ = ("__weakref__", "_watchers")

    def on_epoch(self, watcher: Callable[[], None]) -> None:
        """Call this method of an object before each move of ``epoch``, for as long as the object is there."""
        object.__setattr__(self, "_watchers", (*self._watching(), weakref.WeakMethod(watcher)))

    def _watching(self) -> tuple[weakref.WeakMethod[Callable[[], None]], ...]:
        return tuple(one for one in getattr(self, "_watchers", ()) if one() is not None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "epoch" and value != getattr(self, "epoch", value):
            for watcher in self._watching():
                told = watcher()
                if told is not None:
                    told()
        object.__setattr__(self, name, value)

    def __reduce__(self) -> Any:
        counters: Any = self
        return type(self), tuple(asdict(counters).values())


@dataclass(slots=True)
class TrainProgress(_Watched):
    """Counters that the training loop moves; a save reads them at the instant of its capture.

    Attributes:
        global_step: Optimizer steps done.
        epoch: Epochs done.
        micro_step: Backward passes since the last optimizer step: above 0 inside an accumulation window.
        consumed_samples: Samples that all ranks together have trained on, since the beginning of the run.
    """

    global_step: int = 0
    epoch: int = 0
    micro_step: int = 0
    consumed_samples: int = 0

    def recorded(self) -> manifest.Progress:
        """As the manifest records it: by value, so that a later step does not change it.

        Raises:
            ConfigError: A counter is negative, or no int.
        """
        try:
            return msgspec.convert(asdict(self), manifest.Progress, strict=True)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ConfigError(f"not a progress: {error}", next_step="count with plain ints from 0") from error


def bound_to_counters(saved: Mapping[str, Any], cursors: Collection[str], fresh: Collection[str]) -> list[str]:
    """What cannot be restored while the counters begin anew.

    Args:
        saved: The saved counters.
        cursors: Names of data whose cursor is a counter.
        fresh: What begins anew.
    """
    if "progress" not in fresh:
        return []
    names = [] if "data" in fresh else [f"data:{name}" for name in cursors if f"data:{name}" not in fresh]
    names += ["gradients"] if saved.get("micro_step") and "gradients" not in fresh else []
    every = anew(*sorted({*fresh, *names}))
    return [f"the counters begin anew, and {name!r} goes on where a saved one stands ({every})" for name in names]


class ProgressPiece:
    """The piece of state that holds the counters."""

    def __init__(self, progress: TrainProgress) -> None:
        self._progress = progress

    def capture(self, place: Place) -> PieceState:  # noqa: ARG002 - the signature of a piece
        """The counters, by value."""
        return PieceState(shared=asdict(self._progress))

    def targets(self, saved: SavedKeys, place: Place) -> Targets:  # noqa: ARG002 - the signature of a piece
        """None: the counters are plain data."""
        return Targets()

    def problems(self, loaded: Loaded) -> list[str]:
        """Counters that are none."""
        try:
            msgspec.convert(loaded.shared, manifest.Progress, strict=True)
        except msgspec.ValidationError as error:
            return [f"the saved progress is malformed: {error}"]
        return []

    def differences(self, loaded: Loaded) -> list[Difference]:  # noqa: ARG002 - the signature of a piece
        """None that may be meant."""
        return []

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Set the counters of the loop's own object."""
        for name, value in loaded.shared.items():
            setattr(self._progress, name, value)
        return dict(loaded.shared)
