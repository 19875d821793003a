"""Prefixes that need care, and objects of others in the bucket."""

import pytest

from txstore.catalog import newest
from txstore.store import BytesSource
from txstore.testing.saves import load, save
from txstore_s3 import open_store


@pytest.mark.parametrize(
    "prefix",
    [
        "a b",
        "a+b",
        "100%25",
        "проба/训练",
        "a%26b=c;d,e@f:g",
        "q%3Fx%23y",
        "~user/$HOME",
        "quote'\"",
        "tab%20%20double",
    ],
)
def test_a_prefix_with_odd_characters_works(s3_bucket, place, prefix):
    url = f"{place}/{prefix}"
    with open_store(url, **s3_bucket.options, part_bytes=5 << 20) as store:
        decision = save(store, "step-1", [b"x", bytes(6 << 20)])
        assert load(store, decision) == [b"x", bytes(6 << 20)]
        assert newest(store) == decision
        assert list(store.unfinished("")) == []
    with open_store(store.url, **s3_bucket.options) as again:
        assert newest(again) == decision
    with open_store(f"{place}/{prefix}x", **s3_bucket.options) as other:
        assert list(other.list("")) == []


def test_a_bucket_without_a_prefix_is_a_store(s3_bucket):
    s3_bucket.client.create_bucket(Bucket="txstore-whole")
    with open_store("s3://txstore-whole", **s3_bucket.options) as store:
        decision = save(store, "step-1", [b"x"])
        assert newest(store) == decision
        assert load(store, decision) == [b"x"]


def test_foreign_objects_are_passed_over(s3_bucket, place, direct):
    direct.put("data/mine", BytesSource(b"x"))
    prefix = place.removeprefix(f"s3://{s3_bucket.name}/")
    for name in ("data/", "data/a b", "data/.hidden", "data/\u0430", "other key", "data/ok"):
        s3_bucket.client.put_object(Bucket=s3_bucket.name, Key=f"{prefix}/{name}", Body=b"y")
    assert [info.key for info in direct.list("")] == ["data/mine", "data/ok"]
