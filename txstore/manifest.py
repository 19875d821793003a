"""The typed documents of the protocol: encode, decode, validate. Pure functions, no I/O, no pickle.

Decisions, manifests and the small ones are canonical JSON (sorted keys, no spaces), so that a document
has one encoding and every retry sends the same bytes. The index, which may hold a million chunks, is
msgpack. Decoding is strict: unknown fields, wrong types, unknown versions and inconsistent numbers raise
`FormatError`; nothing of a document is believed before that.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from txstore.checksum import BLOCK_BYTES, sha256_hex
from txstore.errors import ConfigError, FormatError, IntegrityError
from txstore.keys import check_checkpoint, check_key, check_txn, parse_attempt, step_of

VERSION = 1
DECISION_MAX_BYTES = 4096
MANIFEST_MAX_BYTES = 256 << 20
INDEX_MAX_BYTES = 4 << 30
SPLIT_AXES_MAX = 12
"""Most dimensions along which one tensor may be cut into chunks; a device mesh has fewer."""

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Crc = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=512)]
Extents = Annotated[tuple[Natural, ...], Meta(max_length=64)]
"""Offsets or sizes, one a dimension; torch knows at most 64 dimensions."""


class _Document(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Common to all JSON documents."""

    version: int = VERSION


class StoreFormat(_Document, frozen=True, kw_only=True):
    """``txstore.json``: this root is a txstore store of this format version."""

    format: Literal["txstore"] = "txstore"


class FileRef(Struct, forbid_unknown_fields=True, frozen=True):
    """A document by name and content: the reader checks size and digest before it decodes a byte."""

    key: str
    size: Natural
    sha256: Sha256


class Totals(Struct, forbid_unknown_fields=True, frozen=True):
    """What a checkpoint amounts to, so that `ls` needs no manifest."""

    bytes: Natural
    shards: Natural
    tensors: Natural
    objects: Natural
    world_size: Natural


class Decision(_Document, frozen=True, kw_only=True):
    """``commits/<checkpoint>.<slot>.json``: the only truth about whether a checkpoint exists.

    An abort names the transaction that must not commit any more; a commit names its manifest by digest.
    """

    kind: Literal["commit", "abort"]
    checkpoint: str
    slot: Natural
    step: Natural | None
    txn: str
    writer: Text
    decided_at: Text
    manifest: FileRef | None = None
    totals: Totals | None = None


class Begin(_Document, frozen=True, kw_only=True):
    """``begin.json``: who started this attempt. `started_at_s` is the writer's clock, seconds since the epoch."""

    checkpoint: str
    step: Natural | None
    txn: str
    world_size: Natural
    overwrite: bool
    writer: Text
    started_at_s: float


class Tombstone(_Document, frozen=True, kw_only=True):
    """``retired/<checkpoint>.<slot>``: retention removes this commit's data; set before the first delete."""

    checkpoint: str
    slot: Natural
    txn: str
    reason: Text


class Pointer(_Document, frozen=True, kw_only=True):
    """``latest.json``: a hint, never believed without the decision it names."""

    checkpoint: str
    slot: Natural
    txn: str


class ShardRef(Struct, forbid_unknown_fields=True, frozen=True):
    """One shard file: who wrote it, its size in bytes and the CRC32C of all of it."""

    key: str
    rank: Natural
    size: Natural
    crc32c: Crc


class Progress(Struct, forbid_unknown_fields=True, frozen=True):
    """Where training stood."""

    global_step: Natural
    epoch: Natural = 0
    micro_step: Natural = 0
    consumed_samples: Natural = 0


class Description(Struct, forbid_unknown_fields=True, frozen=True):
    """What the trainer says about its state; stored in the manifest, readable without torch.

    Attributes:
        progress: Step, epoch, micro step and samples.
        topology: Sizes of the parallelism, such as ``{"dp": 8, "tp": 2}``.
        fingerprints: Digests of configuration, tokenizer, data and code.
    """

    progress: Progress | None = None
    topology: dict[str, int] = {}
    fingerprints: dict[str, str] = {}


