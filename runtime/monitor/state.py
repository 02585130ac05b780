"""What the events and records of a run add up to, for Prometheus."""

from collections import Counter
from typing import Any

from runtime.log.ledger import Account
from runtime.log.log_lines import is_number


class RunState:
    """The state of a run, from the first event of events.jsonl on."""

    def __init__(self) -> None:
        self.state = "starting"  # then running, and as in status.json, died or refused
        self.record: dict[str, Any] = {}  # each entry as last logged; of earlier starts only `step`
        self.record_time: float | None = None  # when it was logged, in seconds since 1970
        self.start_time: float | None = None  # when the last start began, likewise
        self.account = Account()  # seconds by cause
        self.events: Counter[str] = Counter()  # over all starts
        self.verdicts: Counter[str] = Counter()  # of examinations, over all starts
        self.failed_saves = self.failed_commands = 0  # over all starts
        self.checkpoint: dict[str, Any] = {}  # the event of the last good save
        self.slow: dict[tuple[str, ...], float] = {}  # (rank, node) → factor, of this start
        self.spares: int | None = None  # nodes that wait

    def note_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind != "boundary":  # of an older version (log/events.py)
            self.events[kind] += 1
        self.account.add(event)
        if kind == "start":
            self.state, self.slow, self.start_time = "running", {}, event["time"]
            self.spares = None if self.spares is None else 0  # unless `spares` follows
        elif kind == "data_stage":  # as a start: a slow first step, no rank judged yet
            self.slow, self.start_time = {}, event["time"]
        elif kind == "end":
            self.state = str(event.get("state"))
        elif kind in ("died", "refused"):
            self.state = kind
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

    def note_record(self, record: dict[str, Any], logged: float) -> None:
        """logged: when it was, in seconds since 1970."""
        # added, because what is evaluated is in one record only, which may have nothing else
        self.record, self.record_time = self.record | record, logged
