"""What goes over the wire: signatures and checksums."""

import os
import re

import pytest

from tests.s3.conftest import PART_BYTES
from txstore.store import BytesSource
from txstore.testing.proxy import Rule

UNSIGNED = "UNSIGNED-PAYLOAD"
SHARD = os.urandom(2 << 20)
OBJECT = os.urandom(PART_BYTES + 1)


def kinds(proxy):
    """How the bodies of uploads are covered: `signed`, `unsigned`, each with `checksum` if a signed one goes along."""
    found = []
    for request in proxy.requests:
        if request.method == "PUT":
            headers = {name.lower(): value for name, value in request.headers.items()}
            digest = headers["x-amz-content-sha256"]
            assert digest == UNSIGNED or re.fullmatch("[0-9a-f]{64}", digest)
            signed = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
            covered = " with checksum" if "x-amz-checksum-crc32c" in signed else ""
            found.append(("unsigned" if digest == UNSIGNED else "signed") + covered)
    return found


def save_all(store):
    store.create("decision", b"x")
    store.put("document", BytesSource(b"x"))
    store.put("shard", BytesSource(SHARD))
    store.put("object", BytesSource(OBJECT))


def test_without_tls_documents_are_signed_and_data_goes_with_a_checksum_that_is(make, proxy):
    save_all(make(endpoint_url=proxy.url))
    assert kinds(proxy) == ["signed with checksum"] * 2 + ["unsigned with checksum"] * 3


def test_data_without_a_checksum_is_signed(make, proxy):
    save_all(make(endpoint_url=proxy.url, checksum="none"))
    assert kinds(proxy) == ["signed"] * 5, "else nothing would cover it"


@pytest.mark.parametrize(("wanted", "kind"), [(True, "signed with checksum"), (False, "unsigned with checksum")])
def test_what_is_asked_for_holds_for_all_bodies(make, proxy, wanted, kind):
    save_all(make(endpoint_url=proxy.url, sign_payload=wanted))
    assert kinds(proxy) == [kind] * 5


def test_no_upload_waits_for_leave_to_send_its_body(make, proxy):
    save_all(make(endpoint_url=proxy.url))
    assert proxy.count(header="Expect") == 0


def test_a_success_that_holds_an_error_is_one(remote, direct, proxy, answer):
    proxy.add(Rule("PUT", reply=answer(200, "InternalError")))
    with pytest.raises(Exception, match="500 InternalError"):
        remote.put("x", BytesSource(b"x"))