class Manifest(_Document, frozen=True, kw_only=True):
    """``manifest.json``: names and digests of all files of one attempt."""

    checkpoint: str
    step: Natural | None
    txn: str
    writer: Text
    created_at: Text
    software: dict[str, str]
    totals: Totals
    index: FileRef
    shards: tuple[ShardRef, ...]
    description: Description = Description()


class FileRecord(Struct, array_like=True, frozen=True, gc=False):
    """A shard file in the index: its key, its size and the CRC32C of each block, little-endian."""

    key: str
    size: Natural
    blocks: bytes


class ChunkRecord(Struct, array_like=True, frozen=True, gc=False):
    """Where one chunk of a tensor lies.

    `start` and `length` are bytes of file number `file`. Encoding 0 is the row-major memory of the
    values; 1 is a ``torch.save`` payload, for tensors that are more than their memory (quantized ones,
    wrapper subclasses).
    """

    offsets: Extents
    sizes: Extents
    file: Natural
    start: Natural
    length: Natural
    encoding: Literal[0, 1] = 0


class TensorRecord(Struct, array_like=True, frozen=True, tag="t", gc=False):
    """A tensor: dtype by torch's name, bytes per element, global shape and its chunks."""

    name: str
    dtype: Text
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    shape: Extents
    requires_grad: bool
    pin_memory: bool
    memory_format: Text
    chunks: tuple[ChunkRecord, ...]


class ObjectRecord(Struct, array_like=True, frozen=True, tag="o", gc=False):
    """A value that is not a tensor, as the planner serialised it."""

    name: str
    file: Natural
    start: Natural
    length: Natural


class Index(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """``index.msgpack``: where every tensor chunk and object lies.

    Attributes:
        escaped: Names and paths are ``unicode_escape``d, since one of them holds a lone surrogate.
        files: The shard files, in the manifest's order.
        items: All state, in the planner's order.
        paths: The planner's map from flat names to nested paths, if it keeps one.
        planner: Other plain planner data.
    """

    version: int = VERSION
    block_bytes: int = BLOCK_BYTES
    escaped: bool = False
    files: tuple[FileRecord, ...]
    items: tuple[TensorRecord | ObjectRecord, ...]
    paths: dict[str, tuple[str | int, ...]] | None = None
    planner: msgspec.Raw = msgspec.Raw(b"\xc0")


class _Version(Struct):
    version: int


_D = TypeVar("_D", bound=Struct)
_JSON = msgspec.json.Encoder(order="sorted")
_MSGPACK = msgspec.msgpack.Encoder()


def encode(document: _Document) -> bytes:
    """Canonical JSON of a document.

    Raises:
        FormatError: A value has no JSON form (a lone surrogate, an integer of more than 64 bits), or a decision exceeds
            4 KiB. Bounds are checked by decoding: `Transaction.commit` decodes what it is about to publish.
    """
    try:
        data = _JSON.encode(document)
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        raise FormatError(f"cannot encode a {type(document).__name__.lower()}: {error}") from error
    if isinstance(document, Decision) and len(data) > DECISION_MAX_BYTES:
        raise FormatError(f"a decision record of {len(data)} bytes exceeds {DECISION_MAX_BYTES}", key=document.txn)
    return data


def _decode(kind: type[_D], data: bytes, key: str, *, packed: bool = False) -> _D:
    decode = msgspec.msgpack.decode if packed else msgspec.json.decode
    try:
        version = decode(data, type=_Version).version
        if version != VERSION:
            raise FormatError(
                f"{kind.__name__.lower()} has format version {version}, this release knows {VERSION}",
                key=key,
                next_step="use the txstore release that wrote it",
            )
        return decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"malformed {kind.__name__.lower()}: {error}", key=key) from error


