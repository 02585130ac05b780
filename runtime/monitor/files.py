"""The monitor's work on files, in a thread of its own: a file system may not respond for minutes.

It reads what happened before this start, adds up what happens (state.py) and shows that to
Prometheus, and writes the monitor's events. All in order, one piece of work after another.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from errors import short
from runtime.log.events import append_event, is_whole_event, named_as_today
from runtime.log.log_lines import whole_lines
from runtime.log.status import end_start, read_status
from runtime.monitor.send import say_once
from runtime.monitor.state import RunState

LOOK_SECONDS = 1.0  # between two looks at whether the file for Prometheus is due
READ_BYTES = 1 << 24  # of events.jsonl at a time: after months it is larger
# after rank 0's end: the launcher may still record how it ended (tools/launch.py)
END_EVENT_SECONDS = 3.0
GONE = "rank 0 is gone and recorded no end: it was killed, or the run folder is not readable"
Event = dict[str, Any]


class Files:
    """The thread, and what other threads may ask of it.

    Args:
        told: the settings (rank_0.py).
        numbers: returns those of the monitor itself for Prometheus, given the state of the run.
    """

    def __init__(self, told: dict[str, Any], numbers: Callable[[RunState], dict[str, float]]):
        self.told, self.path = told, Path(told["folder"]) / "events.jsonl"
        self.state, self._lock = RunState(), threading.Lock()  # scrapes read it, in their threads
        self.shown = None
        if told["prometheus"]:
            # takes as long as all other imports
            from runtime.monitor.prometheus import Shown, families

            def metrics() -> list[Any]:
                with self._lock:
                    return [*families(told["name"], self.state, numbers(self.state))]

            self.shown = Shown(told["prometheus"], metrics)
        self.is_rank_0_gone = self._closing = False
        # what is to be done: a function and its arguments
        self._work: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="files", daemon=True)
        self._thread.start()

    def note_event(self, event: Event, writes: bool = False) -> None:
        """Add an event to the state; with `writes`, also to events.jsonl."""
        self._work.put((self._note, self.state.note_event, event))
        if writes:
            self._work.put((self._write, event))

    def note_record(self, record: dict[str, Any]) -> None:
        self._work.put((self._note, self.state.note_record, record, time.time()))

    def find_end(self, start: Event, step: int) -> Event | None:
        """Find out how this start ended after `step`, which the launcher may still record; if
        nobody has, record it, and return None. In bounded time, also if the file system does not
        respond.

        start: its event; empty if there is none.
        """
        found: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._work.put((self._find_end, start, step, found))
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=END_EVENT_SECONDS + LOOK_SECONDS)
        return None

    def close(self, seconds: float) -> None:
        """Do what is left to be done, for at most so many seconds."""
        self._work.put((self._close,))
        self._thread.join(seconds)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        survive(self._read_past)
        while not self._closing:
            survive(self._show)
            with contextlib.suppress(queue.Empty):
                survive(*self._work.get(timeout=LOOK_SECONDS))
        survive(self._show)

    def _close(self) -> None:
        self._closing = True

    def _read_past(self) -> None:
        """Note what happened before this start."""
        for event in _events_until(self.path, self.told["past"]):
            survive(self._note, self.state.note_event, event)
            if event["event"] == "spent":  # with each logged step
                self._note(self.state.note_record, {"step": event["step"]}, event["time"])
        self.state.state = "starting"

    def _note(self, note: Callable[..., None], *about: Any) -> None:
        with self._lock:
            note(*about)

    def _write(self, event: Event) -> None:
        if event["event"] != "refused" or self.path.exists():  # a new run folder stays empty
            about = {name: value for name, value in event.items() if name not in ("event", "time")}
            append_event(self.path.parent, event["event"], **about)

    def _find_end(self, start: Event, step: int, found: "queue.SimpleQueue[Event | None]") -> None:
        until, folder = time.monotonic() + END_EVENT_SECONDS, self.path.parent
        # until a start begins, status.json is about the one before, and then there is none
        while start and time.monotonic() < until:
            if status := read_status(folder):
                return found.put({"event": "end", "time": time.time(), **status})
            time.sleep(0.1)
        found.put(None)
        if start:
            end_start(folder, start, "failed", step, GONE)

    def _show(self) -> None:
        if self.shown is not None:
            try:
                self.shown.update(self.is_rank_0_gone, is_last=self._closing)
            except OSError as error:
                about = f"run.prometheus={self.told['prometheus']}: {error.strerror or error}"
                say_once(f"{about}; trying again")


def survive(work: Callable[..., None], *about: Any) -> None:
    """Do a piece of work; if it fails, say so and go on with the next."""
    try:
        work(*about)
    except Exception as error:
        line = next((each for each in about if isinstance(each, dict)), None)
        what = short(line) if line is not None else work.__name__
        say_once(f"warning: {what}: {type(error).__name__}: {error}")


def _events_until(path: Path, until: int) -> Iterator[Event]:
    """Yield the whole events in the first `until` bytes of a file."""
    begin = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while data := file.read(max(0, min(until - begin, READ_BYTES))):
            if not data.endswith(b"\n"):
                data += file.readline()
            yield from map(named_as_today, whole_lines(path, data, is_whole_event, begin))
            begin += len(data)
