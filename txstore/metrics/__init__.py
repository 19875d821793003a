"""What to watch of saves and resumes, for Prometheus.

Every name, what it means and what to do about it is in docs/observability/README.md.
"""

from txstore.metrics.observer import VERIFIED_BY, Metrics

__all__ = ["VERIFIED_BY", "Metrics"]
