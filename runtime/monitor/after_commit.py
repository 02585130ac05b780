"""Run a command for each committed checkpoint, until it succeeds: checkpoint.after_commit.

    COMMAND … RUN/checkpoints/step-00000100 RUN/checkpoints/step-00000100/manifest.json

It runs without a shell, one at a time, for the newest checkpoint first; its output goes to
RUN/after_commit.log. If it fails or takes too long, it is tried again, after longer and longer
pauses. If it is interrupted because rank 0 ends, the next start runs it again: it must be able to
find its own unfinished work. The monitor of the start before may still be ending: a lock on this
machine (`_lock_of`) keeps the next one waiting until it has.

    RUN/checkpoints/after_commit/
        step-00000100.SHA.running   it runs for the checkpoint whose manifest states this sha256
        step-00000100.SHA.done      … has succeeded for it

What is pending is every complete checkpoint without its own `.done`, so a crash between a commit
and this file loses nothing, and a step that was saved again is done again.

checkpoint.keep_last does not delete a checkpoint while its command runs. Those that are still
waiting may be deleted, so that a slow or unreachable object store does not fill the disk: they are
recorded in events.jsonl as failed. A deletion and a beginning command cannot miss each other,
because the saver renames before it looks for `.running`, and this process writes `.running` before
it looks for the folder.
"""

import contextlib
import hashlib
import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.folder import (
    AFTER_COMMIT,
    MANIFEST,
    NAME,
    complete_checkpoints,
    names_in,
    step_of,
)
from runtime.files import locked
from runtime.monitor.command import run_command
from runtime.monitor.send import say_once

LOOK_SECONDS = 1.0  # between two looks for a checkpoint whose turn has come
# after the first failure; doubled after each, up to the second number
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 300.0
ENDING_ATTEMPTS = 5  # of one command, after the run has finished
PATIENCE_SECONDS = 2.0  # between SIGTERM and SIGKILL
DELETED = "it was deleted or put aside before the command had succeeded"
UNREADABLE = "its manifest cannot be read"
REASON_BYTES = 300  # of the end of a failed command's output, for its event


def progress(checkpoints: Path) -> tuple[list[Path], int | None]:
    """Return the checkpoints for which the command has not succeeded, newest first, and the step
    of the newest for which it has (perhaps deleted since)."""
    names = (Path(name) for name in names_in(checkpoints / AFTER_COMMIT))
    done = {name.stem.partition(".")[::2] for name in names if name.suffix == ".done"}
    done = {(name, sha) for name, sha in done if NAME.fullmatch(name)}
    found = reversed(complete_checkpoints(checkpoints))
    waiting = [path for path in found if (path.name, _manifest_sha(path)) not in done]
    return waiting, max((step_of(Path(name)) for name, _ in done), default=None)


