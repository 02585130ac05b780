"""slurm/train_70b.sh without a Slurm: `srun`, `squeue` and the others are replaced by programs that
note how they were called, and fail where a test wants it. (tests/slurm/slurm_scenarios.py runs the
script on a real Slurm.)"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.monitor.alert_helpers import wait_until
from tools.slurm_next import what_next

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs GNU's date, tail and wc")
PROGRAMS = {
    # passes the preflight, notes alarms, and runs $TRAINING instead of training
    "python": f"""case $2 in
        tools.preflight) eval "${{PREFLIGHT:-echo n3 $PWD/run}}" ;;
        tools.alarm) echo "${{@:3}}" >>alarms ;;
        tools.slurm_next) exec {sys.executable} "$@" ;;
        *) eval "$TRAINING" ;;
        esac""",
    # unless it exports all, a step gets Slurm's variables only (here also those of these programs)
    "srun": '[ "$1" != --help ] || exec echo "${PYXIS:-}"; echo "$@" >>steps; '
    '[ "${SLURM_EXPORT_ENV:-ALL}" = ALL ] || for name in $(compgen -e); do '
    '[[ $name = @(SLURM*|PATH|PYTHON*|TRAINING) ]] || unset "$name"; done; '
    "while [ $# -gt 0 ] && [[ $1 != @(bash|apptainer) ]]; do shift; done; "
    'eval "${PROLOG:-}"; exec "$@"',
    "apptainer": '[ "$1 $2 $3 $5 $7" = "exec --nv --bind --pwd tiny.sif" ] && exec "${@:8}"',
    "scontrol": '[ "$1" != show ] || exec echo n3; echo "$@" >>calls; exit ${REQUEUE:-0}',
    "squeue": '[ "$2" != --steps ] || exec echo 7.0; eval "${SQUEUE:-false}"',
    "scancel": 'echo scancel "$@" >>calls; eval "${SCANCEL:-true}"',
    "sleep": "exec /bin/sleep 0.05",
    "touch": '[ "${1##*/}" != STOP ] || eval "${FILES:-}"; exec /bin/touch "$@"',
    "tail": 'exec /usr/bin/tail --sleep-interval 0.05 "$@"',
}
# as training does when the file of this start is there, half a second later
SAVE = (
    'until [ -e "$LATTICE_STOP_FILE" ]; do /bin/sleep 0.02; done; /bin/sleep 0.5; '
    "echo saved >>calls; "
    """echo '{"state": "requeue", "reason": "the job script requested a stop"}' >run/status.json"""
)
FINISH = """echo '{"state": "finished"}' >run/status.json"""
ARRAY = {"JOB_ID": "7", "TASK_ID": "3", "TASK_MAX": "3"}  # its last job


class Job:
    """Starts of the script in `folder`, as job 7 on one node of one GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, None
        (folder / "bin").mkdir()
        (folder / "slurm").symlink_to(ROOT / "slurm")
        for name, text in PROGRAMS.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / "bin" / name).chmod(0o755)
        (folder / "run" / "checkpoints").mkdir(parents=True)

    def start(self, training: str, **variables: str) -> subprocess.Popen[bytes]:
        slurm = {
            "JOB_ID": "7", "JOB_NUM_NODES": "1", "JOB_NODELIST": "n3", "GPUS_ON_NODE": "1",
            "CPUS_ON_NODE": "1", "SUBMIT_DIR": str(self.folder), "RESTART_COUNT": "",
        }  # fmt: skip
        given = {f"SLURM_{name}": value for name, value in slurm.items()} | {
            "SLURMD_NODENAME": "n3", "PYTHON": "python", "TRAINING": training,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with open(self.folder / "log", "wb") as log:
            self.script = subprocess.Popen(
                ["bash", ROOT / "slurm/train_70b.sh"], env={**os.environ, **given, **variables},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self.script

    def ends(self, training: str, **variables: str) -> int:
        return self.start(training, **variables).wait(60)

    def stop(self) -> None:
        """What Slurm does before the time is up."""
        wait_until(lambda: (self.folder / "run" / "logs" / "7.0" / "n3.log").exists())
        self.script.send_signal(signal.SIGUSR1)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text() if (self.folder / name).exists() else ""


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    if job.script is not None and job.script.poll() is None:
        os.killpg(job.script.pid, signal.SIGKILL)
        job.script.wait()


@pytest.mark.parametrize("squeue", ["exit 1", pytest.param("echo N/A", marks=pytest.mark.thorough)])
def test_the_job_waits_for_the_save(job, squeue):
    """Even if the controller does not say when the job ends, or the ranks cannot be signalled; and
    training ends while the script still tries that."""
    slow = "/bin/sleep 0.8; exit 1"
    job.start(SAVE, SQUEUE=squeue, SCANCEL=slow, SLURM_JOB_END_TIME="1")
    job.stop()
    assert job.script.wait(60) == 0
    assert job.read("calls").splitlines() == ["scancel --signal=USR1 7.0", "saved", "requeue 7"]
    assert "have not saved in time" not in job.read("log")


@pytest.mark.parametrize(
    "source", [pytest.param("squeue", marks=pytest.mark.thorough), "environment"]
)
def test_the_last_resort(job, source):
    """The ranks hang, so the job requeues itself before its end: at half of what is left, because
    that is less than a minute; also if the file system hangs. What asked for the save is for this
    start only."""
    end = int(time.time()) + 12
    said = {"SLURM_JOB_END_TIME": str(end), "FILES": "/bin/sleep 60"}
    if source == "squeue":  # the time limit has been changed
        said = {"SQUEUE": f"date --date @{end} +%FT%T", "SLURM_JOB_END_TIME": str(end + 999)}
    job.start("/bin/sleep 60", **said)
    job.stop()
    wait_until(lambda: "requeue 7" in job.read("calls"))
    assert end - 6 <= time.time() <= end
    assert "the ranks have not saved in time" in job.read("log")
    os.killpg(job.script.pid, signal.SIGKILL)  # as Slurm does
    assert (job.folder / "run" / "logs" / "7.0" / "STOP").exists() == (source == "squeue")
    finish = f'test ! -e "$LATTICE_STOP_FILE" && {FINISH}'
    assert job.ends(finish, SLURM_RESTART_COUNT="1") == 0
    assert "] finished\n" in job.read("log")


@pytest.mark.parametrize("command", ["training=$!", "follower=$!", 'wait "$training"'])
def test_the_signal_comes_just_before(job, command):
    """The ranks save, and the job ends with them: it does not wait for what the trap starts."""
    trap = """trap '[ "$BASH_COMMAND" != "$BEFORE" ] || kill -USR1 $$' DEBUG"""
    (job.folder / "trap").write_text(trap)
    training = f'until [ -e "$LATTICE_STOP_FILE" ]; do /bin/sleep 0.02; done; {FINISH}'
    given = {"BASH_ENV": str(job.folder / "trap"), "BEFORE": command, "SQUEUE": "/bin/sleep 90"}
    assert job.ends(training, **given) == 0
    assert "status 0\n" in job.read("log")
    assert "] finished\n" in job.read("log")
    assert job.read("calls") == "scancel --signal=USR1 7.0\n"


def test_how_a_start_ends(job):
    """The script does what tools/slurm_next.py says. If that cannot be asked, it requeues the job,
    unless the run has finished or a user has stopped it."""
    state = 'echo \'{"state": "%s", "reason": "the file STOP was found"}\' >run/status.json'
    array = {f"SLURM_ARRAY_{name}": value for name, value in ARRAY.items()}
    assert job.ends(state % "requeue") == 0
    assert "stopped: the file STOP was found" in job.read("log")
    assert not job.read("calls")
    assert job.ends("exit 1", SLURM_RESTART_COUNT="1", **array) == 1
    assert job.ends("exit 1", SLURM_RESTART_COUNT="2", REQUEUE="1") == 1
    assert job.read("alarms").startswith("Slurm job 7.2 gives up: Slurm does not requeue it")
    assert job.ends("exit 0", SLURM_RESTART_COUNT="2", PYTHONPATH="/") == 0
    for left in (FINISH, state % "requeue"):
        assert job.ends(left, SLURM_RESTART_COUNT="2", PYTHONPATH="/") == 0
    assert job.read("calls").splitlines() == ["requeue 7_3", *["requeue 7"] * 6]
    assert job.ends("", SLURM_RESTART_COUNT="3", PREFLIGHT="exit 2") == 2
    assert "7.3 ends: the preflight failed (status 2)" in job.read("alarms")
    assert job.ends(FINISH, SLURM_RESTART_COUNT="4", CONTAINER_IMAGE="tiny.sif", **array) == 0
    assert job.read("calls").endswith("scancel --state=PENDING 7\n")  # no steps are left for others
    assert job.ends(state % "requeue", SLURM_RESTART_COUNT="4", **array) == 0
    assert job.read("calls").endswith("scancel --state=PENDING 7\n" * 2)  # nor are they wanted
    refuse = 'mkdir -p "$PET_LOG_DIR/x/attempt_1"; touch "$PET_LOG_DIR/x/attempt_1/refused"; exit 1'
    assert job.ends(refuse, SLURM_RESTART_COUNT="3") == 2
    assert "7.3 ends: the start was refused" in job.read("alarms")


def test_what_the_site_has_set(job):
    """No node ends the preflight of the others, whatever KillOnBadExit and WaitTime are; and bash
    before 5.1 writes here-strings to a disk, which may be full (root may "write" to /proc)."""
    assert job.ends("exit 1", BASH_COMPAT="50", TMPDIR="/proc") == 1
    assert job.read("calls") == "requeue 7\n"
    assert {"--kill-on-bad-exit=0", "--wait=0"} <= {*job.read("steps").splitlines()[0].split()}


def test_what_a_step_gets(job):
    """What the script exports, also if it was submitted without variables."""
    says = 'echo "$LATTICE_STOP_FILE $PET_LOG_DIR $NCCL_IB_TIMEOUT" >step; '
    assert job.ends(says + FINISH, SLURM_EXPORT_ENV="NONE") == 0
    logs = job.folder / "run" / "logs" / "7.0"
    assert job.read("step") == f"{logs}/STOP {logs}/n3 22\n"


def test_what_else_a_step_prints_is_no_answer(job):
    """A TaskProlog's lines, and SLURM_LABELIO's numbers; with pyxis, tools.slurm_next is a step."""
    site = {"PROLOG": 'echo loads cuda; exec > >(sed "s/^/0: /")'}
    assert job.ends(FINISH, PREFLIGHT="exit 1", **site) == 1
    assert "7.0 ends: the preflight failed (status 1)" in job.read("alarms")
    pyxis = {"PYXIS": "--container-image", "CONTAINER_IMAGE": "tiny.sqsh"}
    assert job.ends(FINISH, **site, **pyxis) == 0
    assert "] finished\n" in job.read("log")
    assert (job.folder / "run" / "logs" / "7.0" / "n3.log").exists()


def test_a_log_that_cannot_be_created_ends_no_start(job):
    (job.folder / "full").write_text("touch() { return 1; }")
    assert job.ends(FINISH, BASH_ENV=str(job.folder / "full")) == 0
    assert "] finished\n" in job.read("log")


def test_the_log_has_every_node(job):
    """Also if there are more nodes than Slurm lets the script open files at first."""
    (job.folder / "few").write_text("unset BASH_ENV; ulimit -Sn 64")
    nodes = ",".join([*(f"m{number}" for number in range(80)), "n3"])  # n3's file is the last
    given = {"BASH_ENV": str(job.folder / "few"), "PREFLIGHT": f"echo {nodes} $PWD/run"}
    assert job.ends(f"echo trained; ulimit -Sn >limit; {FINISH}", **given) == 0
    assert "trained\n" in job.read("log")
    assert int(job.read("limit")) > 64  # also of torchrun, in which each rank holds a socket


def test_every_try_has_its_first_failure(tmp_path):
    """An agent counts only the restarts that its own ranks have caused, and n3 joins late."""
    starts = {"n1": {0: 0, 1: 0, 2: 1}, "n2": {0: 0, 1: 0, 2: 0}, "n3": {1: 0, 2: 1}}
    fails = {"n1": {1: 10}, "n3": {1: 12}, "n2": {2: 10}}  # start → when, in seconds
    failed = "failed (exitcode: -9) local_rank: 0\n"
    for first, (node, counts) in enumerate(starts.items()):
        said = [
            f"I1121 19:0{start}:00.0   restart_count={count}\n  global_ranks=[{first}]\n"
            + f"E1121 19:0{start}:{fails[node].get(start)}.0 {failed}" * (start in fails[node])
            for start, count in counts.items()
        ]
        (tmp_path / f"{node}.log").write_text("".join(said))
    command = ["bash", str(ROOT / "slurm/first_failure.sh"), str(tmp_path), "/dev/null"]
    told = subprocess.check_output(command, text=True)
    assert re.findall(r"try (\d): rank (\d) on (n\d)", told) == [("0", "0", "n1"), ("1", "1", "n2")]


def test_a_start_that_goes_on_into_the_next_year(tmp_path):
    for rank, (node, failed) in enumerate({"n1": "0102", "n2": "0101"}.items()):
        (tmp_path / f"{node}.log").write_text(
            f"I1231 23:00:00.0   restart_count=0\n  global_ranks=[{rank}]\n"
            f"E{failed} 01:00:00.0 failed (exitcode: -9) local_rank: 0\n"
        )
    command = ["bash", str(ROOT / "slurm/first_failure.sh"), str(tmp_path), "/dev/null"]
    told = subprocess.check_output(command, text=True)
    assert re.findall(r"try 0: rank 1 on n2 ended by SIGKILL, (0101) ", told) == ["0101"]


REFUSED = (2, "refused: and the next start would be, too")
STOP = {"state": "requeue", "reason": "the file STOP was found"}


def logs_of(folder: Path, restarts: int, status: dict[str, str] | None = None) -> Path:
    """The logs of a start of job 7 before its training, and a status.json that is as old."""
    logs = folder / "run" / "logs" / f"7.{restarts}"
    logs.mkdir(parents=True)
    (logs / "nodes").write_text("n3\n")
    (folder / "run" / "status.json").write_text(json.dumps(status or {}))
    os.utime(folder / "run" / "status.json", (1.0, 1.0))
    return logs


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (0, {"state": "finished"}, (0, "finished")),
        (0, STOP, (0, "stopped: the file STOP was found")),
        (0, STOP | {"reason": "USR1 was received"},
         (0, "requeue: the run is requeue: USR1 was received")),
        (1, {"state": "finished"}, (1, "requeue: the run is at an unknown point")),
        (None, STOP, (0, "requeue: the run is at an unknown point")),  # no save in time
    ],
)  # fmt: skip
def test_what_is_next(tmp_path, status, said, expected):
    assert what_next(logs_of(tmp_path, 0, said), status) == expected


