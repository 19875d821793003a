"""Where the time of one contender's save and load goes: ``python -m benchmarks profile --backend s3 --kind llama``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.cases import BACKENDS, Case
from benchmarks.record import Run


def main(arguments: Sequence[str]) -> None:
    """Print the functions with the largest shares of samples."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks profile", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="tmpfs")
    parser.add_argument("--kind", choices=("large", "llama"), default="large")
    parser.add_argument("--contender", default="txstore")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--readers", type=int, help="ranks that load; default as many as save")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--tmpfs", default="/dev/shm")
    parser.add_argument("--most", type=int, default=20)
    options = parser.parse_args(arguments)
    case = Case(
        options.backend,
        options.kind,
        options.mib,
        options.world,
        options.readers or options.world,
        partial=False,
        rounds=1,
        contenders=(options.contender,),
    )
    with ExitStack() as stack:
        run = Run(stack, disk=options.disk, tmpfs=options.tmpfs)
        for operation, (measured, profile) in run.profile(case).items():
            print(
                f"\n{operation}: {measured.wall_s:.2f} s, {measured.cpu_s:.2f} CPU-s, "
                f"{measured.needed_bytes >> 20} MiB, "
                f"{(measured.read_bytes or 0) / max(1, measured.needed_bytes):.3f} read/needed, {measured.calls} calls"
            )
            for what, shares in profile.items():
                print(f"  {what} time, share of rank 0's samples outside waits for other threads")
                for name, share in shares[: options.most]:
                    print(f"    {share:6.1%}  {name}")