def check_ref(ref: FileRef, data: bytes) -> bytes:
    """Return `data` if it is what `ref` names.

    Raises:
        IntegrityError: Size or SHA-256 differ.
    """
    if len(data) != ref.size:
        raise IntegrityError(f"object has {len(data)} bytes, {ref.size} were committed", key=ref.key)
    if sha256_hex(data) != ref.sha256:
        raise IntegrityError("object has another SHA-256 than was committed", key=ref.key)
    return data


def decode_store_format(data: bytes, key: str) -> StoreFormat:
    """Decode ``txstore.json``."""
    return _decode(StoreFormat, data, key)


def decode_begin(data: bytes, key: str) -> Begin:
    """Decode ``begin.json`` and check it against the key it was found under."""
    begin = _decode(Begin, data, key)
    _check_identity(begin.checkpoint, begin.step, begin.txn, key)
    if parse_attempt(key) != (begin.checkpoint, begin.txn):
        raise FormatError(f"the begin of {begin.txn} lies under another key", key=key)
    return begin


def decode_pointer(data: bytes, key: str) -> Pointer:
    """Decode ``latest.json``."""
    pointer = _decode(Pointer, data, key)
    _check_identity(pointer.checkpoint, step_of(pointer.checkpoint), pointer.txn, key)
    return pointer


def decode_decision(data: bytes, key: str, *, checkpoint: str, slot: int) -> Decision:
    """Decode a decision and check it against the key it was found under.

    Raises:
        FormatError: Malformed, or it speaks of another checkpoint, slot or step than its key.
    """
    if len(data) > DECISION_MAX_BYTES:
        raise FormatError(f"a decision record exceeds {DECISION_MAX_BYTES} bytes", key=key)
    decision = _decode(Decision, data, key)
    _check_identity(decision.checkpoint, decision.step, decision.txn, key)
    if (decision.checkpoint, decision.slot) != (checkpoint, slot):
        raise FormatError(f"a decision of {decision.checkpoint}.{decision.slot} lies under another key", key=key)
    if decision.kind == "commit":
        if decision.manifest is None or decision.totals is None:
            raise FormatError("a commit without a manifest", key=key)
        _check_keys([decision.manifest.key], key)
        _check_size(decision.manifest, MANIFEST_MAX_BYTES)
    return decision


def decode_manifest(data: bytes, decision: Decision) -> Manifest:
    """Decode a manifest and check it against the decision that names it.

    Raises:
        IntegrityError: The bytes are not those that were committed.
        FormatError: Malformed or inconsistent.
    """
    ref = decision.manifest
    if ref is None:
        raise FormatError("an abort has no manifest", key=decision.txn)
    manifest = _decode(Manifest, check_ref(ref, data), ref.key)
    if (manifest.checkpoint, manifest.step, manifest.txn) != (decision.checkpoint, decision.step, decision.txn):
        raise FormatError("the manifest speaks of another checkpoint than its decision", key=ref.key)
    totals, sizes = manifest.totals, [shard.size for shard in manifest.shards]
    if totals != decision.totals or (totals.shards, totals.bytes) != (len(sizes), sum(sizes)):
        raise FormatError("the manifest's totals disagree", key=ref.key)
    _check_size(manifest.index, INDEX_MAX_BYTES)
    keys = [shard.key for shard in manifest.shards]
    _check_keys([*keys, manifest.index.key], ref.key)
    if len(set(keys)) != len(keys):
        raise FormatError("the manifest names one shard twice", key=ref.key)
    return manifest


def _check_identity(checkpoint: str, step: int | None, txn: str, key: str) -> None:
    try:
        check_checkpoint(checkpoint)
        check_txn(txn)
    except (ConfigError, FormatError) as error:
        raise FormatError(f"{error.message}: {error.key!r}", key=key) from error
    if step != step_of(checkpoint):
        raise FormatError(f"step {step} is not that of checkpoint {checkpoint}", key=key)


