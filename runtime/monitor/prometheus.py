"""The state of a run for Prometheus: a file for node_exporter's textfile collector, or an endpoint.
Only this file imports prometheus_client, and the monitor imports this file only if it is asked for.

Units are seconds, bytes and ratios; times are in seconds since 1970, so that a rule computes ages
with `time() - …`. Every sample has the label `run`, the absolute path of the run folder: no
two runs share one. What a rollback takes back (steps, tokens, skipped updates, seconds by cause) is
a gauge, because a counter never falls.
"""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime.log.events import VERDICTS, read_events
from runtime.log.ledger import Account
from runtime.log.log_lines import is_number
from runtime.monitor.after_commit import Commands
from runtime.monitor.alarms import TEMPLATES
from runtime.monitor.send import Sender

CLIENT_SECONDS = 5.0  # that the endpoint waits for a client: a scrape takes milliseconds
STATES = ("starting", "running", "finished", "requeue", "failed", "died", "refused")
# entries of a record (metrics/metrics.py) → metric and help; others: lattice_record{name="…"}
RECORD = {
    "step": ("lattice_step", "Last logged step."),
    "loss": ("lattice_loss", "Mean loss over all target tokens of that step."),
    "grad_norm": ("lattice_grad_norm", "Norm of all gradients before clipping."),
    "lr": ("lattice_learning_rate", "Learning rate."),
    "tokens": ("lattice_tokens", "Tokens trained on so far."),
    "tokens_per_second": ("lattice_tokens_per_second", "Tokens per second, all ranks."),
    "tokens_per_second_per_device": (
        "lattice_tokens_per_second_per_device",
        "Tokens per second and rank.",
    ),
    "mfu": ("lattice_mfu_ratio", "Model FLOPs utilization."),
    "step_seconds": ("lattice_step_duration_seconds", "Seconds per step."),
    "data_seconds": ("lattice_data_wait_seconds", "Seconds per step waiting for the batch."),
    "peak_memory_bytes": ("lattice_peak_memory_bytes", "Largest peak memory of a rank."),
    "skipped_updates": ("lattice_skipped_updates", "Updates skipped so far."),
    "eval_loss": ("lattice_eval_loss", "Loss on held-out text."),
}
UPDATED = "When this text was written; old: the monitor is gone, or hangs."
# name, help, names of the labels besides `run`; the value (None: not known yet), or values by label
Numbers = tuple[str, str, str, Any]


class RunState:
    """What the events and records of a run add up to, from the first event of events.jsonl on."""

    def __init__(self) -> None:
        self.state = "starting"  # then running, and as in status.json, died or refused
        self.record: dict[str, Any] = {}  # each entry as last logged; of earlier starts only `step`
        self.record_time: float | None = None  # when it was logged, in seconds since 1970
        self.start_time: float | None = None  # when the last start began, likewise
        self.account = Account()  # seconds by cause
        self.events: Counter[str] = Counter()  # over all starts; likewise those below
        self.verdicts: Counter[str] = Counter()  # of examinations
        self.failed: Counter[str] = Counter()  # saves (`checkpoint`) and commands (`after_commit`)
        self.checkpoint: dict[str, Any] = {}  # the event of the last good save
        self.slow: dict[tuple[str, ...], float] = {}  # (rank, node) → factor, of this start
        self.spares: int | None = None  # nodes that wait

    def read_past(self, folder: Path, until: int) -> None:
        """Note what happened before this start: the first `until` bytes of events.jsonl."""
        for event in read_events(folder, until):
            self.note_event(event)
            if event["event"] == "spent":  # with each logged step
                self.note_record({"step": event["step"]}, event["time"])
        self.state = "starting"

    def note_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind != "boundary":  # of an older version (log/events.py)
            self.events[kind] += 1
        self.account.add(event)
        self.failed[kind] += "failed" in event
        if kind == "start":
            self.state, self.slow, self.start_time = "running", {}, event["time"]
            self.spares = None if self.spares is None else 0  # unless `spares` follows
        elif kind == "data_stage":  # as a start: a slow first step, no rank judged yet
            self.slow, self.start_time = {}, event["time"]
        elif kind in ("end", "died", "refused"):
            self.state = str(event.get("state", kind))
        elif kind == "checkpoint" and "failed" not in event:
            self.checkpoint = event
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


