"""Run slurm/train_70b.sh unmodified on a real Slurm, with a tiny model: `make test-slurm`. (`make
test` does not collect this file.)

Two nodes × four processes over gloo. Where a test needs other settings than the script's, it passes
options to sbatch, or sets the variables that the block at the top of the script reads. No test
waits for a fixed time: each polls for the expected event, for up to ten minutes.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.log.events import read_events
from runtime.log.log_lines import read_records
from tests import ROOT
from tests.runs import LAYOUT_3D, losses, status_of, write_config
from tests.slurm.slurm_cluster import Cluster, install, wait_for

SCRIPT = "slurm/train_70b.sh"
# enough that the run is still going at the last failure, on a fast machine too
STEPS = 160
SECRET = "not-to-be-seen-0123456789"
VARIABLES = {"PYTHON": sys.executable, "DEVICE": "cpu", "PREFLIGHT_SECONDS": "300",
             "WANDB_API_KEY": SECRET}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    install()
    # Not pytest's folder: munge requires its socket in a folder that everyone may enter.
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        Cluster(Path(folder), nodes=32) as cluster,
    ):
        yield cluster


class Run:
    """A configuration and the Slurm job that trains it."""

    def __init__(self, cluster: Cluster, folder: Path, data: Path, **sections: dict) -> None:
        self.cluster, self.folder = cluster, folder
        folder.mkdir()
        usual = {"checkpoint": {"interval": 5}, "train": {"steps": STEPS, "micro_batch_size": 2}}
        self.config = write_config(folder, data, **(usual | sections))
        self.job = ""
        self.killed_rank = -1

    def submit(self, *options: str, nodes: str = "n1,n2", ranks: int = 4, **variables: str):
        size = ["--nodes", str(nodes.count(",") + 1), "--nodelist", nodes,
                "--gpus-per-node", str(ranks), "--cpus-per-task", str(ranks)]  # fmt: skip
        arguments = (*size, "--time", "60", *options, SCRIPT, self.config)
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


def test_slurm_accepts_every_script_as_it_is(cluster):
    scripts = [path for path in (ROOT / "slurm").glob("*.sh") if "#SBATCH" in path.read_text()]
    assert scripts
    for script in scripts:
        lines = script.read_text().splitlines()
        # sbatch stops at the first command
        unread = itertools.dropwhile(lambda line: not line or line.startswith("#"), lines)
        assert not [line for line in unread if line.startswith("#SBATCH")]
        cluster.run("sbatch", "--test-only", str(script))
    wider = ["configs/llama3_8b.yaml", "parallel.dp_replicate=8"]
    cluster.run("sbatch", "--test-only", "--nodes", "8", SCRIPT, *wider)
    # control: a job of more nodes than the cluster has is refused
    with pytest.raises(subprocess.SubprocessError, match="not available"):
        cluster.run("sbatch", "--test-only", "--nodes", "33", SCRIPT)


def test_shellcheck_is_clean():
    subprocess.run(["shellcheck", *sorted(map(str, (ROOT / "slurm").glob("*.sh")))], check=True)


# --- an undisturbed run, and the same run through a series of failures ----------------------------


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    # srun would expand these patterns in a file name
    folder = tmp_path_factory.mktemp("undisturbed") / "100%N and %j"
    run = Run(cluster, folder, data, parallel=LAYOUT_3D).submit()
    cluster.wait_until_ended(run.job, "COMPLETED")
    return run


def test_a_run_to_its_end(undisturbed):
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


def test_the_time_limit(cluster, disturbed):
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


def test_a_rank_is_killed(cluster, disturbed):
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


def test_scontrol_requeue(cluster, disturbed):
    cluster.run("scontrol", "requeue", disturbed.job)
    cluster.start_now(disturbed.job, restarts=2)
    # The first failure is on the log's first line, although the run continued after it.
    first_line, rank = disturbed.log.splitlines()[0], disturbed.killed_rank
    said = f"FIRST FAILURE of {disturbed.job}.1, try 0: rank {rank} on n2 ended by SIGKILL"
    assert first_line.startswith(said)
    errors = Path(first_line.rpartition(" ")[2])
    assert errors.match(f"n2/*/attempt_0/{rank % 4}/stderr.log")
    assert errors.exists()
    disturbed.wait_for_log(f"job {disturbed.job}.2] 2 nodes")


def test_a_node_dies(cluster, disturbed, undisturbed):
    """A node's daemon and processes are killed at once. Slurm notices and requeues the job, and
    the losses of the finished run equal those of an undisturbed run, bit for bit."""
    logs = disturbed.folder / "run" / "logs" / f"{disturbed.job}.2"

    def said() -> str:
        return "".join(path.read_text() for path in logs.glob("*.log"))

    wait_for(lambda: "starting from" in said(), "the third start")
    disturbed.wait_for_step(disturbed.step + 1)
    cluster.kill_node("n2")
    wait_for(lambda: cluster.job(disturbed.job)["Restarts"] == "3", "the requeue after its death")
    cluster.start_node("n2")
    cluster.wait_until_idle("n2")
    cluster.start_now(disturbed.job, restarts=3)
    cluster.wait_until_ended(disturbed.job, "COMPLETED")
    assert disturbed.status["state"] == "finished"
    assert losses(disturbed.folder) == losses(undisturbed.folder)  # every step's, bit for bit


# --- links and spares -----------------------------------------------------------------------------


def test_an_array_of_jobs(cluster, data, tmp_path):
    """The first saves before its time limit, and the next one continues; the third is cancelled
    because the second finishes the run."""
    run = Run(cluster, tmp_path / "it", data).submit("--array=1-3%1", nodes="n1", ranks=2)
    array, starts, running = run.job, [], ("squeue", "-h", "-t", "R", "-o", "%i")
    for link in (1, 2):
        name = f"{array}_{link}"
        wait_for(lambda name=name: name in cluster.run(*running), f"link {name}")
        run.job = cluster.job(name)["JobId"]
        run.wait_for_log("starting from")
        starts.append(int(re.findall(r"at step (\d+); run folder", run.log)[-1]))
        if link == 1:
            run.wait_for_step(3)
            with cluster.held("n1"):
                # as Slurm does before the time limit
                os.kill(cluster.batch_shell("n1"), signal.SIGUSR1)
                run.wait_for_log("USR1: all ranks save")
        cluster.wait_until_ended(run.job, "COMPLETED")
        assert run.status["state"] == ("requeue" if link == 1 else "finished")
    assert 0 == starts[0] < starts[1]
    cluster.wait_until_ended(f"{array}_3", "CANCELLED")  # no steps were left for it
    assert sorted(losses(run.folder)) == list(range(1, STEPS + 1))


def test_a_spare_node_does_not_train(cluster, data, tmp_path):
    run = Run(cluster, tmp_path / "it", data, train={"steps": 2, "micro_batch_size": 1})
    # only these reach the script, but all that it exports reaches its steps
    run.submit(f"--export={','.join(VARIABLES)},SPARE_NODES", SPARE_NODES="1")
    cluster.wait_until_ended(run.job, "COMPLETED")
    assert "preflight passed: 1 nodes, without n2" in run.log
    assert run.status["state"] == "finished"
    assert list((run.folder / "run" / "logs").glob("*/n1/*/attempt_0/0/stderr.log"))


# --- a job whose number of nodes changes ----------------------------------------------------------

LAYOUTS = [
    {"pp": 2, "dp_shard": 3, "tp": 1, "micro_batch_size": 2},  # 3 nodes of 2 ranks
    {"pp": 1, "dp_shard": 2, "tp": 2, "micro_batch_size": 3},  # 2 nodes
]


def test_a_job_shrinks_and_grows(cluster, data, tmp_path):
    """A job of two to three nodes starts on three. When one dies, the job goes on in place with
    two. A user's STOP ends it without a requeue, although srun's status is that of the dead node.
    Submitted again, it starts on two; a requeue while the third is back brings it again. The losses
    are those of a run that was never disturbed."""
    train = {"steps": STEPS, "global_batch_size": 12, "dtype": "float64"}
    alone, run = (
        Run(cluster, tmp_path / name, data, parallel={"layouts": LAYOUTS}, train=train)
        for name in ("alone", "it")
    )
    size = ["--nodes", "2-3", "--exclude", "n[4-32]", "--no-kill", "--time", "60",
            "--gpus-per-node", "2", "--cpus-per-task", "2"]  # fmt: skip

    def submit() -> None:
        run.job = cluster.sbatch(*size, SCRIPT, run.config, **VARIABLES, MIN_NODES="2")

    def worlds() -> list[int]:
        events = read_events(run.folder / "run")
        return [event["world_size"] for event in events if event["event"] == "start"]

    submit()
    run.wait_for_step(7)
    assert worlds() == [6]
    cluster.kill_node("n3")
    wait_for(lambda: worlds()[-1] == 4, "the start on two nodes")
    run.wait_for_step(run.step + 3)
    assert cluster.job(run.job)["Restarts"] == "0"  # in place
    (run.folder / "run" / "STOP").touch()
    cluster.wait_until_ended(run.job, "COMPLETED")
    assert (run.status["state"], run.status["reason"]) == ("requeue", "the file STOP was found")
    stopped = len(worlds())
    submit()
    wait_for(lambda: worlds()[stopped:] == [4], "the start of the new job on two nodes")
    cluster.start_node("n3")
    cluster.wait_until_idle("n3")
    cluster.run("scontrol", "requeue", run.job)
    cluster.start_now(run.job, restarts=1)
    wait_for(lambda: worlds()[-1] == 6, "the start on three nodes")
    cluster.wait_until_ended(run.job, "COMPLETED")
    assert run.status["state"] == "finished"
    assert cluster.job(run.job)["Restarts"] == "1"
    alone.submit(nodes="n1,n2,n3", ranks=2)
    cluster.wait_until_ended(alone.job, "COMPLETED")
    expected, found = losses(alone.folder), losses(run.folder)
    assert expected.keys() == found.keys() == set(range(1, STEPS + 1))
    # layouts differ in the order of float64 sums
    assert max(abs(found[step] / expected[step] - 1) for step in expected) <= 1e-9