def _check_keys(keys: list[str], document: str) -> None:
    for key in keys:
        try:
            check_key(key)
        except FormatError as error:
            raise FormatError(f"{error.message}: {error.key!r}", key=document) from error


def _check_size(ref: FileRef, limit: int) -> None:
    if ref.size > limit:
        raise FormatError(f"a document of {ref.size} bytes exceeds the limit of {limit}", key=ref.key)


def encode_index(index: Index) -> bytes:
    """Msgpack of an index."""
    return _MSGPACK.encode(index)


def decode_index(data: bytes, manifest: Manifest) -> Index:
    """Decode an index and check every number in it against the manifest.

    Raises:
        IntegrityError: The bytes are not those that were committed.
        FormatError: Malformed or inconsistent.
    """
    key = manifest.index.key
    index = _decode(Index, check_ref(manifest.index, data), key, packed=True)
    if index.block_bytes != BLOCK_BYTES:
        raise FormatError(f"blocks of {index.block_bytes} bytes, this release knows {BLOCK_BYTES}", key=key)
    if [(file.key, file.size) for file in index.files] != [(shard.key, shard.size) for shard in manifest.shards]:
        raise FormatError("index and manifest name different shards", key=key)
    for file in index.files:
        if len(file.blocks) != 4 * -(-file.size // BLOCK_BYTES):
            raise FormatError(f"wrong number of block checksums for {file.key}", key=key)
    check_index(index, key)
    return index


def check_index(index: Index, key: str) -> None:
    """Check the items of an index: bounds, lengths, coverage and unique names.

    Raises:
        FormatError: Some number is impossible. A chunk set that does not tile its tensor would be
            loaded as uninitialised memory, so it is refused at save and at load.
    """
    seen: set[str] = set()
    for item in index.items:
        if item.name in seen:
            raise FormatError(f"{item.name!r} is listed twice", key=key)
        seen.add(item.name)
        if isinstance(item, ObjectRecord):
            _check_range(index, item, item.name, key)
            continue
        for chunk in item.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(item.shape) or any(
                offset + size > extent
                for offset, size, extent in zip(chunk.offsets, chunk.sizes, item.shape, strict=True)
            ):
                raise FormatError(f"a chunk of {item.name!r} lies outside its tensor", key=key)
            if chunk.encoding == 0 and chunk.length != math.prod(chunk.sizes) * item.itemsize:
                raise FormatError(f"a chunk of {item.name!r} has the wrong length", key=key)
            _check_range(index, chunk, item.name, key)
        if not _tile(item.shape, [chunk for chunk in item.chunks if 0 not in chunk.sizes]):
            raise FormatError(f"the chunks of {item.name!r} do not cover it exactly once", key=key)


def _tile(shape: tuple[int, ...], chunks: list[ChunkRecord]) -> bool:
    """Whether the chunks, which are not empty and lie inside, cover the tensor exactly once.

    Volumes alone would pass an overlap that pays for a hole. A box is determined by its corners modulo 2 (apply the
    difference in each dimension), so if all corners but the tensor's own cancel in pairs, every element is covered an
    odd number of times; and once on average, by the volumes. Linear in the number of chunks.
    """
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    split = [axis for axis, extent in enumerate(shape) if any(chunk.sizes[axis] != extent for chunk in chunks)]
    if len(split) > SPLIT_AXES_MAX:
        return False
    corners = set(product(*((0, shape[axis]) for axis in split))) if chunks else set()
    for chunk in chunks:
        corners ^= set(product(*((chunk.offsets[axis], chunk.offsets[axis] + chunk.sizes[axis]) for axis in split)))
    return not corners


def _check_range(index: Index, where: ChunkRecord | ObjectRecord, name: str, key: str) -> None:
    if where.length and (where.file >= len(index.files) or where.start + where.length > index.files[where.file].size):
        raise FormatError(f"{name!r} lies outside its shard", key=key)
