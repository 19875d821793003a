"""The machine in neutral terms: what matters to a number, nothing that names a host or a path."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe(disk: str, tmpfs: str) -> dict[str, Any]:
    """Cores, memory, kernel, file systems, versions, and the load when the run ended."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release().partition("-")[0],
        "file_systems": {"disk": _file_system(disk), "tmpfs": _file_system(tmpfs)},
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("txstore", "torch")},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _file_system(path: str) -> str:
    """Type of the file system that holds `path`: that of the longest mount point above it."""
    path = os.path.realpath(path)
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(above, key=lambda mount: len(mount[0]))[1]
