"""The companion of rank 0: `python -m runtime.monitor.companion`, started by rank_0.py.

Standard input is a pipe: first a line with the settings, then a line whenever rank 0 begins to do
something else than steps ("evaluation"; empty: steps again), and one that says why this start was
refused, if it was. Its end means that rank 0 has closed it or is gone. Nothing that may take time
is done by the main thread, so it notices a stall or rank 0's death even if the file system does not
respond.

    thread        does                                             may wait for
    main          the clock, rank 0's end                          nothing
    reader        reads the run's files, writes events             the file system
    sender        sends alarms (send.py)                           a webhook, a command
    after_commit  runs the command (after_commit.py)               the command
    prometheus    answers scrapes, writes the file                 a client

It ends at most so long after rank 0, whatever hangs:

    the run                 alarms           checkpoint.after_commit
    finished                ENDING_SECONDS   checkpoint.after_commit_minutes
    stopped, failed, died   ENDING_SECONDS   ENDING_SECONDS; then it is ended, and the next start
                                             runs it again
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from errors import short
from output import guard_output
from runtime.log.events import append_event, is_whole_event, named_as_today
from runtime.log.log_lines import Follower, is_record
from runtime.monitor.after_commit import Commands, progress
from runtime.monitor.alarms import Series, alarm, is_alarm
from runtime.monitor.prometheus import Endpoint, exposition, write_file
from runtime.monitor.send import Sender, say
from runtime.monitor.settings import Settings
from runtime.monitor.state import RunState, StallClock

LOOK_SECONDS = 1.0  # between two looks at the run's files
FILE_SECONDS = 10.0  # between two versions of the file for Prometheus
TAIL_BYTES = 1 << 16  # of an older metrics.jsonl: enough for its last line
ENDING_SECONDS = 10.0
# after rank 0's end: the launcher may still record how it ended (tools/launch.py)
END_EVENT_SECONDS = 3.0
REFUSED = "refused: "  # begins the line of the pipe that says why this start was refused


class Companion:
    """All that the process does."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.run = settings, Path(settings.folder)
        self.state, self.lock = RunState(), threading.Lock()  # the lock is held only to compute
        self.clock = StallClock(settings.hang_factor, settings.hang_seconds, time.monotonic())
        self.series = Series()
        self.own_events: list[tuple[str, dict[str, Any]]] = []  # to be written by the reader
        self.events = Follower(self.run / "events.jsonl", is_whole_event)
        self.records = Follower(self.run / "metrics.jsonl", is_record, tail=TAIL_BYTES)
        self.sender, self.commands, self.endpoint = None, None, None
        if settings.on_event:
            self.sender = Sender(settings.on_event, settings.cwd, self._lost)
        if settings.after_commit:
            self.commands = Commands(settings, self._commanded)
        self.is_file = settings.prometheus.endswith(".prom")
        if settings.prometheus and not self.is_file:
            self.endpoint = Endpoint(settings, self.text)
        self.progress: tuple[int, int | None] = 0, None  # of the commands: pending; newest done
        self.gone, self.closing = threading.Event(), threading.Event()  # rank 0; this process
        self.began = self.ended = False  # whether a `start` and an `end` event were read
        self.past = False  # whether the next start has begun, which has a companion of its own
        self.logged = -1  # the last step whose record was read, or from which the run goes on
        self.file_due = 0.0  # when the file for Prometheus is written again, by the monotonic clock
        self.said: set[str] = set()  # what is said only once
        self.unfinished = b""  # a line of the pipe
        self.reader = threading.Thread(target=self._read_all, name="reader", daemon=True)

    # --- main thread ------------------------------------------------------------------------------

    def follow(self) -> None:
        """Work until rank 0 ends, and for a bounded time after that."""
        self.reader.start()
        while True:
            if select.select([STDIN], [], [], LOOK_SECONDS)[0]:
                said = os.read(STDIN, 4096)
                if not said:
                    break
                self.hear(said, time.monotonic())
            self.look(time.monotonic())
        self._end()

    def look(self, now: float) -> None:
        """Report a stall."""
        with self.lock:
            seconds, busy = self.clock.stalled(now), self.clock.cause
        if seconds is not None:
            step = self.state.record.get("step", 0)
            self.happened("stalled", step=step, seconds=seconds, busy=busy or "steps")

    def hear(self, said: bytes, now: float) -> None:
        """Note what rank 0 does: lines of the pipe, or parts of them."""
        *lines, self.unfinished = (self.unfinished + said).split(b"\n")
        for line in (line.decode(errors="replace") for line in lines):
            if line.startswith(REFUSED):
                self.happened("refused", reason=line.removeprefix(REFUSED))
                self.ended = True
            else:
                with self.lock:
                    self.clock.busy(line, now)

    def _end(self) -> None:
        self.gone.set()
        patience = time.monotonic() + END_EVENT_SECONDS
        while not self.ended and time.monotonic() < patience:
            time.sleep(0.02)
        if not self.ended:
            reason = "rank 0 is gone and recorded no end: it was killed, or the run folder is not "
            reason += "readable"
            self.happened("died", step=self.state.record.get("step", 0), reason=reason)
            self.ended = True
        if self.commands is not None:
            finished = self.state.state == "finished"
            seconds = self.settings.after_commit_seconds if finished else ENDING_SECONDS
            self.commands.finish(seconds)
        if self.sender is not None:
            self.sender.finish(ENDING_SECONDS)
        self.closing.set()
        self.reader.join(2 * LOOK_SECONDS)  # longer only if the file system does not respond

    # --- any thread -------------------------------------------------------------------------------

    def happened(self, event: str, **about: Any) -> None:
        """Note an event of the companion's own: send it if it is an alarm, and let the reader write
        it to events.jsonl."""
        whole = {"event": event, "time": time.time(), **about}
        with self.lock:
            self.own_events.append((event, about))
            self.state.note_event(whole)
        self._send(whole)

    def _commanded(self, **about: Any) -> None:
        self.happened("after_commit", **about)
        if "failed" in about:
            say(f"checkpoint.after_commit failed for step {about['step']}: {about['failed']}")

    def _lost(self, lost: dict[str, Any], why: str) -> None:
        self.happened("undelivered", text=lost["text"], about=lost["event"], why=why)

    def _send(self, event: dict[str, Any]) -> None:
        if self.sender is not None and is_alarm(event):
            with self.lock:
                passes = self.series.passes(event, time.monotonic())
            if passes:
                self.sender.send(alarm(self.settings.name, self.settings.folder, event))

    def text(self) -> str:
        """The text for Prometheus."""
        more: dict[str, float] = {}
        if self.sender is not None:
            more["lattice_alarms_delivered_total"] = self.sender.delivered
            more["lattice_alarms_lost_total"] = self.sender.failed
        if self.commands is not None:
            waiting, done = self.progress
            more["lattice_after_commit_failures_total"] = self.state.failed_commands
            more["lattice_after_commit_pending"] = waiting
            more |= {"lattice_after_commit_step": done} if done is not None else {}
        with self.lock:
            return exposition(self.settings.name, self.state, more)

    # --- reader -----------------------------------------------------------------------------------

    def _read_all(self) -> None:
        read_to = -1
        while self.events.offset != read_to:  # a part may have no whole event
            read_to = self.events.offset
            for event in self.events.read(until=self.settings.events_from):
                self._survive(self._note, named_as_today(event))
        self.state.state = "starting"
        self._survive(self._read_records)  # of an earlier start
        is_last = False
        while not is_last:
            is_last = self.closing.is_set()
            for work in (self._read, self._serve, partial(self._write_file, is_last)):
                self._survive(work)
            if not self.gone.is_set():
                self.gone.wait(LOOK_SECONDS)
            else:  # soon again: the `end` event, if it is not there yet, is about to be written
                self.closing.wait(LOOK_SECONDS if self.ended else 0.05)

    def _survive(self, work: Callable[..., None], *about: Any) -> None:
        """Do a piece of work; if it fails, say so and go on with the next."""
        try:
            work(*about)
        except Exception as error:
            what = " ".join(map(short, about)) or "the run's files"
            self._say_once(f"warning: {what}: {type(error).__name__}: {error}")

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            say(text)

    def _serve(self) -> None:
        if self.endpoint is not None and self.endpoint.server is None:
            problem = self.endpoint.open()
            if problem:
                self._say_once(
                    f"run.prometheus={self.settings.prometheus}: {problem}; trying again"
                )

    def _write_file(self, is_last: bool) -> None:
        is_due = is_last or time.monotonic() >= self.file_due
        if self.is_file and is_due and not self.past:
            self.file_due = time.monotonic() + FILE_SECONDS
            write_file(Path(self.settings.prometheus), self.text())

    def _read(self) -> None:
        """Read what was added to the run's files, and write the companion's own events."""
        with self.lock:
            own, self.own_events = self.own_events, []
        for event, about in own:
            if event != "refused" or self.events.path.exists():  # a new run folder stays empty
                append_event(self.run, event, **about)
        for found in self.events.read():
            self._survive(self._hear, named_as_today(found))
        if not self.past:
            self._read_records()
        if self.commands is not None:
            waiting, done = progress(self.run / "checkpoints")
            self.progress = len(waiting), done

    def _hear(self, found: dict[str, Any]) -> None:
        """Note an event that rank 0 has written, and send it if it is an alarm."""
        if found["event"] == "start":
            self.past |= self.began or self.ended
            if self.commands is not None and not self.past:
                self.commands.start()  # not before: the newest checkpoint may be damaged
            self.began = True
        if self.past or found["event"] in OWN:
            return
        if found["event"] in ("start", "rollback"):
            self.logged = found["step"]
        try:
            self._note(found)
            self._send(found)
        finally:  # not that which this start has noted of the one before (log/status.py)
            self.ended |= found["event"] == "end" and not found.get("noted_later")

    def _read_records(self) -> None:
        """Note the last record. It is no news if the file was replaced, as at a start and after a
        rollback, and its last line was there before."""
        for record in self.records.read()[-1:]:
            step = record["step"]
            is_new = self.began and step > self.logged
            with self.lock:
                self.state.note_record(record, None if is_new else self.records.modified)
                over = self.clock.line(time.monotonic()) if is_new else None
            if is_new:
                self.logged = step
            if over is not None:
                self.happened("resumed", step=step, seconds=over)

    def _note(self, event: dict[str, Any]) -> None:
        with self.lock:
            self.state.note_event(event)


STDIN = 0
# events that are noted when they happen
OWN = {"stalled", "resumed", "died", "refused", "undelivered", "after_commit"}


def start_companion(
    settings: Settings, stderr: IO[bytes] | None = None
) -> "subprocess.Popen[bytes]":
    """Start the process, and tell it its settings. The pipe to it is not buffered."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.monitor.companion"],
        cwd=Path(__file__).parents[2],  # this repository
        stdin=subprocess.PIPE,
        bufsize=0,
        stderr=stderr,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(settings.dumps().encode() + b"\n")
    return process


def main() -> None:
    # Handlers, not SIG_IGN: that would be inherited by the commands. What ends the run also signals
    # this process; it ends when rank 0 has.
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for number in stops:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    with open(STDIN, "rb", buffering=0, closefd=False) as pipe:  # reads no further than the line
        settings = Settings.loads(pipe.readline().decode())
    Companion(settings).follow()
    sys.stderr.flush()
    os._exit(0)  # no thread is waited for


if __name__ == "__main__":
    guard_output()
    main()
