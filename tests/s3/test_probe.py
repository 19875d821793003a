"""A store that ignores conditions is refused before a shard is written; one that keeps them is used."""

import pytest

from tests.servers.rclone import rclone
from tests.servers.seaweed import Bucket
from txstore.errors import CapabilityError
from txstore.probe import probe
from txstore.retry import RetryingStore
from txstore.testing.proxy import Answer, LostReplyProxy, Rule
from txstore.testing.saves import contents, load, save
from txstore_s3 import open_store


@pytest.fixture(scope="module")
def careless():
    with rclone() as endpoint:
        yield Bucket(endpoint, "txstore-careless")


def names(bucket):
    return [entry["Key"] for entry in bucket.client.list_objects_v2(Bucket=bucket.name).get("Contents", ())]


def test_rclone_ignores_conditions_and_is_refused_before_a_shard_is_written(careless):
    with open_store(f"s3://{careless.name}/runs/1", **careless.options) as store:
        with pytest.raises(CapabilityError) as caught:
            save(RetryingStore(store), "step-1", [b"shard"])
        assert "never replaces" in str(caught.value)
        assert "docs/compatibility.md" in str(caught.value)
        problems = {check.sentence: check.problem for check in probe(store)}
    assert problems["create makes an object"] == ""
    assert problems["create never replaces an object"] != ""
    assert names(careless) == []


def test_seaweed_keeps_every_sentence(s3_bucket):
    with open_store(f"s3://{s3_bucket.name}/{s3_bucket.new_prefix()}", **s3_bucket.options) as store:
        assert [check.problem for check in probe(store)] == [""] * 6
        assert contents(store) == {}
        decision = save(store, "step-1", [b"shard"])
        assert load(store, decision) == [b"shard"]


@pytest.mark.parametrize("status", [400, 405, 501])
def test_a_store_that_rejects_the_condition_is_refused(s3_bucket, status):
    with LostReplyProxy(s3_bucket.endpoint.url) as proxy:
        proxy.add(Rule("PUT", header="if-none-match", forward="never", reply=Answer(status), times=None))
        options = {**s3_bucket.options, "endpoint_url": proxy.url}
        with open_store(f"s3://{s3_bucket.name}/{s3_bucket.new_prefix()}", **options) as store:
            with pytest.raises(CapabilityError):
                save(RetryingStore(store), "step-1", [b"shard"])
            assert contents(store) == {}
            assert proxy.count("PUT", "data/") == 0
