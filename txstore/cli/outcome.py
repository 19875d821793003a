"""What a command answers, and how it leaves the process: one JSON document or text, and an exit code."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TextIO, TypeGuard

from txstore.cli.render import Part, render
from txstore.errors import (
    AccessDeniedError,
    CheckpointNotFound,
    CheckpointRetired,
    ConfigError,
    FormatError,
    IntegrityError,
    StoreError,
    TxStoreError,
    describe,
)
from txstore.redact import printable, redact, redact_text, scrub
from txstore.registry import open_store
from txstore.retry import RetryingStore, RetryPolicy
from txstore.store import Store

OK, UNEXPECTED, USAGE, NOT_FOUND, DAMAGED, STORE = range(6)
INTERRUPTED = 130

JSON_VERSION = 1
"""Version of every JSON document; it changes when a field goes or changes its meaning, not when one comes."""

RETRY = RetryPolicy(attempts=5, deadline_s=30.0, longest_wait_s=5.0)
"""A person is waiting: less patience than a save has."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer of a command.

    Attributes:
        code: Exit code.
        document: For ``--json``; `version` and, of a store, `url` are added.
        text: For people: lines, tables and charts, in order.
        notes: Lines for stderr.
    """

    code: int
    document: dict[str, object]
    text: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()


def run(url: str, action: Callable[[Store], Outcome], *, as_json: bool) -> NoReturn:
    """Open the store, act, print the answer, exit."""

    def on_store() -> Outcome:
        with RetryingStore(open_store(url), RETRY) as store:
            return action(store)

    run_without_store(on_store, url, as_json=as_json)


def run_without_store(action: Callable[[], Outcome], url: str = "", *, as_json: bool) -> NoReturn:
    """Act, print the answer, exit; `url` is what must be redacted, and "" of a command that has no store.

    Every end is one line of text: no traceback reaches the user unless ``TXSTORE_DEBUG`` is set.
    """
    try:
        outcome = action()
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the outermost handler: any error becomes a message and a code
        if is_debug():
            _tell(scrub(traceback.format_exc(), url))
        outcome = failure(error, url)
    code = outcome.code
    try:
        for note in outcome.notes:
            _tell(f"txstore: {scrub(printable(note), url)}\n")
        _answer(outcome, url, as_json=as_json)
    except BrokenPipeError:
        # `txstore ls | head -1`: the reader has what it wanted, and the code still says what was found.
        _silence(sys.stdout)
    except OSError as error:
        code = _unwritten(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    _leave(code)


def _answer(outcome: Outcome, url: str, *, as_json: bool) -> None:
    if not (as_json or outcome.text):
        return
    if not _is_open(sys.stdout):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    if as_json:
        of_store = {"url": redact(url)} if url else {}
        document = {"version": JSON_VERSION, **of_store, **outcome.document}
        # json escapes whatever is not printable ASCII: nothing in a name can reach a terminal raw.
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        render(outcome.text)
    sys.stdout.flush()


def leave_unwritten(error: OSError) -> NoReturn:
    """Exit after help, a version or a message on wrong usage could not be written; the last keeps its own code."""
    _leave(getattr(error.__context__, "exit_code", None) or _unwritten(error))


def _unwritten(error: OSError) -> int:
    """Tell, if stderr still works, that stdout took no answer (full disk, closed); the exit code for that."""
    _silence(sys.stdout)
    _tell(f"txstore: the answer could not be written to stdout: {error.strerror or describe(error)}\n")
    return UNEXPECTED


def failure(error: Exception, url: str) -> Outcome:
    """The outcome of an error: its code, one line, and what to do next."""
    code = exit_code(error)
    message, key, next_step = describe(error), "", "set TXSTORE_DEBUG=1 for the traceback, and report it"
    if isinstance(error, TxStoreError):
        message, key, next_step = error.message, error.key, error.next_step or _default_step(error, url)
    message, key, next_step = (scrub(text, url) for text in (message, key, next_step))
    prefix = "unexpected error: " if code == UNEXPECTED else ""
    where = f" [{key}]" if key and key not in message else ""
    notes = (f"{prefix}{message}{where}", f"next: {next_step}") if next_step else (f"{prefix}{message}{where}",)
    detail = {
        "type": type(error).__name__,
        "message": message,
        "key": key,
        "next_step": next_step,
        "exit_code": code,
    }
    return Outcome(code, {"error": detail}, notes=notes)


def exit_code(error: Exception) -> int:
    """The exit code of an error, as documented in ``txstore --help``."""
    match error:
        case CheckpointNotFound() | CheckpointRetired():
            return NOT_FOUND
        case IntegrityError() | FormatError():
            return DAMAGED
        case StoreError() | ConfigError():
            return STORE
        case _:
            return UNEXPECTED


def _default_step(error: TxStoreError, url: str) -> str:
    match error:
        case CheckpointNotFound() | CheckpointRetired():
            return f"txstore ls {redact(url)} --all shows what there is"
        case IntegrityError() | FormatError():
            return f"txstore verify {redact(url)} --all names all damage"
        case AccessDeniedError():
            return "run as a user who may read the store"
        case StoreError():
            return "check that the storage is mounted and answers, then try again"
        case _:
            return ""


def is_debug() -> bool:
    """Whether ``TXSTORE_DEBUG`` asks for tracebacks and debug logs."""
    return os.environ.get("TXSTORE_DEBUG", "") not in {"", "0"}


def set_up_process() -> None:
    """Logging and streams: what libraries log is free of secrets and controls, and printing cannot fail."""
    if sys.stderr is None:
        # Closed (`2>&-`): click would tell of wrong usage on stdout, and a file of the store would get descriptor 2.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding lacks must not end in a UnicodeEncodeError.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("txstore: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.DEBUG if is_debug() else logging.WARNING)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(redact_text(super().format(record)))


def _is_open(stream: TextIO | None) -> TypeGuard[TextIO]:
    """Python has None for a stream whose descriptor was closed when it started (``>&-``)."""
    return stream is not None and not stream.closed


def _tell(text: str) -> None:
    """Write to stderr if it takes anything: that it is full or closed must not change the answer or its code."""
    if not _is_open(sys.stderr):
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO | None) -> None:
    """Nothing more is written to a broken stream, not even by the interpreter on its way out, which would exit 120."""
    try:
        if _is_open(stream):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass  # it has no descriptor: a test's buffer


def _leave(code: int) -> NoReturn:
    _tell("")  # what a log line left in the buffer of a stderr that is full
    sys.exit(code)
