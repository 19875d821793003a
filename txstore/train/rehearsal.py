"""Whether a sampler's order comes back: it is asked for its order twice, under other random numbers.

A loader's state says how many indices of an epoch were drawn. A sampler that has no state of its own is begun anew at a
resume, and as many are skipped: right if its order follows from its attributes, and another order in silence if it was
drawn from random numbers whose state at the begin of the epoch nobody has kept. What a sampler does is found out and
not guessed from its class: a copy is asked, the attributes are put back, all random streams are moved, and it is asked
again. Attributes that others move between epochs, such as ``epoch``, are state: see `places`. What it moves itself
must be such a number, or stand after each order as after the one before: else a resume would begin elsewhere.

Not noticed: what is drawn or moved only after `MOST_ASKED` indices, or only in later epochs; a list that others shuffle
or replace between epochs, but by ``set_epoch``, such as weights; an order that follows from something outside the
sampler, such as a global variable.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from txstore.errors import describe
from txstore.train.contents import digest_of, of_class
from txstore.train.piece import Place
from txstore.train.python_state import flatten
from txstore.train.rng import Generator, Streams, capture_streams, reseed_streams, restore_streams

MOST_ASKED = 100_000
"""Indices, or batches of them, that a sampler is asked for. A longer order is judged by its begin."""

DRAWS, MOVES = "draws its order from random numbers", "moves its own"
"""How `why_not_again` begins where it knows what a sampler does: the one needs a generator, the other a state."""

_NUMBERS = frozenset({bool, int, float, type(None), np.bool_, np.int32, np.int64, np.float32, np.float64})
_SCALARS = _NUMBERS | {str}
_PLAIN = (list, tuple, range, torch.Tensor, np.ndarray)

Places = dict[str, dict[str, Any]]


def places(sampler: object) -> Places:
    """Plain attributes of a sampler and of those in it, by path: an order without random numbers follows from them."""
    return {path: _scalars(part) for path, part in _parts(sampler)}


def put_back(sampler: object, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Set attributes as `places` told them."""
    parts = dict(_parts(sampler))
    for path, values in found.items():
        part = parts.get(path)
        if part is not None:
            set_numbers(part, values)


def set_numbers(part: object, values: Mapping[str, Any]) -> None:
    """Set attributes of one object; an epoch by its method, which may do more."""
    set_epoch = getattr(part, "set_epoch", None)
    if "epoch" in values and callable(set_epoch):
        set_epoch(values["epoch"])
    vars(part).update(values)


def numbers_of(part: object) -> dict[str, Any]:
    """Those of the plain attributes of one object that are numbers, flags or None, also of its class."""
    return {name: value for name, value in _scalars(part).items() if not isinstance(value, str)}


def why_not_again(sampler: Any, *, fetched_ahead: bool, drawn_from: torch.Generator | None = None) -> str:
    """Why the order of an epoch would not come back, as the rest of a sentence; "" if it would.

    Args:
        sampler: Gives indices, or batches of them. It is left as it is.
        fetched_ahead: Whether workers may be further in the order than training.
        drawn_from: A generator whose state is known when the order begins, and put back.
    """
    if isinstance(sampler, _PLAIN):
        return ""
    if isinstance(sampler, GeneratorType):
        return "can be gone through once only"
    hidden = sorted({name for name in _slots(sampler) if not name.startswith("__")})
    if hidden or not hasattr(sampler, "__dict__"):
        return f"keeps {hidden or 'its attributes'} in __slots__, where nobody looks for a state"
    twin = _copied(sampler, {})
    generators = {f"g{at}": one for at, one in enumerate(_generators(twin)) if one is not drawn_from}
    before = capture_streams(generators)
    began = None if drawn_from is None else drawn_from.get_state()
    try:
        return _ask_twice(twin, generators, before, drawn_from, fetched_ahead=fetched_ahead)
    except Exception as error:  # noqa: BLE001 - of the caller's own class
        return f"does not give its order when it is asked for it beforehand ({describe(error)})"
    finally:
        restore_streams(before, generators)
        if drawn_from is not None and began is not None:
            drawn_from.set_state(began)


def gives_its_state(sampler: Any) -> bool:
    """Whether the iterator of a sampler has a state of its own, which torchdata asks for."""
    if isinstance(sampler, (*_PLAIN, GeneratorType)) or not hasattr(sampler, "__dict__"):
        return False
    twin = _copied(sampler, {})
    generators = {f"g{at}": one for at, one in enumerate(_generators(twin))}
    before = capture_streams(generators)
    try:
        found = iter(twin)
        return callable(getattr(found, "state_dict", None)) and callable(getattr(found, "load_state_dict", None))
    except Exception:  # noqa: BLE001 - then it is asked for its order, and the error is told
        return False
    finally:
        restore_streams(before, generators)


