"""Send alarms to a webhook or a command, in a thread: with a time limit for each attempt, a few
retries and a bounded queue."""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from output import log
from runtime.monitor.alarms import ALWAYS

LIMIT_SECONDS = 10.0  # for one attempt
RETRY_SECONDS = (1.0, 5.0, 30.0)  # before each further attempt
WAITING = 100  # alarms; further ones are lost, but for those that are always sent
Alarm = dict[str, Any]


def is_webhook(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def say(text: str) -> None:
    log(f"alerts: {text}")


class Sender:
    """Delivers alarms in order.

    Args:
        target: as run.on_event, with its variable replaced. It never appears in a log: the path of
            a webhook's address is a secret.
        cwd: where a command runs.
        lost: called with an alarm that was not delivered, and why.
    """

    def __init__(self, target: str, cwd: str, lost: Callable[[Alarm, str], None]) -> None:
        self.target, self.cwd, self.lost = target, cwd, lost
        self.delivered = self.failed = 0  # alarms
        self._waiting: queue.Queue[Alarm | None] = queue.Queue()
        self._now: Alarm | None = None  # the one that is being delivered
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def send(self, alarm: Alarm) -> None:
        if self._waiting.qsize() >= WAITING and alarm["event"] not in ALWAYS:
            self._lose(alarm, f"{WAITING} others are waiting")
        else:
            self._waiting.put(alarm)

    def finish(self, seconds: float) -> None:
        """Deliver what is waiting, without pauses between attempts, in at most so many seconds."""
        self._ending.set()
        self._waiting.put(None)
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return
        left, self._now = [self._now], None
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self._waiting.get_nowait())
        for alarm in left:
            if alarm is not None:
                self._lose(alarm, "the run has ended")

    def _run(self) -> None:
        while (alarm := self._waiting.get()) is not None:
            self._now, problem = alarm, ""
            for pause in (0.0, *RETRY_SECONDS):
                self._ending.wait(pause)
                problem = self._attempt(alarm)
                if not problem:
                    self.delivered += 1
                    break
            if problem and self._now is not None:  # else `finish` has reported it
                self._lose(alarm, problem)
            self._now = None

    def _lose(self, alarm: Alarm, why: str) -> None:
        self.failed += 1
        say(f"not delivered: {alarm['text']} ({why})")
        self.lost(alarm, why)

    def _attempt(self, alarm: Alarm) -> str:
        """Make one attempt; return why it failed, or the empty string."""
        if not is_webhook(self.target):
            return _run_command(self.target, self.cwd, alarm)
        # In a thread: urllib's limit is for each read, and a server may send a byte at a time.
        outcome = [f"no answer in {LIMIT_SECONDS:.0f} s"]

        def post() -> None:
            outcome[0] = _post(self.target, alarm)

        thread = threading.Thread(target=post, daemon=True)
        thread.start()
        thread.join(LIMIT_SECONDS)
        return outcome[0]


def _post(url: str, alarm: Alarm) -> str:
    """Post an alarm; return why that failed, or the empty string."""
    import urllib.error  # only if needed: it takes as long as all other imports together
    import urllib.request

    class NoRedirect(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            """A redirected POST would become a GET, without the alarm."""

    data = json.dumps(alarm).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.build_opener(NoRedirect).open(request, timeout=LIMIT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"the server answered {error.code}"
    except Exception as error:  # messages of these errors name the host at most
        return f"{type(error).__name__}: {getattr(error, 'reason', '') or 'no connection'}"


def _run_command(command: str, cwd: str, alarm: Alarm) -> str:
    """Run a command with an alarm as JSON on standard input and in variables; return why that
    failed, or the empty string."""
    variables = {f"LATTICE_{name.upper()}": str(alarm[name]) for name in ("event", "step", "text")}
    variables["LATTICE_RUN"] = alarm["folder"]
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except OSError as error:
        return f"it cannot be started: {error.strerror}"
    except ValueError as error:  # a null byte in the text of an error
        return f"it cannot be started: {error}"
    try:
        process.communicate(json.dumps(alarm).encode() + b"\n", timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        end_group(process)
        return f"it did not end in {LIMIT_SECONDS:.0f} s"
    return f"it ended with status {process.returncode}" if process.returncode else ""


def end_group(process: "subprocess.Popen[bytes]", patience: float = 0.0) -> None:
    """End a process that leads a session, and what it has started: at first by SIGTERM, if
    `patience` seconds are given, then by SIGKILL."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if seconds:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
