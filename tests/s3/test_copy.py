"""A store copied object by object between a directory and S3 is a valid store there."""

from tests.copying import assert_same_store, copy, fill
from txstore_posix import open_store as open_posix


def test_from_a_directory_to_s3_and_back(direct, tmp_path):
    here, again = open_posix(f"{tmp_path}/here"), open_posix(f"{tmp_path}/again")
    fill(here)
    assert copy(here, direct) == copy(direct, again) > 10
    assert_same_store(here, direct)
    assert_same_store(here, again)
