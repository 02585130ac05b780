"""Run slurm/train_70b.sh unmodified on a real Slurm, with a tiny model: `make test-slurm`. (`make
test` does not collect this file.)

Two nodes × four processes over gloo. Where a test needs other settings than the script's, it passes
options to sbatch, or sets the variables that the block at the top of the script reads. No test
waits for a fixed time: each polls for the expected event, for up to ten minutes.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.log.log_lines import read_records
from tests import ROOT
from tests.runs import LAYOUT_3D, losses, status_of, write_config
from tests.slurm.slurm_cluster import Cluster, install, wait_for

SCRIPT = "slurm/train_70b.sh"
# enough that the run is still going at the last failure, on a fast machine too
STEPS = 160
SECRET = "not-to-be-seen-0123456789"
VARIABLES = {
    "PYTHON": sys.executable,
    "DEVICE": "cpu",
    "PREFLIGHT_SECONDS": "300",
    "WANDB_API_KEY": SECRET,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    install()
    # Not pytest's folder: munge requires its socket in a folder that everyone may enter.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        Cluster(Path(folder), nodes=32) as cluster,
    ):
        yield cluster


def size(nodes: str, ranks: int) -> list[str]:
    """The options of sbatch for these nodes with so many ranks each."""
    return ["--nodes", str(nodes.count(",") + 1), "--nodelist", nodes,
            "--gpus-per-node", str(ranks), "--cpus-per-task", str(ranks)]  # fmt: skip


class Run:
    """A configuration and the Slurm job that trains it."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path, **sections: dict) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        sections = {
            "checkpoint": {"interval": 5},
            "train": {"steps": STEPS, "micro_batch_size": 2},
            **sections,
        }
        self.config = write_config(folder, data, **sections)
        self.job = ""
        self.killed_rank = -1

    def submit(
        self,
        *options: str,
        nodes: str = "n1,n2",
        ranks: int = 4,
        overrides: tuple[str, ...] = (),
        **variables: str,
    ):
        arguments = (*size(nodes, ranks), "--time", "60", *options, SCRIPT, self.config, *overrides)
        self.job = self.cluster.sbatch(*arguments, **VARIABLES, **variables)
        return self

    @property
    def log(self) -> str:
        return self.cluster.log(self.job)

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl; 0 if there is none."""
        return max((line["step"] for line in read_records(self.folder / "run")), default=0)

    @property
    def status(self) -> dict:
        return status_of(self.folder)

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait_for_job(
            self.job, lambda job: job["JobState"] == "RUNNING" and self.step >= step, f"step {step}"
        )

    def shorten(self) -> None:
        """Leave the job more than a minute, but less than the 120 s before its end at which Slurm
        sends USR1."""
        used = self.cluster.run("squeue", "-h", "-j", self.job, "-o", "%M").strip()
        hours, minutes, _ = (["0", "0", *used.split(":")])[-3:]
        limit = int(hours) * 60 + int(minutes) + 2
        self.cluster.run("scontrol", "update", f"jobid={self.job}", f"timelimit={limit}")

    def wait_for_log(self, text: str) -> None:
        self.cluster.wait_for_job(self.job, lambda _: text in self.log, f"'{text}' in its log")


# --- the scripts themselves -----------------------------------------------------------------------


def test_slurm_accepts_every_script_as_it_is(cluster: Cluster) -> None:
    scripts = [path for path in (ROOT / "slurm").glob("*.sh") if "#SBATCH" in path.read_text()]
    assert scripts
    for script in scripts:
        lines = script.read_text().splitlines()
        first_command = next(
            number for number, line in enumerate(lines) if line and not line.startswith("#")
        )
        assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")], (
            "sbatch stops at the first command"
        )
        cluster.run("sbatch", "--test-only", str(script))
    wider = ["configs/llama3_8b.yaml", "parallel.dp_replicate=8"]
    cluster.run("sbatch", "--test-only", "--nodes", "8", SCRIPT, *wider)
    # control: a job of more nodes than the cluster has is refused
    with pytest.raises(subprocess.SubprocessError, match="not available"):
        cluster.run("sbatch", "--test-only", "--nodes", "33", SCRIPT)


def test_shellcheck_is_clean() -> None:
    subprocess.run(["shellcheck", *sorted(map(str, (ROOT / "slurm").glob("*.sh")))], check=True)


# --- an undisturbed run, and the same run through a series of failures ----------------------------


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(
        cluster, tmp_path_factory.mktemp("undisturbed") / "it", data, parallel=LAYOUT_3D
    ).submit()
    cluster.wait_until_ended(run.job, "COMPLETED")
    return run


def test_a_run_to_its_end(undisturbed: Run) -> None:
    assert undisturbed.status["state"] == "finished"
    assert sorted(losses(undisturbed.folder)) == list(range(1, STEPS + 1))
    log = undisturbed.log
    assert "preflight passed: 2 nodes" in log
    assert f"0: step {STEPS}/{STEPS}" in log
    assert "FIRST FAILURE" not in log
    logs = undisturbed.folder / "run" / "logs" / f"{undisturbed.job}.0"
    assert {path.name for path in logs.glob("*.log")} == {"n1.log", "n2.log"}
    assert len(list(logs.glob("n[12]/*/attempt_0/[0-3]/stderr.log"))) == 8
    everything = [log, *(path.read_text(errors="replace") for path in logs.rglob("*.log"))]
    assert not [text for text in everything if SECRET in text]


@pytest.fixture(scope="module")
def disturbed(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(cluster, tmp_path_factory.mktemp("disturbed") / "it", data, parallel=LAYOUT_3D)
    return run.submit("--signal=B:USR1@120")


def test_the_time_limit(cluster: Cluster, disturbed: Run) -> None:
    """Slurm sends USR1 to the batch shell, every rank saves, the job requeues itself, and it
    resumes in the same folder without losing a step."""
    disturbed.wait_for_step(7)
    with cluster.held("n2"):
        disturbed.shorten()
        disturbed.wait_for_log("USR1: all ranks save")
    cluster.start_now(disturbed.job, restarts=1)
    assert disturbed.status["state"] == "requeue"
    assert "USR1" in disturbed.status["reason"]
    saved = disturbed.status["step"]
    assert 7 <= saved < STEPS
    cluster.run("scontrol", "update", f"jobid={disturbed.job}", "timelimit=60")
    disturbed.wait_for_step(saved + 1)
    assert f"at step {saved};" in disturbed.log  # no step was lost


def test_a_rank_is_killed(cluster: Cluster, disturbed: Run) -> None:
    """torchrun restarts all ranks within the same job."""
    step = disturbed.step
    disturbed.wait_for_step(step + 1)
    rank, pid = max(cluster.ranks("n2").items())
    os.kill(pid, signal.SIGKILL)
    logs = disturbed.folder / "run" / "logs" / f"{disturbed.job}.1"
    wait_for(lambda: list(logs.glob(f"n2/*/attempt_1/{rank % 4}/stdout.log")), "the second try")
    wait_for(lambda: cluster.ranks("n2").get(rank, pid) != pid, "the killed rank's successor")
    disturbed.wait_for_step(disturbed.step + 1)
    disturbed.killed_rank = rank


def test_scontrol_requeue(cluster: Cluster, disturbed: Run) -> None:
    cluster.run("scontrol", "requeue", disturbed.job)
    cluster.start_now(disturbed.job, restarts=2)
    # The first failure is on the log's first line, although the run continued after it.
    first_line = disturbed.log.splitlines()[0]
    rank = disturbed.killed_rank
    assert first_line.startswith(
        f"FIRST FAILURE of {disturbed.job}.1, try 0: rank {rank} on n2 ended by SIGKILL"
    )
    words = Path(first_line.rpartition(" ")[2])
    assert words.match(f"n2/*/attempt_0/{rank % 4}/stderr.log")
    assert words.exists()
    disturbed.wait_for_log(f"job {disturbed.job}.2] 2 nodes")


def test_a_node_dies(cluster: Cluster, disturbed: Run, undisturbed: Run) -> None:
    """A node's daemon and processes are killed at once. Slurm notices and requeues the job, and
    the losses of the finished run equal those of an undisturbed run, bit for bit."""
    logs = disturbed.folder / "run" / "logs" / f"{disturbed.job}.2"
    wait_for(
        lambda: "starting from" in "".join(path.read_text() for path in logs.glob("*.log")),
        "the third start",
    )
    disturbed.wait_for_step(disturbed.step + 1)
    cluster.kill_node("n2")
    wait_for(
        lambda: cluster.job(disturbed.job)["Restarts"] == "3", "the requeue after the node's death"
    )
    cluster.start_node("n2")
    cluster.wait_until_idle("n2")
    cluster.start_now(disturbed.job, restarts=3)
    cluster.wait_until_ended(disturbed.job, "COMPLETED")
    assert disturbed.status["state"] == "finished"
    assert losses(disturbed.folder) == losses(undisturbed.folder)  # every step's, bit for bit


def test_a_save_that_is_late(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """A rank hangs, so half a minute before its end the job requeues itself without a save. The
    next start makes steps: what asked the first one to stop is not for it."""
    run = Run(cluster, tmp_path / "it", data).submit("--signal=B:USR1@120", nodes="n5", ranks=2)
    run.wait_for_step(7)
    with cluster.held("n5"):
        run.shorten()
        run.wait_for_log("the ranks have not saved in time")
        cluster.start_now(run.job, restarts=1)
    cluster.run("scontrol", "update", f"jobid={run.job}", "timelimit=60")
    assert (run.folder / "run" / "logs" / f"{run.job}.0" / "STOP").exists()
    cluster.wait_until_ended(run.job, "COMPLETED")
    assert run.status["state"] == "finished"
    assert cluster.job(run.job)["Restarts"] == "1"


# --- links, spares, refusals ----------------------------------------------------------------------


def test_an_array_of_three_links(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """Each job of an array saves before its time limit, and the next one continues; the fourth is
    cancelled because the third finishes the run. The jobs run under a fake Apptainer, which checks
    its options and runs the command without a container."""
    stand_in = tmp_path / "bin" / "apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/bash\n[ "$1 $2 $3 $5" = "exec --nv --bind --pwd" ] && [ "$7" = tiny.sif ] '
        '&& exec "${@:8}"\n'
    )
    stand_in.chmod(0o755)
    run = Run(cluster, tmp_path / "it", data)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    run.submit("--array=1-4%1", nodes="n1", ranks=2, CONTAINER_IMAGE="tiny.sif", PATH=path)
    array, starts = run.job, []
    for link in (1, 2, 3):
        wait_for(
            lambda link=link: (
                f"{array}_{link}" in cluster.run("squeue", "-h", "-t", "R", "-o", "%i")
            ),
            f"link {link}",
        )
        run.job = cluster.job(f"{array}_{link}")["JobId"]
        run.wait_for_log("starting from")
        starts.append(int(re.findall(r"at step (\d+); run folder", run.log)[-1]))
        if link < 3:
            run.wait_for_step(starts[-1] + 3)
            with cluster.held("n1"):
                # as Slurm does before the time limit
                os.kill(cluster.batch_shell("n1"), signal.SIGUSR1)
                run.wait_for_log("USR1: all ranks save")
        cluster.wait_until_ended(run.job, "COMPLETED")
        assert run.status["state"] == ("requeue" if link < 3 else "finished")
    assert 0 == starts[0] < starts[1] < starts[2]
    cluster.wait_until_ended(f"{array}_4", "CANCELLED")  # no steps were left for it
    assert sorted(losses(run.folder)) == list(range(1, STEPS + 1))


@pytest.fixture
def other_code_on_n2(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """One file of the repository has other content on n2, by a mount that exists only in the
    namespace of n2."""
    changed = tmp_path / "errors.py"
    changed.write_text((ROOT / "errors.py").read_text() + "\n# another version\n")
    pid = (cluster.folder / "slurmd-n2.pid").read_text().strip()
    enter = ["nsenter", "--mount", "--target", pid]
    cluster.run(*enter, "mount", "--bind", str(changed), str(ROOT / "errors.py"))
    yield
    cluster.run(*enter, "umount", str(ROOT / "errors.py"))


def test_a_preflight_that_fails_on_one_node(
    cluster: Cluster, data: Path, tmp_path: Path, other_code_on_n2: None
) -> None:
    run = Run(cluster, tmp_path / "it", data, train={"steps": 2, "micro_batch_size": 1}).submit()
    cluster.wait_until_ended(run.job, "FAILED")
    assert cluster.job(run.job)["ExitCode"] == "1:0"
    assert "FAILED   n2: other code than most nodes: errors.py" in run.log
    assert "sbatch --exclude=n2" in run.log
    assert not (run.folder / "run").exists()
    # If a spare node is requested, the failing node is left out.
    run.submit(SPARE_NODES="1")
    cluster.wait_until_ended(run.job, "COMPLETED")
    assert "preflight passed: 1 nodes, without n2" in run.log
    assert run.status["state"] == "finished"


def test_what_training_would_refuse(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    alarms = tmp_path / "alarms"
    to_file = {"on_event": f"tee -a {alarms}"}
    run = Run(cluster, tmp_path / "it", data, run=to_file).submit(overrides=("parallel.tp=3",))
    cluster.wait_until_ended(run.job, "FAILED")
    assert cluster.job(run.job)["ExitCode"] == "2:0"
    (alarm,) = map(json.loads, alarms.read_text().splitlines())
    assert alarm["text"].endswith(f"Slurm job {run.job}.0 ends: the preflight failed (status 2)")
    assert run.log.count("error: parallel.tp = 3") == 1
    assert not (run.folder / "run").exists()


def test_two_jobs_do_not_write_to_one_run_folder(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """The second job is refused, and the first continues. The folder's name and an override contain
    % patterns that srun would expand, and must be taken literally."""
    odd = str(tmp_path / "100%N and %j")
    first = Run(
        cluster,
        tmp_path / "it",
        data,
        train={"steps": 4000, "micro_batch_size": 1},
        run={"dir": odd, "wandb_project": "%N"},
    )
    first.submit(nodes="n3", ranks=2)
    metrics = Path(odd) / "metrics.jsonl"
    wait_for(metrics.exists, "the first job's first step")
    second = cluster.sbatch(*size("n4", 2), SCRIPT, first.config, **VARIABLES)
    cluster.wait_until_ended(second, "FAILED")
    assert cluster.job(second)["ExitCode"] == "2:0"
    log = cluster.log(second)
    assert "error: run.dir = " in log
    holder = rf"process \d+ on host \S+ of Slurm job {first.job}, since \S+"
    assert re.search(rf"{holder} is writing there and renewed its lease", log)
    assert cluster.job(first.job)["JobState"] == "RUNNING"
    assert (Path(odd) / "logs" / f"{first.job}.0" / "n3.log").exists()
    assert "wandb_project: '%N'" in (Path(odd) / "config.yaml").read_text()
    cluster.run("scancel", first.job)
    cluster.wait_until_ended(first.job, "CANCELLED")


# --- the job script only, with a fake Python: no rank is ever started -----------------------------


def stand_in_for_python(folder: Path, torchrun: str) -> str:
    """Write a program that passes every preflight on n3 and runs the shell command `torchrun`
    instead of training; return its path. Alarms go to the file `alarms`."""
    (folder / "run" / "checkpoints").mkdir(parents=True)
    program = folder / "python"
    program.write_text(
        f'#!/bin/bash\nif [ "$2" = tools.preflight ]; then echo n3 {folder}/run; exit; fi\n'
        f'if [ "$2" = tools.alarm ]; then echo "${{@:3}}" >>{folder}/alarms; exit; fi\n'
        f'if [ "$2" = tools.slurm_next ]; then exec {sys.executable} "$@"; fi\n'
        f"{torchrun}\n"
    )
    program.chmod(0o755)
    return str(program)


def test_the_controller_does_not_answer(cluster: Cluster, tmp_path: Path) -> None:
    """squeue fails when the time is nearly up. The job requeues itself after the save."""
    (tmp_path / "squeue").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    save = "until [ -e $LATTICE_STOP_FILE ]; do sleep 0.1; done; sleep 3; "
    save += f"""echo '{{"state": "requeue"}}' >{tmp_path}/run/status.json"""
    variables = VARIABLES | {"PYTHON": stand_in_for_python(tmp_path, save)}
    variables["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    job = cluster.sbatch(*size("n3", 1), SCRIPT, **variables)
    wait_for((tmp_path / "run" / "logs" / f"{job}.0" / "n3.log").exists, "the start of training")
    os.kill(cluster.batch_shell("n3"), signal.SIGUSR1)
    cluster.start_now(job, restarts=1)
    assert "requeue: the run is requeue" in cluster.log(job)
    assert "have not saved in time" not in cluster.log(job)
    cluster.run("scancel", job)


def test_a_job_does_not_requeue_itself_for_ever(cluster: Cluster, tmp_path: Path) -> None:
    """Five starts fail, and only the second has made a checkpoint. After three starts in a row
    without a checkpoint, the job stops requeueing itself."""
    fail = (
        '[ "$SLURM_RESTART_COUNT" != 1 ] || echo step-00000005 > '
        f"{tmp_path}/run/checkpoints/latest; exit 1"
    )
    variables = VARIABLES | {"PYTHON": stand_in_for_python(tmp_path, fail)}
    job = cluster.sbatch(*size("n3", 1), SCRIPT, **variables)
    for restarts in (1, 2, 3, 4):
        cluster.start_now(job, restarts)
    cluster.wait_until_ended(job, "FAILED")
    assert "gives up: 3 starts in a row made no checkpoint" in cluster.log(job)
    said = f"Slurm job {job}.4 gives up: 3 starts in a row made no checkpoint"
    assert (tmp_path / "alarms").read_text() == f"{said} configs/llama3_70b.yaml\n"
