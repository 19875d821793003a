"""What is measured: the cases of the full run and of `--quick`, and who takes part on each backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

OURS, SHARED, UNVERIFIED = "txstore", "txstore, reads shared", "txstore, load unverified"
DCP = ("DCP FileSystem, 1 thread", "DCP FileSystem, 2 threads")
TORCH_CHECKPOINTING = "torch_checkpointing"
RAW = ("raw: plain", "raw: best")
S3_TORCH = ("s3torchconnector, 1 thread", "s3torchconnector, 2 threads")
FSSPEC = "DCP Fsspec"

IN_PEERS_ENVIRONMENT = frozenset({TORCH_CHECKPOINTING, *S3_TORCH, FSSPEC})
"""The others need nothing that the project's own environment lacks."""

Backend = Literal["disk", "tmpfs", "s3", "gcs", "azure"]
BACKENDS: tuple[Backend, ...] = ("disk", "tmpfs", "s3", "gcs", "azure")

NAMES = {
    "disk": "POSIX, disk",
    "tmpfs": "POSIX, tmpfs",
    "s3": "S3, SeaweedFS",
    "gcs": "GCS, fake-gcs-server",
    "azure": "Azure, Azurite",
}


@dataclass(frozen=True)
class Case:
    """One state on one backend.

    Attributes:
        kind: A state of `benchmarks.states`.
        mib: Size of the whole state.
        world: Ranks that save it.
        readers: Ranks that load it: another number is a reshard, and then only the load is measured.
        partial: Also load the model without the optimizer.
        rounds: Every contender takes part once a round.
        contenders: In the order of the first round.
    """

    backend: Backend
    kind: Literal["large", "llama"]
    mib: int
    world: int
    readers: int
    partial: bool
    rounds: int
    contenders: tuple[str, ...]

    @property
    def title(self) -> str:
        """For people."""
        what = "a few large tensors" if self.kind == "large" else "Llama-like mix"
        if self.readers != self.world:
            return f"{what}, {self.mib} MiB, saved by {self.world} ranks, loaded by {self.readers}"
        return f"{what}, {self.mib} MiB, {self.world} rank" + ("s" if self.world > 1 else "")


def cases(
    *, quick: bool, backends: Sequence[Backend] = BACKENDS, mib: int | None = None, rounds: int | None = None
) -> list[Case]:
    """All cases of a run, backend by backend."""
    found = [case for backend in backends for case in _of(backend, quick=quick)]
    return [replace(case, mib=mib or case.mib, rounds=rounds or case.rounds) for case in found]


def smoke(mib: int) -> list[Case]:
    """A little of everything that needs no peers' environment and no server."""
    contenders: tuple[str, ...] = (OURS, DCP[0], RAW[1])
    whole = Case("disk", "llama", mib, 1, 1, partial=True, rounds=1, contenders=contenders)
    return [whole, replace(whole, world=1, readers=2, partial=False, contenders=(OURS, SHARED, DCP[0]))]


def _of(backend: Backend, *, quick: bool) -> list[Case]:
    posix = backend in {"disk", "tmpfs"}
    alone = _alone(backend)
    # DCP's own writers take a mix tensor by tensor: minutes each, where the rest of the run takes seconds.
    sharded = tuple(name for name in alone if name not in {UNVERIFIED, TORCH_CHECKPOINTING, DCP[1], S3_TORCH[1], *RAW})
    several = (OURS, SHARED, *(name for name in sharded if name != OURS))
    if quick:
        mib, rounds = (256, 3) if posix else (64, 2)
        whole = Case(backend, "large", mib, 1, 1, partial=False, rounds=rounds, contenders=alone)
        # Below this size the documents, and one block at the model's edge, are a large part of the model.
        mix = replace(whole, kind="llama", mib=192, partial=True, rounds=1, contenders=sharded)
        reshard = replace(mix, world=4, readers=3, partial=False, contenders=several)
        return {"disk": [whole, mix, reshard], "s3": [whole, mix]}.get(backend, [whole])
    whole = Case(
        backend, "large", 1024 if posix else 256, 1, 1, partial=False, rounds=5 if posix else 3, contenders=alone
    )
    compared = tuple(name for name in alone if name not in {UNVERIFIED, TORCH_CHECKPOINTING, RAW[0]})
    # s3fs is far behind s3torchconnector. And fsspec's pairs take one round of a mix up to two minutes: once is enough.
    compared = tuple(name for name in compared if backend != "s3" or name != FSSPEC)
    several = tuple(name for name in several if name != FSSPEC)
    mix = replace(whole, kind="llama", mib=256, partial=True, rounds=3 if posix else 2, contenders=compared)
    small = replace(mix, mib=128, partial=False, rounds=2, contenders=several)
    return [
        whole,
        mix,
        replace(small, world=2, readers=2),
        replace(small, world=4, readers=4),
        replace(small, world=4, readers=3),
    ]


def _alone(backend: Backend) -> tuple[str, ...]:
    if backend in {"disk", "tmpfs"}:
        return (OURS, *DCP, TORCH_CHECKPOINTING, *RAW, UNVERIFIED)
    return (OURS, *S3_TORCH, FSSPEC) if backend == "s3" else (OURS, FSSPEC)
