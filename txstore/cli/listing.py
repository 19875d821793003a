"""``txstore ls`` and ``txstore latest``."""

from __future__ import annotations

from txstore.catalog import Entry, State, entries, newest
from txstore.cli.outcome import OK, Outcome, failure
from txstore.cli.render import Table, size_text
from txstore.decisions import read_store_format
from txstore.errors import CheckpointNotFound
from txstore.manifest import Decision
from txstore.redact import redact
from txstore.store import Store


def entry_document(decision: Decision, state: State) -> dict[str, object]:
    """One decision in JSON; the numbers of an abort are null."""
    totals = decision.totals
    return {
        "checkpoint": decision.checkpoint,
        "slot": decision.slot,
        "step": decision.step,
        "state": state,
        "bytes": totals.bytes if totals else None,
        "shards": totals.shards if totals else None,
        "tensors": totals.tensors if totals else None,
        "objects": totals.objects if totals else None,
        "world_size": totals.world_size if totals else None,
        "decided_at": decision.decided_at,
        "writer": decision.writer,
        "txn": decision.txn,
    }


def ls(store: Store, url: str, *, everything: bool) -> Outcome:
    """The commits that stand; with `everything` every decision."""
    found = entries(store)
    shown = [entry for entry in found if everything or entry.state == "committed"]
    document: dict[str, object] = {"checkpoints": [entry_document(entry.decision, entry.state) for entry in shown]}
    if not found and not read_store_format(store):
        error = CheckpointNotFound(
            f"no store at {redact(url)}: nothing was ever saved there",
            key=redact(url),
            next_step="check the URL, or save the first checkpoint",
        )
        absent = failure(error, url)
        return Outcome(absent.code, {**document, **absent.document}, notes=absent.notes)
    if not shown:
        hint = f"; --all shows {len(found)} other decisions" if found else ""
        return Outcome(OK, document, notes=(f"no committed checkpoint in {redact(url)}{hint}",))
    return Outcome(OK, document, (_table(shown, everything=everything),))


def _table(shown: list[Entry], *, everything: bool) -> Table:
    columns = ["CHECKPOINT", "STEP", "STATE", "SIZE", "SHARDS", "WORLD", "DECIDED", "WRITER"]
    if everything:
        columns += ["SLOT", "TXN"]
    rows = []
    for entry in shown:
        decision, totals = entry.decision, entry.decision.totals
        row = [
            decision.checkpoint,
            "" if decision.step is None else str(decision.step),
            entry.state,
            size_text(totals.bytes if totals else None),
            str(totals.shards) if totals else "",
            str(totals.world_size) if totals else "",
            decision.decided_at,
            decision.writer,
        ]
        rows.append(tuple([*row, str(decision.slot), decision.txn] if everything else row))
    return Table(tuple(columns), tuple(rows), frozenset({"STEP", "SIZE", "SHARDS", "WORLD", "SLOT"}))


def latest(store: Store) -> Outcome:
    """The newest commit: its bare name, for shells."""
    decision = newest(store)
    return Outcome(OK, {"checkpoint": entry_document(decision, "committed")}, (decision.checkpoint,))
