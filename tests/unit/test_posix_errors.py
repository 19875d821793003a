import errno

import pytest

from txstore.errors import (
    AccessDeniedError,
    ConfigError,
    NotFoundError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    TransientError,
)
from txstore_posix.errors import translate, translate_publish, translate_write, unknown

T, U, A, F, N, C = TransientError, OutcomeUnknownError, AccessDeniedError, StoreFullError, NotFoundError, ConfigError

# errno: on reading, on preparing a write, on publishing
TABLE = {
    "ENOENT": (N, T, U),
    "ENOTDIR": (N, C, C),
    "EISDIR": (N, C, C),
    "EACCES": (A, A, A),
    "EPERM": (A, A, A),
    "EROFS": (A, A, A),
    "ENOSPC": (F, F, F),
    "EDQUOT": (F, F, F),
    "EFBIG": (F, F, U),
    "ENAMETOOLONG": (C, C, C),
    "ELOOP": (C, C, C),
    "ENOTEMPTY": (C, C, C),
    "EINTR": (T, T, U),
    "EAGAIN": (T, T, U),
    "EBUSY": (T, T, U),
    "EMFILE": (T, T, U),
    "EIO": (T, T, U),
    "ESTALE": (T, T, U),
    "ETIMEDOUT": (T, T, U),
    "ENOTCONN": (T, T, U),
    "EUCLEAN": (StoreError, StoreError, U),
    "EINVAL": (StoreError, StoreError, U),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_errno_has_one_class_per_situation(name):
    number = getattr(errno, name)
    found = [call(OSError(number, "text"), "a/b", "fsync") for call in (translate, translate_write, translate_publish)]
    assert [type(error) for error in found] == list(TABLE[name])
    for error in found:
        assert name in str(error)
        assert "fsync" in str(error)
        assert error.key == "a/b"


@pytest.mark.parametrize("name", TABLE)
def test_after_publishing_every_errno_is_unknown(name):
    assert type(unknown(OSError(getattr(errno, name), "x"), "k", "fsync")) is OutcomeUnknownError


def test_an_errno_without_a_name_keeps_its_number():
    assert "errno 524" in str(translate(OSError(524, "x"), "k", "lock"))
    assert type(translate(OSError("no errno"), "k", "lock")) is StoreError
