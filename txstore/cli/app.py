"""The commands and their arguments. Each hands over to its own module and exits through `outcome.run`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

import typer

import txstore
from txstore.cli import listing
from txstore.cli.outcome import run, run_without_store
from txstore.errors import ConfigError
from txstore.keys import SPREAD_MAX, check_checkpoint
from txstore.ops.report import SAMPLE_BLOCKS, Depth
from txstore.ops.timeline import MOST_BUFFERS, Drawn, Plan

EXIT_CODES = """\b
Exit codes:
  0    the answer is on stdout, and nothing is wrong
  1    unexpected error, or the answer could not be written
  2    wrong usage
  3    no such checkpoint, none committed, or no store at this URL
  4    damaged: stored bytes are not those that were committed, or of a format
       version that this release does not know
  5    the store refused, could not be reached, or its URL is wrong
  130  interrupted

\b
With --json stdout holds one JSON document, errors included.
TXSTORE_DEBUG=1 adds debug logs and tracebacks on stderr.
"""

app = typer.Typer(
    name="txstore",
    help="Look at the checkpoints of a txstore store. Nothing here unpickles, and only init and probe write.",
    epilog=EXIT_CODES,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="The store's root: file:///path, a plain path, or a backend's URL.")
]
Name = Annotated[
    str | None, typer.Argument(metavar="CHECKPOINT", help="Its name, such as step-1000; the newest if left out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback signature
    if wanted:
        typer.echo(f"txstore {txstore.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def ls(
    url: Url,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Also superseded, retired and aborted decisions, with slot and transaction.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List committed checkpoints by ascending step."""
    run(url, lambda store: listing.ls(store, url, everything=everything), as_json=as_json)


@app.command(epilog=EXIT_CODES)
def latest(url: Url, *, as_json: AsJson = False) -> None:
    """Print the name of the newest committed checkpoint, and nothing else."""
    run(url, listing.latest, as_json=as_json)


@app.command(epilog=EXIT_CODES)
def show(
    url: Url,
    checkpoint: Name = None,
    *,
    tensors: Annotated[
        int, typer.Option("--tensors", min=-1, metavar="N", help="Rows of the tensor table; -1 for all, 0 for none.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint: progress, topology, fingerprints, settings, shards, tensors."""
    from txstore.cli import showing  # noqa: PLC0415 - `ls` must not pay for it

    name = _checked(checkpoint)
    run(url, lambda store: showing.show(store, name, tensors=tensors), as_json=as_json)


@app.command(epilog=EXIT_CODES)
def verify(
    url: Url,
    checkpoint: Name = None,
    *,
    depth: Annotated[
        Depth,
        typer.Option(
            help="documents: digests and sizes; sample: also some blocks of each shard; full: every byte and header."
        ),
    ] = "sample",
    everything: Annotated[
        bool, typer.Option("--all", help="Every commit that is not retired, and all decision records.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Sample the same blocks again; the report names its seed.")
    ] = None,
    blocks: Annotated[
        int, typer.Option("--blocks", min=0, metavar="N", help="Random blocks of each shard besides first and last.")
    ] = SAMPLE_BLOCKS,
    as_json: AsJson = False,
) -> None:
    """Check what was committed against its digests and checksums, and name all damage."""
    from txstore.cli import verifying  # noqa: PLC0415 - `ls` must not pay for it

    name = _checked(checkpoint)
    if name is not None and everything:
        raise typer.BadParameter("a CHECKPOINT and --all exclude each other")
    run(
        url,
        lambda store: verifying.verify(store, name, everything=everything, depth=depth, seed=seed, blocks=blocks),
        as_json=as_json,
    )


@app.command(epilog=EXIT_CODES)
def init(
    url: Url,
    *,
    spread: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help=f"Spread shards over N key prefixes, 2 to {SPREAD_MAX}, for S3's limits of a prefix; 0 for none.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a store before its first save, and choose its layout; the same again changes nothing."""
    from txstore.cli import making  # noqa: PLC0415 - `ls` must not pay for it

    if spread is not None and spread != 0 and not 2 <= spread <= SPREAD_MAX:
        raise typer.BadParameter(f"--spread {spread} is neither 0 nor 2 to {SPREAD_MAX}")
    run(url, lambda store: making.init(store, url, spread), as_json=as_json)


@app.command(epilog=EXIT_CODES)
def probe(url: Url, *, as_json: AsJson = False) -> None:
    """Try whether a store keeps the contract: writes, and removes again, one small object below probe/."""
    from txstore.cli import probing  # noqa: PLC0415 - `ls` must not pay for it

    run(url, lambda store: probing.run_probe(store, url), as_json=as_json)


def _duration(text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(metavar="MS", help=f"{text}, in milliseconds.")
    return option


@app.command(epilog=EXIT_CODES)
def timeline(
    *,
    steps: Annotated[int, typer.Option(min=1, max=10**9, metavar="N", help="Steps of training.")] = 4,
    step_ms: Annotated[str, _duration("One step")] = "10",
    save_every: Annotated[int, typer.Option(min=1, metavar="N", help="A save after every so many steps.")] = 2,
    copy_ms: Annotated[str, _duration("The copy, for which training stands still")] = "2",
    write_ms: Annotated[str, _duration("Write and commit, in the background")] = "12",
    buffers: Annotated[int, typer.Option(min=1, max=MOST_BUFFERS, metavar="N", help="Copies that fit in memory.")] = 1,
    when_busy: Annotated[Drawn, typer.Option(help="What a save does if no buffer is free.")] = "wait",
    as_json: AsJson = False,
) -> None:
    """Draw when training stands still and when its saves are committed; needs no store."""
    from txstore.cli import drawing  # noqa: PLC0415 - `ls` must not pay for it

    try:
        plan = Plan(
            steps=steps,
            step_ms=_milliseconds("--step-ms", step_ms),
            save_every=save_every,
            copy_ms=_milliseconds("--copy-ms", copy_ms),
            write_ms=_milliseconds("--write-ms", write_ms),
            buffers=buffers,
            when_busy=when_busy,
        )
    except ConfigError as error:
        raise typer.BadParameter(error.message) from error
    run_without_store(lambda: drawing.timeline(plan), as_json=as_json)


def _milliseconds(option: str, text: str) -> Fraction:
    """A decimal number, exactly: a float would bring noise into a schedule that people check by hand."""
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,6})?", text):
        raise typer.BadParameter(f"{option} {text!r} is no number of milliseconds, such as 12 or 0.5")
    return Fraction(text)


def _checked(checkpoint: str | None) -> str | None:
    """The name if it can be one: a wrong name is wrong usage, not a missing checkpoint."""
    try:
        return None if checkpoint is None else check_checkpoint(checkpoint)
    except ConfigError as error:
        raise typer.BadParameter(f"{error.message}: {error.next_step}") from error
