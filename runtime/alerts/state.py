"""What the events and records of a run add up to, for Prometheus; and the clock that notices when
no step is logged any more."""

import statistics
import time
from collections import Counter, deque
from typing import Any

from runtime.ledger import Account

FIRST_LINE_SECONDS = 3600.0  # until the first step of a start is logged: it may compile
USUAL_LINES = 64  # the last so many lines say what is usual


class RunState:
    """The state of a run, from the first event of events.jsonl on."""

    def __init__(self) -> None:
        self.state = "starting"  # then running, and as in status.json, or died
        self.record: dict[str, Any] = {}  # the last one
        self.record_time = 0.0  # when it was found, in seconds since 1970; 0: not yet
        self.account = Account()  # seconds by cause
        self.events: Counter[str] = Counter()  # over all starts
        self.failed_saves = self.failed_commands = 0  # over all starts
        self.checkpoint: dict[str, Any] = {}  # the event of the last good save
        self.slow: dict[tuple[str, str], float] = {}  # (rank, node) → factor, of this start
        self.spares: int | None = None  # nodes that wait

    def note_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self.events[kind] += 1
        if kind in ("start", "rollback", "spent"):
            self.account.add(event)
        if kind == "start":
            self.state, self.slow = "running", {}
        elif kind == "end":
            self.state = str(event.get("state"))
        elif kind == "died":
            self.state = "died"
        elif kind == "checkpoint":
            self.failed_saves += "failed" in event
            self.checkpoint = self.checkpoint if "failed" in event else event
        elif kind == "after_commit":
            self.failed_commands += "failed" in event
        elif kind == "slow_rank":
            key, factor = (str(event.get("rank")), str(event.get("node"))), event.get("factor")
            self.slow.pop(key, None)
            if isinstance(factor, int | float) and not event.get("ended"):
                self.slow[key] = float(factor)
        elif kind == "spares" and isinstance(event.get("ranks"), dict):
            self.spares = len(event["ranks"])

    def note_record(self, record: dict[str, Any], found: float | None = None) -> None:
        """found: when the record was found, in seconds since 1970; None: now."""
        self.record, self.record_time = record, time.time() if found is None else found


class StallClock:
    """Notices that a run logs no step, by its own clock.

    The watchdog of each rank (watchdog.py) ends a step that hangs. This clock also runs where that
    one does not: during the start, a save, an evaluation; or if it was turned off, or if the
    process was stopped. It only reports. Its limit is twice the watchdog's, so that a step that
    hangs is reported only once; and what takes time between two lines regularly, as saves do, is
    part of what is usual.

    Args:
        factor, least: guard.hang_factor and guard.hang_seconds. Without a factor: 10.
    """

    def __init__(self, factor: float, least: float, now: float) -> None:
        self.factor, self.least = 2 * (factor or 10.0), 2 * least
        self._gaps: deque[float] = deque(maxlen=USUAL_LINES)  # seconds
        self._first: float | None = None  # seconds until the first line
        self._last, self.reported = now, False

    def line(self, now: float) -> float | None:
        """Note that a step was logged. Returns the seconds of a stall that was reported and is
        over."""
        gap, over = now - self._last, self.reported
        if self._first is None:
            self._first = gap
        # a stall does not become usual, unless nothing is: lines may always be that far apart
        elif not over or not self._gaps:
            self._gaps.append(gap)
        self._last, self.reported = now, False
        return gap if over else None

    def stalled(self, now: float) -> float | None:
        """Return the seconds without a logged step when they exceed the limit for the first
        time."""
        if self._first is None:
            usual = FIRST_LINE_SECONDS
        else:  # before the second line, the first is known: that took a start, and as many steps
            usual = self.factor * statistics.median(self._gaps) if self._gaps else self._first
        limit = max(self.least, usual)
        if self.reported or now - self._last <= limit:
            return None
        self.reported = True
        return now - self._last
