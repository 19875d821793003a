"""Key grammar, and every key that txstore ever writes (commit protocol, "Layout").

Keys are relative, ``/``-separated, ASCII and lower-risk on every backend: no empty, ``.`` or
``..`` segment, and no segment that begins with a dot (backends use those for files in flight).
"""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass

from txstore.errors import ConfigError, FormatError

_log = logging.getLogger(__name__)

STORE_KEY = "txstore.json"
LATEST_KEY = "latest.json"
COMMITS_PREFIX = "commits/"
RETIRED_PREFIX = "retired/"
DATA_PREFIX = "data/"
SPREAD_PREFIX = "data/_"
PROBE_PREFIX = "probe/"

SPREAD_MAX = 256
"""Most prefixes that a store spreads its shards over."""

_SEGMENT = re.compile(r"[A-Za-z0-9_=+-][A-Za-z0-9._=+-]*")
_CHECKPOINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}")
_SPREAD = re.compile(r"_[0-9a-f]{2}")
_TXN = re.compile(r"[0-9a-f]{32}")
_STEP = re.compile(r"(?<![0-9])([0-9]{1,18})\Z")
_TOO_LONG = re.compile(r"[0-9]{19}$")
_told: set[str] = set()
_MOST_TOLD = 64
_SLOT = re.compile(r"(0|[1-9][0-9]{0,8})", re.ASCII)


def check_key(key: str) -> str:
    """Return `key` if it obeys the grammar.

    Raises:
        FormatError: It does not. Keys come out of documents: a hostile one must not escape the root.
    """
    if len(key) > 900 or not all(_SEGMENT.fullmatch(part) for part in key.split("/")):
        raise FormatError("not a valid object key", key=key[:200])
    return key


def is_key(text: str) -> bool:
    """Whether `text` obeys the grammar: a listing passes over what somebody else put below the root."""
    try:
        check_key(text)
    except FormatError:
        return False
    return True


def check_checkpoint(name: str) -> str:
    """Return `name` if it can name a checkpoint.

    Raises:
        ConfigError: It cannot.
    """
    if not _CHECKPOINT.fullmatch(name):
        raise ConfigError(
            "not a valid checkpoint name",
            key=name[:200],
            next_step="use 1 to 128 of A-Z a-z 0-9 . _ = + -, beginning with a letter or digit, such as step-1000",
        )
    if _TOO_LONG.search(name):
        # It would have no step, and lose to every older checkpoint that has one.
        raise ConfigError("a checkpoint name ends in at most 18 digits, its step", key=name, next_step="use the step")
    return name


def step_of(checkpoint: str) -> int | None:
    """The step that a checkpoint name carries: its trailing decimal digits, or None.

    ``step-1000`` and ``1000`` have step 1000, ``step-007`` has 7, ``handpicked`` has none.
    A number of more than 18 digits is none: its tail would put the checkpoint in the wrong place.
    """
    found = _STEP.search(checkpoint)
    return int(found[1]) if found else None


def warn_of_no_step(checkpoint: str) -> None:
    """Say once, before a save, that a name holds a number and yet no step, such as ``epoch=1-step=20.ckpt``.

    It is not taken for a step: ``-best`` after one is meant, and records of such names say that they have none.
    """
    numbers = re.findall("[0-9]+", checkpoint)
    kind = re.sub("[0-9]+", "<n>", checkpoint)
    # Once for each kind of name, not for each save; and not without end, should every name be another kind.
    if not numbers or step_of(checkpoint) is not None or kind in _told or len(_told) > _MOST_TOLD:
        return
    _told.add(kind)
    _log.warning(
        "%r does not end in a step, and %s is not taken for one: the checkpoint is loaded by its name, and is never "
        "newer than one with a step. End the names of recovery points in the step, without a suffix such as .ckpt",
        checkpoint,
        numbers[-1],
    )


def new_txn() -> str:
    """A fresh, unguessable transaction id (128 bits, hex)."""
    return secrets.token_hex(16)


def check_txn(txn: str) -> str:
    """Return `txn` if it has the form of a transaction id; FormatError otherwise."""
    if not _TXN.fullmatch(txn):
        raise FormatError("not a transaction id", key=txn[:200])
    return txn


