"""The typed documents of the protocol: encode, decode, validate. Pure functions, no I/O, no pickle.

Decisions, manifests and the small ones are canonical JSON (sorted keys, no spaces), so that a document
has one encoding and every retry sends the same bytes. The index, which may hold a million chunks, is
msgpack. Decoding is strict: unknown fields, wrong types, unknown versions and inconsistent numbers raise
`FormatError`; nothing of a document is believed before that.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from txstore.checksum import crc32c, sha256_hex
from txstore.errors import ConfigError, FormatError, IntegrityError, UnknownVersion
from txstore.keys import SPREAD_MAX, check_checkpoint, check_key, check_txn, parse_attempt, step_of

VERSION = 1
DECISION_MAX_BYTES = 4096
MANIFEST_MAX_BYTES = 256 << 20
INDEX_MAX_BYTES = 4 << 30

Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Crc = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Text = Annotated[str, Meta(max_length=512)]


class _Document(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Common to all JSON documents."""

    version: int = VERSION


SPREAD_VERSION = 2
"""Version of a store that spreads its shards; releases that know only version 1 refuse it."""


class StoreFormat(_Document, frozen=True, kw_only=True):
    """``txstore.json``: this root is a txstore store of this format version.

    Attributes:
        spread: How many prefixes the shards are spread over (version 2); absent if they are not (version 1).
    """

    format: Literal["txstore"] = "txstore"
    spread: Annotated[int, Meta(ge=2, le=SPREAD_MAX)] | msgspec.UnsetType = msgspec.UNSET


def store_format(spread: int) -> StoreFormat:
    """The format document of a store with this spread, 0 for none.

    Raises:
        ConfigError: Not 0, nor 2 to `SPREAD_MAX`.
    """
    if not spread:
        return StoreFormat()
    if not 2 <= spread <= SPREAD_MAX:
        raise ConfigError(f"a spread of {spread} is neither 0 nor 2 to {SPREAD_MAX}", next_step="16 is a good one")
    return StoreFormat(version=SPREAD_VERSION, spread=spread)


