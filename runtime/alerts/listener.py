"""Starts the companion on rank 0, if a key asks for it, and waits for it at the end of the run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from runtime.alerts.after_commit import progress
from runtime.alerts.check import on_event
from runtime.alerts.companion import END_EVENT_SECONDS, ENDING_SECONDS
from runtime.alerts.settings import Settings
from runtime.listener import Listener, Run
from runtime.messages import log
from runtime.run_folder import checkpoint_folder
from runtime.signals import Signals, requests
from runtime.status import read_status, write_whole
from training.config import Config

ROOT = Path(__file__).parents[2]  # of this repository
# Once a stop was requested or the run has failed: the job's next start is more urgent, and the
# companion ends by itself.
BRIEF_SECONDS = 3.0


class Companion(Listener):
    """The companion of this rank; the first listener, so that its `__exit__` is the last. Built
    before the start is recorded in events.jsonl.

    A step never waits for it. A run that has finished waits until its alarms are delivered, for at
    most ENDING_SECONDS, and until checkpoint.after_commit has succeeded for its last checkpoints,
    for at most checkpoint.after_commit_minutes or until a signal; status.json then tells what is
    left (`after_commit`).
    """

    def __init__(self, config: Config, signals: Signals) -> None:
        self.config, self.signals = config, signals
        self.process: subprocess.Popen[bytes] | None = None
        keys = (config.run.on_event, config.run.prometheus, config.checkpoint.after_commit)
        self.is_wanted = dist.get_rank() == 0 and any(keys)
        events = Path(config.run.dir) / "events.jsonl"
        self.events_from = events.stat().st_size if self.is_wanted and events.exists() else 0

    def __enter__(self) -> "Companion":
        if not self.is_wanted:
            return self
        run, checkpoint, guard = self.config.run, self.config.checkpoint, self.config.guard
        prometheus = str(run.prometheus)
        settings = Settings(
            folder=str(Path(run.dir).absolute()),
            name=run.dir,
            cwd=os.getcwd(),
            events_from=self.events_from,
            on_event=on_event(self.config),
            prometheus=os.path.abspath(prometheus) if prometheus.endswith(".prom") else prometheus,
            after_commit=checkpoint.after_commit,
            after_commit_seconds=checkpoint.after_commit_minutes * 60,
            hang_factor=guard.hang_factor,
            hang_seconds=guard.hang_seconds,
        )
        # Until its handlers are set, a signal that stops the run must not end the companion. The
        # pipe is not buffered, and no write to it waits.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, requests())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runtime.alerts.companion"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
            assert self.process.stdin is not None
            os.set_blocking(self.process.stdin.fileno(), False)
            self.process.stdin.write(settings.dumps().encode() + b"\n")
        except OSError as error:
            log(f"warning: the companion cannot be started, so no alarms are sent: {error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def is_busy(self, cause: str) -> None:
        """Tell the companion what rank 0 does besides steps; "": steps again. Left out if the pipe
        is full, because the companion hangs."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self.process.stdin.write(cause.encode() + b"\n")

    def after_step(self, run: Run) -> None:
        if self.process is None or not run.is_due(run.config.run.log_interval):
            return
        if self.process.poll() is not None:
            status = self.process.returncode
            log(
                f"warning: the companion ended with status {status}: until the next start there "
                "are no alarms, no numbers for Prometheus, and no commands after commits"
            )
            self.process = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.process is None or self.process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the companion sees the end of the pipe
        folder = Path(self.config.run.dir)
        finished = read_status(folder).get("state") == "finished"
        seconds = BRIEF_SECONDS
        if finished:
            seconds = ENDING_SECONDS + END_EVENT_SECONDS
            if self.config.checkpoint.after_commit:
                seconds += self.config.checkpoint.after_commit_minutes * 60
        self._wait(seconds)
        if self.config.checkpoint.after_commit:
            self._add_to_status(folder)

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
        waiting, done = progress(checkpoint_folder(self.config))
        about = {"done_step": done, "pending": [path.name for path in waiting]}
        if waiting:
            log(f"warning: checkpoint.after_commit has not succeeded for {about['pending']}")
        status = read_status(folder)
        if status:
            write_whole(folder / "status.json", json.dumps(status | {"after_commit": about}) + "\n")
