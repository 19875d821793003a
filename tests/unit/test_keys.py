"""The key grammar: what is written can be parsed back, and nothing else gets through."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txstore import keys
from txstore.errors import ConfigError, FormatError

CHECKPOINTS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}\Z")
SLOTS = st.integers(0, 999_999_999)
TXNS = st.from_regex(r"\A[0-9a-f]{32}\Z")


@given(CHECKPOINTS, SLOTS)
def test_decision_and_tombstone_keys_round_trip(checkpoint, slot):
    name = keys.SlotName(checkpoint, slot)
    assert keys.parse_decision_key(keys.decision_key(checkpoint, slot)) == name
    assert keys.parse_retired_key(keys.retired_key(checkpoint, slot)) == name
    assert keys.decision_key(checkpoint, slot).startswith(keys.decision_prefix(checkpoint))
    for key in (keys.decision_key(checkpoint, slot), keys.retired_key(checkpoint, slot)):
        assert keys.check_key(key) == key


@given(CHECKPOINTS, TXNS, st.integers(0, 99_999), st.integers(0, 99_999))
def test_data_keys_round_trip_and_obey_the_grammar(checkpoint, txn, rank, number):
    for key in (
        keys.begin_key(checkpoint, txn),
        keys.shard_key(checkpoint, txn, rank, number),
        keys.index_key(checkpoint, txn),
        keys.manifest_key(checkpoint, txn),
    ):
        assert keys.check_key(key) == key
        assert keys.parse_attempt(key) == (checkpoint, txn)
        assert keys.parse_decision_key(key) is None


@given(CHECKPOINTS, TXNS, st.integers(0, 99_999), st.integers(0, 99_999), st.integers(2, keys.SPREAD_MAX))
def test_spread_shards_round_trip_and_lie_below_one_of_the_prefixes(checkpoint, txn, rank, number, spread):
    key = keys.shard_key(checkpoint, txn, rank, number, spread)
    assert keys.check_key(key) == key
    assert keys.parse_attempt(key) == (checkpoint, txn)
    first, *rest = keys.attempt_prefixes(checkpoint, txn, spread)
    assert first == keys.attempt_prefix(checkpoint, txn)
    assert len(set(rest)) == spread
    assert sum(key.startswith(prefix) for prefix in rest) == 1
    assert not key.startswith(first)
    assert all(keys.parse_attempt(prefix + "x") == (checkpoint, txn) for prefix in rest)


@pytest.mark.parametrize(("ranks", "files"), [(1000, 1), (1, 1000), (100, 10)])
def test_shards_are_spread_evenly(ranks, files):
    prefixes = Counter(
        keys.shard_key("step-1", "0" * 32, rank, number, 16).split("/")[1]
        for rank in range(ranks)
        for number in range(files)
    )
    assert set(prefixes) == {f"_{part:02x}" for part in range(16)}
    assert max(prefixes.values()) - min(prefixes.values()) <= files


@pytest.mark.parametrize(
    "key", ["data/_0/step-1", "data/_0g/step-1", "data/_0a/_0b/step-1", "data/_0a", "_0a/data/step-1"]
)
def test_what_is_no_spread_is_a_stray_object(key):
    assert keys.parse_attempt(f"{key}/{'0' * 32}/x") is None


@given(st.text(max_size=40))
def test_text_that_parses_is_exactly_what_would_be_written(text):
    for prefix, suffix, parse, build in (
        ("commits/", ".json", keys.parse_decision_key, keys.decision_key),
        ("retired/", "", keys.parse_retired_key, keys.retired_key),
    ):
        key = prefix + text + suffix
        found = parse(key)
        assert found is None or build(found.checkpoint, found.slot) == key


@given(st.text(alphabet="abc./\\\0 -_=+~:%é", max_size=30))
def test_a_key_that_passes_stays_below_its_root(key):
    try:
        keys.check_key(key)
    except FormatError:
        return
    parts = key.split("/")
    assert all(parts)
    assert not any(part.startswith(".") for part in parts)
    assert key.isascii()
    assert not set(key) & set("\\\0 :%~")


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "a/",
        "/a",
        "a//b",
        ".",
        "..",
        "a/..",
        "../a",
        "a/./b",
        ".tmp",
        "a/.b",
        "a\\b",
        "a b",
        "a\n",
        "a\0",
        "C:",
        "~a",
        "é",
        "x" * 901,
    ],
)
def test_hostile_keys_are_refused(key):
    with pytest.raises(FormatError):
        keys.check_key(key)


@pytest.mark.parametrize("name", ["", ".a", "-a", "_a", "a/b", "a b", "a\n", "é", "..", "x" * 129, "٣"])
def test_hostile_checkpoint_names_are_refused(name):
    with pytest.raises(ConfigError):
        keys.check_checkpoint(name)
    assert keys.parse_attempt(f"data/{name}/{'0' * 32}/x") is None
    assert keys.parse_decision_key(f"commits/{name}.0.json") is None


@pytest.mark.parametrize("slot", ["", "00", "01", "-1", "+1", "1.", "٣", "1000000000", "a", " 1", "1\n"])
def test_a_slot_has_one_spelling(slot):
    assert keys.parse_decision_key(f"commits/step-1.{slot}.json") is None
    assert keys.parse_retired_key(f"retired/step-1.{slot}") is None


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-1000", 1000),
        ("1000", 1000),
        ("step-007", 7),
        ("0900000", 900000),
        ("a1b", None),
        ("best", None),
        ("v2.10", 10),
        ("x٣", None),
        ("s" + "9" * 18, 10**18 - 1),
    ],
)
def test_the_step_is_the_trailing_number(name, step):
    assert keys.step_of(name) == step


def test_a_step_of_too_many_digits_is_not_read_as_its_tail():
    # Fails closed: such a name must not be ordered by part of its number.
    assert keys.step_of("step-" + "1" + "0" * 18) is None


def test_one_checkpoint_name_may_begin_another():
    assert keys.parse_decision_key("commits/a.1.0.json") == keys.SlotName("a.1", 0)
    assert keys.parse_decision_key("commits/a.1.json") == keys.SlotName("a", 1)


@pytest.mark.parametrize("txn", ["", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", "../" + "0" * 29])
def test_hostile_transaction_ids_are_refused(txn):
    with pytest.raises(FormatError):
        keys.check_txn(txn)


def test_transaction_ids_are_fresh():
    assert len({keys.check_txn(keys.new_txn()) for _ in range(100)}) == 100


def test_a_step_of_more_than_18_digits_is_refused_rather_than_lost():
    assert keys.check_checkpoint("run-" + "9" * 18)
    with pytest.raises(ConfigError, match="18 digits"):
        keys.check_checkpoint("run-20261129140000123456")
