"""The demo: train, kill every rank in the middle of a save, start again, and compare with a run that nobody touched.

Exit status 0 only if everything that the tables say was checked and holds.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch import RANKS, DemoFailedError, Run, expect
from rich.console import Console
from rich.table import Table

from txstore import Store, open_store
from txstore.catalog import entries
from txstore.errors import TxStoreError
from txstore.keys import DATA_PREFIX, parse_attempt
from txstore.probe import probe
from txstore.retry import RetryingStore, RetryPolicy

MARKER = ".txstore-demo"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One transaction's objects, and what became of it."""

    checkpoint: str
    txn: str
    shards: int
    size: int
    committed: bool


def attempts(store: Store) -> list[Attempt]:
    """All attempts under data/, judged by the decision records alone."""
    committed = {entry.decision.txn for entry in entries(store) if entry.state == "committed"}
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for info in store.list(DATA_PREFIX):
        if attempt := parse_attempt(info.key):
            found.setdefault(attempt, []).append((info.key, info.size))
    listed = [
        Attempt(
            checkpoint,
            txn,
            sum(key.endswith(".safetensors") for key, _ in objects),
            sum(size for _, size in objects),
            txn in committed,
        )
        for (checkpoint, txn), objects in found.items()
    ]
    return sorted(listed, key=lambda attempt: (int(attempt.checkpoint.partition("-")[2]), attempt.committed))


def fresh_folder(folder: Path) -> Path:
    """Empty `folder`. Only one that the demo made itself: DEMO_DIR may be mistyped."""
    if folder.exists() and any(folder.iterdir()):
        expect((folder / MARKER).exists(), f"{folder} is not empty and not the demo's: choose another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder.resolve()


@dataclass(frozen=True, slots=True)
class Story:
    """What happened, as far as it was checked."""

    control: Run
    killed: Run
    resumed: Run
    at_kill: list[Attempt]
    at_end: list[Attempt]
    resumed_from: int


def play(folder: Path, url: str, steps: int, save_every: int, console: Console) -> Story:
    """Run the three runs, and check each claim on the way."""
    common = {"steps": steps, "save_every": save_every}
    # The save before the last one is interrupted: there is a commit to fall back to, and work left to do.
    victim = f"step-{steps - save_every}"
    expected = steps - 2 * save_every
    expect(expected > 0, "too few saves: --steps must be more than twice --save-every")

    console.print(f"1/3 control: {steps} steps on {RANKS} ranks, a background save every {save_every} steps")
    with Run(name="control", folder=folder / "control", url=f"{url}/control", **common) as control:
        control.finish()

    console.print(f"2/3 the same again, and SIGKILL to every rank in the middle of the save of {victim}")
    with Run(name="killed", folder=folder / "killed", url=f"{url}/run", stop_in=victim, **common) as killed:
        killed.wait_until_stopped()
        killed.kill()
    with open_store(f"{url}/run") as store:
        at_kill = attempts(store)
    half = [attempt for attempt in at_kill if attempt.checkpoint == victim]
    expect(len(half) == 1 and not half[0].committed, f"{victim} should have one undecided attempt, found {half}")
    expect(half[0].shards >= RANKS, f"the shards of all ranks should be there, found {half[0].shards}")
    commits = [int(attempt.checkpoint.partition("-")[2]) for attempt in at_kill if attempt.committed]
    expect(max(commits, default=0) == expected, f"step {expected} should be the newest commit, found {commits}")

    console.print("3/3 the same command again")
    with Run(name="resumed", folder=folder / "resumed", url=f"{url}/run", **common) as resumed:
        resumed.finish()
    with open_store(f"{url}/run") as store:
        at_end = attempts(store)
    return Story(control, killed, resumed, at_kill, at_end, check_equal(control, killed, resumed, expected))


def check_equal(control: Run, killed: Run, resumed: Run, expected: int) -> int:
    """The resumed run went on from the newest commit, and every figure equals the control's, bit for bit."""
    (start,) = resumed.events("start")
    expect(start["step"] == expected, f"resumed from step {start['step']} instead of {expected}")
    truth = control.figures()
    expect(sorted(truth) == list(range(1, control.steps + 1)), "the control run did not log every step")
    expect(sorted(resumed.figures()) == list(range(expected + 1, control.steps + 1)), "the resumed run left out steps")
    for run in (killed, resumed):
        for step, figures in run.figures().items():
            expect(figures == truth[step], f"{run.name} run, step {step}: {figures}, control: {truth[step]}")
    (control_end,), (resumed_end,) = control.events("end"), resumed.events("end")
    expect(control_end == resumed_end, f"the parameters differ: {resumed_end}, control: {control_end}")
    expect(truth[control.steps][0] < truth[1][0], "the control run has learned nothing")
    return expected


def tell(story: Story, console: Console) -> None:
    """Print what happened."""
    runs = Table(title="Runs", title_justify="left")
    for column in ("run", "started at", "ended", "final loss", "parameters (sha256)", "equal to control"):
        runs.add_column(column)
    for run in (story.control, story.killed, story.resumed):
        last = max(run.figures())
        ends = run.events("end")
        runs.add_row(
            f"{run.name} ({run.seconds:.0f} s)",
            "scratch" if run is not story.resumed else f"step {story.resumed_from}, the newest committed",
            f"step {last}" if ends else f"SIGKILL at step {last}",
            f"{run.figures()[last][0]:.6f}" if ends else "-",
            ends[0]["parameters"][:12] if ends else "-",
            "-" if run is story.control else f"bit for bit, {len(run.figures())} steps",
        )
    console.print(runs)
    stored = Table(title="Attempts in the store of the killed run", title_justify="left")
    for column in ("checkpoint", "transaction", "shards", "size", "when it was killed", "now"):
        stored.add_column(column)
    before = {attempt.txn: attempt for attempt in story.at_kill}
    for attempt in story.at_end:
        then = before.get(attempt.txn)
        stored.add_row(
            attempt.checkpoint,
            attempt.txn[:8],
            str(attempt.shards),
            f"{attempt.size / 2**20:.1f} MiB",
            "-" if then is None else "committed" if then.committed else "[red]half-written, no decision[/]",
            "committed" if attempt.committed else "[red]no commit names it: readers never see it[/]",
        )
    console.print(stored)


def check_place(url: str) -> None:
    """Refuse a place that cannot serve, in one line and before any rank is started."""
    if url.startswith(("memory:", "fsspec+memory:")):
        raise DemoFailedError(f"{url}: a store in the memory of one process, and the demo has several")
    with open_store(url) as store:
        for check in probe(RetryingStore(store, RetryPolicy(attempts=3, deadline_s=20))):
            if check.problem:
                raise DemoFailedError(f"{url} does not keep the contract: {check.sentence}, but {check.problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="for logs and, without --url, the store")
    parser.add_argument("--url", help="where to save instead; a fresh folder is made under it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    # SIGTERM as an exception: the ranks are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    try:
        folder = fresh_folder(options.dir)
        url = f"{options.url.rstrip('/')}/demo-{secrets.token_hex(4)}" if options.url else (folder / "store").as_uri()
        check_place(url)
        tell(play(folder, url, options.steps, options.save_every, console), console)
    except (DemoFailedError, TxStoreError, subprocess.TimeoutExpired) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    console.print(f"\nAs claimed. The half-written save was never taken for a checkpoint. Store: {url}/run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