def _manifest_sha(path: Path) -> str | None:
    """The sha256 that a checkpoint's manifest states; None if it was deleted, "" if it cannot be
    read."""
    try:
        return str(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["sha256"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _lock_of(checkpoints: Path) -> Path:
    """A file of this machine, the same for each start of a run. It is not in the run folder: a
    shared file system may keep the locks of a machine that died."""
    of_run = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"lattice-after-commit-{os.getuid()}-{of_run}"


@dataclass
class Tries:
    """Of the command for a pending checkpoint."""

    made: int = 0
    due: float = 0.0  # when it is the next one's turn, by the monotonic clock


class Commands:
    """Runs the command, in a thread.

    Args:
        told: what the monitor was told (rank_0.py).
        event: called with the content of an `after_commit` event (log/events.py).
    """

    def __init__(self, told: dict[str, Any], event: Callable[..., None]) -> None:
        self.command, self.cwd, self.event = told["after_commit"], told["cwd"], event
        self.run, self.checkpoints = Path(told["folder"]), Path(told["folder"]) / "checkpoints"
        self.limit: float = told["after_commit_seconds"]  # of one run of the command
        self.pending: dict[Path, Tries] = {}
        self.done_step: int | None = None  # the newest step for which it has succeeded
        self._news: queue.Queue[Path | None] = queue.Queue()  # new checkpoints; None: rank 0 ended
        self._ends_at = float("inf")  # when the running command is ended, by the monotonic clock
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="after_commit", daemon=True)

    def start(self) -> None:
        """Begin with the checkpoints of earlier starts."""
        if self._thread.ident is None:
            self._thread.start()

    def committed(self, step: int) -> None:
        self._news.put(self.checkpoints / f"step-{step:08d}")

    def finish(self, seconds: float) -> None:
        """Run the command for what is pending, for at most so many seconds; then end it."""
        self._ends_at = time.monotonic() + seconds
        self._news.put(None)
        if self._thread.ident is not None:
            self._thread.join(seconds + PATIENCE_SECONDS + 1.0)

    def _run(self) -> None:
        with locked(_lock_of(self.checkpoints), seconds=float("inf")):
            while not self._begin() and time.monotonic() < self._ends_at:
                time.sleep(LOOK_SECONDS)
            while time.monotonic() < self._ends_at and self._goes_on():
                now = time.monotonic()
                ready = [path for path, tries in self.pending.items() if tries.due <= now]
                if ready:
                    self._once(max(ready))

    def _begin(self) -> bool:
        """Note what earlier starts have left. Returns False if that cannot be read now."""
        try:
            for left in (self.checkpoints / AFTER_COMMIT).glob("*.running"):  # by a killed start
                left.unlink(missing_ok=True)
            waiting, self.done_step = progress(self.checkpoints)
        except OSError as error:
            say_once(f"checkpoint.after_commit waits, {self.checkpoints}: {error.strerror}")
            return False
        self.pending = {path: Tries() for path in waiting}
        return True

    def _goes_on(self) -> bool:
        """Hear what is new; wait for that, or until it is a checkpoint's turn. Returns False once
        rank 0 has ended and no attempt is left."""
        tries = self.pending.values()
        if self._ending and all(each.made >= ENDING_ATTEMPTS for each in tries):
            return False
        first = min((each.due for each in tries), default=float("inf"))
        pause = min(LOOK_SECONDS, max(0.0, first - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            while True:
                new = self._news.get(timeout=pause)
                pause = 0.0
                if new is None:
                    self._ending = True
                    self.pending = {path: Tries() for path in self.pending}
                else:
                    self.pending[new] = Tries()
        return True

    def _once(self, path: Path) -> None:
        """Run the command once for a checkpoint."""
        began, sha = time.monotonic(), _manifest_sha(path)
        running = self.checkpoints / AFTER_COMMIT / f"{path.name}.{sha}.running"
        if os.path.exists(running.with_suffix(".done")):  # found at the start, and then heard of
            del self.pending[path]
            return
        try:
            running.parent.mkdir(exist_ok=True)
            running.touch()
        except OSError as error:  # without it, checkpoint.keep_last may delete the checkpoint
            problem = f"{running} cannot be written: {error.strerror}"
        else:
            is_gone = sha is None or _manifest_sha(path) is None
            problem = DELETED if is_gone else self._command(path) if sha else UNREADABLE
            # If this fails, it is not run again now, but by the next start.
            with contextlib.suppress(OSError):
                running.unlink() if problem else running.rename(running.with_suffix(".done"))
        tries, has_failed = self.pending[path], problem not in ("", DELETED)
        if has_failed and time.monotonic() >= self._ends_at:
            return  # it was interrupted
        tries.made += problem != DELETED
        if has_failed:
            pause = min(RETRY_SECONDS * 2 ** (tries.made - 1), LONGEST_RETRY_SECONDS)
            tries.due = time.monotonic() + pause
        else:
            del self.pending[path]
        if not problem:
            self.done_step = max(step_of(path), self.done_step or 0)
        about = {"failed": problem} if problem else {"seconds": time.monotonic() - began}
        self.event(step=step_of(path), attempts=tries.made, **about)

    def _command(self, path: Path) -> str:
        """Run the command; return why it failed, or the empty string."""
        manifest = path / MANIFEST
        variables = {
            "LATTICE_RUN": str(self.run),
            "LATTICE_CHECKPOINT": str(path),
            "LATTICE_MANIFEST": str(manifest),
            "LATTICE_STEP": str(step_of(path)),
        }
        limit = time.monotonic() + self.limit
        try:
            with open(self.run / "after_commit.log", "ab+") as log:
                begin = log.tell()
                problem = run_command(
                    self.command,
                    str(path),
                    str(manifest),
                    cwd=self.cwd,
                    variables=variables,
                    until=lambda: min(limit, self._ends_at),
                    output=log,
                    patience=PATIENCE_SECONDS,
                )
                if not problem:
                    return ""
                log.seek(max(begin, log.seek(0, os.SEEK_END) - REASON_BYTES))
                said = log.read().decode(errors="replace").split("\n")
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        last = next((line for line in reversed(said) if line.strip()), "it printed nothing")
        return f"{problem}: {last.strip()}"
