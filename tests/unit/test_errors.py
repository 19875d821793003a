"""Errors travel between ranks: every class pickles, keeps its facts and never doubles its message."""

import copy
import pickle

import pytest

from txstore import errors
from txstore.errors import TxStoreError


def subclasses(kind):
    return [kind, *(below for child in kind.__subclasses__() for below in subclasses(child))]


CLASSES = sorted({kind for kind in subclasses(TxStoreError) if kind.__module__ == errors.__name__}, key=str)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling(kind, protocol):
    error = kind("it broke", key="data/x", rank=3, next_step="mend it")
    error.extra = "kept"
    for copied in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(copied) is kind
        assert str(copied) == str(error) == "it broke: key='data/x' [rank 3] (mend it)"
        assert (copied.key, copied.rank, copied.next_step, copied.extra) == ("data/x", 3, "mend it", "kept")
        assert copied.args == ("it broke",)


def test_every_class_is_drawn_in_the_module():
    assert [kind.__name__ for kind in CLASSES if kind.__name__ not in errors.__doc__] == []
    assert len(CLASSES) > 20


def test_standard_handlers_catch_them():
    assert issubclass(errors.NotFoundError, FileNotFoundError)
    assert issubclass(errors.AlreadyExistsError, FileExistsError)
    assert issubclass(errors.AccessDeniedError, PermissionError)
    assert issubclass(errors.ConfigError, ValueError)
    assert errors.NotFoundError("gone", key="x").errno is None, "the key must not be read as an errno"


def test_the_first_rank_stays():
    assert errors.SaveError("x").at_rank(2).at_rank(5).rank == 2


def test_a_key_that_the_message_names_is_not_repeated():
    assert str(errors.FormatError("'a/b' is bad", key="a/b")) == "'a/b' is bad"


def test_a_foreign_exception_becomes_one_short_line():
    text = errors.describe(ValueError("two\nlines " + "x" * 1000))
    assert "\n" not in text
    assert text.startswith("ValueError: two lines")
    assert len(text) < 600
    assert errors.describe(KeyboardInterrupt()) == "KeyboardInterrupt"
