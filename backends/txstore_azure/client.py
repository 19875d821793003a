"""One signed HTTP request to the Blob service: never repeated here, bounded in number, answered with our errors.

The SDK signs, authenticates and connects; the verbs are plain REST calls through its pipeline, because its own
methods repeat requests, read whole bodies into memory and turn every 409 into "exists".
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

import requests
from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.core.exceptions import AzureError
from azure.core.pipeline import Pipeline
from azure.core.pipeline.transport import RequestsTransport
from azure.core.rest import HttpRequest, HttpResponse
from azure.storage.blob import ContainerClient
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from txstore.checksum import Buffer
from txstore.errors import ConfigError, StoreError, TxStoreError
from txstore.lean_http import SettledEnvironment, sendable
from txstore.request_cap import THROTTLED, max_requests, request_slot
from txstore_azure.config import AzureConfig
from txstore_azure.errors import Effect, translate_error, translate_status, unclear

API_VERSION = "2021-12-02"
"""Fixed, so that a newer SDK does not change what is said on the wire; it has blocks of 4000 MiB."""

_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10
_SIGNATURE = re.compile(r"([?&]sig=)[^&\s]+", re.IGNORECASE)
_CODE = re.compile(rb"<Code>(\w{1,100})</Code>")

_lock = threading.Lock()


def _after_fork() -> None:
    # A lock that another thread held at the fork would never be given back in the child.
    global _lock  # noqa: PLW0603 - the only way to replace it
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class Body:
    """A buffer that is sent in pieces, without a copy, as often as it is asked for.

    Sent in one piece it would have to be taken whole within the connection timeout.
    """

    def __init__(self, data: Sequence[Buffer]) -> None:
        self._data = data
        self._size = sum(memoryview(one).nbytes for one in data)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Buffer]:
        return sendable(self._data, _PIECE_BYTES)


@dataclass(frozen=True, slots=True)
class Blob:
    """Where an object lies: its key in the store, and its URL without a signature."""

    key: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, and what it means for the errors.

    Attributes:
        method: HTTP method.
        url: Without query and signature.
        key: The object concerned, or "".
        doing: What is asked, in a few words.
        expect: The one status that means success.
        effect: What it may have done when the answer is unclear.
        query: Query parameters, not escaped.
        headers: Besides those that every request has.
        body: What is sent, or None.
    """

    method: str
    url: str
    key: str
    doing: str
    expect: int
    effect: Effect = Effect.NONE
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | None = None

    def failed(self, error: Exception) -> TxStoreError:
        """The error for an exception of the SDK."""
        return translate_error(error, key=self.key, doing=self.doing, effect=self.effect)

    def refused(self, status: int, code: str, headers: Mapping[str, str]) -> TxStoreError:
        """The error for an unexpected answer."""
        return translate_status(status, code, headers, key=self.key, doing=self.doing, effect=self.effect)

    def garbled(self, what: str) -> StoreError:
        """The error for a success that does not look like the service's."""
        return unclear(self.effect)(f"{self.doing} was answered {what}", key=self.key).because("garbled reply")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, read to its end."""

    headers: Mapping[str, str]
    body: bytes


class Client:
    """Requests to one container. Thread-safe; makes its connections in each process anew.

    Args:
        config: Account, container and limits.
    """

    def __init__(self, config: AzureConfig) -> None:
        self._config = config
        self._held: tuple[int, Pipeline[HttpRequest, HttpResponse], requests.Session] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config, "_held": None}

    @property
    def container_url(self) -> str:
        """Without a signature."""
        return f"{self._config.account.endpoint}/{self._config.container}"

    def blob_url(self, name: str) -> str:
        """URL of a blob, percent-escaped as the SDK does it."""
        return f"{self.container_url}/{quote(name, safe='~/')}"

    def send(self, request: Request) -> Reply:
        """Send one request and read the whole answer.

        Raises:
            TxStoreError: Any answer but status `request.expect`, by the table of `txstore_azure.errors`.
        """
        with self.stream(request) as response:
            try:
                # Read even where nothing is expected: a connection with an unread answer is not used again.
                return Reply(response.headers, response.read())
            except AzureError as error:
                raise request.failed(error) from error

    @contextmanager
    def stream(self, request: Request) -> Iterator[HttpResponse]:
        """As `send`, but the block reads the body; it holds one of the process's slots while it does."""
        with request_slot() as slot:
            try:
                response = self._run(request)
                if response.status_code == 401 and self._config.account.credential_expires:
                    # Refused before anything was done; the SDK has dropped the token and gets a new one.
                    response.read()
                    response = self._run(request)
            except AzureError as error:
                raise request.failed(error) from error
            try:
                if response.status_code in THROTTLED:
                    slot.throttled()
                if response.status_code != request.expect:
                    raise request.refused(response.status_code, _code(response), response.headers)
                yield response
            finally:
                response.close()

    def _run(self, request: Request) -> HttpResponse:
        headers: dict[str, str] = {"x-ms-version": API_VERSION, "Accept": "application/xml", **request.headers}
        if request.body is not None:
            headers["Content-Length"] = str(len(request.body))
            headers["Content-Type"] = "application/octet-stream"
        # A blank as a plus sign is not what the SDK signs.
        query = "?" + urlencode(request.query, quote_via=quote) if request.query else ""
        content: Any = request.body or None
        signed = HttpRequest(request.method, request.url + query, headers=headers, content=content)
        response: HttpResponse = self._pipeline().run(signed, stream=True).http_response
        return response

    def close(self) -> None:
        """Close the connections of this process; the next request makes new ones."""
        with _lock:
            held, self._held = self._held, None
        if held and held[0] == os.getpid():
            held[2].close()

    def _pipeline(self) -> Pipeline[HttpRequest, HttpResponse]:
        held = self._held
        if held is None or held[0] != os.getpid():
            with _lock:
                held = self._held
                if held is None or held[0] != os.getpid():
                    session = _session(max_requests())
                    held = self._held = (os.getpid(), _make_pipeline(self._config, session), session)
        return held[1]


