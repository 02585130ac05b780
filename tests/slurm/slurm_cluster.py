"""Run a real Slurm on this machine, with one controller and several nodes, for
tests/slurm/slurm_scenarios.py. Needs Linux and root.

A node is a slurmd with its own host name, hosts file and loopback address (UTS and mount
namespaces, no container). Its GPUs are device nodes equivalent to /dev/null, which Slurm allocates
as if they were GPUs. There is no systemd and no cgroup, nothing is written outside `folder`, and
every process is killed by its id, even after an error.
"""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests import ROOT
from tests.monitor.alert_helpers import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "shellcheck")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "shellcheck")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")  # states of a job
PARTITION = "YOUR_PARTITION"  # the placeholder in slurm/*.sh, which users replace

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
CommunicationParameters=NoCtldInAddrAny
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
KillWait=15
MessageTimeout=30
SlurmdTimeout=20
BatchStartTimeout=120
MinJobAge=3600
PartitionName={partition} Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
NODE = (
    "NodeName={node} NodeAddr={address} Port={port} Sockets=2 CoresPerSocket=56 RealMemory=2000000 "
    "Gres=gpu:h100:8\n"
)


def install() -> None:
    """Install Slurm and shellcheck from Debian's packages if they are missing."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    command = ["apt-get", "install", "-qq", "--no-install-recommends", *PACKAGES]
    subprocess.run(command, check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


def wait_for(condition: Callable[[], object], what: str, seconds: float = 600) -> None:
    """Wait until `condition()` holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"timed out after {seconds:.0f} s: {what}"
        time.sleep(0.1)


