"""Who holds a run folder, as its lease says, and whether that process is still there. (lease.py:
what follows from it.)"""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

RELEASED = 0  # a lease's time, in seconds since 1970, once it is released

# a lease may have been written by anybody
Word = Annotated[str, Field(pattern=r"^[\w.:\[\]-]{0,200}$")]


class Holder(BaseModel):
    """What a lease says of its holder."""

    model_config = ConfigDict(strict=True, frozen=True)

    token: Word  # of this lease and no other, whatever its number
    host: Word
    machine: Word  # one boot of one kernel, and the process numbers that count there
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    # a process number is used again
    process_began: Annotated[str, Field(pattern=r"^[\w :]{0,100}$")]
    job: Word  # Slurm's, or ""
    restart: int  # how often Slurm has requeued the job
    since: Word  # universal time, to be read by people

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

    def runs(self) -> bool | None:
        """Whether the process is alive; None where that cannot be told from here."""
        if self.machine != _machine():
            return None
        began = _process_began(self.pid)
        return None if began == "" else began == self.process_began

    def was_requeued_as(self, job: str, restart: int) -> bool:
        return bool(job) and self.job == job and self.restart < restart

    def __str__(self) -> str:
        job = f" of Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on host {self.host}{job}, since {self.since}"


@dataclass(frozen=True)
class Found:
    """A lease as it was read."""

    path: Path
    holder: Holder | None  # None: it cannot be read, perhaps because it is being written
    time_ns: int

    @property
    def number(self) -> int:
        return int(self.path.stem)

    @property
    def is_released(self) -> bool:
        return self.time_ns == RELEASED

    def __str__(self) -> str:
        return str(self.holder or "a process that cannot be named yet")


def newest_lease(folder: Path) -> Found | None:
    """The lease with the highest number."""
    while True:
        paths = sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())
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
    """Where process numbers mean the same: one boot of one kernel, and one of its namespaces
    (containers have others)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _process_began(pid: int) -> str | None:
    """What tells a process from others that had its number; None: it is dead; "": nobody knows."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):  # another user's
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except OSError:
        if sys.platform == "linux":
            return ""
    began = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return " ".join(began.stdout.split())
