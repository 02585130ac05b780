"""Allow one writer per run folder: a lease names it, and fencing stops even a writer that was
paused.

    RUN/lease/00000007.json                     the highest number is the holder's: its host,
                                                process and job; renewed by setting the file's time
    RUN/checkpoints/partial-00000007-3f2a9c1b/  the holder's work folder: what it is writing or
                                                deleting

Taking the lease. Numbers are created exclusively, so only one start gets each. A newcomer takes the
next number at once if the holder has released its lease, is a process of this host that has died,
or is an earlier start of the same Slurm job. Otherwise it watches for EXPIRE_SECONDS: if the holder
renews the lease, the newcomer is refused; if not (its node died), it takes the number. Only the
newcomer's own clock counts; the lease's time need not be right, it must only change.

Fencing. A process that has checked that it is the holder can be paused right after the check. So
every change that a run makes to the set of checkpoints is a rename into or out of its own work
folder, in this order: create the work folder, check the lease, rename. A newcomer first takes the
lease, then moves every other work folder into its own, and only then reads the checkpoints.

    the displaced run was paused    what stops it
    before its check                the check finds a higher number
    between check and rename        the rename fails: its work folder, and with it the source or the
                                    target, is gone
    after its rename                nothing; the rename came before the newcomer read the folder, so
                                    the newcomer finds a whole checkpoint

A newcomer that is itself paused and displaced is stopped in the same way, because moving another
work folder is such a rename.

Other files of the run folder are only appended to or replaced as a whole. Before writing them, a
holder whose last check is older than TRUST_SECONDS checks again. A displaced run reports it, and
its process exits immediately with status 2.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from errors import UserError, raise_passing
from runtime.agreement import from_rank_0, on_all_ranks
from runtime.checkpoint.folder import ABANDONED, DAMAGED, LATEST, complete_checkpoints, names_in
from runtime.exit import refuse
from runtime.files import write_durably
from runtime.output import log

RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 60.0
# well below EXPIRE_SECONDS: the lease cannot have expired for another run in this time
TRUST_SECONDS = 20.0
# for all nodes to see a new file: NFS remembers for up to 60 s that a name was not there
SEEN_SECONDS = 90.0
RELEASED = 0  # the time of a released lease file, in seconds since 1970

# restricted, because any program may have written the lease
Word = Annotated[str, Field(pattern=r"^[\w.:\[\]-]{0,200}$")]


class Holder(BaseModel):
    """The holder of a lease, as recorded in the file."""

    model_config = ConfigDict(strict=True, frozen=True)

    token: Word  # unique to this lease, whatever its number
    host: Word
    machine: Word  # identifies the boot and the PID namespace, see `_machine`
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    process_began: Word  # needed because process numbers are reused
    job: Annotated[str, Field(pattern="^[!-~]{0,200}$")]  # Slurm's job number, or ""
    restart: int  # how often Slurm has requeued the job
    since: Word  # in UTC, for people to read

    @classmethod
    def this_process(cls, token: str) -> "Holder":
        return cls(
            token=token,
            host=_host(),
            machine=_machine(),
            pid=os.getpid(),
            process_began=_process_began(os.getpid()) or "",
            job=os.environ.get("SLURM_JOB_ID", ""),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def __str__(self) -> str:
        job = f" of Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on host {self.host}{job}, since {self.since}"


@dataclass(frozen=True)
class Found:
    """A lease file that was read."""

    path: Path
    holder: Holder | None  # None: unreadable, perhaps because it is being written
    time_ns: int  # the file's modification time

    def has_died(self) -> bool:
        """Whether the holder is certainly over: its process, or its job before it was requeued."""
        was, me = self.holder, Holder.this_process("")
        if was is None:
            return False
        if me.job and was.job == me.job and was.restart < me.restart:
            return True
        return was.machine == me.machine and _process_began(was.pid) not in ("", was.process_began)

    def __str__(self) -> str:
        return str(self.holder or "an unknown process (its lease cannot be read yet)")


def newest_lease(folder: Path) -> Found | None:
    """Return the lease with the highest number, or None. Raises OSError."""
    while True:
        found = map(folder.joinpath, sorted(names_in(folder)))
        paths = [path for path in found if path.suffix == ".json" and path.stem.isdecimal()]
        if not paths:
            return None
        try:
            with open(paths[-1], encoding="utf-8", errors="replace") as file:
                text, time_ns = file.read(10_000), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            continue
        try:
            holder = Holder.model_validate_json(text)
        except ValidationError:
            holder = None
        return Found(paths[-1], holder, time_ns)


def _host() -> str:
    """This machine's name as a Word: macOS, for one, allows other characters in it."""
    return re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:200]


