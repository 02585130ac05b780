"""Send alarms to a webhook or a command, in a thread: with a time limit for each attempt, a few
retries and a bounded queue."""

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from runtime.monitor.alarms import ALWAYS
from runtime.monitor.command import LOOK_SECONDS, run_command
from runtime.output import log

LIMIT_SECONDS = 10.0  # for one attempt; of a webhook, for each answer that it is waited for
RETRY_SECONDS = (1.0, 5.0, 30.0)  # before each further attempt
WAITING = 100  # alarms; further ones are lost, but for those that are always sent
Alarm = dict[str, Any]


def is_webhook(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def say(text: str) -> None:
    log(f"alerts: {text}")


@functools.cache
def say_once(text: str) -> None:
    say(text)


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
        self._attempt = functools.partial(_post, target) if is_webhook(target) else self._give
        self._ends_at = float("inf")  # when a command is ended, by the monotonic clock
        self.delivered = self.failed = 0  # alarms
        self._waiting: deque[Alarm] = deque()  # the first is being delivered
        self._ending, self._news = threading.Event(), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def send(self, alarm: Alarm) -> None:
        if len(self._waiting) > WAITING and alarm["event"] not in ALWAYS:
            self._lose(alarm, f"{WAITING} others are waiting")
        else:
            self._waiting.append(alarm)
            self._news.release()

    def finish(self, seconds: float, pauses: bool = False) -> None:
        """Deliver what is waiting, without pauses between attempts unless `pauses`, in at most so
        many seconds: a server that sends its answer byte by byte can hold the thread for longer,
        but nobody."""
        # a command ends before this process, which would leave it behind
        self._ends_at = time.monotonic() + seconds - 2 * LOOK_SECONDS
        if not pauses:
            self._ending.set()
        self._news.release()
        self._thread.join(seconds)
        left, self._waiting = self._waiting, deque()
        for alarm in left:
            self._lose(alarm, "the run has ended")

    def _run(self) -> None:
        while self._news.acquire() and self._waiting:
            alarm, problem = self._waiting[0], ""
            for pause in (0.0, *RETRY_SECONDS):
                self._ending.wait(pause)
                problem = self._attempt(alarm)
                if not problem:
                    break
                if time.monotonic() >= self._ends_at:
                    return  # `finish` reports it, and those behind it
            try:
                self._waiting.popleft()
            except IndexError:  # `finish` has given up
                return
            if problem:
                self._lose(alarm, problem)
            else:
                self.delivered += 1

    def _give(self, alarm: Alarm) -> str:
        """Run the command with an alarm as JSON on standard input and in variables; return why
        that failed, or the empty string."""
        told = {f"LATTICE_{name.upper()}": str(alarm[name]) for name in ("event", "step", "text")}
        limit = time.monotonic() + LIMIT_SECONDS
        return run_command(
            self.target,
            cwd=self.cwd,
            variables={**told, "LATTICE_RUN": alarm["folder"]},
            until=lambda: min(limit, self._ends_at),
            given=json.dumps(alarm).encode() + b"\n",
        )

    def _lose(self, alarm: Alarm, why: str) -> None:
        self.failed += 1
        say(f"not delivered: {alarm['text']} ({why})")
        self.lost(alarm, why)


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
