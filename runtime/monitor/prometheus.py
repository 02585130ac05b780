"""The state of a run for Prometheus: a file for node_exporter's textfile collector, or an endpoint.
Only this file imports prometheus_client, and only the monitor imports this file.

Units are seconds, bytes and ratios; times are in seconds since 1970, so that a rule computes ages
with `time() - …`. Every sample has the label `run`. What a rollback takes back (steps, tokens,
skipped updates, seconds by cause) is a gauge, because a counter never falls.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from runtime.log.events import VERDICTS
from runtime.log.log_lines import is_number
from runtime.monitor.alarms import TEMPLATES
from runtime.monitor.state import RunState

FILE_SECONDS = 10.0  # between two versions of the file
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
UPDATED = "When this text was written; old: the monitor or its machine is gone."
# name, help, names of the labels besides `run`, and values by those of the labels
Numbers = tuple[str, str, tuple[str, ...], Mapping[tuple[str, ...], float]]
MORE = {
    "lattice_alarms_delivered_total": "Alarms of this start that were delivered (run.on_event).",
    "lattice_alarms_lost_total": "Alarms of this start that could not be delivered.",
    "lattice_after_commit_failures_total": "Failures of checkpoint.after_commit, all starts.",
    "lattice_after_commit_pending": "Checkpoints for which it has not succeeded yet.",
    "lattice_after_commit_step": "Step of the newest checkpoint for which it has succeeded.",
}


def families(run: str, state: RunState, more: dict[str, float]) -> Iterator[Metric]:
    """Yield the metrics as prometheus_client has them, each with the label `run`.

    more: numbers of the monitor itself, by metric (MORE).
    """
    for name, about, labels, values in _numbers(state, more):
        if values:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, about, labels=["run", *labels])
            for texts, value in values.items():
                family.add_metric([_plain(text) for text in (run, *texts)], value)
            yield family


def _numbers(state: RunState, more: dict[str, float]) -> Iterator[Numbers]:
    record = {key: value for key, value in state.record.items() if is_number(value, finite=False)}
    last = state.checkpoint
    single: list[tuple[str, str, float | None]] = [  # None: not known yet
        ("lattice_running", "1 while the run trains.", state.state == "running"),
        ("lattice_updated_timestamp_seconds", UPDATED, time.time()),
        ("lattice_start_timestamp_seconds", "When the last start began.", state.start_time),
        ("lattice_last_step_timestamp_seconds", "When a step was logged last.", state.record_time),
        *((*RECORD[key], record.pop(key)) for key in RECORD if key in record),
        ("lattice_failed_saves_total", "Saves that failed.", state.failed_saves),
        ("lattice_checkpoint_step", "Step of the last one.", last.get("step")),
        ("lattice_checkpoint_timestamp_seconds", "When it was committed.", last.get("time")),
        ("lattice_checkpoint_bytes", "Its size.", last.get("bytes")),
        ("lattice_spare_nodes", "Nodes that wait.", state.spares),
        *((name, MORE[name], value) for name, value in more.items()),
    ]
    for name, about, value in single:
        if value is not None:
            yield name, about, (), {(): value}
    # 0 for what has not happened yet: otherwise Prometheus would not see the first as an increase
    events = {kind: state.events[kind] for kind in sorted(TEMPLATES.keys() | state.events.keys())}
    verdicts = {each: state.verdicts[each] for each in VERDICTS}
    states = {each: each == state.state for each in STATES}
    spent = state.account.seconds
    by_label: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("lattice_state", "1 for the state of the run.", "state", states),
        ("lattice_record", "Every other number, as last logged.", "name", record),
        ("lattice_spent_seconds", "Seconds of all starts by cause.", "cause", spent),
        ("lattice_events_total", "Events of all starts (events.jsonl).", "event", events),
        ("lattice_suspicions_total", "Suspicions by verdict, all starts.", "verdict", verdicts),
    ]
    for name, about, label, found in by_label:
        yield name, about, (label,), {(text,): value for text, value in found.items()}
    about = "Own computing time relative to its peers."
    yield "lattice_slow_rank_ratio", about, ("rank", "node"), state.slow


def _plain(text: str) -> str:
    """Without what JSON can express and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def _version(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


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
        self._due = 0.0  # when the file is written again
        # its last version: not the inode alone, whose number a file system gives again
        self._written: tuple[int, int] | None = None

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
            is_ours = not gone or self._written is None or self._written == _version(self.where)
            self._due = time.monotonic() + FILE_SECONDS
            if is_ours:
                write_to_textfile(self.where, self.registry)
                self._written = _version(self.where)

    def _serve(self, host: str, port: int) -> None:
        self.server, _ = start_http_server(port, host, self.registry)
        handler = self.server.RequestHandlerClass
        # a client that sends or reads nothing keeps no thread; one that goes away is no news
        self.server.RequestHandlerClass = type("Handler", (handler,), {"timeout": CLIENT_SECONDS})
        self.server.handle_error = lambda *_: None
