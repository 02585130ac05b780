"""What commands share: ending without a traceback on Ctrl-C, or when their output is cut off
(`| head`), and the argument for settings."""

import argparse
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits with its status. After a closed output pipe or Ctrl-C, and main's own
    cleanup, exits as other programs do on SIGPIPE or SIGINT."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a calling script stops too
    except BrokenPipeError:
        if not _reader_is_gone():  # the broken pipe was not standard output
            raise
        # the interpreter flushes standard output once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    sys.exit(status)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Let a command take settings after the configuration."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings to override, as for train.py",
    )


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe without a reader."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # error events are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
