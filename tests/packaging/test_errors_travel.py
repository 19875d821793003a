"""Every error reaches the other ranks whole: DCP pickles it, and one that cannot be pickled leaves them waiting."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import txstore
import txstore_posix
from txstore.errors import Conflict, StoreFullError, TxStoreError


def classes(root: type[TxStoreError]) -> Iterator[type[TxStoreError]]:
    yield root
    for child in root.__subclasses__():
        yield from classes(child)


def every_class() -> list[type[TxStoreError]]:
    """Also those that another module, such as a backend, may have defined."""
    for package in (txstore, txstore_posix):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            # testing holds pytest suites, and dcp needs torch: both are imported by their own tests.
            if module.name.split(".")[1] not in {"testing", "dcp"}:
                importlib.import_module(module.name)
    unique = {cls.__qualname__: cls for cls in classes(TxStoreError) if cls.__module__.startswith("txstore")}
    return [unique[name] for name in sorted(unique)]


@pytest.mark.parametrize("cls", every_class())
@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL])
@pytest.mark.parametrize("times", [1, 2])
def test_pickling_keeps_everything(cls: type[TxStoreError], protocol: int, times: int) -> None:
    error = cls("it went wrong: 5", key="commits/step-1.0.json", rank=3, next_step="save again")
    error.detail = "of a subclass"  # type: ignore[attr-defined]
    again: TxStoreError = error
    for _ in range(times):
        again = pickle.loads(pickle.dumps(again, protocol))
    assert type(again) is cls
    assert str(again) == str(error)
    assert str(again).count("it went wrong") == 1
    assert again.args == error.args
    assert again.__dict__ == error.__dict__
    assert (again.key, again.rank, again.next_step) == ("commits/step-1.0.json", 3, "save again")


@pytest.mark.parametrize("cls", every_class())
def test_message_names_key_rank_and_next_step(cls: type[TxStoreError]) -> None:
    text = str(cls("it went wrong", key="commits/a.0.json", rank=0, next_step="save again"))
    assert text == "it went wrong: key='commits/a.0.json' [rank 0] (save again)"
    assert str(cls("it went wrong")) == "it went wrong"


@pytest.mark.parametrize("cls", every_class())
def test_copies_and_ranks(cls: type[TxStoreError]) -> None:
    error = cls("it went wrong")
    assert error.at_rank(2) is error
    assert error.at_rank(5).rank == 2
    assert copy.copy(error).__dict__ == error.__dict__


def test_attributes_of_subclasses_survive() -> None:
    error = Conflict("another transaction committed this checkpoint", key="step-1")
    error.winner = "f" * 32
    assert pickle.loads(pickle.dumps(error)).winner == "f" * 32


class QuotaError(StoreFullError):
    """As a backend may define it: with a constructor of its own."""

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(f"the quota of {limit_bytes} bytes is used up", next_step="ask for more")
        self.limit_bytes = limit_bytes


def test_a_class_with_another_constructor_survives() -> None:
    error = QuotaError(limit_bytes=5).at_rank(1)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is QuotaError
    assert (str(again), again.__dict__) == (str(error), error.__dict__)


def test_the_tree_is_not_empty() -> None:
    assert len(every_class()) >= 26
