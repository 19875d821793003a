"""`Metrics`: the observer, and two ways to export what it counts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, get_args

from txstore.errors import ConfigError, describe
from txstore.events import (
    ChecksumFailed,
    Committed,
    Depth,
    Event,
    Proved,
    Restored,
    RestoreFailed,
    SaveFailed,
    SaveRequested,
    SaveSkipped,
    Staged,
    StepRecorded,
    Verified,
    Written,
)
from txstore.metrics.instruments import Instruments
from txstore.metrics.standing import Standing

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

VERIFIED_BY: frozenset[Depth] = frozenset({"full", "drill"})
"""Depths of `Verified` that make a checkpoint count as verified; a proved resume always does."""


class Metrics:
    """Feeds Prometheus metrics from events; thread-safe.

    Each rank is a process with numbers of its own; across ranks take sums of bytes and counts, maxima of the rest.

    Args:
        registry: Where the metrics are registered; by default a new one, so that two runs in one process do not clash.
        labels: Fixed labels for every sample, such as ``{"run": "run-1", "rank": "0"}``: needed where one node's ranks
            write text files, or several runs share a registry's scrape.
        verified_by: Depths of verification that count for the verified step.
        textfile: Written again after every event, for node_exporter's textfile collector; must end in ``.prom``.
        textfile_every_s: A recorded step alone writes the file at most this often, in seconds.

    Raises:
        ConfigError: prometheus_client is not installed, a label or the file's name is wrong, or the registry has
            these metrics already.
    """

    def __init__(
        self,
        *,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
        verified_by: Iterable[Depth] = VERIFIED_BY,
        textfile: str | os.PathLike[str] | None = None,
        textfile_every_s: float = 10.0,
    ) -> None:
        self._lock = threading.RLock()
        self._verified_by = frozenset(verified_by)
        self._textfile = None if textfile is None else os.fspath(textfile)
        self._textfile_every_s = textfile_every_s
        self._written_s = -float("inf")
        self._servers: list[tuple[WSGIServer, threading.Thread]] = []
        self._closed = False
        self._told = False
        if not self._verified_by <= set(get_args(Depth)):
            raise ConfigError(f"verified_by={sorted(self._verified_by)} is not among {get_args(Depth)}")
        if self._textfile is not None and not self._textfile.endswith(".prom"):
            raise ConfigError("node_exporter reads only files that end in .prom", key=self._textfile)
        self._standing = Standing()
        self._instruments = Instruments(labels or {}, registry)
        self.registry: CollectorRegistry = self._instruments.registry
        self._publish()
        self._refresh(every_s=0.0)

    def __call__(self, event: Event) -> None:
        """Count one event."""
        with self._lock:
            self._on_save(event)
            self._on_resume(event)
            self._publish()
            self._refresh(every_s=self._textfile_every_s if isinstance(event, StepRecorded) else 0.0)

    def _on_save(self, event: Event) -> None:
        m, at = self._instruments, self._standing
        match event:
            case StepRecorded():
                at.training_step = event.step or 0
            case SaveRequested():
                at.requested(event)
            case SaveSkipped():
                at.in_flight.discard(event.checkpoint)
                m.skipped.labels(event.reason).inc()
            case Staged():
                m.staging.observe(event.capture_s + event.copy_s)
                m.waited.inc(event.waited_s)
            case Written():
                m.bytes.inc(event.bytes)
            case Committed():
                at.committed(event)
                m.save.observe(event.save_s)
                m.lag.observe(event.lag_s)
            case SaveFailed():
                at.in_flight.discard(event.checkpoint)
                at.consecutive_failures = event.consecutive
                m.failures.labels(event.phase).inc()
            case _:
                pass

    def _on_resume(self, event: Event) -> None:
        m, at = self._instruments, self._standing
        match event:
            case Verified() if event.depth in self._verified_by or not event.ok:
                at.verified(event.step, event.stood_at_s, ok=event.ok)
            case Restored():
                at.restored(event)
                m.restore.observe(event.restore_s)
                m.resized.inc(event.saved_world_size != event.world_size)
            case RestoreFailed():
                m.restore_failures.labels(event.reason).inc()
            case ChecksumFailed():
                m.checksum_failures.inc()
            case Proved():
                at.verified(event.step, None, ok=event.ok)
                m.reprocessed.inc(event.reprocessed_samples or 0)
                if event.loss_delta is not None:
                    m.loss_delta.set(event.loss_delta)
            case _:
                pass

    def _publish(self) -> None:
        m, at = self._instruments, self._standing
        m.in_progress.set(len(at.in_flight))
        m.training_step.set(at.training_step)
        m.committed_step.set(at.committed_step)
        m.committed_at.set(at.committed_at_s)
        m.verified_step.set(at.verified_step)
        m.verified_at.set(at.verified_at_s)
        m.consecutive_failures.set(at.consecutive_failures)
        m.since_commit.set(at.saves_since_commit)

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve the metrics over HTTP in a daemon thread until `close`.

        Args:
            port: 0 takes a free one.
            host: Loopback by default: metrics have no password. Name an address for Prometheus on another machine.

        Returns:
            The port.

        Raises:
            OSError: The address is taken, or not of this machine.
        """
        from prometheus_client import start_http_server  # noqa: PLC0415 - an extra

        with self._lock:
            server, thread = start_http_server(port, host, self.registry)
            self._servers.append((server, thread))
            return int(server.server_port)

    def close(self, *, remove_textfile: bool = True) -> None:
        """Stop serving, and remove the text file: a run that has ended must not raise alerts about its age.

        Args:
            remove_textfile: False keeps it, with the last numbers: after a failure. A killed run keeps it too.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            servers, self._servers = self._servers, []
            if self._textfile is not None:
                if remove_textfile:
                    _remove(self._textfile)
                else:
                    self._write(self._textfile)
        for server, thread in servers:
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(remove_textfile=error is None)

    def _refresh(self, *, every_s: float) -> None:
        now_s = time.monotonic()
        if self._textfile is None or self._closed or now_s - self._written_s < every_s:
            return
        self._written_s = now_s  # also if it fails: a full disk must not be tried at every step
        self._write(self._textfile)

    def _write(self, path: str) -> None:
        from prometheus_client import write_to_textfile  # noqa: PLC0415 - an extra

        try:
            write_to_textfile(path, self.registry)
        except OSError as error:
            # Events come from the training loop, too: a full disk must not end the run.
            log.log(logging.DEBUG if self._told else logging.WARNING, "metrics were not written: %s", describe(error))
            self._told = True


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        pass  # nothing has happened yet