def test_the_status_of_a_dead_node(tmp_path):
    """It is not that of the others, if they have ended by themselves, and in this start."""
    logs = logs_of(tmp_path, 0, STOP)
    assert what_next(logs, 137)[0] == 137
    os.utime(tmp_path / "run" / "status.json")
    os.utime(logs / "nodes", (1.0, 1.0))
    assert what_next(logs, 137) == (0, "stopped: the file STOP was found")


@pytest.mark.parametrize(
    ("state", "written", "refused", "expected"),  # status.json, its time, and that of the mark
    [
        ("finished", 30.0, 20.0, (0, "finished")),  # after a rank 0 was displaced
        ("finished", 20.0, 30.0, REFUSED),
        ("finished", 5.0, 20.0, REFUSED),  # of a start before
        (None, None, 20.0, REFUSED),
        # of another rank's refusal, rank 0 knows only that it has lost a connection
        ("failed", 30.0, 20.0, REFUSED),
    ],
)  # fmt: skip
def test_a_refusal_is_final_unless_the_run_went_on(tmp_path, state, written, refused, expected):
    logs, status = logs_of(tmp_path, 0, {"state": state}), tmp_path / "run" / "status.json"
    mark = logs / "n3" / "x" / "attempt_0" / "refused"
    mark.parent.mkdir(parents=True)
    mark.touch()
    os.utime(logs / "nodes", (10.0, 10.0))
    os.utime(mark, (refused, refused))
    if written is None:
        status.unlink()
    else:
        os.utime(status, (written, written))
    assert what_next(logs, 137) == expected