def families(
    run: str, state: RunState, sender: Sender | None = None, commands: Commands | None = None
) -> Iterator[Metric]:
    """Yield the metrics as prometheus_client has them, each with the label `run`: of the run's
    state, and of the monitor's threads."""
    record = {key: value for key, value in state.record.items() if is_number(value, finite=False)}
    last = state.checkpoint
    rows: list[Numbers] = [
        ("lattice_running", "1 while the run trains.", "", state.state == "running"),
        ("lattice_updated_timestamp_seconds", UPDATED, "", time.time()),
        ("lattice_start_timestamp_seconds", "When the last start began.", "", state.start_time),
        ("lattice_last_step_timestamp_seconds", "When a step was logged last.", "",
         state.record_time),
        *((*RECORD[key], "", record.pop(key)) for key in RECORD if key in record),
        ("lattice_failed_saves_total", "Saves that failed.", "", state.failed["checkpoint"]),
        ("lattice_checkpoint_step", "Step of the last one.", "", last.get("step")),
        ("lattice_checkpoint_timestamp_seconds", "When it was committed.", "", last.get("time")),
        ("lattice_checkpoint_bytes", "Its size.", "", last.get("bytes")),
        ("lattice_spare_nodes", "Nodes that wait.", "", state.spares),
    ]  # fmt: skip
    if sender is not None:  # of this start
        delivered, lost = "Alarms that were delivered (run.on_event).", "… that could not be."
        rows.append(("lattice_alarms_delivered_total", delivered, "", sender.delivered))
        rows.append(("lattice_alarms_lost_total", lost, "", sender.failed))
    if commands is not None:
        failed, waiting = state.failed["after_commit"], len(commands.pending)
        about, done = "Failures of checkpoint.after_commit.", commands.done_step
        rows.append(("lattice_after_commit_failures_total", about, "", failed))
        rows.append(("lattice_after_commit_pending", "Checkpoints that wait for it.", "", waiting))
        rows.append(("lattice_after_commit_step", "The newest for which it ended well.", "", done))
    # 0 for what has not happened yet: otherwise Prometheus would not see the first as an increase
    events = {kind: state.events[kind] for kind in sorted(TEMPLATES.keys() | state.events.keys())}
    verdicts = {each: state.verdicts[each] for each in VERDICTS}
    states = {each: each == state.state for each in STATES}
    spent, ratio = state.account.seconds, "Own computing time relative to its peers."
    rows += [
        ("lattice_state", "1 for the state of the run.", "state", states),
        ("lattice_record", "Every other number, as last logged.", "name", record),
        ("lattice_spent_seconds", "Seconds of all starts by cause.", "cause", spent),
        ("lattice_events_total", "Events of all starts (events.jsonl).", "event", events),
        ("lattice_suspicions_total", "Suspicions by verdict, all starts.", "verdict", verdicts),
        ("lattice_slow_rank_ratio", ratio, "rank node", state.slow),
    ]
    for name, about, labels, found in rows:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, about, labels=["run", *labels.split()])
        values = found if isinstance(found, dict) else {(): found} if found is not None else {}
        for label, value in values.items():
            texts = (label,) if isinstance(label, str) else label
            family.add_metric([_plain(text) for text in (run, *texts)], value)
        if family.samples:
            yield family


def _plain(text: str) -> str:
    """Without what JSON can express and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


class Shown:
    """The metrics, where Prometheus finds them: a file, or the host and port of an endpoint."""

    def __init__(self, where: str | list[Any]) -> None:
        self.where = where
        self.server: Any = None
        self.metrics: list[Metric] = []  # as last shown: scrapes read it, in their threads
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> list[Metric]:
        """Called by the registry."""
        return self.metrics

    def update(self, metrics: list[Metric]) -> None:
        """Write the file; serve the endpoint if that has failed before, because the monitor of the
        start before still used the port. Raises OSError."""
        self.metrics = metrics
        if isinstance(self.where, str):
            write_to_textfile(self.where, self.registry)
        elif self.server is None:
            host, port = self.where
            self.server, _ = start_http_server(port, host, self.registry)
            handler = self.server.RequestHandlerClass
            # a client that sends or reads nothing keeps no thread; one that goes away is no news
            own = type("Handler", (handler,), {"timeout": CLIENT_SECONDS})
            self.server.RequestHandlerClass = own
            self.server.handle_error = lambda *_: None
