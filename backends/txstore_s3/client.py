"""The SDK client: one for each process, made when it is first needed, with the SDK's own retries off."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.session import Session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.session import Session as CoreSession

from txstore.errors import ConfigError, TxStoreError
from txstore.redact import redact_text
from txstore.request_cap import THROTTLED, max_requests, request_slot
from txstore_s3.config import S3Config, check_endpoint
from txstore_s3.errors import EXPIRED, SDK_ERRORS, Call, code_of, translate
from txstore_s3.wire import Answer, Request, Wire

_log = logging.getLogger(__name__)
_DEFAULT_REGION = "us-east-1"

_making = threading.Lock()
"""Held while a client is made: a session that stores share does not bear two threads at that."""


def _after_fork() -> None:
    global _making  # noqa: PLW0603 - another thread of the parent may hold it for ever
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class _Connection:
    pid: int
    client: Any
    wire: Wire
    credentials: Any  # as they were at the beginning
    amazon: bool


class Clients:
    """The client of this process, and every request made with it.

    Pickles to its configuration; a forked child makes its own client, since connections and locks cannot be shared.
    """

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._made: _Connection | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Clients, (self.config,)

    @property
    def amazon(self) -> bool:
        """Whether the endpoint is Amazon's own: there listings are known to be in order.

        Raises:
            ConfigError: As `request`.
        """
        return self._get().amazon

    def _get(self) -> _Connection:
        made = self._made
        if made is not None and made.pid == os.getpid():
            return made
        if made is not None:
            self._lock = threading.Lock()  # the parent may have held it while it forked
        with self._lock:
            if self._made is None or self._made.pid != os.getpid():
                self._made = _connect(self.config)
            return self._made

    @contextmanager
    def request(self, call: Call) -> Iterator[Any]:
        """The client, for one request inside the block; what the SDK raises becomes an error of the contract.

        Raises:
            ConfigError: The configuration that the SDK finds is unusable.
            StoreError: See `translate`.
        """
        with self._connected(call) as connection:
            yield connection.client

    @contextmanager
    def answer(self, call: Call, request: Request) -> Iterator[Answer]:
        """The service's success, for a block that reads its body.

        Raises:
            ConfigError, StoreError: As `request`.
        """
        with self._connected(call) as connection:
            answer = connection.wire.send(request)
            try:
                yield answer
            finally:
                answer.raw.close()  # unless it was read to its end, the connection ends too

    def tell(self, call: Call, request: Request) -> Mapping[str, str]:
        """The headers of the service's success.

        Raises:
            ConfigError, StoreError: As `request`.
        """
        with self.answer(call, request) as answer:
            return answer.headers

    @contextmanager
    def _connected(self, call: Call) -> Iterator[_Connection]:
        with request_slot() as slot:
            connection = self._get()
            try:
                yield connection
            except TxStoreError:
                raise  # some of ours are OSErrors too
            except SDK_ERRORS as error:
                status, code = code_of(error)
                if status in THROTTLED or code == "SlowDown":
                    slot.throttled()
                refreshed = code in EXPIRED and self._refreshed(connection.client)
                raise translate(error, call, refreshed=refreshed) from error
            except RecursionError:
                # botocore asks the bucket for its region when it is redirected, and is redirected again.
                raise ConfigError(
                    f"{call.operation}: the endpoint redirects every request",
                    key=call.key,
                    next_step="give its final address as endpoint_url or AWS_ENDPOINT_URL, https:// included",
                ) from None

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        with self._lock:
            made, self._made = self._made, None
        if made is not None and made.pid == os.getpid():
            made.client.close()

    def _refreshed(self, client: Any) -> bool:
        """After "expired": make a client anew; whether it has other credentials than the one that was refused.

        A thread that comes second finds them already replaced.
        """
        with self._lock:
            made = self._made
            if made is None or made.client is not client:
                return True
            try:
                new = _connect(self.config)
            except TxStoreError:
                return False  # "expired" says more than this
            if new.credentials == made.credentials:
                new.client.close()
                return False
            self._made = new
        _log.warning("credentials for %s had expired and were loaded again", self.config.url)
        return True


def _connect(config: S3Config) -> _Connection:
    try:
        return _make(config)
    except TxStoreError:
        raise
    except SDK_ERRORS as error:
        raise translate(error, Call("configuration", "")) from error
    except ValueError as error:
        raise ConfigError(
            f"not a usable endpoint: {redact_text(str(error))}",
            next_step="write endpoint_url or AWS_ENDPOINT_URL as http://host:port or https://host",
        ) from error


def _make(config: S3Config) -> _Connection:
    with _making:
        session = _session(config)
        style, sign = config.addressing_style, config.sign_payload
        # Environment and profile may name endpoint and style; only the SDK knows where to look.
        client = _client(session, config, style, sign=sign)
        endpoint = client.meta.endpoint_url
        check_endpoint(endpoint)
        amazon = (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        given = (client.meta.config.s3 or {}).get("addressing_style")
        wanted = style or given or ("auto" if amazon else "path")
        signed = sign if sign is not None else endpoint.startswith("http:")
        # What a checksum goes along with is not signed as well, unless that is asked for: the server compares.
        sign_body = False if sign is None and config.checksum == "crc32c" else None
        if (wanted, signed) != (given, sign):
            client.close()
            client = _client(session, config, wanted, sign=signed)
        credentials = None if config.anon else session.get_credentials()
        frozen = credentials.get_frozen_credentials() if credentials is not None else None
        bucket = {"Bucket": config.bucket, **config.owner}
        return _Connection(os.getpid(), client, Wire(client, bucket, sign_body=sign_body), frozen, amazon)


def _session(config: S3Config) -> Session:
    """The session of the option, or boto3's default one if the program has set it up, or one of our own."""
    if config.session is not None:
        return config.session
    if boto3.DEFAULT_SESSION is not None and config.profile is None and config.key is None:
        return boto3.DEFAULT_SESSION
    core = CoreSession(profile=config.profile)
    # The description of the API is large: read once for each process, not for each client.
    loader = _loader(os.getpid(), core.get_config_variable("data_path"))
    core.register_component("data_loader", loader)
    if config.key is not None:
        core.set_credentials(config.key, config.secret, config.token)
    session = Session(botocore_session=core)
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds its folder once more
    return session


@lru_cache(maxsize=64)
def _loader(pid: int, data_path: str | None) -> Any:  # noqa: ARG001 - a fork's child has its own
    return create_loader(data_path)


def _client(session: Session, config: S3Config, style: str | None, *, sign: bool | None) -> Any:
    s3 = {"addressing_style": style, "payload_signing_enabled": sign}
    settings = Config(
        # A repeated conditional write is told "exists" by its own first attempt: txstore.retry repeats, nobody else.
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=config.connect_timeout_s,
        read_timeout=config.read_timeout_s,
        max_pool_connections=max_requests(),
        tcp_keepalive=True,
        # Not "when_supported": trailers break stores that know none. We send our own checksums as plain headers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version=UNSIGNED if config.anon else None,
        s3={name: value for name, value in s3.items() if value is not None},
        user_agent_extra="txstore",
    )
    return session.client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region or session.region_name or _DEFAULT_REGION,
        verify=config.verify,
        config=settings,
    )
