"""The command line. `main` is the console script; what it needs is imported when it runs."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    """Run ``txstore`` with the arguments of this process, and exit; the codes are in `txstore.cli.outcome`."""
    from txstore.cli.app import app  # noqa: PLC0415 - `import txstore.cli` alone must stay cheap
    from txstore.cli.outcome import leave_unwritten, set_up_process  # noqa: PLC0415 - as above

    set_up_process()
    try:
        app(prog_name="txstore")  # whatever it was started as
    except OSError as error:
        leave_unwritten(error)
    raise AssertionError("the command line returned")
