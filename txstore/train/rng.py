"""The random streams of one rank: captured as plain data, restored completely or not at all.

A stream that is missing, cut short or of another kind is refused: training on a fresh stream would diverge
quietly. Every rank has streams of its own, so they are saved under its rank.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from txstore.compat.differences import Difference
from txstore.errors import ConfigError, StateMismatch, describe
from txstore.train.piece import Loaded, PieceState, Place, SavedKeys, Targets, anew
from txstore.train.python_state import flatten

Generator = np.random.Generator | np.random.RandomState | torch.Generator | random.Random
Streams = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")
_WORDS = 625  # Python's Mersenne twister: 624 words and the position


def with_loaders(generators: Mapping[str, Generator] | None, loaders: Iterable[object]) -> dict[str, Generator]:
    """The caller's generators, and those that data loaders draw from: no loader's state dict holds its generator.

    Without it the epoch in which a run resumed would be right, and the order of the next one another (a torch
    ``DataLoader(shuffle=True, generator=g)`` draws from it at the begin of each epoch).

    Raises:
        ConfigError: No mapping of generators by name.
    """
    if generators is not None and not isinstance(generators, Mapping):
        raise ConfigError(
            f"generators is a {type(generators).__name__}",
            next_step="pass them by name: generators={'noise': generator}",
        )
    found = dict(generators or {})
    for number, loader in enumerate(loaders):
        generator = getattr(loader, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in found.values()):
            found[f"data-{number}"] = generator
    return found


def with_modules(generators: Mapping[str, Generator], modules: Iterable[tuple[str, object]]) -> dict[str, Generator]:
    """The given generators, and those that modules keep to draw from in `forward`: no module's state dict holds them.

    Each is called by its module and attribute: ``module-layers-3-noise``. Those of the system have no state.
    """
    found = dict(generators)
    known = {id(one) for one in (*found.values(), random._inst, np.random.mtrand._rand, torch.default_generator)}  # noqa: SLF001 - as in `process_streams`
    for path, module in modules:
        for attribute, kept in vars(module).items():
            for place, one in _kept(attribute, kept):
                if isinstance(one, Generator) and not isinstance(one, random.SystemRandom) and id(one) not in known:
                    known.add(id(one))
                    name = re.sub(r"[^A-Za-z0-9_-]", "-", ".".join(part for part in ("module", path, place) if part))
                    while name in found:
                        name += "-"
                    found[name] = one
    return found


def _kept(attribute: str, value: object) -> Iterable[tuple[str, object]]:
    """What an attribute holds: itself, or what is in its list, tuple or dict."""
    if isinstance(value, dict):
        return [(f"{attribute}.{key}", one) for key, one in value.items() if isinstance(one, Generator)]
    if isinstance(value, list | tuple):
        return [(f"{attribute}.{at}", one) for at, one in enumerate(value) if isinstance(one, Generator)]
    return [(attribute, value)]


def capture_streams(generators: Mapping[str, Generator] | None = None) -> Streams:
    """The state of every stream by name: ``python``, ``numpy``, ``torch``, ``cuda:0`` and ``generator.<name>``.

    Args:
        generators: Generators of your own, by name.
    """
    return {name: stream.get() for name, stream in _streams(generators or {}).items()}


def problems_with(
    saved: Any, generators: Mapping[str, Generator] | None = None, fresh: Collection[str] = ()
) -> list[str]:
    """Why `saved` cannot be restored here, a sentence each; tries every stream and leaves it as it was."""
    if not isinstance(saved, dict):
        return ["no random streams were saved for this rank"]
    every = _streams(generators or {})
    nowhere = [name for name in fresh if name not in every and name not in saved]
    problems = [f"the random stream {name!r} is named in fresh, and neither side has it" for name in nowhere]
    here = {name: stream for name, stream in every.items() if name not in fresh}
    saved = {name: state for name, state in saved.items() if name not in fresh}
    one_sided = [(name, "was not saved") for name in here if name not in saved]
    one_sided += [(name, "was saved, and there is none here") for name in saved if name not in here]
    problems += [f"the random stream {name!r} {what} ({anew(f'rng:{name}')})" for name, what in one_sided]
    for name, stream in here.items():
        if name in saved:
            now = stream.get()
            try:
                stream.set(saved[name])
                if _packed(stream.get()) != _packed(saved[name]):
                    problems.append(f"the random stream {name!r} does not take the saved state")
            except Exception as error:  # noqa: BLE001 - each library refuses a wrong state in its own way
                problems.append(f"the saved random stream {name!r} is not valid: {describe(error)}")
            finally:
                stream.set(now)
    return problems


def restore_streams(
    saved: Any, generators: Mapping[str, Generator] | None = None, fresh: Collection[str] = ()
) -> list[str]:
    """Restore every stream but those in `fresh`; returns their names.

    Raises:
        StateMismatch: A stream is missing, unknown here, cut short or of another kind; none has been changed.
    """
    problems = problems_with(saved, generators, fresh)
    if problems:
        raise StateMismatch("; ".join(problems), key="rng", next_step="resume where the streams can be restored")
    here = {name: stream for name, stream in _streams(generators or {}).items() if name not in fresh}
    for name, stream in here.items():
        stream.set(saved[name])
    return list(here)


def reseed_streams(saved: Any, place: Place, generators: Mapping[str, Generator] | None = None) -> list[str]:
    """Seed every stream from saved ones and the new place; returns the streams' names.

    The same saved streams and place give the same seeds, and no two ranks or world sizes share one.
    """
    here = _streams(generators or {})
    for name, stream in here.items():
        text = f"{name}/{place.rank}/{place.world_size}".encode()
        stream.seed(int.from_bytes(hashlib.sha256(_packed(saved) + text).digest()[:8], "little"))
    return list(here)


class Stream:
    """One stream: how to read, write and seed it."""

    def __init__(self, get: Callable[[], Any], set_: Callable[[Any], Any], seed: Callable[[int], Any]) -> None:
        self.get = get
        self.set = set_
        self.seed = seed


def _packed(state: Any) -> bytes:
    return flatten(state, "rng")[0]


def _streams(generators: Mapping[str, Generator]) -> dict[str, Stream]:
    return process_streams() | _devices() | own_streams(generators)


def process_streams() -> dict[str, Stream]:
    """The streams that every process has: of Python, NumPy and torch on the CPU."""
    return {
        "python": _python(random._inst),  # noqa: SLF001 - the global generator, else offered method by method
        "numpy": _legacy_numpy(np.random.mtrand._rand),  # noqa: SLF001 - as above
        "torch": _torch(torch.default_generator),
    }


def own_streams(generators: Mapping[str, Generator]) -> dict[str, Stream]:
    """Those of your own generators.

    Raises:
        ConfigError: Not a name, or not a generator with a state.
    """
    return {f"generator.{name}": _own(name, generator) for name, generator in generators.items()}


def _devices() -> dict[str, Stream]:
    """Every device of the accelerator, whatever its kind."""
    if not torch.accelerator.is_available():
        return {}
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    module = torch.get_device_module(kind)
    return {f"{kind.type}:{at}": _device(module, at) for at in range(torch.accelerator.device_count())}


def _device(module: Any, at: int) -> Stream:
    def seed(value: int) -> None:
        module.get_rng_state(at)  # the generators are made with the first use
        generators = getattr(module, "default_generators", ())
        if len(generators) > at:
            generators[at].manual_seed(value)
            return
        with module.device(at):  # on CUDA this would take memory on every device, from every rank
            module.manual_seed(value)

    return Stream(
        lambda: _to_bytes(module.get_rng_state(at)), lambda state: module.set_rng_state(_to_tensor(state), at), seed
    )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.match(name) is not None


def _own(name: str, generator: Generator) -> Stream:
    if not _is_name(name):
        raise ConfigError(f"not a generator's name: {name!r}", next_step="use letters, digits, _ and -")
    if isinstance(generator, torch.Generator):
        return _torch(generator)
    if isinstance(generator, np.random.Generator):
        return _numpy(generator)
    if isinstance(generator, np.random.RandomState):
        return _legacy_numpy(generator)
    if isinstance(generator, random.SystemRandom):
        raise ConfigError(f"generator {name!r} is the system's and has no state", next_step="draw from another one")
    if isinstance(generator, random.Random):
        return _python(generator)
    raise ConfigError(
        f"generator {name!r} is a {type(generator).__name__}",
        next_step="pass a numpy Generator or RandomState, a torch.Generator or a random.Random",
    )


def _python(generator: random.Random) -> Stream:
    def set_state(state: Any) -> None:
        _, words, _ = state
        if len(words) != _WORDS:
            raise ValueError(f"{len(words)} words of {_WORDS}")
        generator.setstate(state)

    return Stream(generator.getstate, set_state, generator.seed)


def _legacy_numpy(generator: np.random.RandomState) -> Stream:
    return Stream(
        lambda: generator.get_state(legacy=False), generator.set_state, lambda seed: generator.seed(seed % (1 << 32))
    )


def _numpy(generator: np.random.Generator) -> Stream:
    bits = generator.bit_generator

    def set_state(state: Any) -> None:
        bits.state = state

    def seed(value: int) -> None:
        bits.state = type(bits)(value).state

    return Stream(lambda: bits.state, set_state, seed)


def _torch(generator: torch.Generator) -> Stream:
    return Stream(
        lambda: _to_bytes(generator.get_state()),
        lambda state: generator.set_state(_to_tensor(state)),
        lambda value: generator.manual_seed(value % (1 << 63)),
    )


def _to_bytes(state: torch.Tensor) -> bytes:
    return bytes(state.cpu().numpy().tobytes())


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


class RandomStreams:
    """The piece of state that holds this rank's streams."""

    def __init__(self, generators: Mapping[str, Generator]) -> None:
        self._generators = dict(generators)
        _streams(self._generators)  # refuses a wrong generator now, and not at the first save

    def capture(self, place: Place) -> PieceState:  # noqa: ARG002 - the signature of a piece
        """All streams."""
        return PieceState(own=capture_streams(self._generators))

    def targets(self, saved: SavedKeys, place: Place) -> Targets:  # noqa: ARG002 - the signature of a piece
        """None: the streams are plain data."""
        return Targets()

    def problems(self, loaded: Loaded) -> list[str]:
        """Streams that cannot be restored, or belong to ranks that are no more."""
        if loaded.same_world:
            return problems_with(loaded.own, self._generators, loaded.fresh)
        return [] if isinstance(loaded.own, dict) else ["no random streams were saved"]

    def differences(self, loaded: Loaded) -> list[Difference]:
        """Streams of another number of ranks, unless new ones may be derived."""
        if loaded.same_world or loaded.on_world_size_change == "reseed":
            return []
        was, now = (f"of world size {ranks}" for ranks in (loaded.saved_world_size, loaded.place.world_size))
        step = 'on_world_size_change="reseed" derives new ones'
        return [Difference("state", "random streams", was, now, change_class=1, next_step=step)]

    def restore(self, loaded: Loaded) -> Mapping[str, Any]:
        """Restore, or derive new streams when the world size has changed."""
        if loaded.same_world:
            return {"restored": restore_streams(loaded.own, self._generators, loaded.fresh)}
        return {"reseeded": reseed_streams(loaded.own, loaded.place, self._generators)}
