"""``python -m benchmarks NAME ...``: each compares txstore with what it replaces, in one run, in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks import posix, stall

BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {"posix": posix.main, "stall": stall.main}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names."""
    if arguments[:1] and arguments[0] in BENCHMARKS:
        BENCHMARKS[arguments[0]](arguments[1:])
        return
    print(__doc__)
    for name, run in BENCHMARKS.items():
        print(f"  {name:8}{(sys.modules[run.__module__].__doc__ or '').splitlines()[0]}")
    sys.exit(0 if arguments[:1] in (["--help"], ["-h"]) else 2)


if __name__ == "__main__":
    main(sys.argv[1:])
