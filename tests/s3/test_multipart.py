"""Large objects: parts that fail, completions whose reply is lost, uploads that somebody aborts."""

import random

import pytest

from txstore.checksum import crc32c
from txstore.errors import ConfigError, FormatError, NotFoundError, OutcomeUnknownError, StoreError, TransientError
from txstore.retry import RetryingStore, RetryPolicy
from txstore.slot_walk import claim_abort
from txstore.store import BytesSource, KeepsUnfinished, Unfinished
from txstore.sweep import sweep
from txstore.testing.proxy import Answer, Rule
from txstore.transaction import begin
from txstore_s3.upload import MARK, part_bytes_for

PART = 5 << 20
DATA = random.Random(7).randbytes(3 * PART + 12345)
KEY = "data/step-1/" + "0" * 32 + "/rank-00000-00000.safetensors"
COMPLETE, PARTS, START = r"uploadId=[^&]*$", "partNumber=", r"\?uploads"


def check(direct, data=DATA):
    assert direct.head(KEY).crc32c == crc32c(data)
    assert direct.read(KEY) == data
    assert list(direct.unfinished("")) == []


def nothing_left(direct):
    with pytest.raises(NotFoundError):
        direct.head(KEY)
    assert list(direct.unfinished("")) == []


def patient(store):
    return RetryingStore(store, RetryPolicy(first_wait_s=0, longest_wait_s=0), sleep=lambda _s: None)


def test_the_store_reports_the_checksum_of_the_whole(remote, proxy, direct):
    info = remote.put(KEY, BytesSource(DATA))
    assert (info.size, info.crc32c) == (len(DATA), crc32c(DATA))
    assert proxy.count("PUT", PARTS) == 4
    assert proxy.count() == 6
    check(direct)


def test_an_object_of_one_part_is_one_request(remote, proxy, direct):
    remote.put(KEY, BytesSource(DATA[:PART]))
    assert proxy.count() == 1
    check(direct, DATA[:PART])


@pytest.mark.parametrize("forward", ["now", "never"])
@pytest.mark.parametrize(
    "reply", ["reset", "stall", "truncate", "garble", Answer(500), Answer(503, b"<html>")], ids=str
)
def test_a_lost_part_is_sent_again_alone(through, proxy, direct, reply, forward):
    remote = through(reply)
    proxy.add(Rule("PUT", "partNumber=2", forward=forward, reply=reply))
    assert remote.put(KEY, BytesSource(DATA)).crc32c == crc32c(DATA)
    check(direct)
    if reply != "stall":  # on a busy machine another part may have been too slow for the short timeout
        assert proxy.count("PUT", "partNumber=2") == 2
        assert proxy.count("PUT", PARTS) == 5
        assert sum(remote.retries.values()) == 1


def test_a_part_that_never_arrives_ends_the_upload_and_frees_it(remote, proxy, direct):
    proxy.add(Rule("PUT", "partNumber=2", forward="never", reply=Answer(500), times=None))
    with pytest.raises(OutcomeUnknownError, match="500"):
        remote.put(KEY, BytesSource(DATA))
    assert proxy.count("PUT", "partNumber=2") == 4
    nothing_left(direct)


def test_a_refused_part_ends_the_upload_at_once(remote, proxy, direct, answer):
    proxy.add(Rule("PUT", "partNumber=1", forward="never", reply=answer(403, "AccessDenied"), times=None))
    with pytest.raises(StoreError, match="AccessDenied"):
        remote.put(KEY, BytesSource(DATA))
    assert proxy.count("PUT", "partNumber=1") == 1
    nothing_left(direct)


@pytest.mark.parametrize("reply", ["reset", "garble", "truncate", Answer(500)], ids=str)
def test_a_lost_start_is_repeated_and_what_it_left_is_swept(remote, proxy, direct, reply):
    proxy.add(Rule("POST", START, reply=reply))
    remote.put(KEY, BytesSource(DATA))
    assert direct.read(KEY) == DATA
    (left,) = direct.unfinished("")
    assert left.key.startswith(KEY + "/")
    direct.discard(left)
    assert list(direct.unfinished("")) == []