def body_of(response: HttpResponse) -> Any:
    """The body as it comes over the wire, unread: a ``urllib3.HTTPResponse``."""
    return response.internal_response.raw  # type: ignore[attr-defined]


def _code(response: HttpResponse) -> str:
    """The service's error code; an answer to HEAD has it in a header only."""
    try:
        body = response.read()
    except AzureError:
        body = b""
    found = _CODE.search(body[:4096])
    return response.headers.get("x-ms-error-code", "") or (found[1].decode("ascii") if found else "")


class _HideSignatures(logging.Filter):
    """urllib3 logs whole URLs at level DEBUG, and a SAS is part of the URL."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass, without signatures."""
        if isinstance(record.args, tuple):
            record.args = tuple(_SIGNATURE.sub(r"\1***", one) if isinstance(one, str) else one for one in record.args)
        return True


_hide_signatures = _HideSignatures()


class _Session(SettledEnvironment, requests.Session):
    pass


def _session(connections: int) -> requests.Session:
    # Added once, however often: it is always the same filter.
    logging.getLogger("urllib3.connectionpool").addFilter(_hide_signatures)
    session = _Session()
    # Without any an entry of .netrc for the host would replace the signature.
    session.auth = _keep_signature
    never = Retry(total=False, redirect=False, raise_on_status=False)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=connections, max_retries=never))
    return session


def _keep_signature(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _make_pipeline(config: AzureConfig, session: requests.Session) -> Pipeline[HttpRequest, HttpResponse]:
    try:
        client = ContainerClient(
            config.account.endpoint,
            config.container,
            credential=_credential(config),
            transport=RequestsTransport(
                session=session,
                connection_timeout=config.connect_timeout_s,
                read_timeout=config.read_timeout_s,
                connection_data_block_size=_CHUNK_BYTES,
            ),
            retry_total=0,
            permit_redirects=False,
        )
    except ValueError as error:
        # For one: a token credential over http.
        raise ConfigError(f"the SDK refuses these settings: {type(error).__name__}: {error}") from error
    # The one private name that is used: there is no public way to send a signed request of one's own.
    return client._pipeline  # noqa: SLF001


def _credential(config: AzureConfig) -> Any:
    account = config.account
    if account.credential is not None:
        return account.credential
    if account.key:
        return AzureNamedKeyCredential(account.name, account.key)
    if account.sas_token:
        return AzureSasCredential(account.sas_token)
    if account.anonymous:
        return None
    try:
        from azure.identity import DefaultAzureCredential  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(
            "no credentials for the storage account",
            next_step="set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, "
            "or pip install azure-identity",
        ) from error
    return DefaultAzureCredential()
