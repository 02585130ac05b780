"""SIGTERM, and SIGUSR1, which Slurm can send some time before a job's limit. What is made of them is in stop.py.

    train.py │ hold   imports, data, weights │ Signals entered: steps, evaluations, saves │ left: the end
             │ the system keeps them waiting │ heard at once                              │ kept waiting again

train.py imports this before anything else; so nothing is imported here that takes time.
"""

import os
import signal
import threading
import time

STARTED = time.monotonic()  # this process, as good as
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# Slurm signals every process of a job, and torchrun passes its own on to its ranks: what arrives together is one request.
SAME_REQUEST_SECONDS = 5.0
PATIENCE_SECONDS = 20  # for other ranks, with a signal in hand: torchrun and Slurm kill after 30


def hold() -> None:
    """Keep signals waiting from now on, until `Signals` listens: none kills the process while it starts, and none is lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def pending() -> list[str]:
    """Names of the signals that came and are kept waiting."""
    return [signal.Signals(number).name for number in signal.sigpending() if number in SIGNALS]


class Signals:
    """While entered, notes which signals came; the same one again, later than together, ends the process at once, with status
    128 + its number. Only the main thread may enter.

    A thread of its own listens: the main one may wait in a collective that will never end, where Python runs no handler.
    """

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}  # signal → when it came first

    def __enter__(self) -> "Signals":
        self.heard = {number: time.monotonic() for number in signal.sigpending() if number in SIGNALS}
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        # The system's side of a signal writes its number here at once, whatever Python is doing; a handler need do nothing.
        self._old_mouth = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *exception: object) -> None:
        """As it was before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self._old_mouth)
        os.close(self._mouth)
        self._thread.join()
        os.close(self._ear)

    def _listen(self) -> None:
        while number := os.read(self._ear, 1):
            if number[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if now - self.heard.setdefault(number[0], now) > SAME_REQUEST_SECONDS:
                os.write(2, f"{signal.Signals(number[0]).name} again: leaving at once\n".encode())
                os._exit(128 + number[0])
