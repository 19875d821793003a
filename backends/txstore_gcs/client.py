"""HTTP to the JSON API: one authorised session per process, explicit timeouts, no retries, a cap on requests.

The SDK's own upload and download calls are not used: they look at the bucket first, copy bodies into chunks and
retry below `txstore.retry`. What stays the SDK's is where the endpoint is and how a request is signed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import requests
from google.auth.credentials import Credentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from requests.adapters import HTTPAdapter

from txstore.errors import ConfigError
from txstore.lean_http import SettledEnvironment
from txstore.request_cap import max_requests, request_slot
from txstore_gcs.config import GcsConfig, check_endpoint
from txstore_gcs.credentials import load
from txstore_gcs.errors import throttles
from txstore_gcs.upload import Body

_MTLS_ENDPOINT = "https://storage.mtls.googleapis.com"


@dataclass(slots=True, kw_only=True)
class Call:
    """One request. `path` begins with a slash and is percent-encoded already."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Connected:
    pid: int
    session: AuthorizedSession
    endpoint: str


class _Session(SettledEnvironment, AuthorizedSession):
    pass


class _Adapter(HTTPAdapter):
    """Closes its connections when it is told to: urllib3 leaves them to the garbage collector."""

    def close(self) -> None:
        for key in list(self.poolmanager.pools.keys()):
            if (pool := self.poolmanager.pools.get(key)) is not None:
                pool.close()
        super().close()


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


def _read_refusal(response: requests.Response, *_args: object, **_options: object) -> None:
    """Read an answer that AuthorizedSession drops when it signs again: unread, it keeps its connection open."""
    if response.status_code == 401:
        _ = response.content


class Client:
    """Sends requests of one store. Thread-safe; picklable; makes its session lazily, anew after fork.

    Args:
        config: Endpoint, credentials and timeouts.
    """

    def __init__(self, config: GcsConfig) -> None:
        self._config = config
        self._connected: _Connected | None = None
        self._lock = threading.Lock()
        self._lock_pid = os.getpid()

    def __getstate__(self) -> dict[str, object]:
        return {"config": self._config}

    def __setstate__(self, state: dict[str, GcsConfig]) -> None:
        self.__init__(state["config"])  # type: ignore[misc]

    def call(self, call: Call) -> Reply:
        """Send and read the whole answer, whatever its status."""
        with self.stream(call, accept_encoding="gzip") as response:
            return Reply(response.status_code, response.headers, response.content)

    @contextmanager
    def stream(self, call: Call, accept_encoding: str = "identity") -> Iterator[requests.Response]:
        """Send; the body of the answer is read by the block, from ``raw``."""
        connected = self._connect()
        params = dict(call.params)
        if self._config.user_project:
            params["userProject"] = self._config.user_project
        headers = {"Accept-Encoding": accept_encoding, "Cache-Control": "no-cache", **call.headers}
        with request_slot() as slot:
            response: requests.Response = connected.session.request(  # type: ignore[no-untyped-call]
                call.method,
                connected.endpoint + call.path,
                params=params,
                data=call.body,
                headers=headers,
                timeout=(self._config.connect_timeout_s, self._config.read_timeout_s),
                stream=True,
                allow_redirects=False,  # a redirected POST would become a GET
            )
            try:
                if throttles(response):
                    slot.throttled()
                yield response
            finally:
                response.close()

    def close(self) -> None:
        """Close idle connections; the next call makes a new session."""
        connected, self._connected = self._connected, None
        if connected is not None and connected.pid == os.getpid():
            connected.session.close()  # type: ignore[no-untyped-call]

    def _connect(self) -> _Connected:
        connected = self._connected
        if connected is not None and connected.pid == os.getpid():
            return connected
        if self._lock_pid != os.getpid():
            # Held at the fork by a thread that does not exist here, it would never be free.
            self._lock, self._lock_pid = threading.Lock(), os.getpid()
        with self._lock:
            connected = self._connected
            if connected is None or connected.pid != os.getpid():
                connected = self._connected = self._make()
            return connected

    def _make(self) -> _Connected:
        credentials = load(self._config)
        endpoint = _endpoint(self._config, credentials)
        session = _Session(credentials, max_refresh_attempts=1)
        for scheme in ("https://", "http://"):
            session.mount(scheme, _Adapter(pool_maxsize=max_requests(), max_retries=0))
        session.auth = _as_it_is  # else a `default` entry in ~/.netrc would replace the Authorization header
        session.hooks["response"].append(_read_refusal)
        session.configure_mtls_channel()  # type: ignore[no-untyped-call]
        if session.is_mtls and endpoint == "https://storage.googleapis.com":
            endpoint = _MTLS_ENDPOINT
        return _Connected(os.getpid(), session, endpoint)


def _endpoint(config: GcsConfig, credentials: Credentials) -> str:
    """Where the SDK would send requests: option, ``STORAGE_EMULATOR_HOST``, universe, else the public service."""
    options = {"api_endpoint": config.endpoint_url} if config.endpoint_url else None
    try:
        sdk = storage.Client(project=config.project, credentials=credentials, client_options=options)
    except ValueError as error:
        raise ConfigError(f"the SDK refuses this configuration: {error}") from error
    endpoint = str(sdk.api_endpoint)
    sdk.close()
    # STORAGE_EMULATOR_HOST is often given as host:port, which other SDKs accept.
    endpoint = endpoint if "://" in endpoint else f"http://{endpoint}"
    check_endpoint(endpoint)
    return endpoint.rstrip("/")
