"""Signals that ask a run to stop: noted from a process's first line to its last (then: stop.py).

    SIGTERM, SIGUSR1  Slurm, a launcher, `kill`
    SIGINT            Ctrl-C   ┐ not where they were ignored at the start, as for a shell's
    SIGHUP            hang-up  ┘ background job or under nohup

Our launcher also tells the ranks that are left when another has failed (ABANDON): that is no
request, for nothing can be saved without the one that is gone.

train.py imports this before anything else; so nothing is imported here that takes time.
"""

import os
import signal
import threading
import time

STARTED = time.monotonic()  # this process, as good as
# One request reaches a process several times: from Slurm, which signals every process of a job, and
# from torchrun, which passes its own on. What comes later than this is a second request.
SAME_REQUEST_SECONDS = 1.0
PATIENCE_SECONDS = 20  # for other ranks, with a signal in hand: torchrun and Slurm kill after 30
WHAT_HAPPENS = "all ranks stop after the step under way and at most one more, save, and leave"
ABANDON = signal.SIGUSR2
# then, until this process ends: rank 0 may be writing down how far the run came
ABANDON_SECONDS = 5.0
AGAIN = "again: leaving now, without saving"


def requests() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop."""
    # the Slurm script ignores SIGUSR1 for torchrun, not for its ranks
    always = (signal.SIGTERM, signal.SIGUSR1)
    unless_ignored = (signal.SIGINT, signal.SIGHUP)
    return (
        *always,
        *(number for number in unless_ignored if signal.getsignal(number) is not signal.SIG_IGN),
    )


def leave_on_request() -> None:
    """Before there is anything to save: one line and status 128 + the number, where Python would
    raise KeyboardInterrupt."""

    def leave(number: int, _: object) -> None:
        _write(f"{signal.Signals(number).name} was received: nothing was started")
        os._exit(128 + number)

    for number in requests():
        signal.signal(number, leave)


class Signals:
    """Between `listen` and `close`, notes which signals came; the same one as a second request ends
    the process at once, with status 128 + its number. Only the main thread may call them; as a
    context manager it calls both.

    A thread of its own listens: the main one may wait in a collective that will never end, where
    Python runs no handler.

    Args:
        speaks: whether this process says what was received, and what happens now: rank 0 does.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self.heard: dict[int, float] = {}  # signal → when it came first
        self.abandoned = False  # by the launcher, for another rank has failed
        self._said = threading.Lock()

    def listen(self) -> "Signals":
        self._requests = requests()
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        # The system's side of a signal writes its number here at once, whatever Python is doing; a
        # handler need do nothing.
        self._old_mouth = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._old_handlers = {
            number: signal.signal(number, lambda *_: None) for number in (*self._requests, ABANDON)
        }
        for number in self._old_handlers:
            # native code that waits in the system is not disturbed
            signal.siginterrupt(number, False)
        # tools/launch.py forks with them blocked
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._requests)
        return self

    def close(self) -> None:
        """As it was before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_mouth)
        os.close(self._mouth)
        self._thread.join()
        os.close(self._ear)

    def __enter__(self) -> "Signals":
        return self.listen()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def names(self) -> str:
        # copied: it may grow
        return " and ".join(signal.Signals(number).name for number in list(self.heard))

    def announce(self, why: str) -> None:
        """Say why the run stops and what happens now: once, whoever learns of it first."""
        if self._said.acquire(blocking=False) and self.speaks:
            _write(f"{why}: {WHAT_HAPPENS}")

    def hush(self) -> None:
        """Announce nothing from now on: the run has failed, and the launcher is ending it."""
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
            self.announce(f"{name} was received (once more: leave now, without saving)")


def _write(line: str) -> None:
    """Past Python's buffers: another thread may hold their lock."""
    os.write(2, f"{line}\n".encode())
