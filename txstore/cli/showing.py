"""``txstore show``: what the manifest says, and the first tensors of the index."""

from __future__ import annotations

from collections.abc import Mapping

from txstore.catalog import find, newest
from txstore.cli.listing import entry_document
from txstore.cli.outcome import OK, Outcome
from txstore.cli.render import Table, count_text, size_text
from txstore.decisions import read_index, read_manifest
from txstore.index import GridRecord, Index, ObjectRecord, TensorRecord
from txstore.manifest import Decision, Manifest
from txstore.shards.names import unescape
from txstore.store import Store

ALL_TENSORS = -1


def show(store: Store, checkpoint: str | None, *, tensors: int) -> Outcome:
    """One checkpoint, the newest if none is named; `tensors` items of its index, none read if that is 0."""
    decision = newest(store) if checkpoint is None else find(store, checkpoint)
    manifest = read_manifest(store, decision)
    items: list[dict[str, object]] = []
    if tensors:
        index = read_index(store, decision, manifest)
        shown = index.items if tensors == ALL_TENSORS else index.items[:tensors]
        items = [_item(index, item, manifest.index.key) for item in shown]
    left = manifest.totals.tensors + manifest.totals.objects - len(items)
    document: dict[str, object] = {
        "checkpoint": {
            **entry_document(decision, "committed"),
            "created_at": manifest.created_at,
            "software": manifest.software,
            "progress": _progress(manifest),
            "topology": manifest.description.topology,
            "fingerprints": manifest.description.fingerprints,
            "settings": manifest.description.settings,
            "accepted": list(manifest.description.accepted),
            "manifest": _file(decision),
            "index": {"key": manifest.index.key, "bytes": manifest.index.size, "sha256": manifest.index.sha256},
        },
        "shards": [
            {"key": shard.key, "rank": shard.rank, "bytes": shard.size, "crc32c": f"{shard.crc32c:08x}"}
            for shard in manifest.shards
        ],
        "items": items,
        "items_left_out": left,
    }
    text: list[str | Table] = [*_lines(decision, manifest), "", _shard_table(manifest)]
    if items:
        text += ["", _item_table(items)]
    if items and left:
        text.append(f"{left} more; --tensors {ALL_TENSORS} shows all")
    return Outcome(OK, document, tuple(text))


def _progress(manifest: Manifest) -> dict[str, int] | None:
    progress = manifest.description.progress
    if progress is None:
        return None
    return {
        "global_step": progress.global_step,
        "epoch": progress.epoch,
        "micro_step": progress.micro_step,
        "consumed_samples": progress.consumed_samples,
    }


def _file(decision: Decision) -> dict[str, object] | None:
    ref = decision.manifest
    return {"key": ref.key, "bytes": ref.size, "sha256": ref.sha256} if ref else None


def _item(index: Index, item: TensorRecord | GridRecord | ObjectRecord, key: str) -> dict[str, object]:
    name = unescape(item.name, key) if index.escaped else item.name
    if isinstance(item, ObjectRecord):
        return {"name": name, "kind": "object", "dtype": None, "shape": None, "chunks": 1, "bytes": item.length}
    chunks = item.chunks
    return {
        "name": name,
        "kind": "tensor",
        "dtype": item.dtype,
        "shape": list(item.shape),
        "chunks": len(chunks),
        "bytes": sum(chunk.length for chunk in chunks),
    }


def _lines(decision: Decision, manifest: Manifest) -> list[str]:
    totals, progress = manifest.totals, manifest.description.progress
    facts = {
        "checkpoint": f"{decision.checkpoint} (slot {decision.slot})",
        "step": "none" if decision.step is None else str(decision.step),
        "decided": f"{decision.decided_at} by {decision.writer}",
        "transaction": decision.txn,
        "size": f"{size_text(totals.bytes)} in {count_text(totals.shards, 'shard')} "
        f"of {count_text(totals.world_size, 'rank')}",
        "holds": f"{count_text(totals.tensors, 'tensor')}, {count_text(totals.objects, 'object')}",
        "progress": f"step {progress.global_step}, epoch {progress.epoch}, micro step {progress.micro_step}, "
        f"{count_text(progress.consumed_samples, 'sample')}"
        if progress
        else "not recorded",
        "topology": _pairs(manifest.description.topology),
        "fingerprints": _pairs(manifest.description.fingerprints),
        "settings": _pairs(manifest.description.settings),
        "accepted": "; ".join(manifest.description.accepted) or "nothing",
        "software": _pairs(manifest.software),
        "manifest": decision.manifest.key if decision.manifest else "",
        "index": f"{manifest.index.key} ({size_text(manifest.index.size)})",
    }
    width = max(map(len, facts))
    return [f"{name.ljust(width)}  {value}" for name, value in facts.items()]


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(values.items())) or "not recorded"


def _shard_table(manifest: Manifest) -> Table:
    rows = tuple(
        (str(shard.rank), size_text(shard.size), f"{shard.crc32c:08x}", shard.key) for shard in manifest.shards
    )
    return Table(("RANK", "SIZE", "CRC32C", "SHARD"), rows, frozenset({"RANK", "SIZE"}))


def _item_table(items: list[dict[str, object]]) -> Table:
    rows = tuple(
        (
            str(item["name"]),
            str(item["dtype"] or item["kind"]),
            "" if item["shape"] is None else str(item["shape"]),
            str(item["chunks"]),
            size_text(int(str(item["bytes"]))),
        )
        for item in items
    )
    return Table(("NAME", "DTYPE", "SHAPE", "CHUNKS", "SIZE"), rows, frozenset({"CHUNKS", "SIZE"}))
