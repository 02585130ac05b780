"""The state of a run as text for Prometheus (exposition format 0.0.4): a file for node_exporter's
textfile collector, or an endpoint.

Units are seconds, bytes and ratios; times are in seconds since 1970, so that a rule computes ages
with `time() - …`. Every sample has the label `run`. What a rollback takes back (steps, tokens,
skipped updates, seconds by cause) is a gauge, because a counter never falls.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import contextlib
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from runtime.log.events import VERDICTS
from runtime.log.log_lines import is_number
from runtime.monitor.alarms import TEMPLATES
from runtime.monitor.settings import Settings
from runtime.monitor.state import RunState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LOOPBACK = "127.0.0.1"
CLIENT_SECONDS = 5.0  # for a client's request and its answer: a scrape takes milliseconds
MOST_CLIENTS = 16  # at a time, each with a thread; for one more, the oldest is disconnected
HOST = re.compile(rb"[A-Za-z0-9._:%-]*")
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
Labels = dict[str, str]
Samples = list[tuple[Labels, float]]


def samples(state: RunState, more: dict[str, float]) -> Iterator[tuple[str, str, str, Samples]]:
    """Yield each metric: name, type, help, and its samples without the label `run`.

    more: numbers of the companion itself, by metric (companion.py).
    """
    yield "lattice_running", "gauge", "1 while the run trains.", [({}, state.state == "running")]
    states: Samples = [({"state": name}, name == state.state) for name in STATES]
    yield "lattice_state", "gauge", "1 for the state of the run.", states
    about = "When this text was written; old: the companion or its machine is gone."
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


MORE = {
    "lattice_alarms_delivered_total": "Alarms of this start that were delivered (run.on_event).",
    "lattice_alarms_lost_total": "Alarms of this start that could not be delivered.",
    "lattice_after_commit_failures_total": "Failures of checkpoint.after_commit, all starts.",
    "lattice_after_commit_pending": "Checkpoints for which it has not succeeded yet.",
    "lattice_after_commit_step": "Step of the newest checkpoint for which it has succeeded.",
}


def exposition(run: str, state: RunState, more: dict[str, float]) -> str:
    lines = []
    for name, kind, about, found in samples(state, more):
        if found:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for labels, value in found:
            inside = ",".join(
                f'{key}="{_escape(text)}"' for key, text in {"run": run, **labels}.items()
            )
            lines.append(f"{name}{{{inside}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def write_file(path: Path, text: str) -> None:
    """Replace the file atomically. Its collector reads only names that end in .prom."""
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with contextlib.suppress(OSError):  # try again the next time
        partial.write_bytes(text.encode(errors="replace"))
        os.replace(partial, path)


def address(setting: str) -> tuple[str, int]:
    """The address of run.prometheus=PORT, HOST:PORT or [IPV6]:PORT; without a host, loopback.

    Raises ValueError if it is none of these.
    """
    host, _, port = setting.rpartition(":")
    host = host.strip("[]")
    if not HOST.fullmatch(host.encode("idna")):  # a UnicodeError is a ValueError
        raise ValueError(setting)
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or setting[0] == ":":
        raise ValueError(setting)
    return host or LOOPBACK, int(port)


class Endpoint:
    """Serves GET /metrics. If the port is in use (the companion of an earlier start may be ending),
    `open` may be called again."""

    def __init__(self, settings: Settings, text: Callable[[], str]) -> None:
        self.address, self.text = address(settings.prometheus), text
        self.server: ThreadingHTTPServer | None = None

    def open(self) -> str:
        """Begin to serve; return why that failed, or the empty string."""
        text = self.text

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.partition("?")[0] in ("/", "/metrics")
                body = text().encode(errors="replace") if known else b""
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing: a scrape is not worth a line of the run's log."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in self.address[0] else socket.AF_INET
            clients: dict[Any, float]  # connection → when it is ended, oldest first

            def process_request(self, request: Any, client_address: Any) -> None:
                self._end_clients(MOST_CLIENTS - 1)
                self.clients[request] = time.monotonic() + CLIENT_SECONDS
                super().process_request(request, client_address)

            def service_actions(self) -> None:  # called twice a second
                self._end_clients(MOST_CLIENTS)

            def _end_clients(self, most: int) -> None:
                """End the clients whose time is over, and the oldest of more than `most`."""
                clients = [*self.clients.items()]
                for number, (request, until) in enumerate(clients):
                    if len(clients) - number > most or time.monotonic() > until:
                        with contextlib.suppress(OSError):
                            request.shutdown(socket.SHUT_RDWR)  # its thread sees the end

            def shutdown_request(self, request: Any) -> None:
                self.clients.pop(request, None)
                super().shutdown_request(request)

            def handle_error(self, *_: Any) -> None:
                """Nothing: the client went away."""

        try:
            server = Server(self.address, Handler)
        except OSError as error:
            return str(error.strerror or error)
        server.clients, self.server = {}, server
        serve = threading.Thread(target=self.server.serve_forever, name="prometheus", daemon=True)
        serve.start()
        return ""
