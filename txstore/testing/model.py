"""A simulated store whose requests are sent, applied and answered at different moments; what is explored with it.

The explorer, and why its events lose nothing, are in `txstore.testing.explorer`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from txstore.checksum import crc32c
from txstore.errors import (
    AlreadyExistsError,
    NotFoundError,
    StoreError,
)
from txstore.store import ObjectInfo, Source, Store

Content = Mapping[str, bytes]
Outcome = tuple[Hashable, ...]

FAULTS = ("lost", "late", "early", "denied", "down")
UNSEEN = "unseen"
"""The ghost of an actor that has seen nothing yet that could change."""


class Request(NamedTuple):
    """One operation on the store. `data` is the payload of put and create, the bound of list."""

    verb: str
    key: str
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"


class Reply(NamedTuple):
    """What the sender is told: a value, or the class of an error."""

    error: type[StoreError] | None
    value: object = None


class Pending(BaseException):
    """The actor asks what the history does not answer. Not an Exception: no handler of the code may catch it."""

    def __init__(self, request: Request) -> None:
        super().__init__(str(request))
        self.request = request


class Violation(AssertionError):
    """An invariant does not hold; `trace` is a shortest way there."""

    def __init__(self, what: str, trace: Sequence[str]) -> None:
        super().__init__("\n".join([what, *(f"  {number:2}. {step}" for number, step in enumerate(trace, 1))]))
        self.what = what
        self.trace = tuple(trace)


class Broken(Exception):
    """Raised by an invariant that does not hold."""


class ReplayStore(Store):
    """Answers from a list of replies, then raises `Pending`."""

    url = "model://"
    needs_probe = False

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = replies
        self._next = 0

    def _ask(self, request: Request) -> object:
        if self._next == len(self._replies):
            raise Pending(request)
        reply = self._replies[self._next]
        self._next += 1
        if reply.error is not None:
            raise reply.error("simulated", key=request.key)
        return reply.value

    def put(self, key: str, source: Source) -> ObjectInfo:
        """See `Store.put`."""
        data = bytes(source.read(0, source.size))
        self._ask(Request("put", key, data))
        return ObjectInfo(key, len(data), crc32c(data))

    def create(self, key: str, data: bytes) -> None:
        """See `Store.create`."""
        self._ask(Request("create", key, data))

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        """See `Store.read`."""
        data = self._ask(Request("read", key))
        assert isinstance(data, bytes)
        return data[start:] if size is None else data[start : start + size]

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """See `Store.read_into`."""
        data = self.read(key, start, buffer.nbytes)
        buffer[: len(data)] = data
        return len(data)

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        data = self.read(key)
        return ObjectInfo(key, len(data), crc32c(data))

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`. One listing is one event."""
        found = self._ask(Request("list", prefix, start_after.encode()))
        assert isinstance(found, tuple)
        yield from found

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._ask(Request("delete", key))

    def close(self) -> None:
        """Nothing to release."""


def apply(content: Content, request: Request) -> tuple[Reply, Content]:
    """What the store does with one request: the reply, and its content afterwards."""
    verb, key, data = request
    if verb in {"put", "create"}:
        if verb == "create" and key in content:
            return Reply(AlreadyExistsError), content
        return Reply(None), {**content, key: data}
    if verb == "delete":
        return Reply(None), {name: value for name, value in content.items() if name != key}
    if verb == "read":
        return (Reply(None, content[key]) if key in content else Reply(NotFoundError)), content
    after = data.decode()
    names = sorted(name for name in content if name.startswith(key) and name > after)
    return Reply(None, tuple(ObjectInfo(name, len(content[name]), crc32c(content[name])) for name in names)), content


@dataclass(frozen=True)
class Actor:
    """One process. `run` returns its outcome as plain data."""

    name: str
    run: Callable[[Store], Outcome]


@dataclass(frozen=True, kw_only=True)
class World:
    """What is explored.

    Attributes:
        actors: The processes.
        content: What the store holds at first.
        faults: How often each kind of fault may happen in one run, all actors together.
        faulty: Which faults a request may meet.
        frozen: Whether an object, once there, is never changed or deleted.
        hidden: Whether an operation of an actor is taken at once, alone: an argued abstraction of the scenario.
        check_content: Raises `Broken` for a content that must not be. Called once per content.
        check_outcome: Raises `Broken` for an actor's outcome that contradicts the content.
        check_rest: Raises `Broken` if, all actors having stopped here, a promise can not be kept: content, requests in
            flight, and the outcomes so far.
        watch: Data noted for an actor just before its first event that does not commute with all others (a "ghost"),
            given to `check_outcome`.
        apply: The store's semantics; replaced by a mutation.
        longest: Most requests of one actor (invariant 8).
        most_states: Give up, loudly, beyond that.
    """

    actors: Sequence[Actor]
    content: Content
    faults: Mapping[str, int] = field(default_factory=dict)
    faulty: Callable[[str, Request], Sequence[str]] = lambda _actor, _request: ()
    frozen: Callable[[str], bool] = lambda _key: False
    hidden: Callable[[str, Request], bool] = lambda _actor, _request: False
    check_content: Callable[[Content], None] = lambda _content: None
    check_outcome: Callable[[str, Outcome, Hashable, Content], None] = lambda *_: None
    check_rest: Callable[[Content, Sequence[Request], Mapping[str, Outcome]], None] = lambda *_: None
    watch: Callable[[str, Content], Hashable] = lambda _actor, _content: None
    apply: Callable[[Content, Request], tuple[Reply, Content]] = apply
    longest: int = 80
    most_states: int = 2_000_000
