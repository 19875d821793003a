"""Near misses: keys that differ only by a wrapper or a prefix, and vocabularies that changed size. Hints only."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection

from txstore.compat.key_tables import KeyTable

WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DDP or DataParallel",
    "_fsdp_wrapped_module": "FSDP1",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
"""Segments that wrappers put into the names of parameters, and whose they are."""

_SAMPLE = 50
"""Missing keys from which other prefixes are guessed; how many keys each explains is then counted exactly."""

_EMBEDDING = re.compile(r"embed|wte|lm_head|vocab|tok_|word|output|shared|decoder\.(weight|bias)", re.IGNORECASE)


def near_misses(missing: Collection[str], unexpected: Collection[str]) -> list[str]:
    """What would explain the missing keys, one sentence a cause, wrappers first."""
    missing_left, unexpected_left, wrapped = _wrappers(set(missing), set(unexpected))
    hints = sorted(wrapped, key=lambda hint: -hint[0])
    if missing_left and unexpected_left:
        hints += _prefixes(missing_left, unexpected_left)
    return [f"{_share(count, len(missing))} {text}" for count, text in hints]


def _share(count: int, total: int) -> str:
    if count == total:
        return "the only missing key exists" if total == 1 else f"all {total} missing keys exist"
    return f"{count} of {total} missing keys exist{'s' if count == 1 else ''}"


def _wrappers(missing: set[str], unexpected: set[str]) -> tuple[set[str], set[str], list[tuple[int, str]]]:
    """The keys that no wrapper explains, and what wrappers explain."""
    bare: dict[str, list[str]] = {}
    for name in unexpected:
        bare.setdefault(_unwrapped(name), []).append(name)
    counts: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    explained = set()
    for name in missing:
        twins = bare.get(_unwrapped(name), [])
        if len(twins) == 1 and _segments(twins[0]) != _segments(name):  # of two twins neither is the one
            mine, theirs = _segments(name), _segments(twins[0])
            counts[tuple((theirs - mine).elements()), tuple((mine - theirs).elements())] += 1
            explained |= {name, twins[0]}
    hints = []
    for (extra, lacking), count in counts.items():
        parts = [_with(extra, "with")] if extra else []
        parts += [_with(lacking, "without")] if lacking else []
        hints.append((count, f"in the checkpoint {' and '.join(parts)}: save and load the unwrapped module"))
    return missing - explained, unexpected - explained, hints


def _unwrapped(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def _segments(name: str) -> Counter[str]:
    return Counter(segment for segment in name.split(".") if segment in WRAPPERS)


def _with(segments: tuple[str, ...], word: str) -> str:
    return f"{word} " + ", ".join(f"`{one}.` ({WRAPPERS[one]})" for one in dict.fromkeys(segments))


def _prefixes(missing: set[str], unexpected: set[str]) -> list[tuple[int, str]]:
    """Runs of segments that many names have more, or less, than those of the other side: the prefix of another root."""
    found = []
    for word in ("with", "without"):
        short, long = (missing, unexpected) if word == "with" else (unexpected, missing)
        for run, _ in _guesses(sorted(short)[:: len(short) // _SAMPLE + 1], sorted(long)).most_common(3):
            pairs = [(rest, name) for name in long for rest in _without(name, run) if rest in short]
            explained = missing.intersection(rest if word == "with" else name for rest, name in pairs)
            if explained and (len(explained) > 1 or explained == missing):
                what = f"in the checkpoint {word} the prefix `{run}.`: save and load the same module"
                found.append((len(explained), what))
                missing, short, long = missing - explained, short - explained, long - explained
    return found


def _guesses(sample: list[str], long: list[str]) -> Counter[str]:
    """Runs that make a name of the sample one of the long, sorted names; how often each does.

    Whatever comes before and after the run is looked up in order, so that a hundred thousand names take no minute.
    """
    backward = sorted(name[::-1] for name in long)
    runs: Counter[str] = Counter()
    for name in sample:
        parts = name.split(".")
        for cut in range(len(parts) + 1):
            head = "".join(f"{part}." for part in parts[:cut])
            tail = "".join(f".{part}" for part in parts[cut:])
            heads, tails = _beginning(long, head), _beginning(backward, tail[::-1])
            alike = [long[at] for at in heads] if len(heads) < len(tails) else [backward[at][::-1] for at in tails]
            for one in alike:
                if len(one) > len(head) + len(tail) and one.startswith(head) and one.endswith(tail):
                    runs[one[len(head) : len(one) - len(tail)]] += 1
    return runs


def _beginning(names: list[str], head: str) -> range:
    """Where those of sorted names are that begin with `head`."""
    return range(bisect_left(names, head), bisect_left(names, head + chr(sys.maxunicode)))


def _without(name: str, run: str) -> list[str]:
    """The name without one occurrence of the run of segments, for each occurrence."""
    if f".{run}." not in f".{name}.":
        return []
    parts, length = name.split("."), run.count(".") + 1
    return [
        ".".join([*parts[:at], *parts[at + length :]])
        for at in range(len(parts) - length + 1)
        if ".".join(parts[at : at + length]) == run
    ]


def vocabulary_hints(saved: KeyTable, today: KeyTable) -> list[str]:
    """Whether embedding-like tensors differ in dimension 0 only: then the vocabulary changed."""
    changes: Counter[tuple[int, int]] = Counter()
    for name, fact in today.items():
        was = saved.get(name)
        if (
            was
            and was.shape != fact.shape
            and was.shape[1:] == fact.shape[1:]
            and len(was.shape) == len(fact.shape) > 0
        ):
            changes[was.shape[0], fact.shape[0]] += bool(_EMBEDDING.search(name))
    return [
        f"dimension 0 of {count} embedding-like tensor{'' if count == 1 else 's'} went from {old} to {new}: "
        "the vocabulary changed, which needs a migration"
        for (old, new), count in changes.items()
        if count
    ]
