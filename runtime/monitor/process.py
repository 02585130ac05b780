"""The monitor: `python -m runtime.monitor.process`, started by rank_0.py.

Standard input is a pipe of JSON lines. The first has the settings (rank_0.py), the others are those
of the run's log (log/run_log.py), which say for how long rank 0 may then be silent. That clock is
this process's own, so it also runs where the watchdog's does not: during the start, a save, an
evaluation, or if that was turned off, or rank 0 was stopped. What the pipe cannot take at once is
left out. Its end means that rank 0 has closed it or is gone. Nothing that may take time is done by
the main thread, so it notices both even if the file system does not respond.

    thread        does                                               may wait for
    main          hears rank 0, keeps the clock                      nothing
    files         writes events; reads what happened before this     the file system
                  start, and writes the file, for Prometheus
    sender        sends alarms (send.py)                             a webhook, a command
    after_commit  runs the command (after_commit.py)                 the command
    (one each)    answers scrapes (prometheus.py)                    a client

It ends at most so long after rank 0, whatever hangs:

    the run                 alarms           checkpoint.after_commit
    finished                ENDING_SECONDS   checkpoint.after_commit_minutes
    stopped, failed, died   ENDING_SECONDS   ENDING_SECONDS; then it is ended, and the next start
                                             runs it again
"""

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from errors import short
from runtime.log.events import append_event, is_whole_event
from runtime.log.log_lines import is_number, is_record, json_object
from runtime.log.status import end_start, read_status
from runtime.monitor.after_commit import Commands
from runtime.monitor.alarms import Series, alarm, is_alarm
from runtime.monitor.send import Sender, say, say_once
from runtime.output import guard_output

STDIN = 0
LOOK_SECONDS = 1.0  # between two looks at the clock
SHOW_SECONDS = 10.0  # between two versions of the numbers for Prometheus
ENDING_SECONDS = 10.0
# after rank 0's end: tools.launch may still record how it ended
END_EVENT_SECONDS = 3.0
GONE = "rank 0 is gone and recorded no end: it was killed, or the run folder is not readable"


