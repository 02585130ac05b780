"""Read who holds a run folder from its lease, and find out whether that process is alive. (lease.py
decides what follows.)"""

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.checkpoint.folder import names_in

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
            host=socket.gethostname(),
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

    @property
    def is_released(self) -> bool:
        return self.time_ns == RELEASED

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


def _machine() -> str:
    """Identify the scope in which process numbers are comparable: one boot of one kernel, and one
    of its PID namespaces (containers have others)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


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
