"""How a command of this folder ends when nobody wants the rest (`| head`, Ctrl-C): no traceback."""

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run_command(main: Callable[[], int]) -> NoReturn:
    """Exits with main's status; or as other programs do that die of SIGPIPE or SIGINT, after what
    main has to clean up."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a script that called it stops too
    except BrokenPipeError:
        if not _reader_is_gone():  # it was a pipe to another process
            raise
        # the interpreter flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    sys.exit(status)


def _reader_is_gone() -> bool:
    """Whether nobody reads standard output any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are always told
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
