"""What commands share: they end without a traceback on Ctrl-C, whatever becomes of their output
(output.py), and have an argument for settings."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from output import guard_output, log


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Runs `main` and exits with its status; with 1 if that is 0 but some of standard output could
    not be written. After Ctrl-C, and main's own cleanup, exits as other programs do on SIGINT."""
    out = guard_output()
    try:
        status: object = main()
    except SystemExit as leaving:  # also after --help
        status = leaving.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a calling script stops too
    sys.stdout.flush()
    if out.problem and not status:
        log(f"error: standard output could not be written: {out.problem}")
        status = 1
    sys.exit(status)  # type: ignore[arg-type]


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Let a command take settings after the configuration."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings to override, as for train.py",
    )
