"""The state of a run for Prometheus: a file for node_exporter's textfile collector, or an endpoint.
Only this file imports prometheus_client, and only the monitor imports this file.

Units are seconds, bytes and ratios; times are in seconds since 1970, so that a rule computes ages
with `time() - …`. Every sample has the label `run`. What a rollback takes back (steps, tokens,
skipped updates, seconds by cause) is a gauge, because a counter never falls.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime.health.verdicts import VERDICTS
from runtime.log.log_lines import is_number
from runtime.monitor.alarms import TEMPLATES
from runtime.monitor.state import RunState

FILE_SECONDS = 10.0  # between two versions of the file
CLIENT_SECONDS = 5.0  # that the endpoint waits for a client: a scrape takes milliseconds
STATES = ("starting", "running", "finished", "requeue", "failed", "died")
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
KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
Labels = dict[str, str]
Samples = list[tuple[Labels, float]]
MORE = {
    "lattice_alarms_delivered_total": "Alarms of this start that were delivered (run.on_event).",
    "lattice_alarms_lost_total": "Alarms of this start that could not be delivered.",
    "lattice_after_commit_failures_total": "Failures of checkpoint.after_commit, all starts.",
    "lattice_after_commit_pending": "Checkpoints for which it has not succeeded yet.",
    "lattice_after_commit_step": "Step of the newest checkpoint for which it has succeeded.",
}


def samples(state: RunState, more: dict[str, float]) -> Iterator[tuple[str, str, str, Samples]]:
    """Yield each metric: name, type, help, and its samples without the label `run`.

    more: numbers of the monitor itself, by metric (MORE).
    """
    yield "lattice_running", "gauge", "1 while the run trains.", [({}, state.state == "running")]
    states: Samples = [({"state": name}, name == state.state) for name in STATES]
    yield "lattice_state", "gauge", "1 for the state of the run.", states
    about = "When this text was written; old: the monitor or its machine is gone."
    yield "lattice_updated_timestamp_seconds", "gauge", about, [({}, time.time())]
    if state.start_time:
        about = "When the last start began."
        yield "lattice_start_timestamp_seconds", "gauge", about, [({}, state.start_time)]
    if state.record_time:
        about = "When the last step was logged."
        yield "lattice_last_step_timestamp_seconds", "gauge", about, [({}, state.record_time)]
    others: Samples = []
    for key, value in state.record.items():
        if key in RECORD and is_number(value, finite=False):
            name, about = RECORD[key]
            yield name, "gauge", about, [({}, value)]
        elif is_number(value, finite=False):
            others.append(({"name": key}, value))
    yield "lattice_record", "gauge", "Every other number of the last logged step.", others
    seconds: Samples = [({"cause": cause}, value) for cause, value in state.account.seconds.items()]
    yield "lattice_spent_seconds", "gauge", "Seconds of all starts by cause.", seconds
    # 0 for what has not happened yet: otherwise Prometheus would not see the first as an increase
    kinds = sorted(TEMPLATES.keys() | state.events.keys())
    counts: Samples = [({"event": kind}, state.events[kind]) for kind in kinds]
    yield "lattice_events_total", "counter", "Events of all starts (events.jsonl).", counts
    verdicts: Samples = [({"verdict": each}, state.verdicts[each]) for each in VERDICTS]
    yield "lattice_suspicions_total", "counter", "Suspicions by verdict, all starts.", verdicts
    failed: Samples = [({}, state.failed_saves)]
    yield "lattice_failed_saves_total", "counter", "Saves that failed.", failed
    if state.checkpoint:
        written = state.checkpoint
        yield "lattice_checkpoint_step", "gauge", "Step of the last one.", [({}, written["step"])]
        when: Samples = [({}, written["time"])]
        yield "lattice_checkpoint_timestamp_seconds", "gauge", "When it was committed.", when
        size: Samples = [({}, written["bytes"])]
        yield "lattice_checkpoint_bytes", "gauge", "Its size.", size
    slow: Samples = [
        ({"rank": rank, "node": node}, factor) for (rank, node), factor in state.slow.items()
    ]
    yield "lattice_slow_rank_ratio", "gauge", "Own computing time relative to its peers.", slow
    if state.spares is not None:
        yield "lattice_spare_nodes", "gauge", "Nodes that wait.", [({}, state.spares)]
    for name, value in more.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        yield name, kind, MORE[name], [({}, value)]


def families(run: str, state: RunState, more: dict[str, float]) -> Iterator[Metric]:
    """Yield the metrics as prometheus_client has them, each with the label `run`."""
    for name, kind, about, found in samples(state, more):
        if found:
            family = KINDS[kind](name, about, labels=["run", *found[0][0]])
            for labels, value in found:
                family.add_metric([_plain(run), *map(_plain, labels.values())], value)
            yield family


def _plain(text: str) -> str:
    """Without what JSON can express and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


class Shown:
    """The metrics, where Prometheus finds them.

    Args:
        where: a file, or the host and port of an endpoint.
        collect: returns them.
    """

    def __init__(self, where: str | list[Any], collect: Callable[[], list[Metric]]) -> None:
        self.where, self.collect = where, collect
        self.registry = CollectorRegistry()
        self.registry.register(self)  # it calls `collect`
        self.server: Any = None
        self._due, self._inode = 0.0, -1  # when the file is written again; its last version

    def update(self, gone: bool = False, is_last: bool = False) -> None:
        """Write the file if it is time or the last version; serve the endpoint if that has failed
        before, because the monitor of the start before still used the port.

        gone: rank 0 has ended. Then the file stays if the next start's monitor has replaced it.

        Raises OSError.
        """
        if not isinstance(self.where, str):
            if self.server is None:
                self._serve(*self.where)
        elif is_last or time.monotonic() >= self._due:
            is_ours = not gone or self._inode in (-1, os.stat(self.where).st_ino)
            self._due = time.monotonic() + FILE_SECONDS
            if is_ours:
                write_to_textfile(self.where, self.registry)
                self._inode = os.stat(self.where).st_ino

    def _serve(self, host: str, port: int) -> None:
        self.server, _ = start_http_server(port, host, self.registry)
        handler = self.server.RequestHandlerClass
        # a client that sends or reads nothing keeps no thread; one that goes away is no news
        self.server.RequestHandlerClass = type("Handler", (handler,), {"timeout": CLIENT_SECONDS})
        self.server.handle_error = lambda *_: None