ERROR_IN_200 = Answer(200, b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>")


@pytest.mark.parametrize("again", ["replayed", "NoSuchUpload"])
@pytest.mark.parametrize(
    "reply", ["reset", "stall", "truncate", "garble", "garble-body", Answer(500), ERROR_IN_200], ids=str
)
def test_a_lost_completion_is_settled_by_looking(through, proxy, direct, answer, reply, again):
    remote = through(reply)
    proxy.add(Rule("POST", COMPLETE, reply=reply))
    if again == "NoSuchUpload":  # Amazon and others; SeaweedFS answers a replay as it did the first time
        proxy.add(Rule("POST", COMPLETE, forward="never", reply=answer(404, "NoSuchUpload"), times=None))
    assert remote.put(KEY, BytesSource(DATA)).crc32c == crc32c(DATA)
    check(direct)
    if reply != "stall":
        assert proxy.count("POST", COMPLETE) == 2
        assert proxy.count("HEAD") == (1 if again == "NoSuchUpload" else 0)
        assert proxy.count("PUT", PARTS) == 4


@pytest.mark.parametrize("reply", [ERROR_IN_200, Answer(500), Answer(200, b""), Answer(200, b"<Comp")], ids=str)
def test_a_completion_that_was_not_applied_is_repeated(remote, proxy, direct, reply):
    proxy.add(Rule("POST", COMPLETE, forward="never", reply=reply))
    with_whole_retries = patient(remote)  # an empty 200 looks like success until the object is missing
    assert with_whole_retries.put(KEY, BytesSource(DATA)).crc32c == crc32c(DATA)
    check(direct)


@pytest.mark.parametrize("there", ["nothing", "another object of the same size"])
def test_no_such_upload_without_our_object_is_not_success(remote, proxy, direct, answer, there):
    old = bytes(len(DATA))
    if there != "nothing":
        direct.put(KEY, BytesSource(old))
    proxy.add(Rule("POST", COMPLETE, forward="never", reply=answer(404, "NoSuchUpload"), times=1))
    with pytest.raises(OutcomeUnknownError):
        remote.put(KEY, BytesSource(DATA))
    if there == "nothing":
        nothing_left(direct)
    else:
        assert direct.read(KEY) == old
    assert patient(remote).put(KEY, BytesSource(DATA)).size == len(DATA)
    check(direct)


def head(**headers):
    return Answer(200, b"", {"Content-Length": str(len(DATA)), "ETag": '"x"', **headers})


@pytest.mark.parametrize(
    ("seen", "accepted"),
    [
        (head(), False),
        (head(**{f"x-amz-meta-{MARK}": "0" * 32}), False),
        (head(**{"x-amz-checksum-crc32c": "AAAAAA=="}), False),
        (Answer(200, b"", {"Content-Length": "1", "ETag": '"x"'}), False),
        ("etag of the parts", True),
    ],
    ids=["bare", "another mark", "another checksum", "another size", "etag"],
)
def test_what_a_store_without_checksums_and_metadata_shows_is_judged(remote, proxy, direct, answer, seen, accepted):
    if seen == "etag of the parts":
        direct.put(KEY, BytesSource(DATA))
        request = direct._clients.request
        from txstore_s3.errors import Call

        with request(Call("HeadObject", KEY)) as client:
            etag = client.head_object(**direct._names(KEY))["ETag"]
        direct.delete(KEY)
        seen = head(ETag=etag)
    proxy.add(
        Rule("POST", COMPLETE, forward="never", reply=answer(404, "NoSuchUpload"), times=1),
        Rule("HEAD", reply=seen, forward="never"),
    )
    if accepted:
        assert remote.put(KEY, BytesSource(DATA)).crc32c is None
    else:
        with pytest.raises(OutcomeUnknownError):
            remote.put(KEY, BytesSource(DATA))


class WrongChecksum(BytesSource):
    def crc32c(self, start, stop):
        return super().crc32c(start, stop) ^ 1


@pytest.mark.parametrize("size", [10, len(DATA)])
def test_bytes_that_change_on_their_way_are_refused_by_the_store(direct, size):
    with pytest.raises(TransientError, match="BadDigest"):
        direct.put(KEY, WrongChecksum(DATA[:size]))
    nothing_left(direct)


def test_an_endpoint_without_checksums_is_served_too(make, proxy, direct):
    store = make(endpoint_url=proxy.url, checksum="none")
    for size in (10, len(DATA)):
        store.put(KEY, BytesSource(DATA[:size]))
        assert direct.read(KEY) == DATA[:size]
    store.create("commits/x", b"x")
    for request in proxy.requests:
        assert not any("checksum" in name.lower() or "trailer" in name.lower() for name in request.headers)


def test_no_request_has_a_trailer_or_a_chunked_body(remote, proxy):
    # Some stores keep the framing of a trailer as part of the object.
    remote.put(KEY, BytesSource(DATA))
    remote.put("latest.json", BytesSource(b"x"))
    remote.create("commits/x", b"x")
    for request in proxy.requests:
        names = {name.lower() for name in request.headers}
        assert not names & {"x-amz-trailer", "transfer-encoding", "content-encoding", "x-amz-decoded-content-length"}
    checked = [request for request in proxy.requests if request.method == "PUT"]
    assert len(checked) == 6
    assert all("x-amz-checksum-crc32c" in {name.lower() for name in request.headers} for request in checked)


# what interrupted uploads leave


def leave_upload(bucket, place, key=KEY):
    name = place.removeprefix(f"s3://{bucket.name}/") + "/" + key
    upload = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=name)["UploadId"]
    bucket.client.upload_part(Bucket=bucket.name, Key=name, UploadId=upload, PartNumber=1, Body=DATA[:PART])
    return upload


