"""Record the signals that request a stop, from a process's first line to its last. (stop.py acts on
them.)

    SIGTERM, SIGUSR1  from Slurm, a launcher, `kill`
    SIGINT            Ctrl-C   ┐ unless ignored when the process started, as in a background job
    SIGHUP            hang-up  ┘ of a shell or under nohup

When a rank has failed, tools/launch.py sends ABANDON to the others. That is not a stop request,
because nothing can be saved without the failed rank.

train.py imports this module before anything else, so it imports nothing that takes time.
"""

import contextlib
import ctypes
import os
import signal
import threading
import time

STARTED = time.monotonic()  # approximately when this process started
# One request can reach a process several times: from Slurm, which signals every process of a job,
# and from torchrun, which forwards signals. A signal after this time is a second request.
SAME_REQUEST_SECONDS = 1.0
PATIENCE_SECONDS = 20  # to wait for other ranks after a signal: torchrun and Slurm kill after 30
WHAT_HAPPENS = "all ranks stop after the current step and at most one more, save, and exit"
ABANDON = signal.SIGUSR2
# from ABANDON until this process exits: rank 0 may still be recording how far the run came
ABANDON_SECONDS = 5.0
AGAIN = "again: exiting now, without saving"
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h


def requests() -> tuple[signal.Signals, ...]:
    """Return the signals that request this process to stop."""
    # always, although the Slurm script ignores SIGUSR1: that is for torchrun, not for its ranks
    always = (signal.SIGTERM, signal.SIGUSR1)
    others = (signal.SIGINT, signal.SIGHUP)
    return (*always, *(each for each in others if signal.getsignal(each) is not signal.SIG_IGN))


def leave_on_request() -> None:
    """Exit on a signal while there is nothing to save: with one line and status 128 + the signal's
    number, instead of Python's KeyboardInterrupt."""

    def leave(number: int, _: object) -> None:
        _write(f"{signal.Signals(number).name} was received before the run was started")
        os._exit(128 + number)

    for number in requests():
        signal.signal(number, leave)


def end_with_parent(parent: int, number: int) -> None:
    """Let this process receive the signal `number` when `parent`, which has forked it, ends (Linux
    only)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), number)


class Signals:
    """Records signals from `listen` on, in a `with` block only until its end. A second request by
    the same signal ends the process immediately, with status 128 + its number. Only the main thread
    may begin and end it.

    A separate thread listens, because the main thread may be blocked in a collective that never
    ends, where Python runs no signal handlers.

    Args:
        speaks: whether this process reports which signal was received and what happens next; only
            rank 0 does.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.heard: dict[int, float] = {}  # signal → when it was first received
        self.abandoned = False  # whether the launcher sent ABANDON: another rank has failed
        self._said = threading.Lock()

    def listen(self) -> "Signals":
        self._requests = requests()
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        # The C-level handler writes the signal's number to this pipe immediately, whatever Python
        # is doing, so the Python handlers below do nothing.
        self._old_mouth = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._old_handlers = {
            number: signal.signal(number, lambda *_: None) for number in (*self._requests, ABANDON)
        }
        for number in self._old_handlers:
            # do not interrupt system calls in native code
            signal.siginterrupt(number, False)
        # tools/launch.py forks the ranks with these signals blocked
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._requests)
        return self

    __enter__ = listen

    def __exit__(self, *exception: object) -> None:
        """Restore the previous signal handling."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_mouth)
        os.close(self._mouth)
        self._thread.join()
        os.close(self._ear)

    def names(self) -> str:
        # a copy, because another thread may add to it
        return " and ".join(signal.Signals(number).name for number in list(self.heard))

    def announce(self, why: str) -> None:
        """Report, once, why the run stops and what happens next."""
        if self._said.acquire(blocking=False) and self.speaks:
            _write(f"{why}: {WHAT_HAPPENS}")

    def hush(self) -> None:
        """Report nothing from now on: the run has failed, and the launcher is ending it."""
        self._said.acquire(blocking=False)

    def _listen(self) -> None:
        while number := os.read(self._ear, 1):
            if number[0] == ABANDON and not self.abandoned:
                self.abandoned = True
                self.hush()
                leaving = threading.Timer(ABANDON_SECONDS, os._exit, [1])
                leaving.daemon = True
                leaving.start()
            if number[0] not in self._requests:
                continue
            now, name = time.monotonic(), signal.Signals(number[0]).name
            if now - self.heard.setdefault(number[0], now) > SAME_REQUEST_SECONDS:
                if self.speaks:
                    _write(f"{name} {AGAIN}")
                os._exit(128 + number[0])
            self.announce(f"{name} was received (send it again to exit at once, without saving)")


def _write(line: str) -> None:
    """Write to standard error directly: another thread may hold the lock of Python's buffer. A line
    that cannot be written (the disk is full, the terminal or the reader gone) fails no stop."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
