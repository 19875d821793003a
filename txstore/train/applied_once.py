"""A name in `fresh` is applied by the first resume that gives it: a launch script is started again and again.

Applied by each of them, a name that is left in the script would take from every restart what training had made of
that state since; and the name of an object that the code no longer has would be "on neither side" at the second.
So the checkpoints that follow a resume record what it left fresh (`Description.accepted`), and as long as every
resume gives the name again, it is done. One that does not give it ends that: given later, it is a new wish.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from txstore.errors import TxStoreError
from txstore.manifest import Description

_FRESH = "fresh "
_FORMERLY = "formerly fresh "


def done(fresh: Collection[str], accepted: Collection[str]) -> frozenset[str]:
    """The names that the resume before a checkpoint has applied, by what that checkpoint records."""
    return frozenset(name for name in fresh if f"{_FRESH}{name}" in accepted)


def recorded(fresh: Collection[str], accepted: Iterable[str]) -> list[str]:
    """What the next checkpoints record: all that was accepted, and the names of this resume as fresh ones."""
    names = [f"{_FRESH}{name}" for name in sorted(fresh)]
    past = (
        f"{_FORMERLY}{one.removeprefix(_FRESH)}" if one.startswith(_FRESH) and one not in names else one
        for one in accepted
    )
    return list(dict.fromkeys([*past, *names]))


def on_record(run: Description, accepted: tuple[str, ...] | None) -> Description:
    """A run, with what resumes of its state have accepted, through whichever checkpointer; None if there were none."""
    return run if accepted is None else replace(run, accepted=accepted)


def tell(error: TxStoreError, done: Collection[str], checkpoint: str) -> None:
    """Say in an error that advises what is done how to do it once more."""
    again = sorted(name for name in done if repr(name) in str(error))
    if again:
        error.next_step += (
            f"; {', '.join(map(repr, again))} in fresh was applied by an earlier resume: to begin it anew once more, "
            f"give checkpoint={checkpoint!r} beside it, for one start"
        )


def note(name: str, checkpoint: str) -> str:
    """What is told of a name that is done."""
    return (
        f"{name!r} in fresh was applied by an earlier resume, so what {checkpoint} holds of it is restored; "
        f"take it out, or, to begin it anew once more, resume with checkpoint={checkpoint!r}"
    )
