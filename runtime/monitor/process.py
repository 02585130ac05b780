"""The monitor: `python -m runtime.monitor.process`, started by rank_0.py.

Standard input is a pipe of JSON lines. The first has the settings (rank_0.py). The others come from
the run's log, as something happens:

    {"event": {…}, "due": 240.0}        it writes a line of events.jsonl
    {"record": {…}, "due": 240.0}       … of metrics.jsonl: a step is logged
    {"busy": "saving", "due": 3600.0}   rank 0 begins to do something else than steps, by a cause of
                                        log/ledger.py; "": steps again

`due` says for how many seconds rank 0 may now be silent: then it is stuck. That clock is this
process's own, so it also runs where the watchdog's does not: during the start, a save, an
evaluation, or if that was turned off, or rank 0 was stopped. What the pipe cannot take at once is
left out. Its end means that rank 0 has closed it or is gone. Nothing that may take time is done by
the main thread, so it notices both even if the file system does not respond.

    thread        does                                               may wait for
    main          hears rank 0, keeps the clock                      nothing
    files         reads what happened before this start, writes      the file system
                  events and the file for Prometheus
    sender        sends alarms (send.py)                             a webhook, a command
    after_commit  runs the command (after_commit.py)                 the command
    (one each)    answers scrapes (prometheus.py)                    a client

It ends at most so long after rank 0, whatever hangs:

    the run                 alarms           checkpoint.after_commit
    finished                ENDING_SECONDS   checkpoint.after_commit_minutes
    stopped, failed, died   ENDING_SECONDS   ENDING_SECONDS; then it is ended, and the next start
                                             runs it again
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from errors import short
from runtime.log.events import append_event, is_whole_event, named_as_today
from runtime.log.log_lines import is_number, is_record, json_object, whole_lines
from runtime.log.status import end_start, read_status
from runtime.monitor.after_commit import Commands
from runtime.monitor.alarms import Series, alarm, is_alarm
from runtime.monitor.send import Sender, say
from runtime.monitor.state import RunState
from runtime.output import guard_output

STDIN = 0
LOOK_SECONDS = 1.0  # between two looks at the clock
READ_BYTES = 1 << 24  # of events.jsonl at a time: after months it is larger
ENDING_SECONDS = 10.0
# after rank 0's end: the launcher may still record how it ended (tools/launch.py)
END_EVENT_SECONDS = 3.0
GONE = "rank 0 is gone and recorded no end: it was killed, or the run folder is not readable"


class Monitor:
    """All that the process does.

    Args:
        told: the settings (rank_0.py).
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told, self.path = told, Path(told["folder"]) / "events.jsonl"
        self.sender, self.commands, self.shown = None, None, None
        if told["on_event"]:
            self.sender = Sender(told["on_event"], told["cwd"], self._lost)
        if told["after_commit"]:
            self.commands = Commands(told, self._commanded)
        if told["prometheus"]:
            from runtime.monitor.prometheus import Shown  # takes as long as all other imports

            self.shown = Shown(told["prometheus"], self._metrics)
        # main thread: what rank 0 does; the step that it has logged last, when, and what it owes
        self.busy, self.step, self.logged = "start", 0, time.monotonic()
        self.due, self.stalls = self.logged + told["due"], False
        self.start: dict[str, Any] = {}  # the event of this start
        self.end_state = ""
        self.gone = False  # whether rank 0 is
        # all threads; the lock is held only to compute
        self.state, self.series, self.lock = RunState(), Series(), threading.Lock()
        self.said: set[str] = set()  # what is said only once
        # files: what is to be done, a function and its arguments; and what `_find_end` has found
        self.work: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.found_end: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.closing = False
        self.files = threading.Thread(target=self._files, name="files", daemon=True)

    # --- main thread ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Work until rank 0 ends, and for a bounded time after that."""
        self.files.start()
        unfinished = b""
        while True:
            if not select.select([STDIN], [], [], LOOK_SECONDS)[0]:
                # only now: if this process was stopped, what rank 0 said meanwhile comes first
                self.look(time.monotonic())
            elif said := os.read(STDIN, 1 << 16):
                *lines, unfinished = (unfinished + said).split(b"\n")
                for line in lines:
                    self._survive(self.hear, json_object(line), time.monotonic())
            else:
                break
        self.end()

    def look(self, now: float) -> None:
        """Report a stall."""
        if now > self.due and not self.stalls:
            self.stalls = True
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
            self.work.put((self._note, self.state.note_record, record, time.time()))
            if self.stalls:
                self.stalls = False
                self.happened("resumed", step=self.step, seconds=silent)

    def hear_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "rollback"):
            self.step = event["step"]
        self.work.put((self._note, self.state.note_event, event))
        if kind == "refused":  # not written by rank 0: a new run folder stays empty
            self.work.put((self._write, event))
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
        self.gone = True
        if not self.end_state:
            self.work.put((self._find_end,))
            end = None
            with contextlib.suppress(queue.Empty):  # if the file system does not respond
                end = self.found_end.get(timeout=END_EVENT_SECONDS + LOOK_SECONDS)
            if end is not None:
                self.hear_event(end)
            else:
                self.happened("died", step=self.step, reason=GONE)
        if self.commands is not None:
            finished = self.end_state == "finished"
            seconds = self.told["after_commit_seconds"] if finished else ENDING_SECONDS
            self.commands.finish(seconds)
        if self.sender is not None:
            self.sender.finish(ENDING_SECONDS)
        self.work.put((self._close,))
        self.files.join(2 * LOOK_SECONDS)  # longer only if the file system does not respond

    # --- any thread -------------------------------------------------------------------------------

    def happened(self, kind: str, **about: Any) -> None:
        """Note an event of the monitor's own: send it if it is an alarm, and let it be written to
        events.jsonl."""
        event = {"event": kind, "time": time.time(), **about}
        self.work.put((self._note, self.state.note_event, event))
        self.work.put((self._write, event))
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
            with self.lock:
                passes = self.series.passes(event, time.monotonic())
            if passes:
                self.sender.send(alarm(self.told["name"], self.told["folder"], event))

    def _metrics(self) -> list[Any]:
        """The metrics for Prometheus."""
        from runtime.monitor.prometheus import families

        more: dict[str, float] = {}
        if self.sender is not None:
            more["lattice_alarms_delivered_total"] = self.sender.delivered
            more["lattice_alarms_lost_total"] = self.sender.failed
        with self.lock:
            if self.commands is not None:
                done = self.commands.done_step
                more["lattice_after_commit_failures_total"] = self.state.failed_commands
                more["lattice_after_commit_pending"] = len(self.commands.pending)
                more |= {"lattice_after_commit_step": done} if done is not None else {}
            return [*families(self.told["name"], self.state, more)]

    def _survive(self, work: Callable[..., None], *about: Any) -> None:
        """Do a piece of work; if it fails, say so and go on with the next."""
        try:
            work(*about)
        except Exception as error:
            line = next((each for each in about if isinstance(each, dict)), None)
            what = short(line) if line is not None else work.__name__
            self._say_once(f"warning: {what}: {type(error).__name__}: {error}")

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            say(text)

    # --- files ------------------------------------------------------------------------------------

    def _files(self) -> None:
        self._survive(self._read_past)
        while not self.closing:
            self._survive(self._show)
            with contextlib.suppress(queue.Empty):
                self._survive(*self.work.get(timeout=LOOK_SECONDS))
        self._survive(self._show)

    def _close(self) -> None:
        self.closing = True

    def _read_past(self) -> None:
        """Note what happened before this start."""
        for event in _events_until(self.path, self.told["past"]):
            self._survive(self._note, self.state.note_event, event)
            if event["event"] == "spent":  # with each logged step
                self._note(self.state.note_record, {"step": event["step"]}, event["time"])
        self.state.state = "starting"

    def _note(self, note: Callable[..., None], *about: Any) -> None:
        with self.lock:
            note(*about)

    def _write(self, event: dict[str, Any]) -> None:
        if event["event"] != "refused" or self.path.exists():
            about = {name: value for name, value in event.items() if name not in ("event", "time")}
            append_event(self.path.parent, event["event"], **about)

    def _show(self) -> None:
        if self.shown is not None:
            try:
                self.shown.update(self.gone, is_last=self.closing)
            except OSError as error:
                about = f"run.prometheus={self.told['prometheus']}: {error.strerror or error}"
                self._say_once(f"{about}; trying again")

    def _find_end(self) -> None:
        """Find out how this start ended, which the launcher may still record; or record it."""
        until, folder = time.monotonic() + END_EVENT_SECONDS, self.path.parent
        # until a start begins, status.json is about the one before, and then there is none
        while self.start and time.monotonic() < until:
            if status := read_status(folder):
                return self.found_end.put({"event": "end", "time": time.time(), **status})
            time.sleep(0.1)
        self.found_end.put(None)
        if self.start:
            end_start(folder, self.start, "failed", self.step, GONE)


def _events_until(path: Path, until: int) -> Iterator[dict[str, Any]]:
    """Yield the whole events in the first `until` bytes of a file."""
    begin = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while data := file.read(max(0, min(until - begin, READ_BYTES))):
            if not data.endswith(b"\n"):
                data += file.readline()
            yield from map(named_as_today, whole_lines(path, data, is_whole_event, begin))
            begin += len(data)


def start_monitor(
    told: dict[str, Any], stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start the process, and tell it its settings: not as arguments, which every user of the
    machine can read, because a webhook's address is a secret. The pipe to it is not buffered."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.monitor.process"],
        cwd=Path(__file__).parents[2],  # this repository
        stdin=subprocess.PIPE,
        bufsize=0,
        stderr=stderr,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(told).encode() + b"\n")
    return process


def main() -> None:
    # Handlers, not SIG_IGN: that would be inherited by the commands. What ends the run also signals
    # this process; it ends when rank 0 has.
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in stops:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    with open(STDIN, "rb", buffering=0, closefd=False) as pipe:  # reads no further than the line
        told = json.loads(pipe.readline())
    Monitor(told).follow()
    sys.stderr.flush()
    os._exit(0)  # no thread is waited for


if __name__ == "__main__":
    guard_output()
    main()
