"""Does this live store keep the contract? Asked once before the first write, and by ``txstore probe URL``.

Some endpoints accept a conditional write, ignore the condition and overwrite: two writers would both win.
Brands and documentation do not tell; two writes of one fresh key do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from txstore.errors import AlreadyExistsError, CapabilityError, NotFoundError, StoreError
from txstore.keys import new_txn, probe_key
from txstore.store import BytesSource, Store

_proved: weakref.WeakSet[Store] = weakref.WeakSet()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Check:
    """One sentence of the contract, and what is wrong with it here, or ""."""

    sentence: str
    problem: str = ""


def probe(store: Store) -> list[Check]:
    """Try the contract on a fresh key, which is removed again.

    Returns:
        What was tried; a `Check.problem` that is not empty means that the store must not be used.

    Raises:
        StoreError: The store refused or could not be reached: nothing was learnt about the contract.
    """
    key = probe_key(new_txn())
    first, second = b"txstore probe: first", b"txstore probe: second, longer"
    checks: list[Check] = []

    def check(sentence: str, problem: Callable[[], str]) -> None:
        checks.append(Check(sentence, problem()))

    try:
        check("create makes an object", lambda: _create(store, key, first, ""))
        check(
            "create never replaces an object",
            lambda: _create(store, key, second, "a second create of one key succeeded") or _differs(store, key, first),
        )
        check("a listing shows what was written", lambda: _listed(store, key))
        store.delete(key)
        check("a deleted object is gone", lambda: _gone(store, key))
        store.put(key, BytesSource(second))
        check("put stores an object", lambda: _differs(store, key, second))
        check("create finds an object that put made", lambda: _create(store, key, first, "create replaced it"))
    except BaseException:
        with suppress(StoreError):  # the first error is the one to tell
            store.delete(key)
        raise
    store.delete(key)
    return checks


def prove(store: Store) -> None:
    """Probe `store` once per process and open store, if it needs that, before anything is written.

    Raises:
        CapabilityError: It does not keep the contract; nothing was written but the probe's own key.
    """
    if not store.needs_probe:
        return
    with _lock:
        if store in _proved:
            return
    for check in probe(store):
        if check.problem:
            raise CapabilityError(
                f"{store.url} does not keep the contract: {check.sentence}, but {check.problem}",
                next_step="two writers could both win: use a store with conditional writes (docs/compatibility.md)",
            )
    with _lock:
        _proved.add(store)


def _create(store: Store, key: str, data: bytes, if_it_succeeds: str) -> str:
    try:
        store.create(key, data)
    except AlreadyExistsError:
        return "" if if_it_succeeds else "the fresh key was taken"
    except CapabilityError as error:
        return error.message
    return if_it_succeeds


def _differs(store: Store, key: str, wanted: bytes) -> str:
    try:
        return "" if store.read(key) == wanted else "other bytes were read"
    except StoreError as error:
        return error.message


def _listed(store: Store, key: str) -> str:
    return "" if any(info.key == key for info in store.list(key)) else "the listing lacks it"


def _gone(store: Store, key: str) -> str:
    try:
        store.head(key)
    except NotFoundError:
        return ""
    return "it is still there"
