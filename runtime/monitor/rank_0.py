"""Rank 0's side of the monitor: starts it, if a key asks for it, passes on what the run's log says,
and waits for it at the end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from errors import exists
from runtime.log.run_log import PAUSE_SECONDS
from runtime.log.status import read_status, write_status
from runtime.monitor.after_commit import progress
from runtime.monitor.check import on_event, prometheus
from runtime.monitor.process import END_EVENT_SECONDS, ENDING_SECONDS
from runtime.output import log
from runtime.signals import Signals, requests
from settings.config import Config

# Once a stop was requested or the run has failed: the job's next start is more urgent, and the
# monitor ends by itself.
BRIEF_SECONDS = 3.0
# Variables that make a process a rank, or lead it to this run's launcher. With them, a command such
# as tools.evaluate would join the run's store as a second rank 0, or end torchrun.
OF_RANK = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_.*"
    r"|LATTICE_STOP_FILE"
)


class Monitor:
    """The monitor of this process, as a context manager that every rank enters once it holds the
    lease, before anything is read from the run folder or written to it, and that outlives the run's
    log, whose lines it gets. So it also reports a start that fails before its first step.

    A step never waits for it. A run that has finished waits until its alarms are delivered, for at
    most ENDING_SECONDS, and until checkpoint.after_commit has succeeded for its last checkpoints,
    for at most checkpoint.after_commit_minutes or until a signal; status.json then tells what is
    left (`after_commit`).
    """

    def __init__(self, config: Config, signals: Signals) -> None:
        self.config, self.signals = config, signals
        self.process: subprocess.Popen[bytes] | None = None
        self._is_cut = False  # whether the pipe has taken only a part of the last line
        self._has_finished = False  # the training, as the log says

    def __enter__(self) -> "Monitor":
        run, checkpoint = self.config.run, self.config.checkpoint
        is_wanted = run.on_event or run.prometheus or checkpoint.after_commit
        if dist.get_rank() != 0 or not is_wanted:
            return self
        events = Path(run.dir) / "events.jsonl"
        told = {
            "folder": str(Path(run.dir).absolute()),
            "name": run.dir,  # as in the configuration: how the run is called in alarms
            "cwd": os.getcwd(),  # commands run there
            # bytes of events.jsonl: what happened before this start, and raises no alarm
            "past": events.stat().st_size if exists(events) else 0,
            "due": PAUSE_SECONDS,
            # torchrun does not, and where its end ends a container or a job, also the monitor's
            "launcher_records": "TORCHELASTIC_RUN_ID" not in os.environ,
            "on_event": on_event(self.config.run),
            "prometheus": run.prometheus and prometheus(str(run.prometheus)),
            "after_commit": checkpoint.after_commit,
            "after_commit_seconds": checkpoint.after_commit_minutes * 60,
        }
        # Until its handlers are set, a signal that stops the run must not end the monitor.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, requests())
        try:
            self.process = start_monitor(told)
            assert self.process.stdin is not None
            os.set_blocking(self.process.stdin.fileno(), False)  # no write waits
        except OSError as error:
            log(f"warning: the monitor cannot be started, so no alarms are sent: {error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return self

    def tell(self, line: dict[str, Any]) -> None:
        """Pass on a line of the run's log (log/run_log.py). It is left out if the pipe is full,
        because the monitor hangs; if that has died, that is said once."""
        self._has_finished |= line.get("event", {}).get("state") == "finished"
        if self.process is None or self.process.stdin is None:
            return
        data = b"\n" * self._is_cut + json.dumps(line).encode() + b"\n"
        try:
            written = self.process.stdin.write(data)
            self._is_cut = written < len(data) if written else self._is_cut
        except ValueError:  # it is closed: a save has outlived this start
            pass
        except OSError:
            log(
                f"warning: the monitor ended with status {self.process.poll()}: until the next "
                "start there are no alarms, no numbers for Prometheus, no commands after commits"
            )
            self.process = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        finished, checkpoint = error is None and self._has_finished, self.config.checkpoint
        seconds = ENDING_SECONDS + END_EVENT_SECONDS if finished else BRIEF_SECONDS
        if finished and checkpoint.after_commit:
            seconds += checkpoint.after_commit_minutes * 60
        if self.process is not None:
            self._wait(self.process, seconds)
        if finished and checkpoint.after_commit:  # also where the monitor has died
            with contextlib.suppress(OSError):  # a run that has finished has finished
                self._add_to_status()

    def _wait(self, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the monitor sees the end of the pipe
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < seconds:
            seconds = min(seconds, BRIEF_SECONDS) if self.signals.heard else seconds
            time.sleep(0.02)

    def _add_to_status(self) -> None:
        """Add to status.json for which checkpoints the command has not succeeded."""
        folder = Path(self.config.run.dir)
        waiting, done = progress(folder / "checkpoints")
        about = {"done_step": done, "pending": [path.name for path in waiting]}
        if waiting:
            log(f"warning: checkpoint.after_commit has not succeeded for {about['pending']}")
        if status := read_status(folder):
            write_status(folder, **status, after_commit=about)


def start_monitor(told: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Start the process, and tell it its settings: not as arguments, which every user of the
    machine can read, because a webhook's address is a secret. The pipe to it is not buffered."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.monitor.process"],
        cwd=Path(__file__).parents[2],  # this repository
        stdin=subprocess.PIPE,
        bufsize=0,
        env={name: value for name, value in os.environ.items() if not OF_RANK.fullmatch(name)},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(told).encode() + b"\n")
    return process