def _machine() -> str:
    """Identify the scope in which process numbers are comparable: one boot of one kernel, and one
    of its PID namespaces (containers have others)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return _host()


def _process_began(pid: int) -> str | None:
    """Return the start time of a process, which tells it from others that had its number; None if
    it is dead, "" if that is unknown: only Linux says it exactly, whatever is done to the clock."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):  # another user's process
        pass
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return ""


class Lease:
    """The right to write to a run folder, as a context manager that all ranks enter. Rank 0 takes
    the lease and makes the renames.

    Entering raises AgreedError, on every rank, if another run holds the lease.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self.folder = self.run_dir / "lease"
        self.checkpoints = self.run_dir / "checkpoints"
        self._made: list[Path] = []  # folders that did not exist before
        self._path = self.folder
        self._token = ""
        self._looked = 0.0  # when a check last found that this run is the holder
        self._ends = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @property
    def work(self) -> Path:
        """The path of the work folder; `make_work` creates the folder when it is needed."""
        return self.checkpoints / f"partial-{self._token}"

    def make_work(self) -> Path:
        if not self.work.exists():
            self._require()
            self.work.mkdir(parents=True, exist_ok=True)
        return self.work

    def check(self) -> None:
        """End the process if another run has taken over; called before files other than checkpoints
        are written. Reads the lease only if the last check is older than TRUST_SECONDS. Does
        nothing on ranks other than 0, which have no token."""
        if self._token and time.monotonic() - self._looked > TRUST_SECONDS:
            with contextlib.suppress(OSError):  # if reading fails, writing will hardly succeed
                self._require()

    def move(self, source: Path, target: Path) -> None:
        """Rename into or out of the work folder; end the process if another run has taken over."""
        assert self.work in (*source.parents, *target.parents)
        self.make_work()
        # Check after creating the work folder: a folder created after a newcomer has moved all work
        # folders away would not make the rename fail.
        self._require()
        try:
            os.replace(source, target)
        except FileNotFoundError:
            self._require()
            raise

    def __enter__(self) -> "Lease":
        taken = from_rank_0(self._take)
        try:
            on_all_ranks(lambda: self._see(taken))
        except UserError:
            self.__exit__(None, None, None)
            raise
        return self

    def _see(self, taken: str) -> None:
        """Raise UserError unless this rank's folder has the lease that rank 0 has taken: else it
        would find all checkpoints damaged, and write its part of new ones elsewhere."""
        until = time.monotonic() + SEEN_SECONDS
        while not (self._token or os.path.exists(self.folder / taken)):
            if time.monotonic() > until:
                why = f"on {socket.gethostname()} it is another folder than rank 0's"
                remedy = "give a folder that all nodes share, and mount it on each"
                raise UserError("run.dir", str(self.run_dir), why, remedy)
            time.sleep(0.5)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._token:  # rank 0; the process group may be gone
            self._release()

    def _release(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        # Only if it is empty: after a failure, a save's thread may be about to commit from it, or a
        # checkpoint may be on its way aside. The next start clears it (`_clear`).
        with contextlib.suppress(OSError):
            self.work.rmdir()
        # if this fails, a newcomer finds that this process has ended or no longer renews the lease
        with contextlib.suppress(OSError):
            # the run was refused before it wrote anything
            if self._made and {path.name for path in self.run_dir.iterdir()} == {"lease"}:
                self._path.unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()
            else:
                os.utime(self._path, (RELEASED, RELEASED))

    # --- taking it, on rank 0 ---------------------------------------------------------------------

    def _take(self) -> str:
        try:
            while not self._try_to_take():
                pass
            self._looked = time.monotonic()
            self._thread.start()
            self._clear()
            return self._path.name
        except OSError as error:
            self._release()
            raise_passing(error)
            remedy = "free some space, choose another folder, or change its permissions"
            why = f"cannot be written: {error}"
            raise UserError("run.dir", str(self.run_dir), why, remedy) from None

    def _try_to_take(self) -> bool:
        self._made = [
            path for path in (self.folder, *self.folder.absolute().parents) if not path.exists()
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        found = newest_lease(self.folder)
        if found is not None and not self._is_free(found):
            return False
        number = int(found.path.stem) + 1 if found is not None else 1
        self._token = f"{number:08d}-{secrets.token_hex(4)}"
        self._path = self.folder / f"{number:08d}.json"
        try:
            holder = Holder.this_process(self._token)
            write_durably(self._path, holder.model_dump_json(indent=1) + "\n", mode="x")
        # another newcomer was faster, or left and removed the folder
        except (FileExistsError, FileNotFoundError):
            self._path = self.folder  # not the winner's file, if the next try fails
            return False
        if not self._is_mine():  # this process was paused meanwhile: there is a higher number
            self._path.unlink(missing_ok=True)
            return False
        for older in self.folder.glob("*.json"):
            if older.name < self._path.name:
                older.unlink(missing_ok=True)
        return True

    def _is_free(self, found: Found) -> bool:
        """Whether the next number may be taken now. False: the lease has changed, try again. Raises
        UserError if the holder is alive."""
        if found.time_ns == RELEASED or found.has_died():
            return True
        log(
            f"{self.run_dir} is held by {found}; this run waits up to {EXPIRE_SECONDS:.0f} s "
            "to see whether that process is alive and renews its lease"
        )
        expires = time.monotonic() + EXPIRE_SECONDS
        while time.monotonic() < expires:
            time.sleep(0.5)
            now = newest_lease(self.folder)
            if now is None or now.path != found.path or now.time_ns == RELEASED:
                return False
            if now.time_ns != found.time_ns:
                why = f"{now} is writing there and has just renewed its lease ({now.path})"
                stop = f"stop that run first (touch {self.run_dir / 'STOP'})"
                remedy = f"choose another run.dir, or {stop}, or end it by deleting its lease"
                raise UserError("run.dir", str(self.run_dir), why, remedy)
        return True

    def _clear(self) -> None:
        """Delete the work folders of other starts; checkpoints that they were putting aside are
        kept and get their names."""
        others = [name for name in names_in(self.checkpoints) if name.startswith("partial-")]
        for name in others:
            self.move(self.checkpoints / name, self.work / name)
        if others:
            for path in sorted(self.work.rglob("step-*.*")):
                if path.suffix.startswith((DAMAGED, ABANDONED)):
                    self._put(path, path.suffix)
            shutil.rmtree(self.work, ignore_errors=True)

    # --- keeping it -------------------------------------------------------------------------------

    def put_aside(self, path: Path, suffix: str) -> Path:
        """Rename a checkpoint so that it no longer counts as one, after taking it out of `latest`;
        return the new path. `suffix`: DAMAGED or ABANDONED."""
        self.name_latest(but=path)
        going = self.work / (path.stem + suffix)  # if this is cut short, `_clear` keeps it
        self.move(path, going)
        return self._put(going, suffix)

    def _put(self, path: Path, suffix: str) -> Path:
        """Move a checkpoint out of the work folder, to a free name with `suffix`."""
        free, number = self.checkpoints / (path.stem + suffix), 1
        while free.exists():
            number += 1
            free = self.checkpoints / f"{path.stem}{suffix}-{number}"
        self.move(path, free)
        return free

    def name_latest(self, but: Path | None = None) -> None:
        """Let `latest` name the newest complete checkpoint other than `but`, or remove the file if
        there is none."""
        complete = [path.name for path in complete_checkpoints(self.checkpoints) if path != but]
        latest = self.checkpoints / LATEST
        if complete:
            write_durably(self.make_work() / LATEST, complete[-1])
            self.move(self.work / LATEST, latest)
        elif latest.exists():
            self.move(latest, self.work / LATEST)
            (self.work / LATEST).unlink()

    def _renew(self) -> None:
        """Renew the lease periodically, in a thread, until it is released."""
        while not self._closed.wait(RENEW_SECONDS):
            # the file server may be unavailable for a while; try again the next time
            with contextlib.suppress(OSError):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._path)
                self._require()

    def _require(self) -> None:
        if not self._is_mine():
            self._end()
        self._looked = time.monotonic()

    def _is_mine(self) -> bool:
        newest = newest_lease(self.folder)
        return bool(newest and newest.holder and newest.holder.token == self._token)

    def _end(self) -> NoReturn:
        self._ends.acquire()  # never released: only one thread reports, and it ends the process
        why = "the lease of this run was deleted"
        with contextlib.suppress(OSError):
            if newest := newest_lease(self.folder):
                why = f"this run was displaced by {newest}"
        remedy = "let the other run continue, or stop it and restart this one; this one has "
        remedy += "committed no checkpoint since it was displaced"
        refuse(UserError("run.dir", str(self.run_dir), why, remedy))
