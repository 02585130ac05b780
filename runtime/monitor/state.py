"""What the events and records of a run add up to, for Prometheus; and the clock that notices when
no step is logged any more."""

import statistics
import time
from collections import Counter, deque
from typing import Any

from runtime.log.ledger import Account
from runtime.log.log_lines import is_number

FIRST_LINE_SECONDS = 3600.0  # until the first step of a start is logged: it may compile
BUSY_SECONDS = 3600.0  # for an evaluation, a save, …; or twice what the same has taken before
START = "start"  # the cause from a start, or from a data stage's end, until the steps begin
USUAL_LINES = 64  # the last so many lines say what is usual


class RunState:
    """The state of a run, from the first event of events.jsonl on."""

    def __init__(self) -> None:
        self.state = "starting"  # then running, and as in status.json, or died
        self.record: dict[str, Any] = {}  # the last one
        self.record_time = 0.0  # when it was found, in seconds since 1970; 0: not yet
        self.start_time = 0.0  # when the last start began, likewise
        self.account = Account()  # seconds by cause
        self.events: Counter[str] = Counter()  # over all starts, a later data stage being none
        self.verdicts: Counter[str] = Counter()  # of examinations, over all starts
        self.failed_saves = self.failed_commands = 0  # over all starts
        self.checkpoint: dict[str, Any] = {}  # the event of the last good save
        self.slow: dict[tuple[str, str], float] = {}  # (rank, node) → factor, of this start
        self.spares: int | None = None  # nodes that wait

    def note_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self.events[kind] += 1
        self.account.add(event)
        if kind == "start":
            self.state, self.slow, self.start_time = "running", {}, event["time"]
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
            key = str(event.get("rank")), str(event.get("node"))
            factor: Any = event.get("factor")
            self.slow.pop(key, None)
            if is_number(factor) and not event.get("ended"):
                self.slow[key] = float(factor)
        elif kind == "suspicion":
            self.verdicts[str(event.get("verdict"))] += 1
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
    hangs is reported only once. Rank 0 states when it does something else than steps (`busy`): that
    has a limit of its own, and is not part of the time between two lines.

    Args:
        factor, least: guard.hang_factor and guard.hang_seconds. Without a factor: 10.
    """

    def __init__(self, factor: float, least: float, now: float) -> None:
        self.factor, self.least = 2 * (factor or 10.0), 2 * least
        self._gaps: deque[float] = deque(maxlen=USUAL_LINES)  # seconds
        self._first: float | None = None  # seconds until the first line
        self._last, self.reported = now, False
        self.cause, self._since = "", now  # what rank 0 does; "": steps
        self._elsewhere = 0.0  # seconds since the last line that were not for steps
        self._longest: dict[str, float] = {}  # cause → seconds

    def busy(self, cause: str, now: float) -> None:
        """Note what rank 0 does from now on, by a cause of log/ledger.py; "": steps again."""
        took = now - self._since
        if self.cause:
            self._elsewhere += took
            self._longest[self.cause] = max(took, self._longest.get(self.cause, 0.0))
        if self.cause == START:  # the steps before, if any, were those of another data stage
            self._first, self._elsewhere = None, now - self._last
            self._gaps.clear()
        self.cause, self._since = cause, now

    def line(self, now: float) -> float | None:
        """Note that a step was logged. Returns the seconds without one, if a stall was reported
        that is now over."""
        gap, over = now - self._last, self.reported
        if self.cause:  # the line was written in the middle of it
            self.busy(self.cause, now)
        for_steps, self._elsewhere = gap - self._elsewhere, 0.0
        if self._first is None:
            self._first = for_steps
        else:  # a stall too: the median does not follow one, and follows many
            self._gaps.append(for_steps)
        self._last, self.reported = now, False
        return gap if over else None

    def stalled(self, now: float) -> float | None:
        """Return the seconds since the last line when a limit is exceeded for the first time."""
        if self.cause:
            seconds = now - self._since
            limit = max(BUSY_SECONDS, 2 * self._longest.get(self.cause, 0.0))
        else:
            seconds, limit = now - self._last - self._elsewhere, max(self.least, self._usual())
        if self.reported or seconds <= limit:
            return None
        self.reported = True
        return now - self._last

    def _usual(self) -> float:
        if self._first is None:
            return FIRST_LINE_SECONDS
        # before the second line, the first is known: that took a start, and as many steps
        return self.factor * statistics.median(self._gaps) if self._gaps else self._first
