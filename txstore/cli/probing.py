"""``txstore probe``: does this live store keep the contract?"""

from __future__ import annotations

from txstore.cli.outcome import OK, STORE, Outcome
from txstore.cli.render import Table
from txstore.probe import probe
from txstore.redact import redact
from txstore.store import Store


def run_probe(store: Store, url: str) -> Outcome:
    """Try every sentence of the contract on a fresh key; exit 5 if one does not hold."""
    checks = probe(store)
    bad = [check for check in checks if check.problem]
    rows = tuple((check.sentence, check.problem or "yes") for check in checks)
    notes: tuple[str, ...] = ()
    if bad:
        notes = (
            f"{redact(url)} does not keep the contract: two writers of one checkpoint could both win",
            "next: use a store with conditional writes; docs/compatibility.md names those that were tried",
        )
    document: dict[str, object] = {
        "usable": not bad,
        "checks": [{"sentence": check.sentence, "problem": check.problem} for check in checks],
    }
    return Outcome(STORE if bad else OK, document, (Table(("CONTRACT", "HOLDS"), rows),), notes)
