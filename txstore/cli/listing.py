"""``txstore ls`` and ``txstore latest``."""

from __future__ import annotations

from txstore.catalog import Damaged, Entry, State, by_step, entries, newest, nothing_committed
from txstore.cli.outcome import DAMAGED, OK, Outcome, failure
from txstore.cli.render import Table, size_text
from txstore.decisions import read_store_format
from txstore.errors import IntegrityError, TxStoreError
from txstore.keys import SlotName, decision_key
from txstore.manifest import Decision
from txstore.ops.report import Kind
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
    """The commits that stand, and those of which that is not known; with `everything` every decision.

    Records that are damaged are named, and the exit code tells if the list may lack a checkpoint.
    """
    damaged: Damaged = {}
    found = entries(store, damaged=damaged)
    shown = [entry for entry in found if everything or entry.state in {"committed", "unknown"}]
    document: dict[str, object] = {"checkpoints": [entry_document(entry.decision, entry.state) for entry in shown]}
    if damaged:
        problems = [_problem(found, damaged, name) for name in sorted(damaged, key=_place)]
        notes = [note for one in problems for note in (f"{one['what']} [{one['key']}]", f"next: {one['next_step']}")]
        text = (_table(shown, everything=everything),) if shown else ()
        # Of a superseded record nothing depends: it must not page for ever, once its checkpoint was saved again.
        harmless = all(_kind(error) == "format" and _stands_above(found, name) for name, error in damaged.items())
        code = OK if harmless else DAMAGED
        return Outcome(code, {**document, "problems": problems}, text, notes=tuple(notes))
    if not found:
        absent = failure(nothing_committed(store), url)
        if read_store_format(store):
            return Outcome(OK, document, notes=absent.notes)
        return Outcome(absent.code, {**document, **absent.document}, notes=absent.notes)
    if not shown:
        note = f"no committed checkpoint in {redact(url)}; --all shows {len(found)} other decisions"
        return Outcome(OK, document, notes=(note,))
    return Outcome(OK, document, (_table(shown, everything=everything),))


def _kind(error: TxStoreError) -> Kind:
    return "missing" if isinstance(error, IntegrityError) else "format"


def _above(found: list[Entry], name: SlotName) -> list[Entry]:
    """What is in later slots of the same checkpoint."""
    return [one for one in found if one.decision.checkpoint == name.checkpoint and one.decision.slot > name.slot]


def _stands_above(found: list[Entry], name: SlotName) -> bool:
    return any(entry.state == "committed" for entry in _above(found, name))


def _place(name: SlotName) -> tuple[int, str, int]:
    return (*by_step(name.checkpoint), name.slot)


def _problem(found: list[Entry], damaged: Damaged, name: SlotName) -> dict[str, str]:
    """A record that cannot be read, as ``verify --all --json`` tells it; and whether anything depends on it."""
    error, stands = damaged[name], _stands_above(found, name)
    kind = _kind(error)
    restore = "restore the record from a copy of the store"
    if kind == "format":
        next_step = (
            f"a later slot of {name.checkpoint} stands, and readers take that one; what this record named is kept"
            if stands
            else f"{restore}, or save {name.checkpoint} again with overwrite=True; "
            'Checkpointer goes on before it with resume(ResumeOptions(fallback="previous"))'
        )
    elif _above(found, name):  # the slot walk stops there: to pass a free slot could hide a commit
        next_step = f"{restore}: until then {name.checkpoint} is loaded neither by name nor saved again"
        if stands:
            next_step += "; a load of the newest takes its later slot"
    else:
        next_step = error.next_step
    key = decision_key(name.checkpoint, name.slot)
    return {"kind": kind, "key": key, "what": error.message, "next_step": next_step}


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
