"""The contract on S3, against SeaweedFS."""

import pytest

from txstore.testing.conformance import StoreConformance
from txstore_s3 import open_store


class RawObjects:
    def __init__(self, bucket, prefix):
        self._bucket = bucket
        self._prefix = prefix

    def write(self, key, data):
        self._bucket.client.put_object(Bucket=self._bucket.name, Key=f"{self._prefix}/{key}", Body=data)

    def read(self, key):
        try:
            answer = self._bucket.client.get_object(Bucket=self._bucket.name, Key=f"{self._prefix}/{key}")
        except self._bucket.client.exceptions.NoSuchKey:
            return None
        return answer["Body"].read()


class TestS3(StoreConformance):
    @pytest.fixture
    def prefix(self, s3_bucket):
        return s3_bucket.new_prefix()

    @pytest.fixture
    def store(self, s3_bucket, prefix):
        with open_store(f"s3://{s3_bucket.name}/{prefix}", **s3_bucket.options, part_bytes=8 << 20) as store:
            yield store

    @pytest.fixture
    def raw(self, s3_bucket, prefix):
        return RawObjects(s3_bucket, prefix)
