"""A store that ignores conditions, or has none, is refused before a shard is written; one that keeps them is used."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable

import pytest

from txstore.checksum import crc32c
from txstore.errors import CapabilityError, ConfigError, StoreError
from txstore.probe import probe, prove
from txstore.retry import RetryingStore
from txstore.testing.proxy import Answer, LostReplyProxy, Rule
from txstore.testing.saves import contents, load, save
from txstore_gcs import GcsStore

CREATE = "probe%2F.*ifGenerationMatch=0"


def stored(body: bytes) -> Answer:
    """The service's reply to an upload that it took."""
    checksum = base64.b64encode(struct.pack(">I", crc32c(body))).decode()
    resource = {"name": "probe", "generation": "7", "metageneration": "1", "size": str(len(body)), "crc32c": checksum}
    return Answer(200, json.dumps(resource).encode(), {"Content-Type": "application/json"})


def test_the_emulator_keeps_every_sentence(opened: Callable[..., GcsStore]) -> None:
    store = opened()
    assert [check.problem for check in probe(store)] == [""] * 6
    assert contents(store) == {}
    assert load(store, save(store, "step-1", [b"shard"])) == [b"shard"]


def test_a_store_that_ignores_the_condition_is_refused_before_a_shard_is_written(
    opened: Callable[..., GcsStore], proxy: LostReplyProxy
) -> None:
    """Scenario 17. The second create of the probe is answered as a service answers that has overwritten."""
    prove(opened())  # a first look: the reply must confirm what the second create sends
    sent = [request.body for request in proxy.requests if re.search(CREATE, request.target)]
    second = sent[1].split(b"\r\n\r\n")[-1].rsplit(b"\r\n--", 1)[0]  # the last part of a multipart body
    proxy.clear()
    proxy.add(Rule("POST", CREATE, skip=1, reply=stored(second), forward="never", times=None))
    with pytest.raises(CapabilityError, match="a second create of one key succeeded"):
        save(RetryingStore(opened()), "step-1", [b"shard"])
    assert proxy.count("POST", "data%2F") == 0


@pytest.mark.parametrize("status", [400, 405, 501])
def test_a_store_that_rejects_the_condition_is_refused(
    opened: Callable[..., GcsStore], proxy: LostReplyProxy, status: int
) -> None:
    proxy.add(Rule("POST", CREATE, forward="never", reply=Answer(status), times=None))
    store = opened()
    with pytest.raises((StoreError, ConfigError)):
        save(RetryingStore(store), "step-1", [b"shard"])
    assert contents(store) == {}
    assert proxy.count("POST", "data%2F") == 0
