"""Rank 0's side of the companion: starts it, if a key asks for it, tells it what rank 0 does, and
waits for it at the end."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtime.files import write_or_warn
from runtime.listener import Listener, Run
from runtime.log.status import read_status
from runtime.messages import log
from runtime.monitor.after_commit import progress
from runtime.monitor.check import on_event
from runtime.monitor.companion import (
    END_EVENT_SECONDS,
    ENDING_SECONDS,
    REFUSED,
    start_companion,
)
from runtime.monitor.settings import Settings
from runtime.signals import Signals, requests
from settings.config import Config

# Once a stop was requested or the run has failed: the job's next start is more urgent, and the
# companion ends by itself.
BRIEF_SECONDS = 3.0


class Companion:
    """The companion of this process, as a context manager that every rank enters once it holds the
    lease, before anything is read from the run folder or written to it. So it also reports a start
    that fails before its first step, and a failure between two stages.

    A step never waits for it. A run that has finished waits until its alarms are delivered, for at
    most ENDING_SECONDS, and until checkpoint.after_commit has succeeded for its last checkpoints,
    for at most checkpoint.after_commit_minutes or until a signal; status.json then tells what is
    left (`after_commit`).
    """

    def __init__(self, config: Config, signals: Signals) -> None:
        self.config, self.signals = config, signals
        self.folder = Path(config.run.dir)
        self.process: subprocess.Popen[bytes] | None = None
        keys = (config.run.on_event, config.run.prometheus, config.checkpoint.after_commit)
        self.is_rank_0 = dist.get_rank() == 0  # between two stages there is no process group
        self.is_wanted = self.is_rank_0 and any(keys)
        self.has_trained = False

    def __enter__(self) -> "Companion":
        if not self.is_wanted:
            return self
        events = self.folder / "events.jsonl"
        run, checkpoint, guard = self.config.run, self.config.checkpoint, self.config.guard
        prometheus = str(run.prometheus)
        settings = Settings(
            folder=str(Path(run.dir).absolute()),
            name=run.dir,
            cwd=os.getcwd(),
            events_from=events.stat().st_size if events.exists() else 0,
            on_event=on_event(self.config),
            prometheus=os.path.abspath(prometheus) if prometheus.endswith(".prom") else prometheus,
            after_commit=checkpoint.after_commit,
            after_commit_seconds=checkpoint.after_commit_minutes * 60,
            hang_factor=guard.hang_factor,
            hang_seconds=guard.hang_seconds,
        )
        # Until its handlers are set, a signal that stops the run must not end the companion.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, requests())
        try:
            self.process = start_companion(settings)
            assert self.process.stdin is not None
            os.set_blocking(self.process.stdin.fileno(), False)  # no write waits
        except OSError as error:
            log(f"warning: the companion cannot be started, so no alarms are sent: {error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.tell("start")
        return self

    def hear(self, line: dict[str, Any]) -> None:
        """The sink of the run's log (log/run_log.py)."""
        event = line.get("event", {})
        if "busy" in line:
            self.tell(line["busy"])
        elif event.get("event") == "refused":
            self.tell(REFUSED + event["reason"])
        self.has_trained |= event.get("event") == "start"

    def tell(self, line: str) -> None:
        """Write a line to the pipe: what rank 0 does besides steps, by a cause of log/ledger.py
        ("": steps again), or why it was refused. Left out if the pipe is full, because the
        companion hangs."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self.process.stdin.write(line.encode() + b"\n")

    def check(self) -> None:
        """Warn if the companion has died."""
        if self.process is None or self.process.poll() is None:
            return
        log(
            f"warning: the companion ended with status {self.process.returncode}: until the next "
            "start there are no alarms, no numbers for Prometheus, and no commands after commits"
        )
        self.process = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not self.is_rank_0:
            return
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()  # the companion sees the end of the pipe
        if self.process is None:
            return
        finished = error is None and read_status(self.folder).get("state") == "finished"
        seconds = BRIEF_SECONDS
        if finished:
            seconds = ENDING_SECONDS + END_EVENT_SECONDS
            if self.config.checkpoint.after_commit:
                seconds += self.config.checkpoint.after_commit_minutes * 60
        self._wait(seconds)
        if self.config.checkpoint.after_commit and self.has_trained:
            self._add_to_status(self.folder)

    def _wait(self, seconds: float) -> None:
        """Wait for the companion: so long, but only briefly once a signal was received."""
        assert self.process is not None
        began = time.monotonic()
        while self.process.poll() is None and time.monotonic() - began < seconds:
            if self.signals.heard:
                seconds = min(seconds, BRIEF_SECONDS)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    def _add_to_status(self, folder: Path) -> None:
        """Add to status.json for which checkpoints the command has not succeeded."""
        waiting, done = progress(Path(self.config.run.dir) / "checkpoints")
        about = {"done_step": done, "pending": [path.name for path in waiting]}
        if waiting:
            log(f"warning: checkpoint.after_commit has not succeeded for {about['pending']}")
        status = read_status(folder)
        if status:
            write_or_warn(
                folder / "status.json", json.dumps(status | {"after_commit": about}) + "\n"
            )


class CompanionListener(Listener):
    """Warns if the companion has died."""

    def __init__(self, companion: Companion) -> None:
        self.companion = companion

    def after_step(self, run: Run) -> None:
        if run.is_due(run.config.run.log_interval):
            self.companion.check()
