"""A log of events that survives its writer: JSON lines, appended, never rewritten."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

import msgspec
from msgspec import Struct

from txstore.errors import ConfigError, FormatError, describe
from txstore.events import EVENT_NAMES, Event, StepRecorded

log = logging.getLogger(__name__)

_SEAL = b"\x18\n"
"""Ends a torn line: CAN cannot occur in JSON, so a reader tells what a crash tore from what somebody damaged."""

_MAX_LINE_BYTES = 1 << 20

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class EventLog:
    """An observer that appends each event to a file, as one line of JSON in one write.

    A killed process leaves at most its last line torn (a machine that crashes loses what it had not flushed, unless
    `fsync`). Nothing is ever rewritten: whoever appends to a file that ends in a torn line seals that line first.

    Args:
        path: The file; it is made if it is missing, its directory is not. One for each process.
        fsync: Flush each event to the disk before the call returns.

    Raises:
        ConfigError: Another process, or another `EventLog`, writes this file; or its folder does not exist.
        OSError: The file cannot be opened; from calls: it cannot be written (the disk is full).
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = os.fspath(path)
        self._fsync = fsync
        self._lock = threading.Lock()
        if not os.path.isdir(os.path.dirname(self.path) or "."):
            raise ConfigError("the folder of the event log does not exist", key=self.path, next_step="make it first")
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._claim()
            size = os.fstat(self._fd).st_size
            self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "this process or another one writes this event log already",
                key=self.path,
                next_step="open it once; give each rank a file of its own",
            ) from None
        except OSError:
            # Some network filesystems have no locks. Appending is still right there for one writer.
            log.debug("no lock on %s", self.path, exc_info=True)

    def __call__(self, event: Event) -> None:
        """Append one event."""
        line = _encoder.encode(event) + b"\n"
        with self._lock:
            if self._fd < 0:
                raise ConfigError("the event log is closed", key=self.path)
            if self._torn:
                line = _SEAL + line
            self._torn = True
            # One write a line. A short one (the disk is full) leaves a torn line; the next event seals it.
            written = os.write(self._fd, line)
            if written < len(line):
                raise OSError(f"only {written} of {len(line)} bytes of an event were written to {self.path}")
            self._torn = False
            if self._fsync:
                os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; further events raise."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class UnknownEvent(Struct, frozen=True, kw_only=True):
    """A well-formed line whose event this release does not know: a newer one wrote it. It is never dropped."""

    event: str
    fields: dict[str, object]


def read_events(path: str | os.PathLike[str]) -> Iterator[Event | UnknownEvent]:
    """Every event of a log, in the order in which it was written.

    Lines that a crash tore are left out: the last one if it has no end, and those that a later writer sealed. Fields
    that this release does not know are ignored.

    Raises:
        FormatError: Anything else is in the file; `key` is ``<path>:<line>``. What comes before it was yielded.
        OSError: The file cannot be read.
    """
    name = os.fspath(path)
    with open(name, "rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if line.endswith(_SEAL):
                continue
            try:
                yield _decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n") and len(line) <= _MAX_LINE_BYTES:
                    log.info("%s: the last line is torn", name)
                    return
                raise FormatError(
                    f"a line of the event log is no event: {describe(error)}",
                    key=f"{name}:{number}",
                    next_step="the file was damaged or edited: move it away, or cut it off before this line",
                ) from error


def last_step(path: str | os.PathLike[str]) -> StepRecorded | None:
    """The step that was recorded last: how far a run had come when it ended.

    None if that is not known, since no step was recorded or there is no such file, as at the first start of a run.

    Raises:
        FormatError, OSError: As `read_events`.
    """
    last = None
    with suppress(FileNotFoundError):
        for event in read_events(path):
            if isinstance(event, StepRecorded):
                last = event
    return last


def _decode(line: bytes) -> Event | UnknownEvent:
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(line, type=dict[str, object])
        event = fields.get("event")
        if not isinstance(event, str) or event in EVENT_NAMES:
            raise
        return UnknownEvent(event=event, fields=fields)
