"""One writer per run folder: a lease says who it is; a fence stops even a writer that was paused.

    RUN/lease/00000007.json                     the highest number is the holder: host, process,
                                                job; renewed by its time
    RUN/checkpoints/partial-00000007-3f2a9c1b/  the holder's work folder: what is being written, or
                                                is on its way out

Taking. Numbers are created exclusively, so one start gets each. A newcomer takes the next number at
once where the holder has released it, is a process of this host that has died, or is an earlier
start of the same Slurm job. It also does where the holder was silent for EXPIRE_SECONDS (its node
died); until then it watches, and where the holder renews the lease it is refused. Times are
compared only with times of the same file server, or with this process's own clock.

Fencing. Whoever checks that it is the holder can be paused right after the check. So all that a run
changes among checkpoints is a rename into or out of its own work folder, made in this order: make
the work folder, check, rename. A newcomer first takes the lease, then moves every other work folder
into its own, and only then looks at what is there.

    the displaced run was paused    what stops it
    before its check                the check: a higher number is there
    between check and rename        its work folder is gone, and with it the source or the target:
                                    the rename fails
    after its rename                nothing: it was made before the newcomer looked, who finds a
                                    whole checkpoint

A newcomer that was itself paused and displaced is stopped in the same way, for moving another's
work folder is such a rename.

Other files of the run folder are only appended to or replaced as a whole. Before it writes them, a
holder whose last check is older than TRUST_SECONDS checks again. A displaced run says so, and its
process ends with status 2 on the spot.
"""

import contextlib
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from errors import UserError
from runtime.lease_holder import RELEASED, Found, Holder, newest_lease
from runtime.messages import from_rank_0, log, refuse

RENEW_SECONDS = 5.0
EXPIRE_SECONDS = 60.0
# well below EXPIRE_SECONDS: in so short a time nobody can find the lease expired
TRUST_SECONDS = 20.0
KEPT = (".damaged", ".abandoned")  # suffixes of checkpoints that are put aside, not deleted


