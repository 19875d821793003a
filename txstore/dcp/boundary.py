"""The boundary to DCP: what crosses it is typed, picklable and names the rank.

DCP ships exceptions between ranks by pickle. One that cannot be pickled raises `TypeError` on its own
rank and leaves the others waiting in a collective, so every method of the pair that DCP calls is wrapped.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from txstore.errors import ConfigError, TxStoreError, describe
from txstore.keys import check_checkpoint
from txstore.redact import redact
from txstore.registry import open_store, scheme_of
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import Store

P = ParamSpec("P")
T = TypeVar("T")


class Ranked(Protocol):
    """Something that knows which rank it works for, once DCP has said so."""

    @property
    def rank(self) -> int | None:
        """The rank in the save's or load's process group."""


R = TypeVar("R", bound=Ranked)


def at_boundary(
    wrap: type[TxStoreError],
) -> Callable[[Callable[Concatenate[R, P], T]], Callable[Concatenate[R, P], T]]:
    """Decorate a method that DCP calls: foreign exceptions leave it as `wrap`, all with the rank."""

    def decorate(method: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
        @functools.wraps(method)
        def guarded(self: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except TxStoreError as error:
                if self.rank is not None:
                    error.at_rank(self.rank)
                if (able := travelling(error)) is error:
                    raise
                raise able from error
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                # Text only: the foreign object may hold a lock, a socket or a traceback.
                raise wrap(f"{method.__name__} failed: {describe(error)}", rank=self.rank) from error

        return guarded

    return decorate


def travelling(error: TxStoreError) -> TxStoreError:
    """The error itself if it can be sent to another rank, else its text in the nearest class of this package."""
    if _travels(error):
        return error
    return _native(type(error))(describe(error), key=error.key, rank=error.rank)


def _travels(error: TxStoreError) -> bool:
    """Whether an error arrives on another rank: a third party's subclass may hold more than text."""
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - whatever a foreign class does when it is pickled
        return False


def _native(kind: type[TxStoreError]) -> type[TxStoreError]:
    """The nearest class of `txstore.errors` above a foreign subclass."""
    return next(base for base in kind.__mro__ if base.__module__ == TxStoreError.__module__)


def connect(store: str | os.PathLike[str] | Store, retry: RetryPolicy | None, options: dict[str, object]) -> Store:
    """A store behind the retry layer, from a URL or a store."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise ConfigError(f"retry is a {type(retry).__name__}, not a RetryPolicy")
    inner = store if isinstance(store, Store) else open_store(store, **options)
    return inner if isinstance(inner, RetryingStore) else RetryingStore(inner, retry)


def checkpoint_name(store: Store, checkpoint_id: str | os.PathLike[str], options: dict[str, object]) -> str:
    """The checkpoint that a `checkpoint_id` names: a name in the store, or a full URL below its root.

    Raises:
        ConfigError: Not a name, or a URL below another root.
    """
    text = os.fspath(checkpoint_id)
    if "/" not in text:
        return check_checkpoint(text)
    root, _, name = text.rstrip("/").rpartition("/")
    if not root or root.endswith((":/", ":")):
        raise ConfigError(
            f"not a checkpoint URL: {redact(text)!r}", next_step="use <store URL>/<checkpoint>, or just the name"
        )
    there = open_store(root, **options).url if scheme_of(root) == scheme_of(store.url) else root
    if there != store.url:
        raise ConfigError(
            f"checkpoint_id lies below {redact(there)}, the store is {store.url}",
            next_step="open the store that holds the checkpoint, or pass its name only",
        )
    return check_checkpoint(name)


def asked_name(
    store: Store, checkpoint_id: str | os.PathLike[str], options: dict[str, object], wrap: type[TxStoreError]
) -> str | TxStoreError:
    """As `checkpoint_name`, but an error is returned: DCP calls `reset` outside its collectives.

    Raised there on one rank, it would leave the other ranks waiting; it is raised in the first step that
    DCP runs on all ranks.
    """
    try:
        return checkpoint_name(store, checkpoint_id, options)
    except TxStoreError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a foreign backend's, or not a path at all
        return wrap(f"not a checkpoint_id: {describe(error)}")
