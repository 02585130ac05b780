"""A Slurm job whose number of nodes changes: slurm/train_70b.sh unmodified on a real Slurm, with
`parallel.layouts`. `make test-slurm` runs it.
"""

from pathlib import Path

from runtime.log.events import read_events
from tests.runs import losses
from tests.slurm.slurm_cluster import Cluster, wait_for
from tests.slurm.slurm_scenarios import SCRIPT, STEPS, VARIABLES, Run, cluster

__all__ = ["cluster"]  # the fixture

LAYOUTS = [
    {"pp": 2, "dp_shard": 3, "tp": 1, "micro_batch_size": 2},  # 3 nodes of 2 ranks
    {"pp": 1, "dp_shard": 2, "tp": 2, "micro_batch_size": 3},  # 2 nodes
]
TRAIN = {"steps": STEPS, "global_batch_size": 12, "dtype": "float64"}


def test_a_job_shrinks_and_grows(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """A job of two to three nodes starts on three. When one dies, the job goes on in place with
    two. A user's STOP ends it without a requeue, although srun's status is that of the dead node.
    Submitted again, it starts on two; a requeue while the third is back brings it again. The losses
    are those of a run that was never disturbed."""
    alone = Run(cluster, tmp_path / "alone", data, parallel={"layouts": LAYOUTS}, train=TRAIN)
    run = Run(cluster, tmp_path / "it", data, parallel={"layouts": LAYOUTS}, train=TRAIN)
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
    shrunk = run.step
    run.wait_for_step(shrunk + 3)
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