class MonitorProcess:
    """The main thread: hears rank 0, keeps the clock, and hands on what happens.

    Args:
        told: the settings (rank_0.py).
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.folder = told, Path(told["folder"])
        self.files = ThreadPoolExecutor(1)  # its work, in order
        target = told["on_event"]
        self.sender = Sender(target, told["cwd"], self._lost) if target else None
        self.commands = Commands(told, self._commanded) if told["after_commit"] else None
        self.state = self.show = None  # for Prometheus
        if told["prometheus"]:
            # takes as long as all other imports
            from runtime.monitor.prometheus import RunState, Shown, families

            self.state, shown = RunState(), Shown(told["prometheus"])
            about = (told["folder"], self.state, self.sender, self.commands)
            self.show = lambda: shown.update([*families(*about)])
            self._later(self.state.read_past, self.folder, told["past"])
        self.show_next = 0.0
        # what rank 0 does; the step that it has logged last, and when; when its silence is a stall
        self.busy, self.step, self.logged = "start", 0, time.monotonic()
        self.due, self.is_stalled = self.logged + told["due"], False
        self.start: dict[str, Any] = {}  # the event of this start
        self.end_state = ""
        self.series, self._lock = Series(), threading.Lock()  # of all threads

    def follow(self) -> None:
        """Work until rank 0 ends, and for a bounded time after that."""
        unfinished = b""
        while True:
            now = time.monotonic()
            if now >= self.show_next:
                self.show_next = now + SHOW_SECONDS
                self._later(self._show)
            if not select.select([STDIN], [], [], LOOK_SECONDS)[0]:
                # at the time before the wait: if this process was stopped in it, what rank 0 has
                # said meanwhile comes first (a signal may end the wait with no look at the pipe)
                self.look(now)
            elif said := os.read(STDIN, 1 << 16):
                *lines, unfinished = (unfinished + said).split(b"\n")
                for line in lines:
                    survive(self.hear, json_object(line), time.monotonic())
            else:
                break
        self.end()

    def look(self, now: float) -> None:
        """Report a stall."""
        if now > self.due and not (self.is_stalled or self.end_state):
            self.is_stalled = True
            about = {"seconds": now - self.logged, "busy": self.busy or "steps"}
            self.happened("stalled", step=self.step, **about)

    def hear(self, line: dict[str, Any], now: float) -> None:
        """Note what rank 0 says."""
        if is_number(line.get("due")):
            self.due = now + line["due"]
        self.busy = str(line.get("busy", self.busy))
        event, record = line.get("event"), line.get("record")
        if isinstance(event, dict) and is_whole_event(event):
            self.hear_event(event)
        if isinstance(record, dict) and is_record(record):
            silent, self.logged, self.step = now - self.logged, now, record["step"]
            if self.state is not None:
                self._later(self.state.note_record, record, time.time())
            if self.is_stalled:
                self.is_stalled = False
                self.happened("resumed", step=self.step, seconds=silent)

    def hear_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "rollback"):
            self.step = event["step"]
        if kind == "refused":  # the others rank 0 has written
            self._later(self._write, event)
        self._note(event)
        if kind == "start":
            self.start = event
            if self.commands is not None:  # not before: the newest checkpoint may be damaged
                self.commands.start()
        elif kind == "checkpoint" and "failed" not in event and self.commands is not None:
            self.commands.committed(event["step"])
        elif kind == "refused" or (kind == "end" and not event.get("noted_later")):
            self.end_state = str(event.get("state", kind))

    def end(self) -> None:
        """Report rank 0's end, if it has not; then end, in bounded time."""
        if not self.end_state:
            found = self.files.submit(self._find_end)
            wait([found], END_EVENT_SECONDS + LOOK_SECONDS)
            if found.done() and (end := found.result()) is not None:
                self.hear_event(end)
            else:
                if self.start:
                    about = (self.folder, self.start, "failed", self.step, GONE)
                    self._later(end_start, *about)
                self.happened("died", step=self.step, reason=GONE)
        finished = self.end_state == "finished"
        self._later(self._show)
        if not finished:  # from now on the file may be that of the next start
            self._later(setattr, self, "show", None)
        if self.commands is not None:
            self.commands.finish(self.told["after_commit_seconds"] if finished else ENDING_SECONDS)
        if self.sender is not None:
            self.sender.finish(ENDING_SECONDS)
        wait([self._later(self._show)], 2 * LOOK_SECONDS)

    def _find_end(self) -> dict[str, Any] | None:
        """How this start ended, which the launcher may still record; None: nobody has."""
        until = time.monotonic() + END_EVENT_SECONDS * self.told["launcher_records"]
        # until a start begins, status.json is about the one before, and then there is none
        while self.start:
            if status := read_status(self.folder):
                return {"event": "end", "time": time.time(), **status}
            if time.monotonic() >= until:
                break
            time.sleep(0.1)
        return None

    # --- any thread -------------------------------------------------------------------------------

    def happened(self, kind: str, **about: Any) -> None:
        """Note an event of the monitor's own: send it if it is an alarm, and let it be written to
        events.jsonl."""
        event = {"event": kind, "time": time.time(), **about}
        self._later(self._write, event)
        self._note(event)

    def _commanded(self, **about: Any) -> None:
        self.happened("after_commit", **about)
        self._later(self._show)  # after the run's end nothing else renews the numbers
        if "failed" in about:
            say(f"checkpoint.after_commit failed for step {about['step']}: {about['failed']}")

    def _lost(self, lost: dict[str, Any], why: str) -> None:
        self.happened("undelivered", text=lost["text"], about=lost["event"], why=why)

    def _later(self, work: Callable[..., object], *about: Any) -> "Future[None]":
        """Let the thread `files` do a piece of work."""
        return self.files.submit(survive, work, *about)

    def _write(self, event: dict[str, Any]) -> None:
        if event["event"] == "refused" and not (self.folder / "events.jsonl").exists():
            return  # a new run folder stays empty
        about = {name: value for name, value in event.items() if name not in ("event", "time")}
        append_event(self.folder, event["event"], **about)

    def _show(self) -> None:
        if self.show is not None:
            try:
                self.show()
            except OSError as error:
                about = f"run.prometheus={self.told['prometheus']}: {error.strerror or error}"
                say_once(f"{about}; trying again")

    def _note(self, event: dict[str, Any]) -> None:
        """Count an event, and send it if it is an alarm."""
        if self.state is not None:
            self._later(self.state.note_event, event)
        if self.sender is not None and is_alarm(event):
            event = {**event}  # to which `passes` adds
            with self._lock:
                passes = self.series.passes(event, time.monotonic())
            if passes:
                self.sender.send(alarm(self.told["name"], self.told["folder"], event))


def survive(work: Callable[..., object], *about: Any) -> None:
    """Do a piece of work; if it fails, say so and go on with the next."""
    try:
        work(*about)
    except Exception as error:
        line = next((each for each in about if isinstance(each, dict)), None)
        what = short(line) if line is not None else work.__name__
        say_once(f"warning: {what}: {type(error).__name__}: {error}")


def main() -> None:
    # Handlers, not SIG_IGN: that would be inherited by the commands. What ends the run also signals
    # this process; it ends when rank 0 has.
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in stops:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # tools.launch blocks others, too
    with open(STDIN, "rb", buffering=0, closefd=False) as pipe:  # reads no further than the line
        told = json.loads(pipe.readline())
    status = 0
    try:
        MonitorProcess(told).follow()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)  # no thread is waited for, not even the executor's: a file system may hang


if __name__ == "__main__":
    guard_output()
    main()
