"""txstore beside its peers, in turn, in one run.

``python -m benchmarks [--quick]`` is the benchmark of record; ``python -m benchmarks NAME`` one of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks import profile, record, scale, stall

BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {
    "profile": profile.main,
    "scale": scale.main,
    "stall": stall.main,
}


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names; without a name, the benchmark of record."""
    first = arguments[0] if arguments else "--"
    if first in BENCHMARKS:
        BENCHMARKS[first](arguments[1:])
    elif first.startswith("-") and first not in {"--help", "-h"}:
        record.main([argument for argument in arguments if argument != "--"])
    else:
        print(__doc__)
        for name, run in BENCHMARKS.items():
            print(f"  {name:8}{(sys.modules[run.__module__].__doc__ or '').splitlines()[0]}")
        if first in {"--help", "-h"}:
            record.main(["--help"])
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
