"""Requests about objects, without the layers of the client that cost most of a request's CPU time.

The client prepares one request that is never sent, and so tells what all of them have in common: the endpoint, how the
bucket is named, the region to sign for. From then on a request is signed and sent by the client's own signer and
connections, and its handlers of the events before signing and before sending are called; what it would do in between
(validate, serialise, resolve the endpoint again, parse dates that nobody asked for) is left out.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import urllib3
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse, HeadersDict
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.parsers import create_parser

from txstore.checksum import Buffer
from txstore.lean_http import sendable

_PIECE_BYTES = 1 << 20
_SAFE = "/~"  # as the client escapes a key
_SOME_KEY = "txstore"
_SIGNED_LATER = frozenset({"authorization", "x-amz-date", "x-amz-content-sha256", "x-amz-security-token", "date"})
_ELSEWHERE = frozenset({301, 302, 307})
_ELSEWHERE_CODES = frozenset(
    {"301", "400", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)


class Body:
    """A request body over memory that is not copied.

    Sent in pieces: each has the connection timeout to go out, which a part as a whole may not keep on a slow line.
    """

    def __init__(self, data: Sequence[Buffer]) -> None:
        self._data = data
        self._size = sum(memoryview(one).nbytes for one in data)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Buffer]:
        return sendable(self._data, _PIECE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request about one object.

    Attributes:
        operation: The API's name of it: what handlers are registered for.
        method: HTTP method.
        name: The object's whole key.
        query: Escaped, in order of its names, or "".
        headers: Besides those that the client adds.
        body: What is sent, or None.
    """

    operation: str
    method: str
    name: str
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Body | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A success: headers by any case, and the body, unread (`raw`, of urllib3)."""

    status: int
    headers: Mapping[str, str]
    raw: Any


@dataclass(frozen=True, slots=True)
class _Pattern:
    base: str
    auth_base: str | None
    headers: dict[str, str]
    context: dict[str, Any]


class Wire:
    """Sends requests about the objects of one bucket.

    Args:
        client: Of the SDK.
        bucket: Bucket, and its owner if one is expected, as the API names them.
        sign_body: Whether the signature covers a `Body` too; None as the client does.
    """

    def __init__(self, client: Any, bucket: Mapping[str, str], *, sign_body: bool | None = None) -> None:
        self._client = client
        self._bucket = bucket
        self._sign_body = sign_body
        self._events = client.meta.events
        self._parser = create_parser("rest-xml")
        self._lock = threading.Lock()
        self._pattern: _Pattern | None = None

    def send(self, request: Request) -> Answer:
        """Send once; the caller closes `raw`.

        Raises:
            botocore.exceptions.ClientError: The service refused.
            Exception: What the SDK raises for a request without an answer.
        """
        pattern = self._pattern or self._learn()
        try:
            return self._send(pattern, request)
        except _RefusedError as refused:
            error, answer = refused.args
            if not _is_elsewhere(error) or (found := self._find_bucket(pattern, answer)) is None:
                raise error from None
        try:
            # The wrong region refused it: it had no effect, and goes out again.
            return self._send(found, request)
        except _RefusedError as refused:
            raise refused.args[0] from None

    def _send(self, pattern: _Pattern, request: Request) -> Answer:
        name = quote(request.name, safe=_SAFE)
        headers = {**pattern.headers, **request.headers}
        if request.body is not None:
            headers["Content-Length"] = str(len(request.body))
        asked = AWSRequest(
            method=request.method,
            url=f"{pattern.base}{name}{'?' if request.query else ''}{request.query}",
            headers=headers,
            data=_Signable(request.body) if isinstance(request.body, Body) else request.body,
            auth_path=None if pattern.auth_base is None else pattern.auth_base + name,
            stream_output=True,
        )
        asked.context = self._context(pattern, request.body)
        operation = request.operation
        # The client's signer is a handler of this event.
        self._events.emit(f"request-created.s3.{operation}", request=asked, operation_name=operation)
        prepared = AWSPreparedRequest(
            request.method, asked.url, HeadersDict(asked.headers.items()), request.body, stream_output=True
        )
        answers = self._events.emit(f"before-send.s3.{operation}", request=prepared)
        answer = next((one for _, one in answers if one is not None), None)
        if answer is None:
            # The one private name that is used: there is no public way to the client's connections.
            answer = self._client._endpoint.http_session.send(prepared)  # noqa: SLF001
        return self._accepted(request, answer)

    def _context(self, pattern: _Pattern, body: object) -> dict[str, Any]:
        context = dict(pattern.context)
        if isinstance(body, Body) and self._sign_body is not None:
            config: Config = context["client_config"]
            s3 = {**(config.s3 or {}), "payload_signing_enabled": self._sign_body}
            context["client_config"] = config.merge(Config(s3=s3))
        return context

    def _accepted(self, request: Request, answer: Any) -> Answer:
        status = answer.status_code
        if status < 300 and request.method == "GET":
            return Answer(status, answer.headers, answer.raw)
        body = answer.content  # read to its end: a connection with an unread answer is not used again
        if status < 300:
            if not body.strip():
                return Answer(status, answer.headers, answer.raw)
            status = 500  # a success that holds an error, as the client sees it
        parsed = self._parser.parse({"status_code": status, "headers": answer.headers, "body": body}, None)
        raise _RefusedError(ClientError(parsed, request.operation), _answer(answer.url, status, answer.headers, body))

    def _learn(self) -> _Pattern:
        with self._lock:
            if self._pattern is None:
                self._pattern = self._prepared()
            return self._pattern

    def _find_bucket(self, tried: _Pattern, refusal: AWSResponse) -> _Pattern | None:
        """Let the client follow the redirection to the bucket's region; None if that leads nowhere else."""
        with self._lock:
            if self._pattern is tried:
                try:
                    self._pattern = self._prepared(refusal)
                except ClientError:
                    return None  # the client does not know where to go either
            found = self._pattern
        assert found is not None
        same = (found.base, found.context.get("signing")) == (tried.base, tried.context.get("signing"))
        return None if same else found

    def _prepared(self, *refusals: AWSResponse) -> _Pattern:
        """What the client would send for some object, after these answers."""
        seen: list[AWSRequest] = []
        left = list(refusals)
        me = threading.get_ident()

        def keep(request: AWSRequest, **_: Any) -> None:
            if threading.get_ident() == me:
                seen.append(request)

        def answer(request: AWSPreparedRequest, **_: Any) -> AWSResponse | None:
            if threading.get_ident() != me:
                return None
            return left.pop(0) if left else _answer(request.url, 200, {}, b"")

        hooks = (("request-created.s3.HeadObject", keep), ("before-send.s3.HeadObject", answer))
        for event, hook in hooks:
            self._events.register_first(event, hook)
        try:
            self._client.head_object(**self._bucket, Key=_SOME_KEY)
        finally:
            for event, hook in hooks:
                self._events.unregister(event, hook)
        asked = seen[-1]
        auth_path = asked.auth_path
        return _Pattern(
            asked.url.removesuffix(_SOME_KEY),
            None if auth_path is None else auth_path.removesuffix(_SOME_KEY),
            {name: _text(value) for name, value in asked.headers.items() if name.lower() not in _SIGNED_LATER},
            {name: value for name, value in asked.context.items() if name not in {"timestamp", "retries"}},
        )


class _Signable:
    """A body as the signer reads it, where it does."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._left: Iterator[Buffer] | None = None

    def read(self, _size: int) -> Buffer:
        """The next piece, whatever its size."""
        if self._left is None:
            self._left = iter(self._body)
        return next(self._left, b"")

    def tell(self) -> int:
        """Nobody moves but to the beginning."""
        return 0

    def seek(self, _offset: int, _whence: int = 0) -> int:
        """Begin anew."""
        self._left = None
        return 0


class _RefusedError(Exception):
    """The error of the client, and the answer that it was made of."""


def _answer(url: str, status: int, headers: Mapping[str, str], body: bytes) -> AWSResponse:
    return AWSResponse(url, status, headers, urllib3.HTTPResponse(body=io.BytesIO(body), preload_content=False))


def _is_elsewhere(error: ClientError) -> bool:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status in _ELSEWHERE or error.response.get("Error", {}).get("Code") in _ELSEWHERE_CODES


def _text(value: object) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
