"""The DCP pair: `StorageWriter` for ``dcp.save`` and ``dcp.async_save``, `StorageReader` for ``dcp.load``.

Implemented on DCP's abstract classes, not on `FileSystemWriter`, whose helper threads swallow write errors.
"""

from txstore.dcp.planner import StrictLoadPlanner
from txstore.dcp.reader import StorageReader
from txstore.dcp.snapshot import Snapshot, SnapshotBuffers, estimate_bytes
from txstore.dcp.writer import StorageWriter

__all__ = [
    "Snapshot",
    "SnapshotBuffers",
    "StorageReader",
    "StorageWriter",
    "StrictLoadPlanner",
    "estimate_bytes",
]