def spread_of(document: StoreFormat | None) -> int:
    """How many prefixes a store spreads its shards over: 0 for none, and of a store that is not there yet."""
    return 0 if document is None or document.spread is msgspec.UNSET else document.spread


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
    `check` is the CRC32C of the record's own encoding with `check` 0: no other document vouches for a
    decision, and a flipped bit in an abort would free a transaction whose shards may be gone.
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
    check: Crc = 0


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
        topology: Sizes of the parallelism, and the FSDP strategy as text, such as ``{"dp": 8, "fsdp": "full_shard"}``.
        fingerprints: Digests of configuration, tokenizer, data and code.
        settings: Plain values that change what a cursor or a trajectory means: batch size, workers, seeds.
        accepted: Differences that resumes of this run's ancestors accepted on an override or a migration, oldest first.
    """

    progress: Progress | None = None
    topology: dict[str, int | str] = {}
    fingerprints: dict[str, str] = {}
    settings: dict[str, int | float | str | bool] = {}
    accepted: tuple[str, ...] = ()


_ADDED_FIELDS = ("settings", "accepted")
"""Fields that are left out while they are empty: documents that were written before they came keep their bytes."""


def checked_description(description: Description | None) -> Description | None:
    """Return `description` if a manifest can hold it: asked before a shard is written, not after.

    Raises:
        ConfigError: Some field has another type or range.
    """
    if description is not None:
        try:
            written = msgspec.json.decode(msgspec.json.encode(description), type=Description)
        except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"not a description: {error}", next_step="plain numbers, strings and booleans") from error
        if written != description:
            # JSON has only text for names: a setting called 1 would be read as "1", and differ from itself.
            raise ConfigError("not a description: it is read otherwise than written", next_step="names are strings")
    return description


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


class _Version(Struct):
    version: int


_D = TypeVar("_D", bound=Struct)
_JSON = msgspec.json.Encoder(order="sorted")


def encode(document: _Document) -> bytes:
    """Canonical JSON of a document.

    Raises:
        FormatError: A value has no JSON form (a lone surrogate, an integer of more than 64 bits), or a decision exceeds
            4 KiB. Bounds are checked by decoding: `Transaction.commit` decodes what it is about to publish.
    """
    try:
        data = _JSON.encode(_as_written(document))
    except (msgspec.MsgspecError, OverflowError, TypeError, ValueError) as error:
        raise FormatError(f"cannot encode a {type(document).__name__.lower()}: {error}") from error
    if isinstance(document, Decision) and len(data) > DECISION_MAX_BYTES:
        raise FormatError(f"a decision record of {len(data)} bytes exceeds {DECISION_MAX_BYTES}", key=document.txn)
    return data


def _as_written(document: _Document) -> _Document:
    if not isinstance(document, Manifest):
        return document
    written = msgspec.structs.asdict(document.description)
    return replace(document, description={k: v for k, v in written.items() if v or k not in _ADDED_FIELDS})


def seal(decision: Decision) -> Decision:
    """The decision with its own checksum."""
    return replace(decision, check=crc32c(_JSON.encode(replace(decision, check=0))))


def decode_document(
    kind: type[_D], data: bytes, key: str, *, packed: bool = False, versions: tuple[int, ...] = (VERSION,)
) -> _D:
    """Decode strictly, the version first; `versions` are those of this kind that this release reads.

    Raises:
        FormatError: Malformed, or of an unknown version.
    """
    decode = msgspec.msgpack.decode if packed else msgspec.json.decode
    try:
        version = decode(data, type=_Version).version
        if version not in versions:
            known = " and ".join(map(str, versions))
            raise UnknownVersion(
                f"{kind.__name__.lower()} has format version {version}, this release knows {known}",
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
    document = decode_document(StoreFormat, data, key, versions=(VERSION, SPREAD_VERSION))
    if document != store_format(spread_of(document)):
        raise FormatError(f"a store of version {document.version} with a field of another", key=key)
    return document


def decode_begin(data: bytes, key: str) -> Begin:
    """Decode ``begin.json`` and check it against the key it was found under."""
    begin = decode_document(Begin, data, key)
    _check_identity(begin.checkpoint, begin.step, begin.txn, key)
    if parse_attempt(key) != (begin.checkpoint, begin.txn):
        raise FormatError(f"the begin of {begin.txn} lies under another key", key=key)
    return begin


def decode_pointer(data: bytes, key: str) -> Pointer:
    """Decode ``latest.json``."""
    pointer = decode_document(Pointer, data, key)
    _check_identity(pointer.checkpoint, step_of(pointer.checkpoint), pointer.txn, key)
    return pointer


def decode_decision(data: bytes, key: str, *, checkpoint: str, slot: int) -> Decision:
    """Decode a decision and check it against the key it was found under.

    Raises:
        FormatError: Malformed, or it speaks of another checkpoint, slot or step than its key.
    """
    if len(data) > DECISION_MAX_BYTES:
        raise FormatError(f"a decision record exceeds {DECISION_MAX_BYTES} bytes", key=key)
    decision = decode_document(Decision, data, key)
    _check_identity(decision.checkpoint, decision.step, decision.txn, key)
    if (decision.checkpoint, decision.slot) != (checkpoint, slot):
        raise FormatError(f"a decision of {decision.checkpoint}.{decision.slot} lies under another key", key=key)
    if decision.kind == "commit":
        if decision.manifest is None or decision.totals is None:
            raise FormatError("a commit without a manifest", key=key)
        _check_keys([decision.manifest.key], key)
        _check_size(decision.manifest, MANIFEST_MAX_BYTES)
    if seal(decision).check != decision.check:
        raise FormatError("a decision record fails its own checksum", key=key)
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
    manifest = decode_document(Manifest, check_ref(ref, data), ref.key)
    if (manifest.checkpoint, manifest.step, manifest.txn) != (decision.checkpoint, decision.step, decision.txn):
        raise FormatError("the manifest speaks of another checkpoint than its decision", key=ref.key)
    sizes = [shard.size for shard in manifest.shards]
    held = manifest.totals.shards, manifest.totals.bytes
    if manifest.totals != decision.totals or held != (len(sizes), sum(sizes)):
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
