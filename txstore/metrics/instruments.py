"""The metrics by name: types, buckets, closed label values, and how they reach a registry."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from txstore.errors import ConfigError
from txstore.events import RestoreReason, SavePhase, SkipReason

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

SAVE_BUCKETS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Buckets of saves, lags and restores: from a test's second to the hour after which nobody waits."""

STAGING_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Buckets of the time that training stands still for a copy: a GiB is a fraction of a second."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = frozenset({"reason", "phase", "le"})


class Instruments:
    """All metrics, in a registry of their own that is seen through `registry`.

    Args:
        labels: Fixed labels of every sample.
        registry: Where they are seen; None for a new one.

    Raises:
        ConfigError: prometheus_client is not installed, a label cannot be one, or the registry has these names.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry | None) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(
                "metrics need a package that is not installed: prometheus_client",
                next_step="pip install '.[metrics]' in txstore's checkout",
            ) from error
        for name in labels:
            if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
                raise ConfigError(f"no label for every sample: {name!r}")
        own = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, registry=own)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = SAVE_BUCKETS_S) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=own)

        def counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
            made = Counter(name, text, [label] if label else [], registry=own)
            for value in values:
                made.labels(value)  # at 0 from the start: increase() does not see a series that begins at 1
            return made

        self.save = seconds("checkpoint_save_duration_seconds", "Committed saves: end of waiting to commit.")
        self.staging = seconds(
            "checkpoint_async_staging_seconds", "Training stood still for capture and copy.", STAGING_BUCKETS_S
        )
        self.bytes = counter("checkpoint_bytes_total", "Bytes of shards that this rank wrote.")
        self.lag = seconds("checkpoint_commit_lag_seconds", "Committed saves: request to commit, waiting included.")
        self.in_progress = gauge("checkpoint_inprogress_count", "Saves asked for and not ended.")
        self.committed_step = gauge("checkpoint_last_committed_step", "Newest committed step.")
        self.restore = seconds("checkpoint_restore_duration_seconds", "Restores: choosing to validation.")
        self.restore_failures = counter(
            "checkpoint_restore_failures_total", "Recovery points not restored.", "reason", get_args(RestoreReason)
        )
        self.checksum_failures = counter(
            "checkpoint_checksum_failures_total", "Objects with other bytes than committed."
        )
        self.reprocessed = counter("checkpoint_reprocessed_samples_total", "Samples trained on again after a resume.")
        self.loss_delta = gauge(
            "resume_loss_delta", "First loss after the last resume, minus the last one before the save."
        )
        self.resized = counter("resume_world_size_change_total", "Resumes with another world size than saved.")
        # Beyond the mission's twelve: what its policy and its alert need.
        self.skipped = counter(
            "checkpoint_saves_skipped_total", "Saves that the policy left out.", "reason", get_args(SkipReason)
        )
        self.failures = counter("checkpoint_save_failures_total", "Failed saves.", "phase", get_args(SavePhase))
        self.consecutive_failures = gauge("checkpoint_consecutive_failures", "Failed saves since the last commit.")
        self.since_commit = gauge(
            "checkpoint_saves_since_commit", "Saves asked for since the newest committed one was."
        )
        self.waited = counter("checkpoint_waited_seconds_total", "Training stood still for an earlier save.")
        self.committed_at = gauge(
            "checkpoint_last_committed_timestamp_seconds", "When training stood at the newest committed step."
        )
        self.verified_step = gauge("checkpoint_last_verified_step", "Newest step committed and verified or proved.")
        self.verified_at = gauge(
            "checkpoint_last_verified_timestamp_seconds", "When training stood at the newest verified step."
        )
        self.training_step = gauge("training_step", "The step that training has reached.")

        self.registry = CollectorRegistry() if registry is None else registry
        try:
            self.registry.register(_Labelled(own, labels))
        except ValueError as error:
            raise ConfigError(
                f"this registry has metrics of these names already: {error}",
                next_step="give each run a registry of its own, or none",
            ) from error


class _Labelled:
    """The metrics of a registry with fixed labels on every sample.

    Left out are the creation times that the client adds for each counter and histogram: twice the series, and
    nobody asked.
    """

    def __init__(self, inner: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._inner = inner
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [
                sample._replace(labels={**self._labels, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric

    def describe(self) -> Iterator[Metric]:
        """What `register` looks at to find names that are taken."""
        return self.collect()
