"""The monitor: `python -m runtime.monitor.process`, started by rank_0.py.

Standard input is a pipe of JSON lines. The first has the settings (rank_0.py), the others are those
of the run's log (log/run_log.py), which say for how long rank 0 may then be silent. That clock is
this process's own, so it also runs where the watchdog's does not: during the start, a save, an
evaluation, or if that was turned off, or rank 0 was stopped. What the pipe cannot take at once is
left out. Its end means that rank 0 has closed it or is gone. Nothing that may take time is done by
the main thread, so it notices both even if the file system does not respond.

    thread        does                                               may wait for
    main          hears rank 0, keeps the clock                      nothing
    files         reads what happened before this start, writes      the file system
                  events and the file for Prometheus (files.py)
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
from typing import Any

from runtime.log.events import is_whole_event
from runtime.log.log_lines import is_number, is_record, json_object
from runtime.monitor.after_commit import Commands
from runtime.monitor.alarms import Series, alarm, is_alarm
from runtime.monitor.files import GONE, Files, survive
from runtime.monitor.send import Sender, say
from runtime.monitor.state import RunState
from runtime.output import guard_output

STDIN = 0
LOOK_SECONDS = 1.0  # between two looks at the clock
ENDING_SECONDS = 10.0


class MonitorProcess:
    """The main thread: hears rank 0, keeps the clock, and hands on what happens.

    Args:
        told: the settings (rank_0.py).
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        target = told["on_event"]
        self.sender = Sender(target, told["cwd"], self._lost) if target else None
        self.commands = Commands(told, self._commanded) if told["after_commit"] else None
        self.files = Files(told, self._numbers)
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
            if not select.select([STDIN], [], [], LOOK_SECONDS)[0]:
                # only now: if this process was stopped, what rank 0 said meanwhile comes first
                self.look(time.monotonic())
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
            self.files.note_record(record)
            if self.is_stalled:
                self.is_stalled = False
                self.happened("resumed", step=self.step, seconds=silent)

    def hear_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "rollback"):
            self.step = event["step"]
        self.files.note_event(event, writes=kind == "refused")  # the others rank 0 has written
        self._send(event)
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
        self.files.is_rank_0_gone = True
        if not self.end_state:
            if (end := self.files.find_end(self.start, self.step)) is not None:
                self.hear_event(end)
            else:
                self.happened("died", step=self.step, reason=GONE)
        if self.commands is not None:
            finished = self.end_state == "finished"
            self.commands.finish(self.told["after_commit_seconds"] if finished else ENDING_SECONDS)
        if self.sender is not None:
            self.sender.finish(ENDING_SECONDS)
        self.files.close(2 * LOOK_SECONDS)

    # --- any thread -------------------------------------------------------------------------------

    def happened(self, kind: str, **about: Any) -> None:
        """Note an event of the monitor's own: send it if it is an alarm, and let it be written to
        events.jsonl."""
        event = {"event": kind, "time": time.time(), **about}
        self.files.note_event(event, writes=True)
        self._send(event)

    def _commanded(self, **about: Any) -> None:
        self.happened("after_commit", **about)
        if "failed" in about:
            say(f"checkpoint.after_commit failed for step {about['step']}: {about['failed']}")

    def _lost(self, lost: dict[str, Any], why: str) -> None:
        self.happened("undelivered", text=lost["text"], about=lost["event"], why=why)

    def _send(self, event: dict[str, Any]) -> None:
        if self.sender is not None and is_alarm(event):
            event = {**event}  # to which `passes` adds
            with self._lock:
                passes = self.series.passes(event, time.monotonic())
            if passes:
                self.sender.send(alarm(self.told["name"], self.told["folder"], event))

    def _numbers(self, state: RunState) -> dict[str, float]:
        """The monitor's own, for Prometheus."""
        found: dict[str, float] = {}
        if self.sender is not None:
            found["lattice_alarms_delivered_total"] = self.sender.delivered
            found["lattice_alarms_lost_total"] = self.sender.failed
        if self.commands is not None:
            done = self.commands.done_step
            found["lattice_after_commit_failures_total"] = state.failed_commands
            found["lattice_after_commit_pending"] = len(self.commands.pending)
            found |= {"lattice_after_commit_step": done} if done is not None else {}
        return found


def main() -> None:
    # Handlers, not SIG_IGN: that would be inherited by the commands. What ends the run also signals
    # this process; it ends when rank 0 has.
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in stops:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # tools.launch blocks others, too
    with open(STDIN, "rb", buffering=0, closefd=False) as pipe:  # reads no further than the line
        told = json.loads(pipe.readline())
    MonitorProcess(told).follow()
    sys.stderr.flush()
    os._exit(0)  # no thread is waited for


if __name__ == "__main__":
    guard_output()
    main()
