"""Programs that run one after the other, each in its own process, and the rows that they append
(gpu_rows.py). No torch here: the process that runs them does not use the GPU."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_process import ROOT

GRACE_SECONDS = 30.0  # beyond its own budget, before a program is killed
LOG_CHARACTERS = 6000  # of a program's output that are printed, from its end


@dataclass(frozen=True)
class Task:
    """A program, the seconds after which it begins no further row, and its
    arguments."""

    name: str
    module: str
    seconds: float
    arguments: tuple[str, ...] = ()


class Run:
    """One started task."""

    def __init__(self, task: Task, folder: Path, tiny: bool, end: float) -> None:
        self.task = task
        self.began = time.monotonic()
        self.kill_at = min(end, self.began + task.seconds + GRACE_SECONDS)
        self.rows_file, log = (folder / f"{id(self)}.{kind}" for kind in ("rows", "log"))
        budget = max(0.0, min(task.seconds, end - self.began - GRACE_SECONDS))
        command = [sys.executable, "-m", task.module, *task.arguments]
        command += ["--out", str(self.rows_file), "--budget-seconds", f"{budget:.0f}"]
        self.log_file = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command + ["--tiny"] * tiny,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that its own processes end with it
            )
        self.position, self.planned = 0, list[str]()
        self.found: dict[str, dict[str, Any]] = {}
        self.ended = ""  # how it ended; empty: it runs

    def read(self) -> bool:
        """Reads the rows that are new; returns whether there are any."""
        if not self.rows_file.exists():
            return False
        with self.rows_file.open(encoding="utf-8") as file:
            file.seek(self.position)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]  # a program may be writing the last line
        self.position += len(whole.encode())
        for line in whole.splitlines():
            entry = json.loads(line)
            self.planned += entry.get("planned", [])
            if "row" in entry:
                self.found[entry["row"]["name"]] = entry["row"]
        return bool(whole)

    def look(self) -> None:
        """Notices the program's end, or kills it if its time is over."""
        status = self.process.poll()
        if status is not None:
            ended = "" if status in (0, 1) else f" ({signal_name(status)})"
            self.finish(f"exit status {status}{ended}")
        elif time.monotonic() > self.kill_at:
            self.finish(f"killed after {time.monotonic() - self.began:.0f} s")

    def finish(self, how: str) -> None:
        """Ends the program and everything it started, and prints its output."""
        if self.ended:
            return
        with contextlib.suppress(ProcessLookupError):  # it and all of its own have ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.seconds, self.ended = time.monotonic() - self.began, how
        self.read()
        said = self.log_file.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
        print(f"\n--- {self.task.name}: {how}, {self.seconds:.0f} s\n{said}", flush=True)

    def rows(self) -> list[dict[str, Any]]:
        """The rows in the planned order; those that were not reached have a status that says so."""
        unreached = f"not measured ({self.task.name}: {self.ended or 'is running'})"
        names = dict.fromkeys([*self.planned, *self.found])
        return [self.found.get(name, {"name": name, "status": unreached}) for name in names]

    @property
    def crashed(self) -> bool:
        """Whether it ended by itself, otherwise than a program that has run to its end."""
        return self.ended.startswith("exit") and self.process.returncode not in (0, 1)


class Lane:
    """Tasks that run one after the other."""

    def __init__(self, tasks: list[Task], folder: Path, tiny: bool) -> None:
        self.waiting, self.folder, self.tiny = list(tasks), folder, tiny
        self.runs: list[Run] = []
        self._news = False

    def advance(self, end: float) -> bool:
        """Starts the next task if none runs, and reads what is new. Returns False when all have
        ended, or time `end` has come."""
        running = self.runs[-1] if self.runs and not self.runs[-1].ended else None
        if running is not None:
            self._news |= running.read()
            running.look()
            self._news |= bool(running.ended)
            return True
        if not self.waiting or time.monotonic() >= end:
            return False
        self.runs.append(Run(self.waiting.pop(0), self.folder, self.tiny, end))
        return True

    def has_news(self) -> bool:
        """Whether there is something that was not there at the last call."""
        news, self._news = self._news, False
        return news

    def stop(self, why: str) -> None:
        for run in self.runs:
            run.finish(why)

    def rows(self) -> Iterator[dict[str, Any]]:
        for run in self.runs:
            yield from run.rows()

    def summary(self) -> list[dict[str, Any]]:
        """For each task its name, its seconds and how it ended."""
        done = [
            {
                "name": run.task.name,
                "seconds": run.seconds if run.ended else time.monotonic() - run.began,
                "ended": run.ended or "is running",
            }
            for run in self.runs
        ]
        return done + [
            {"name": task.name, "seconds": 0.0, "ended": "not started (time)"}
            for task in self.waiting
        ]

    @property
    def crashed(self) -> bool:
        return any(run.crashed for run in self.runs)


def signal_name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else "it could not run"
