"""The safetensors header parser: what it accepts, and that it believes nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from txstore.errors import FormatError
from txstore.shards.header import DTYPE_BITS, HEADER_MAX_BYTES, Entry, header_bytes, parse_header
from txstore.shards.layout import SAFETENSORS_DTYPES, ShardSource, payload_extent, tensor_extent
from txstore.store import BytesSource


def file_of(header: object, data_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data_bytes)


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_reads_what_the_safetensors_library_writes() -> None:
    numpy = pytest.importorskip("numpy")
    data = save({"a": numpy.arange(6, dtype="float32").reshape(2, 3), "b": numpy.zeros((0, 4), "int8")}, {"who": "me"})
    header = parse_header(data, file_size=len(data))
    assert header.metadata == {"who": "me"}
    assert header.entries["a"] == Entry("F32", (2, 3), 0, 24)
    assert header.entries["b"].shape == (0, 4)
    assert data[header.data_start :][:24] == numpy.arange(6, dtype="float32").tobytes()


def test_reads_what_a_save_writes() -> None:
    source = ShardSource(
        [
            tensor_extent("w", BytesSource(bytes(24)), dtype="float32", itemsize=4, shape=(2, 3), offsets=(2, 0)),
            payload_extent("o", BytesSource(b"abc")),
        ]
    )
    data = bytes(source.read(0, source.size))
    header = parse_header(data, file_size=len(data))
    assert header.data_start % 4096 == 0
    assert header.entries == {"w": Entry("F32", (2, 3), 0, 24), "o": Entry("U8", (3,), 24, 27)}
    assert set(SAFETENSORS_DTYPES.values()) <= DTYPE_BITS.keys()


HOSTILE = {
    "not-json": b"{nope",
    "not-an-object": b"[]",
    "leading-space": b' {"a": 1}',
    "not-utf8": b'{"\xff": 1}',
    "nested-deeply": b'{"a":' + b"[" * 100_000,
    "huge-number": b'{"a": ' + b"9" * 10_000 + b"}",
    "duplicate-name": b'{"a": {"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
    b'"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    "duplicate-field": b'{"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4],"dtype":"U8"}}',
    "entry-no-object": {"a": [1]},
    "field-missing": {"a": {"dtype": "U8", "shape": [4]}},
    "field-unknown": {"a": entry(extra=1)},
    "dtype-unknown": {"a": entry("PICKLE")},
    "dtype-no-text": {"a": entry(8)},
    "dtype-unhashable": {"a": entry({})},
    "shape-no-list": {"a": entry(shape=4)},
    "shape-object": {"a": entry(shape={"4": 1})},
    "shape-float": {"a": entry(shape=[4.0])},
    "shape-bool": {"a": entry(shape=[4, True])},
    "shape-negative": {"a": entry(shape=[-2, -2])},
    "shape-overflow": {"a": entry(), "b": entry(shape=[1 << 63, 0], offsets=[4, 4])},
    "shape-endless": {"a": entry(shape=[1] * 65 + [4])},
    "offsets-three": {"a": entry(offsets=[0, 4, 4])},
    "offsets-backwards": {"a": entry(offsets=[4, 0])},
    "length-wrong": {"a": entry(shape=[3])},
    "overlap": {"a": entry(), "b": entry(offsets=[2, 6], shape=[4])},
    "hole": {"a": entry(), "b": entry(offsets=[5, 9])},
    "hole-at-the-start": {"a": entry(offsets=[4, 8])},
    "trailing-bytes": {"a": entry(shape=[2], offsets=[0, 2])},
    "too-few-bytes": {"a": entry(shape=[4096], offsets=[0, 4096])},
    "metadata-no-object": {"__metadata__": [], "a": entry()},
    "metadata-no-text": {"__metadata__": {"format": 1}, "a": entry()},
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_refuses(header: object) -> None:
    data = file_of(header, 4)
    with pytest.raises(FormatError):
        parse_header(data, file_size=len(data), key="k")


def test_accepts_the_model_of_the_hostile_ones() -> None:
    data = file_of({"a": entry()}, 4)
    assert parse_header(data, file_size=len(data)).entries == {"a": Entry("U8", (4,), 0, 4)}


@pytest.mark.parametrize(
    ("length", "file_size"), [(HEADER_MAX_BYTES + 1, 1 << 40), (1 << 63, 1 << 40), (100, 107), (0, 7)]
)
def test_refuses_lengths_before_anything_is_read(length: int, file_size: int) -> None:
    with pytest.raises(FormatError):
        header_bytes(length.to_bytes(8, "little"), file_size)


def test_refuses_a_header_that_was_not_given_whole() -> None:
    data = file_of({"a": entry()}, 4)
    with pytest.raises(FormatError, match="only 5 of"):
        parse_header(data[:13], file_size=len(data))


@given(st.binary(max_size=200))
def test_noise_is_refused_with_the_one_error(noise: bytes) -> None:
    for data in (noise, file_of(noise), file_of(b"{" + noise)):
        try:
            parse_header(data, file_size=len(data))
        except FormatError:
            pass


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_never_escapes_the_file(at: int, value: int) -> None:
    data = bytearray(file_of({"a": entry(), "b": entry("F32", (2,), (4, 12))}, 12))
    data[at % len(data)] = value
    try:
        header = parse_header(data, file_size=len(data))
    except FormatError:
        return
    assert max(found.stop for found in header.entries.values()) + header.data_start == len(data)
