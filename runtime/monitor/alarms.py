"""Which events (log/events.py) are sent to a person, each in a sentence; and `job`: the job script
gives up (tools/alarm.py). The other events are not worth a message."""

import math
import socket
from collections import Counter
from typing import Any

from runtime.log.log_lines import finite

# Alarms that come in series: of those that are alike, at most one in so many seconds.
SERIES_SECONDS = {"spike": 60.0, "checkpoint": 600.0, "after_commit": 3600.0, "slow_rank": 3600.0}
ALWAYS = {"end", "died", "refused", "hang"}  # sent even if many others wait
TEMPLATES = {
    "start": "started from step {step} on {world_size} ranks",
    "data_stage": "begins data stage {data_stage} after step {step}: {changes}",
    "spares": "spare ranks that wait, by node: {ranks}",
    "end": "{state} at step {step}: {reason}",
    "died": "died after step {step}: {reason}",
    "refused": "was refused: {reason}",
    "job": "{says}",
    "hang": "hangs in the step after {step}: rank 0 is {where}",
    "stalled": "has logged no step for {seconds:.0f} s, the last was {step} (in: {busy})",
    "resumed": "logs steps again: {step}, after {seconds:.0f} s",
    "spike": "skipped {skipped} updates up to step {step}: loss {loss}, gradient norm {grad_norm}",
    "rollback": "went back from step {from_step} to {step}",
    "slow_rank": "rank {rank} on {node} is slow: {factor} times its peers since step {since}",
    "suspicion": "suspicion after step {step} ({cause}): {verdict}; {why}",
    "checkpoint": "could not save the checkpoint of step {step}: {failed}",
    "after_commit": "checkpoint.after_commit failed for step {step}, attempts {attempts}: {failed}",
}
NO_LONGER_SLOW = "rank {rank} on {node} is no longer slow"
SENT_IF_FAILED = {"checkpoint", "after_commit"}


def is_alarm(event: dict[str, Any]) -> bool:
    kind = event["event"]
    return kind in TEMPLATES and (kind not in SENT_IF_FAILED or "failed" in event)


def words(event: dict[str, Any]) -> str:
    """An event in words; a list of its entries if they do not fit its template, or it has none."""
    known = {name: value for name, value in event.items() if name != "time"}
    kind, step = known.pop("event"), known.pop("step", None)
    listed = {n: ", ".join(map(str, v)) if isinstance(v, list) else v for n, v in known.items()}
    try:
        template = NO_LONGER_SLOW if known.get("ended") else TEMPLATES[kind]
        return template.format(step=step, **listed)
    except (KeyError, ValueError, TypeError, OverflowError):
        about = ", ".join(f"{name} {value}" for name, value in known.items())
        return f"{kind} at step {step}: {about}" if step is not None else f"{kind}: {about}"


def alarm(run: str, folder: str, event: dict[str, Any]) -> dict[str, Any]:
    """Return what is sent about an event: `text` (which Slack, Mattermost and others show), `run`,
    `folder`, `host`, `event`, `step` (None if the event has none), `time` (seconds since 1970) and
    `details`, everything else in the event. JSON without NaN."""
    details = finite(event)
    return {
        "text": f"{run}: {words(event)}",
        "run": run,
        "folder": folder,
        "host": socket.gethostname(),
        "event": details.pop("event"),
        "step": details.pop("step", None),
        "time": details.pop("time"),
        "details": details,  # what is left
    }


class Series:
    """Thins out alarms that come in series."""

    def __init__(self) -> None:
        # (event, node if it has one) → when the last one was sent, and whether it was an end
        self._sent: dict[tuple[str, str], tuple[float, bool]] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()  # since then

    def passes(self, event: dict[str, Any], now: float) -> bool:
        """Whether an event is to be sent now, `now` by the monotonic clock. One that is sent has
        the number of those before it that were not, `not_sent`."""
        if event["event"] not in SERIES_SECONDS:
            return True
        series, ended = (event["event"], str(event.get("node"))), bool(event.get("ended"))
        last, had_ended = self._sent.get(series, (-math.inf, ended))
        if ended == had_ended and now - last < SERIES_SECONDS[event["event"]]:
            self._left_out[series] += 1
            return False
        event["not_sent"], self._sent[series] = self._left_out.pop(series, 0), (now, ended)
        return True