@dataclass(frozen=True, slots=True, order=True)
class SlotName:
    """What a key under ``commits/`` or ``retired/`` says: checkpoint and slot."""

    checkpoint: str
    slot: int


def decision_key(checkpoint: str, slot: int) -> str:
    """``commits/<checkpoint>.<slot>.json``."""
    return f"{COMMITS_PREFIX}{checkpoint}.{slot}.json"


def decision_prefix(checkpoint: str) -> str:
    """The prefix of all decision keys of one checkpoint (and of checkpoints named ``<checkpoint>.x``)."""
    return f"{COMMITS_PREFIX}{checkpoint}."


def parse_decision_key(key: str) -> SlotName | None:
    """Inverse of `decision_key`; None for anything else that lies under ``commits/``."""
    if not (key.startswith(COMMITS_PREFIX) and key.endswith(".json")):
        return None
    return _slot_name(key[len(COMMITS_PREFIX) : -len(".json")])


def retired_key(checkpoint: str, slot: int) -> str:
    """``retired/<checkpoint>.<slot>``."""
    return f"{RETIRED_PREFIX}{checkpoint}.{slot}"


def parse_retired_key(key: str) -> SlotName | None:
    """Inverse of `retired_key`; None for anything else that lies under ``retired/``."""
    return _slot_name(key[len(RETIRED_PREFIX) :]) if key.startswith(RETIRED_PREFIX) else None


def _slot_name(text: str) -> SlotName | None:
    checkpoint, _, slot = text.rpartition(".")
    if not (_CHECKPOINT.fullmatch(checkpoint) and _SLOT.fullmatch(slot)):
        return None
    return SlotName(checkpoint, int(slot))


def attempt_prefix(checkpoint: str, txn: str) -> str:
    """``data/<checkpoint>/<txn>/``, the immutable prefix of one attempt: of its documents, and of shards not spread."""
    return f"{DATA_PREFIX}{checkpoint}/{txn}/"


def attempt_prefixes(checkpoint: str, txn: str, spread: int) -> list[str]:
    """Every prefix under which objects of one attempt lie, in a store of that spread."""
    return [attempt_prefix(checkpoint, txn), *(_spread_prefix(checkpoint, txn, part) for part in range(spread))]


def _spread_prefix(checkpoint: str, txn: str, part: int) -> str:
    # No checkpoint begins with an underscore: what is before the checkpoint can never be taken for one.
    return f"{SPREAD_PREFIX}{part:02x}/{checkpoint}/{txn}/"


def spread_part(key: str) -> int | None:
    """Below which of the prefixes of a store that is spread an object lies; None for any other."""
    parts = key.split("/")
    return int(parts[1][1:], 16) if key.startswith(SPREAD_PREFIX) and _SPREAD.fullmatch(parts[1]) else None


def parse_attempt(key: str) -> tuple[str, str] | None:
    """The checkpoint and txn of a key under ``data/``, spread or not, or None for a stray object."""
    parts = key.split("/")
    if len(parts) > 1 and _SPREAD.fullmatch(parts[1]):
        del parts[1]
    if len(parts) < 4 or parts[0] != "data" or not _CHECKPOINT.fullmatch(parts[1]) or not _TXN.fullmatch(parts[2]):
        return None
    return parts[1], parts[2]


def begin_key(checkpoint: str, txn: str) -> str:
    """Who started this attempt."""
    return attempt_prefix(checkpoint, txn) + "begin.json"


def shard_key(checkpoint: str, txn: str, rank: int, number: int, spread: int = 0) -> str:
    """File `number` of `rank`; in a store of a spread, below one of so many prefixes, each rank's files in turn."""
    name = f"rank-{rank:05d}-{number:05d}.safetensors"
    prefix = _spread_prefix(checkpoint, txn, (rank + number) % spread) if spread else attempt_prefix(checkpoint, txn)
    return prefix + name


def index_key(checkpoint: str, txn: str) -> str:
    """Where every tensor chunk lies."""
    return attempt_prefix(checkpoint, txn) + "index.msgpack"


def manifest_key(checkpoint: str, txn: str) -> str:
    """Names and digests of all files of the attempt."""
    return attempt_prefix(checkpoint, txn) + "manifest.json"


def probe_key(name: str) -> str:
    """A key that the probe writes and removes."""
    return f"{PROBE_PREFIX}{name}"