def test_an_orphaned_upload_is_listed_and_freed(s3_bucket, place, direct):
    assert isinstance(direct, KeepsUnfinished)
    leave_upload(s3_bucket, place)
    leave_upload(s3_bucket, place, "data/step-2/" + "1" * 32 + "/x.safetensors")
    assert list(direct.list("")) == []
    one, two = direct.unfinished("")
    assert one.key < two.key
    assert (one.size, two.size) == (PART, PART)
    assert [left.key for left in direct.unfinished("data/step-2")] == [two.key]
    for _ in range(2):
        direct.discard(one)
    assert [left.key for left in direct.unfinished("")] == [two.key]


def test_a_sweep_frees_the_uploads_of_dead_attempts(s3_bucket, place, direct):
    ticket = begin(direct, "step-1", world_size=1).ticket
    leave_upload(s3_bucket, place, f"data/step-1/{ticket.txn}/rank-00000-00000.safetensors")
    assert sweep(direct, dry_run=False) == []
    claim_abort(direct, "step-1", ticket.txn)
    assert [orphan.why for orphan in sweep(direct, dry_run=False)] == ["aborted", "unfinished"]
    assert list(direct.unfinished("")) == []


def test_discard_takes_nothing_but_uploads(direct):
    direct.put("latest.json", BytesSource(b"x"))
    for key in ("latest.json", "latest.json/.upload/", "../x/.upload/1"):
        with pytest.raises(FormatError):
            direct.discard(Unfinished(key, 1, 0.0))
    assert direct.read("latest.json") == b"x"


def test_a_writer_whose_upload_is_discarded_fails_cleanly_and_can_try_again(remote, proxy, direct):
    def discard():
        for left in direct.unfinished(""):
            direct.discard(left)

    proxy.add(Rule("PUT", "partNumber=2", call=discard))
    with pytest.raises(OutcomeUnknownError, match="aborted"):
        remote.put(KEY, BytesSource(DATA))
    nothing_left(direct)
    proxy.add(Rule("PUT", "partNumber=3", call=discard))
    patient(remote).put(KEY, BytesSource(DATA))
    check(direct)


@pytest.mark.parametrize("status", [405, 501])
def test_a_store_that_cannot_list_uploads_has_none(remote, proxy, answer, status):
    proxy.add(Rule("GET", r"\?uploads", forward="never", reply=answer(status, "NotImplemented"), times=None))
    assert list(remote.unfinished("")) == []


def test_another_failure_to_list_uploads_is_an_error(remote, proxy):
    proxy.add(Rule("GET", r"\?uploads", forward="never", reply=Answer(500), times=None))
    with pytest.raises(TransientError):
        list(remote.unfinished(""))


@pytest.mark.parametrize(
    ("size", "wanted", "found"),
    [
        (1, 16 << 20, 16 << 20),
        (10_000 * (8 << 20), 8 << 20, 8 << 20),
        (10_000 * (8 << 20) + 1, 8 << 20, 9 << 20),
        (5 << 40, 16 << 20, 525 << 20),
        (10_000 * (5 << 30), 16 << 20, 5 << 30),
    ],
)
def test_part_sizes_fit_ten_thousand_parts(size, wanted, found):
    assert part_bytes_for(size, wanted) == found
    assert -(-size // found) <= 10_000
    assert found % (1 << 20) == 0


def test_an_object_too_large_for_s3_is_refused():
    with pytest.raises(ConfigError):
        part_bytes_for(10_000 * (5 << 30) + 1, 16 << 20)