def _ask_twice(
    twin: Any,
    generators: Mapping[str, Generator],
    before: Streams,
    drawn_from: torch.Generator | None,
    *,
    fetched_ahead: bool,
) -> str:
    began = None if drawn_from is None else drawn_from.get_state()
    made, held, streams = places(twin), [_held(twin, generators)], [_stand(generators)]
    first = _order(iter(twin), MOST_ASKED)
    held.append(_held(twin, generators))
    streams.append(_stand(generators))
    made = _still_numbers(made, places(twin))
    put_back(twin, made)
    if drawn_from is not None and began is not None:
        drawn_from.set_state(began)
    reseed_streams(before, Place(1, 2), generators)
    streams.append(_stand(generators))
    made, indices = places(twin), iter(twin)
    second = _order(indices, first[1])
    at_last = places(twin)
    is_over = first[1] == MOST_ASKED or next(indices, None) is None
    at_end = places(twin)
    streams.append(_stand(generators))
    held.append(_held(twin, generators))
    drawn, is_same = _drawn(*streams), first == second and is_over
    if drawn:
        return f"{DRAWS} ({', '.join(drawn)}), and nobody keeps how they stood when an epoch began"
    # What was filled by the first order, and then stands, is filled again at a resume.
    moved = _moved(held[1], held[2]) or ("" if is_same else _moved(held[0], held[1]))
    if moved:
        return f"{MOVES} {moved}, which is no number that is saved"
    if not is_same:
        return "gives another order when it is asked again, by random numbers or a state that none of its attributes is"
    if at_end != at_last and fetched_ahead:
        return f"{MOVES} {_differing(at_last, at_end)} at the end of an order, where workers come too early"
    if at_last != made:
        # What it leaves behind in the middle of an order is what a save then finds: it must come there again.
        put_back(twin, at_last)
        if _order(iter(twin), first[1]) != first or places(twin) != at_last:
            return f"{MOVES} {_differing(made, at_last)} while it gives an order: a resume would do so once more"
    return ""


def _stand(generators: Mapping[str, Generator]) -> dict[str, bytes]:
    """How each stream stands, as bytes."""
    return {name: flatten(state, name)[0] for name, state in capture_streams(generators).items()}


def _drawn(
    before: Mapping[str, bytes], ended: Mapping[str, bytes], moved: Mapping[str, bytes], again: Mapping[str, bytes]
) -> list[str]:
    """Streams that were drawn from, and not seeded: two samples in a random order are often in the same one."""
    untouched = {name for name in again if before[name] == ended[name] and moved[name] == again[name]}
    return sorted(name for name in again if again[name] != ended[name] and name not in untouched)


def _order(indices: Iterator[Any], most: int) -> tuple[str, int]:
    """A digest of what comes next, and how much that was."""
    digest, count = hashlib.sha256(), 0
    for item in itertools.islice(indices, most):
        digest.update(repr(item).encode())
        count += 1
    return digest.hexdigest(), count


def _parts(sampler: object) -> list[tuple[str, object]]:
    """A sampler, and all that it asks for an order, each once."""
    found: list[tuple[str, object]] = []
    seen: set[int] = set()

    def walk(path: str, part: object) -> None:
        if id(part) in seen or not hasattr(part, "__dict__"):
            return
        seen.add(id(part))
        found.append((path, part))
        for name, value in vars(part).items():
            if _gives_an_order(value):
                walk(f"{path}.{name}" if path else name, value)

    walk("", sampler)
    return found


def _gives_an_order(value: object) -> bool:
    """A sampler, or what wraps one, such as Lightning's dataset of indices."""
    if isinstance(value, Sampler):
        return True
    inner = getattr(value, "__dict__", None)
    return isinstance(inner, dict) and any(isinstance(one, Sampler) for one in inner.values())


def _scalars(part: object) -> dict[str, Any]:
    """Also numbers of its class: ``calls = 0`` becomes an attribute by ``self.calls += 1``, and must go back to 0."""
    names = [name for name, value in of_class(type(part)) if type(value) in _NUMBERS and value is not None]
    of_kind = {name.split(".")[-1]: getattr(type(part), name.split(".")[-1]) for name in names}
    return of_kind | {name: value for name, value in vars(part).items() if type(value) in _SCALARS}


def _still_numbers(made: Places, now: Places) -> Places:
    """What a resume would put back: numbers that are saved. Not texts, and no None where there is a list by now."""
    return {
        path: {name: value for name, value in part.items() if type(now.get(path, {}).get(name, "")) in _NUMBERS}
        for path, part in made.items()
    }


def _held(sampler: object, streams: Mapping[str, Generator]) -> dict[str, bytes]:
    """What nobody saves of a sampler, and of those in it, by name; without generators that are watched as streams."""
    held: dict[str, bytes] = {}
    watched = {id(generator) for generator in streams.values()}
    for path, part in _parts(sampler):
        for name, value in vars(part).items():
            if type(value) not in _NUMBERS and id(value) not in watched and not _gives_an_order(value):
                held[f"{path}.{name}".removeprefix(".")] = digest_of(value)
        held |= {name: digest_of(value) for name, value in of_class(type(part))}
    return held


def _moved(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> str:
    """Names of what is not what it was. What became a number, or was one, counts."""
    return _named(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _generators(sampler: object) -> list[Generator]:
    found: dict[int, Generator] = {}
    for _, part in _parts(sampler):
        found |= {id(value): value for value in vars(part).values() if isinstance(value, Generator)}
    # The system's has no state: its orders differ.
    return [value for value in found.values() if not isinstance(value, random.SystemRandom)]


def _slots(sampler: object) -> list[str]:
    names: list[str] = []
    for _, part in _parts(sampler):
        for kind in type(part).__mro__:
            slots = vars(kind).get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
    return names


def _copied(part: Any, known: dict[int, Any]) -> Any:
    """A sampler beside the first: its containers copied, what it reads from and draws from shared."""
    if id(part) in known:
        return known[id(part)]
    twin = known[id(part)] = copy.copy(part)
    for name, value in list(vars(part).items()):
        vars(twin)[name] = _copied(value, known) if _gives_an_order(value) else _contents(value)
    return twin


def _contents(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is list and any(type(one) is list for one in value):
        return [_contents(one) for one in value]
    return copy.copy(value) if type(value) in {list, set, dict, np.ndarray} else value


def _differing(left: Places, right: Places) -> str:
    return _named(
        f"{path}.{name}".removeprefix(".")
        for path in left
        for name in left[path].keys() | right.get(path, {}).keys()
        if left[path].get(name, ...) != right.get(path, {}).get(name, ...)
    )


def _named(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)[:5])