def test_starts_without_a_checkpoint(tmp_path, monkeypatch):
    """Five starts fail, and only the second has made a checkpoint. Each is counted once, although a
    start asks again if Slurm did not requeue it. Later, every second start makes a checkpoint, and
    then loses its node, so it does not ask: those that fail are not in a row."""
    latest, found = tmp_path / "run" / "checkpoints" / "latest", []
    latest.parent.mkdir(parents=True)
    for restarts in range(5):
        logs = logs_of(tmp_path, restarts)
        if latest.exists():
            (logs / "newest").write_bytes(latest.read_bytes())
        if restarts == 1:
            latest.write_text("step-00000005")
        found += [what_next(logs, 1)[1].partition(":")[0] for _ in range(2)]
    assert found == [*["requeue"] * 8, *["give up"] * 2]
    logs.with_name("7.fruitless").write_text("no number\n")
    assert what_next(logs, 1)[1].startswith("requeue")
    for name, value in ARRAY.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", value)
    assert what_next(logs, 1)[1].startswith("requeue")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")  # the third one has the steps that are left
    assert what_next(logs, 1)[1].startswith("next")
    for name in ARRAY:
        monkeypatch.delenv(f"SLURM_ARRAY_{name}")
    for restarts in range(6, 16, 2):
        logs = logs_of(tmp_path, restarts)
        latest.write_text(f"step-{restarts:08}\n")
        (logs / "newest").write_bytes(latest.read_bytes())
        assert what_next(logs, 1)[1].startswith("requeue")


def test_the_decision_needs_no_torch():
    program = "import sys, tools.slurm_next; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT).split()
    assert not {name.split(".")[0] for name in loaded} & {"torch", "numpy", "pydantic", "yaml"}
