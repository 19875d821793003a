"""What a verification found: typed problems, one report a checkpoint, one for the store. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from txstore.keys import SlotName, parse_decision_key
from txstore.manifest import Decision

Kind = Literal["missing", "size", "digest", "format", "checksum", "header", "unreadable"]
"""What is wrong with one object:

* ``missing``: a document names it, and it is not there;
* ``size``: it is longer or shorter than was committed;
* ``digest``: a document's SHA-256 differs from the committed one;
* ``format``: a document cannot be decoded, or contradicts the one that names it;
* ``checksum``: blocks, or the file, differ from their CRC32C;
* ``header``: a shard is no safetensors file, or its header contradicts the index;
* ``unreadable``: the store refused to give it, so nothing is known about it.
"""

Depth = Literal["documents", "sample", "full"]
"""How much is read: the documents and each shard's size; also some blocks of each shard; every byte."""

SAMPLE_BLOCKS = 8
"""Random blocks of each shard that ``sample`` reads besides the first and the last."""

State = Literal["sound", "damaged", "unreadable", "retired"]
"""``retired`` wins over everything (the damage is a removal under way), then ``damaged``, then ``unreadable``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: with which object, what, and what to do about it."""

    kind: Kind
    key: str
    what: str
    next_step: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a verification of one commit found.

    Attributes:
        decision: The commit.
        depth: How deep it was verified.
        seed: Seed of the sample: with it, the same blocks are read again.
        state: The verdict.
        problems: Everything that was found, none if `state` is ``sound`` or ``retired``.
        shards: Shards that were looked at.
        blocks: Blocks whose checksum was compared.
        bytes_read: Bytes of shards that were read.
    """

    decision: Decision
    depth: Depth
    seed: int
    state: State
    problems: tuple[Problem, ...]
    shards: int
    blocks: int
    bytes_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What a verification of a store, or of all commits of one name, found.

    Attributes:
        problems: Damage outside of any readable commit: the format document, decision records.
        reports: One for each commit that is not retired, by ascending step, name and slot.
    """

    problems: tuple[Problem, ...]
    reports: tuple[Report, ...]

    def is_superseded(self, name: SlotName) -> bool:
        """Whether a later slot of the same checkpoint is sound: readers take that one, whatever this one is."""
        return any(
            report.state == "sound"
            and report.decision.checkpoint == name.checkpoint
            and report.decision.slot > name.slot
            for report in self.reports
        )

    def is_harmless(self, found: Problem) -> bool:
        """Whether a problem of the records is of a superseded one. A missing one stops the slot walk, and never is."""
        name = parse_decision_key(found.key) if found.kind != "missing" else None
        return name is not None and self.is_superseded(name)

    @property
    def state(self) -> State:
        """The worst that was found of what readers may take: damage first, then objects that could not be read.

        What is superseded by a sound slot is left out: after a fallback it would be damaged for ever.
        """
        standing = (
            report
            for report in self.reports
            if not self.is_superseded(SlotName(report.decision.checkpoint, report.decision.slot))
        )
        problems = tuple(one for one in self.problems if not self.is_harmless(one))
        found = {report.state for report in standing} | {verdict(problems)}
        return "damaged" if "damaged" in found else "unreadable" if "unreadable" in found else "sound"


@dataclass(frozen=True, slots=True)
class Step:
    """How far a verification is.

    Attributes:
        decision: The commit that is being verified.
        key: The object just finished, or being read.
        done_bytes: Bytes of shards read so far.
        total_bytes: Bytes of shards to be read in all; 0 if only documents are.
    """

    decision: Decision
    key: str
    done_bytes: int
    total_bytes: int


def verdict(problems: tuple[Problem, ...]) -> State:
    """The state that follows from the problems alone."""
    if not problems:
        return "sound"
    return "unreadable" if all(problem.kind == "unreadable" for problem in problems) else "damaged"