class Cluster:
    """A Slurm cluster with nodes n1, n2, … (an idle one costs nothing), in an empty folder."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.nodes = folder, [f"n{i}" for i in range(1, nodes + 1)]
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.namespaces: dict[str, str] = {}  # node → its UTS namespace
        for number in range(8):
            os.mknod(folder / f"gpu{number}", 0o20666, os.makedev(1, 3))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        folder.chmod(0o755)
        addresses = {node: f"127.0.0.{10 + i}" for i, node in enumerate(self.nodes)}
        hosts = "".join(f"{address} {node}\n" for node, address in addresses.items())
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        gpus = f"NodeName=n[1-{nodes}] Name=gpu Type=h100 File={folder}/gpu[0-7]\n"
        (folder / "gres.conf").write_text(gpus)
        free = [free_port() for _ in range(1 + nodes)]
        # The scripts derive their ports from the job id, so that job ids start at a random number:
        # another such cluster on this machine must get other ports.
        text = CONFIGURATION.format(
            host=socket.gethostname(), controller_port=free.pop(), folder=folder,
            first_job=random.SystemRandom().randrange(1_000, 900_000),
            partition=PARTITION, nodes=nodes,
        )  # fmt: skip
        for (node, address), port in zip(addresses.items(), free, strict=True):
            text += NODE.format(node=node, address=address, port=port)
        (folder / "slurm.conf").write_text(text)

    def __enter__(self) -> "Cluster":
        # so that SIGTERM leads to `__exit__` too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
        try:
            files = {"key-file": "munge.key", "socket": "munge.socket", "seed-file": "munge.seed",
                     "pid-file": "munged.pid", "log-file": "munged.log"}  # fmt: skip
            self.run("munged", *(f"--{key}={self.folder}/{file}" for key, file in files.items()))
            self.run("slurmctld", "-c", "-f", str(self.folder / "slurm.conf"))
            for node in self.nodes:
                self.start_node(node)
            for node in self.nodes:
                self.wait_until_idle(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """End everything, by process id: first the jobs, then what is left on the nodes, then the
        daemons."""
        if self.namespaces:
            with contextlib.suppress(subprocess.SubprocessError, AssertionError):
                self.run("scancel", "--user", "root")
                jobs = "squeue", "--noheader"
                wait_for(lambda: not self.run(*jobs).strip(), "the end of cancelled jobs", 60)
        for node in self.namespaces:
            self.kill_node(node)
        for name in ("slurmctld", "munged"):
            with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
                daemon = psutil.Process(int((self.folder / f"{name}.pid").read_text()))
                daemon.terminate()
                daemon.wait(30)

    def run(self, *command: str, **environment: str) -> str:
        """Run a command, which must succeed, and return its standard output."""
        variables = {**self.environment, **environment}
        for _ in range(3):
            done = subprocess.run(
                command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=120
            )
            if done.returncode != -signal.SIGPIPE:  # else the busy controller hung up: try again
                break
        if done.returncode:
            said = f"{done.returncode}: {done.stdout}{done.stderr}"
            raise subprocess.SubprocessError(f"{' '.join(command)}: {said}")
        return done.stdout

    def sbatch(self, *arguments: str, **environment: str) -> str:
        """Submit a job and return its id."""
        output = f"--output={self.folder}/slurm-%j.out"
        return self.run("sbatch", "--parsable", output, *arguments, **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """The output of `scontrol show job`: JobState, Restarts, ExitCode, …"""
        words = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job: str) -> str:
        path = self.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_job(self, job: str, condition: Callable[[dict], object], what: str) -> None:
        """Wait until `condition(self.job(job))` holds; fail if the job ends before."""

        def holds() -> object:
            seen = self.job(job)
            ended = f"{seen['JobState']} before {what}:\n{self.log(job)}"
            assert condition(seen) or seen["JobState"] not in OVER, ended
            return condition(seen)

        wait_for(holds, what)

    def wait_until_ended(self, job: str, state: str) -> None:
        """Wait until the job is in `state`; fail if it ends in another."""
        self.wait_for_job(job, lambda seen: seen["JobState"] == state, f"{state} of job {job}")

    def start_now(self, job: str, restarts: int) -> None:
        """Wait until the job is in the queue again, and shorten the two minutes that Slurm would
        keep it there to three seconds: it rejects a start within the second of the requeue as
        forged."""
        again = {"Restarts": str(restarts), "JobState": "PENDING"}
        what = f"requeue {restarts} of job {job}"
        self.wait_for_job(job, lambda seen: again.items() <= seen.items(), what)
        self.run("scontrol", "update", f"jobid={job}", "starttime=now+3")

    def start_node(self, node: str) -> None:
        prepare = f"hostname {node} && mount --bind {self.folder}/hosts /etc/hosts"
        slurmd = f"exec slurmd -f {self.folder}/slurm.conf -N {node}"
        isolated = ["unshare", "--uts", "--mount", "--propagation", "private"]
        self.run(*isolated, "bash", "-c", f"{prepare} && {slurmd}")
        file = self.folder / f"slurmd-{node}.pid"
        wait_for(lambda: file.exists() and file.read_text().strip(), f"the slurmd of {node}", 60)
        self.namespaces[node] = os.readlink(f"/proc/{int(file.read_text())}/ns/uts")

    def wait_until_idle(self, node: str) -> None:
        state = "sinfo", "-h", "-n", node, "-o", "%T"
        wait_for(lambda: "idle" in self.run(*state), f"{node} to be idle", 120)

    def kill_node(self, node: str) -> None:
        """Kill the node's daemon and every process on it with SIGKILL, as when a machine dies."""
        end = time.monotonic() + 60
        while left := list(self.processes(node)):
            assert time.monotonic() < end, f"processes of {node} do not end: {left}"
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        (self.folder / f"slurmd-{node}.pid").unlink(missing_ok=True)

    def processes(self, node: str) -> Iterator[psutil.Process]:
        """All processes of a node that have not ended."""
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):  # the process has ended
                here = os.readlink(f"/proc/{process.pid}/ns/uts") == self.namespaces[node]
                if here and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def ranks(self, node: str) -> dict[int, int]:
        """Rank → process id of the training processes on a node."""
        found = {}
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error, KeyError):
                if "train.py" in process.cmdline():
                    found[int(process.environ()["RANK"])] = process.pid
        return found

    def batch_shell(self, node: str) -> int:
        """The process id of the job script, which runs on the job's first node."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                # Its parent distinguishes the script from its subshells.
                parent = " ".join(psutil.Process(process.ppid()).cmdline())
                is_script = any(word.endswith("/slurm_script") for word in process.cmdline())
                if is_script and "slurmstepd" in parent:
                    return process.pid
        raise AssertionError(f"no job script runs on {node}")

    @contextlib.contextmanager
    def held(self, node: str) -> Iterator[None]:
        """Stop one rank of the node, so that all others soon wait for it. The run then cannot end
        before Slurm, which checks time limits twice a minute, has acted."""
        pid = min(self.ranks(node).items())[1]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
