"""Run a command for each committed checkpoint, until it succeeds: checkpoint.after_commit.

    COMMAND … RUN/checkpoints/step-00000100 RUN/checkpoints/step-00000100/manifest.json

It runs without a shell, one at a time, for the newest checkpoint first; its output goes to
RUN/after_commit.log. If it fails or takes too long, it is tried again, after longer and longer
pauses. If it is interrupted because rank 0 ends, the next start runs it again: it must be able to
find its own unfinished work. The companion of the start before may still be ending: a lock on this
machine (`_alone`) keeps the next one waiting until it has.

    RUN/checkpoints/after_commit.json
        running   the checkpoint for which it runs now
        done      checkpoint → the sha256 of the manifest for which it has succeeded

What is pending is every complete checkpoint that is not in `done` with its own manifest, so a crash
between a commit and this file loses nothing, and a step that was saved again is done again.

checkpoint.keep_last does not delete a checkpoint while its command runs. Those that are still
waiting may be deleted, so that a slow or unreachable object store does not fill the disk: they are
recorded in events.jsonl as failed. A deletion and a beginning command cannot miss each other,
because the saver renames before it looks for `running`, and this process writes `running` before it
looks for the folder.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from runtime.checkpoint.folder import MANIFEST, NAME, complete_checkpoints, step_of
from runtime.log.log_lines import json_object
from runtime.monitor.send import end_group
from runtime.monitor.settings import Settings

RECORD = "after_commit.json"
LOOK_SECONDS = 1.0  # between two looks for new checkpoints
# after the first failure; doubled after each, up to the second number
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 5.0, 300.0
ENDING_ATTEMPTS = 5  # of one command, after the run has finished
PATIENCE_SECONDS = 2.0  # between SIGTERM and SIGKILL
REASON_BYTES = 300  # of the end of a failed command's output, for its event


def read_record(checkpoints: Path) -> dict[str, Any]:
    """Return {"running": a checkpoint's name or None, "done": {…}}; empty if there is none, and
    without entries that are no checkpoint's."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        found = json_object((checkpoints / RECORD).read_bytes())
    done = found.get("done")
    known = done.items() if isinstance(done, dict) else ()
    return {
        "running": found.get("running"),
        "done": {name: sha for name, sha in known if NAME.fullmatch(name)},
    }


def is_running(checkpoints: Path, name: str) -> bool:
    """Whether the command runs for this checkpoint, which must then stay."""
    return bool(read_record(checkpoints)["running"] == name)


def progress(checkpoints: Path) -> tuple[list[Path], int | None]:
    """Return the checkpoints for which the command has not succeeded, newest first, and the step
    of the newest for which it has (perhaps deleted since)."""
    done = read_record(checkpoints)["done"]
    found = reversed(complete_checkpoints(checkpoints))
    waiting = [path for path in found if done.get(path.name) != _manifest_sha(path)]
    return waiting, max((step_of(Path(name)) for name in done), default=None)


def _manifest_sha(path: Path) -> str | None:
    """The sha256 that a checkpoint's manifest states; None if it is deleted meanwhile."""
    try:
        found = (path / MANIFEST).stat()
        return _stated_sha(path / MANIFEST, found.st_ino, found.st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=64)
def _stated_sha(manifest: Path, inode: int, time_ns: int) -> str:
    return str(json.loads(manifest.read_text(encoding="utf-8"))["sha256"])


def _lock(checkpoints: Path) -> contextlib.AbstractContextManager[Any]:
    """A file of this machine for `_alone`, the same for each start of a run; None if it cannot be
    opened. It is not in the run folder: a shared file system may know no locks, or keep those of a
    machine that died."""
    of_run = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"lattice-after-commit-{os.getuid()}-{of_run}"
    with contextlib.suppress(OSError):
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    return contextlib.nullcontext()


def _alone(lock: Any) -> bool:
    """Whether no other companion of this machine holds the lock; from now on this one does, until
    its file is closed or the process ends. True, too, if this machine has no locks."""
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Commands:
    """Runs the command, in a thread.

    Args:
        event: called with the content of an `after_commit` event (log/events.py).
    """

    def __init__(self, settings: Settings, event: Callable[..., None]) -> None:
        self.settings, self.event = settings, event
        self.run, self.checkpoints = Path(settings.folder), Path(settings.folder) / "checkpoints"
        self.limit = settings.after_commit_seconds
        self.attempts: dict[str, int] = {}  # manifest's sha256 → failed attempts
        self._due: dict[str, float] = {}  # … → when to try again, by the monotonic clock
        self._seen: dict[str, str] = {}  # pending checkpoints: name → manifest's sha256
        self._done: dict[str, str] = {}  # those of this start, in case the record cannot be written
        self._unwritten = False  # the record says that a command runs which has ended
        self._ends_at = float("inf")  # when the running command is ended, by the monotonic clock
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="after_commit", daemon=True)

    def start(self) -> None:
        if not self._ending.is_set():
            self._thread.start()

    def finish(self, seconds: float) -> None:
        """Run the command for what is pending, for at most so many seconds; then end it."""
        self._ends_at = time.monotonic() + seconds
        self.attempts.clear()
        self._due.clear()
        self._ending.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(seconds + PATIENCE_SECONDS + 1.0)

    def _run(self) -> None:
        with _lock(self.checkpoints) as lock:
            while not _alone(lock):
                if time.monotonic() >= self._ends_at:
                    return
                time.sleep(0.1)
            # of a start that was killed
            self._unwritten = read_record(self.checkpoints)["running"] is not None
            self._run_alone()

    def _run_alone(self) -> None:
        while time.monotonic() < self._ends_at:
            if self._unwritten:
                self._write(running=None)
            ready = self._next()
            if ready is not None:
                self._once(*ready)
            elif self._ending.is_set() and not self._waiting():
                return
            elif self._ending.is_set():
                time.sleep(0.05)
            else:
                self._ending.wait(LOOK_SECONDS)

    def _next(self) -> tuple[Path, str] | None:
        """Return the newest pending checkpoint whose time has come, and its manifest's sha256."""
        now, ready, seen = time.monotonic(), None, {}
        for path, sha in self._pending():
            seen[path.name] = sha
            if ready is None and self._due.get(sha, 0.0) <= now:
                ready = path, sha
        for name in sorted(self._seen.keys() - seen.keys()):
            if self._seen[name] not in self._done.values():
                why = "it was deleted or put aside before the command had succeeded"
                self.event(step=step_of(Path(name)), attempts=0, failed=why)
        self._seen = seen
        return ready

    def _pending(self) -> list[tuple[Path, str]]:
        found = [(path, _manifest_sha(path)) for path in progress(self.checkpoints)[0]]
        done = self._done.values()
        return [(path, sha) for path, sha in found if sha is not None and sha not in done]

    def _waiting(self) -> bool:
        """Whether a pending checkpoint has attempts left, now that rank 0 has ended."""
        return any(self.attempts.get(sha, 0) < ENDING_ATTEMPTS for _, sha in self._pending())

    def _once(self, path: Path, sha: str) -> None:
        """Run the command once for a checkpoint."""
        began = time.monotonic()
        problem = self._write(running=path.name)
        if problem:  # without the record, checkpoint.keep_last may delete the checkpoint meanwhile
            problem = f"{self.checkpoints / RECORD} cannot be written: {problem}"
        elif not (path / MANIFEST).is_file():  # deleted just now
            self._write(running=None)
            return
        else:
            problem = self._command(path)
            if not problem:
                self._done[path.name] = sha
            self._write(running=None)
        if problem and time.monotonic() >= self._ends_at:
            return  # interrupted: the next start tries again
        self.attempts[sha] = tried = self.attempts.get(sha, 0) + 1
        if not problem:
            seconds = time.monotonic() - began
            self.event(step=step_of(path), attempts=tried, seconds=seconds)
            return
        pause = min(RETRY_SECONDS * 2 ** (tried - 1), LONGEST_RETRY_SECONDS)
        self._due[sha] = time.monotonic() + pause
        self.event(step=step_of(path), attempts=tried, failed=problem)

    def _command(self, path: Path) -> str:
        """Run the command; return why it failed, or the empty string."""
        manifest = path / MANIFEST
        variables = {
            "LATTICE_RUN": str(self.run),
            "LATTICE_CHECKPOINT": str(path),
            "LATTICE_MANIFEST": str(manifest),
            "LATTICE_STEP": str(step_of(path)),
        }
        try:
            with open(self.run / "after_commit.log", "ab") as log:
                begin = log.tell()
                process = subprocess.Popen(
                    [*shlex.split(self.settings.after_commit), str(path), str(manifest)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.settings.cwd,
                    env={**os.environ, **variables},
                    start_new_session=True,
                )
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        until = time.monotonic() + self.limit
        while process.poll() is None:
            if time.monotonic() > min(until, self._ends_at):
                end_group(process, PATIENCE_SECONDS)
                return f"it was ended after {self.limit:.0f} s (checkpoint.after_commit_minutes)"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        if not process.returncode:
            return ""
        with open(self.run / "after_commit.log", "rb") as log:
            log.seek(max(begin, log.seek(0, os.SEEK_END) - REASON_BYTES))
            said = log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "it printed nothing")
        return f"it ended with status {process.returncode}: {last.strip()}"

    def _write(self, running: str | None) -> str:
        """Replace the record, on which only this process writes: the checkpoint for which the
        command runs, and those for which it has succeeded, as far as they are there, with the
        newest. Returns why that failed, or the empty string; it is then tried again, as long as no
        command runs."""
        there = {path.name for path in complete_checkpoints(self.checkpoints)}
        done = read_record(self.checkpoints)["done"] | self._done
        there.add(max(done, default=""))
        record = {"running": running, "done": {n: sha for n, sha in done.items() if n in there}}
        partial = self.checkpoints / f"{RECORD}.tmp"
        try:
            partial.write_text(json.dumps(record, indent=1) + "\n")
            os.replace(partial, self.checkpoints / RECORD)
        except OSError as error:
            self._unwritten |= running is None
            return str(error.strerror or error)
        self._unwritten = False
        return ""