class Lease:
    """The right to write to a run folder, while entered, by all ranks; rank 0 takes it, and moves.

    Raises AgreedError, on every rank, where another run holds it.
    """

    def __init__(self, run_dir: str | Path, device: str) -> None:
        self.run_dir, self.device = Path(run_dir), device
        self.folder = self.run_dir / "lease"
        self.checkpoints = self.run_dir / "checkpoints"
        self._made: list[Path] = []  # folders that were not there before
        self._path = self.folder
        self._token = ""
        self._looked = 0.0  # when this run was last seen to be the holder
        self._ends = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @property
    def work(self) -> Path:
        """The work folder. `make_work` makes it when it is needed."""
        return self.checkpoints / f"partial-{self._token}"

    def make_work(self) -> Path:
        if not self.work.exists():
            self._require()
            self.work.mkdir(parents=True, exist_ok=True)
        return self.work

    def check(self) -> None:
        """Before anything else is written: ends the process if another run has taken over. Rarely
        looks; see the top. Other ranks than 0, which have no token, may call it too."""
        if self._token and time.monotonic() - self._looked > TRUST_SECONDS:
            with contextlib.suppress(OSError):  # what cannot be read now can hardly be written
                self._require()

    def move(self, source: Path, target: Path) -> None:
        """Rename into or out of the work folder; ends the process if another run has taken over."""
        assert self.work in (*source.parents, *target.parents)
        self.make_work()
        # After the work folder is made: one made after a newcomer's sweep would be no fence.
        self._require()
        try:
            os.replace(source, target)
        except FileNotFoundError:
            self._require()
            raise

    def __enter__(self) -> "Lease":
        from_rank_0(self._take, self.device)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if dist.get_rank() == 0:
            self._release()

    def _release(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        shutil.rmtree(self.work, ignore_errors=True)
        # else a newcomer finds that this process is gone, or the lease expired
        with contextlib.suppress(OSError):
            # refused: nothing was written
            if self._made and {path.name for path in self.run_dir.iterdir()} == {"lease"}:
                self._path.unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()
            else:
                os.utime(self._path, (RELEASED, RELEASED))

    # --- taking it, on rank 0 ---------------------------------------------------------------------

    def _take(self) -> None:
        try:
            while not self._try_to_take():
                pass
            self._looked = time.monotonic()
            self._thread.start()
            self._clear()
        except OSError as error:
            self._release()
            remedy = "make room, choose another, or its permissions"
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
        number = found.number + 1 if found is not None else 1
        self._token = f"{number:08d}-{secrets.token_hex(4)}"
        self._path = self.folder / f"{number:08d}.json"
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                file.write(Holder.this_process(self._token).model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
        # another newcomer was faster; or left, and took the folder along
        except (FileExistsError, FileNotFoundError):
            return False
        if not self._is_mine():  # what was judged above is long over, and a higher number is there
            self._path.unlink(missing_ok=True)
            return False
        for older in self.folder.glob("*.json"):
            if older.name < self._path.name:
                older.unlink(missing_ok=True)
        return True

    def _is_free(self, found: Found) -> bool:
        """Whether the next number may be taken now. False: look again. Raises UserError where the
        holder is alive."""
        holder, me = found.holder, Holder.this_process("")
        if found.is_released or (holder is not None and holder.was_requeued_as(me.job, me.restart)):
            return True
        runs = holder.runs() if holder is not None else None
        if runs is False:
            return True
        age = self._seconds_since(found.time_ns)
        if runs and age < EXPIRE_SECONDS:
            self._refuse(found, age)
        if age < EXPIRE_SECONDS:
            left = f"{EXPIRE_SECONDS - age:.0f} s"
            log(
                f"{self.run_dir} is held by {found}; this run waits until that renews its lease, "
                f"or for {left}"
            )
        expires = time.monotonic() + EXPIRE_SECONDS - age
        while time.monotonic() < expires:
            time.sleep(0.5)
            now = newest_lease(self.folder)
            if now is None or now.path != found.path or now.is_released:
                return False
            if now.time_ns != found.time_ns:
                self._refuse(now, 0.0)
        return True

    def _refuse(self, found: Found, age: float) -> NoReturn:
        why = f"{found} writes there, and renewed its lease ({found.path}) {age:.0f} s ago"
        stop = (
            f"stop that run first (touch {self.run_dir / 'STOP'}; "
            f"a dead one's lease expires after {EXPIRE_SECONDS:.0f} s)"
        )
        remedy = f"choose another run.dir, or {stop}; or displace it, and end it: delete the lease"
        raise UserError("run.dir", str(self.run_dir), why, remedy)

    def _seconds_since(self, time_ns: int) -> float:
        """By the clock of the machine that holds the files, as it stamped `time_ns`."""
        probe = self.folder / f"probe-{secrets.token_hex(4)}"
        try:
            probe.touch()
            return max(0.0, (probe.stat().st_mtime_ns - time_ns) / 1e9)
        finally:
            probe.unlink(missing_ok=True)

    def _clear(self) -> None:
        """Take away what others were writing or deleting; what they put aside gets its name."""
        others = [path for path in self.checkpoints.glob("partial-*") if path != self.work]
        for path in others:
            self.move(path, self.work / path.name)
        if others:
            for path in sorted(self.work.rglob("step-*.*")):
                if path.suffix.startswith(KEPT):
                    self.put_aside(path, path.suffix)
            shutil.rmtree(self.work, ignore_errors=True)

    # --- keeping it -------------------------------------------------------------------------------

    def put_aside(self, path: Path, suffix: str) -> Path:
        """Give a checkpoint a name that does not count as one; the new name. Suffixes: KEPT."""
        names = [suffix, *(f"{suffix}-{number}" for number in range(2, 1000))]
        places = (self.checkpoints / (path.stem + name) for name in names)
        free = next(place for place in places if not place.exists())
        if self.work not in path.parents:
            self.move(path, self.work / free.name)
            path = self.work / free.name
        self.move(path, free)
        return free

    def _renew(self) -> None:
        """In a thread, until it is closed."""
        while not self._closed.wait(RENEW_SECONDS):
            # perhaps the file server is away; the next time will do
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
        return (
            newest is not None and newest.holder is not None and newest.holder.token == self._token
        )

    def _end(self) -> NoReturn:
        self._ends.acquire()  # never released: one thread speaks, and nothing survives it
        newest = None
        with contextlib.suppress(OSError):
            newest = newest_lease(self.folder)
        why = (
            f"this run was displaced by {newest}" if newest else "the lease of this run was deleted"
        )
        remedy = (
            "let the other run go on, or stop it and start this one again; "
            "this one has written nothing since"
        )
        refuse(UserError("run.dir", str(self.run_dir), why, remedy))
