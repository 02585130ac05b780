"""What happened to a run, how each start of it ended, and where its time went: written by rank 0.

    with Lease(…) as lease, RunLog(config, sink) as log:   the folder belongs to this run
        log.start(step, world_size)                        it begins to train
        log.busy("")                                       its steps begin
        log.event("rollback", step=…)                      whatever else happens
        log.record({"step": …, "loss": …})                 a logged step
        log.end("finished", "all steps done")              only the first call counts

It is opened once the run folder belongs to this run, outlives data stages, and records the end of
a start that fails outside of its steps. All ranks have one and call it alike; it writes only on
rank 0.

Each line also goes to `sink`, if there is one: to the monitor's pipe (monitor/), after the file.

    {"event": {…}}   as in events.jsonl; and `refused` (a start that is refused), which is not there
    {"record": {…}}  as in metrics.jsonl
    {"busy": cause}  what rank 0 does from now on, by a cause of ledger.py; "": steps

Each has `due`, in seconds: if no line follows for so long, rank 0 is stuck. During steps, that is
twice the watchdog's limit, for as many steps as are logged together; until the first of them, and
while rank 0 does anything else, an hour, or twice as long as the same has taken before.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errors import UserError
from runtime import signals
from runtime.exit import describe, this_rank
from runtime.log.events import append_event
from runtime.log.ledger import Ledger
from runtime.log.status import end_start, record_missing_end, starts_of, write_status
from settings.config import Config

PAUSE_SECONDS = 3600.0  # for a start (it may compile), an evaluation, a save, …
HANG_FACTOR = 10.0  # for `due`, if the watchdog is off
Line = dict[str, Any]


class RunLog:
    """The log of a run folder, as a context manager that every rank enters.

    Args:
        config: of the run.
        sink: gets each line. It must not wait or raise. It is called by one thread at a time.
    """

    def __init__(self, config: Config, sink: Callable[[Line], None] | None = None) -> None:
        self.folder, self.sink = Path(config.run.dir), sink
        self.interval, self.guard = config.run.log_interval, config.guard
        self.writes = this_rank() == 0
        self.step = 0  # steps done, as the run last said
        self.ledger = Ledger()
        self.ended = False  # whether the end of this start is recorded
        self.cause = "start"  # what this process does besides steps; "": steps
        self.busy_since = signals.STARTED  # when it began to, by the monotonic clock
        self._longest: dict[str, float] = {}  # cause → seconds
        self._usual_step: float | None = None  # seconds
        self._start: Line | None = None  # its event
        self._lock = threading.RLock()

    def __enter__(self) -> "RunLog":
        self._tell({"busy": self.cause})
        return self

    def start(self, step: int, world_size: int, resumed: Path | None = None) -> list[str]:
        """Record that this start begins to train from `step`, of the checkpoint `resumed` if any;
        of a later data stage, nothing. Returns lines for the log: what the previous start left to
        be told."""
        self.step = step
        if not self.writes or self._start is not None:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = self._end_previous()
        (self.folder / "status.json").unlink(missing_ok=True)
        began = time.time() - (time.monotonic() - signals.STARTED)
        own = f"{self.folder.absolute() / 'checkpoints'}/"  # only named: the folder may be moved
        about = {"checkpoint": str(resumed.absolute()).removeprefix(own)} if resumed else {}
        self._start = self.event("start", began=began, step=step, world_size=world_size, **about)
        return lines

    def _end_previous(self) -> list[str]:
        """Record the end of the previous start if that has not. Returns lines for the log."""
        event = record_missing_end(self.folder)
        if event is None:
            return []
        self._tell({"event": event})
        reason = event["reason"].partition(" (")[0]
        return [f"the previous start was last recorded at step {event['step']}: {reason}"]

    def event(self, kind: str, **about: Any) -> Line | None:
        """Record what happened (events.py), from any thread. Returns the event, on rank 0."""
        if not self.writes:
            return None
        with self._lock:
            event = append_event(self.folder, kind, **about)
            self._tell({"event": event})
        return event

    def record(self, record: Line, usual_step: float | None) -> None:
        """Tell of a logged step. usual_step: seconds, if known."""
        self._usual_step = usual_step
        self._tell({"record": record})

    def busy(self, cause: str) -> None:
        """Note that this process, which did steps or something else, does `cause` from now on (a
        cause of ledger.py; "": steps). The time up to now belongs to what it did."""
        self.ledger.spent(self.cause or "steps")
        now = self.ledger.counted_until
        if self.cause:
            took = now - self.busy_since
            self._longest[self.cause] = max(took, self._longest.get(self.cause, 0.0))
        self.cause, self.busy_since = cause, now
        self._tell({"busy": cause})

    def leave_data_stage(self) -> None:
        """Note that a data stage has ended; what follows belongs to the start of the next."""
        self.cause = "end"  # since the last step
        self.busy("start")
        self.write_spent()
        self._usual_step = None

    def write_spent(self) -> None:
        """Record the time that has a cause."""
        self.event("spent", step=self.step, seconds=self.ledger.take())

    def end(self, state: str, reason: str, step: int | None = None, **about: Any) -> None:
        """Record how this start ended, unless another thread has.

        Args:
            step: steps done; None: as the run last said.
            about: more for status.json.
        """
        with self._lock:
            if self.ended or not self.writes:
                return
            self.ended, step = True, self.step if step is None else step
            if self._start is None:  # it failed before its first step
                self._end_previous()
                event: Line | None = append_event(
                    self.folder, "end", state=state, step=step, reason=reason
                )
            else:
                event = end_start(self.folder, self._start, state, step, reason)
            if event is not None:  # None: this process was displaced
                write_status(self.folder, state, step, reason, **about)
                self._tell({"event": event})

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Record the end of a start that fails outside of its steps, unless it was refused."""
        left = isinstance(error, SystemExit) and isinstance(error.code, str)  # with a last line
        if error is None or not (left or isinstance(error, Exception)):
            return
        if self.ended or not self.writes:
            return
        if self._start is None and isinstance(error, UserError):
            reason = " ".join(str(error).split())
            self._tell({"event": {"event": "refused", "time": time.time(), "reason": reason}})
        elif self._start is None:
            starts = starts_of(self.folder)
            self.end("failed", describe(error), step=starts[-1]["step"] if starts else 0)
        else:
            error.add_note(f"after step {self.step}, outside of a step")
            self.end("failed", describe(error))

    def _tell(self, line: Line) -> None:
        if self.sink is not None and self.writes:
            with self._lock:
                self.sink({**line, "due": self._due()})

    def _due(self) -> float:
        if self.cause:
            return max(PAUSE_SECONDS, 2 * self._longest.get(self.cause, 0.0))
        if self._usual_step is None:
            return PAUSE_SECONDS
        usual = (self.guard.hang_factor or HANG_FACTOR) * self._usual_step * self.interval
        return 2 * max(self.guard.hang_seconds, usual)
