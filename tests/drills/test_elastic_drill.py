"""Nodes die and return, and the run is the same as an undisturbed one: losses and gradient norms of
all steps, and the last weights and moments, are equal within 1e-9, relative, because layouts differ
in the order of float64 sums. So each step was trained on the same rows, each once.

Four nodes on this machine, each a torchrun agent with one rank (`--nnodes 1:4`), train a tiny model
in float64 over gloo. `parallel.layouts` has layouts for four, three and one node; with two, one
node is a spare. When the run reaches given steps, whole nodes are killed (SIGKILL to the agent and
its ranks) or dead ones are started again. If it is the first node, which has the rendezvous' store,
all agents must end by themselves, and all of them are started again, as a requeued Slurm job would.
Each rank is this file: train.py, which the drill can slow down.
"""

import os
import sys

from runtime.signals import Signals

if __name__ == "__main__":  # as in train.py, before the imports that take seconds
    listening = Signals(speaks=os.environ["RANK"] == "0").listen()

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import train
from runtime.checkpoint.folder import complete_checkpoints
from runtime.files import write_whole
from runtime.listener import Run
from runtime.log.log_lines import read_records
from runtime.log.status import read_status
from tests import ROOT, runs
from tests.drills import ON_THIS_MACHINE
from tests.monitor.alert_helpers import free_port, wait_until
from tests.planted import planted

NODES = 4
LAYOUTS: list[dict[str, Any]] = [  # for four nodes, three nodes, and one node
    {"pp": 2, "dp_shard": 1, "tp": 2, "micro_batch_size": 6},
    {"pp": 1, "dp_shard": 3, "tp": 1, "micro_batch_size": 2},
    {"pp": 1, "dp_shard": 1, "tp": 1, "micro_batch_size": 12},
]
# so that a death is noticed after 12 s, not 15, and a restart waits 5 s for others, not 30
RENDEZVOUS = "keep_alive_interval=3,keep_alive_max_attempt=4,last_call_timeout=5"
TOLERANCE = 1e-9
PATIENCE = 900  # seconds for one start; only a hang takes so long
LONGEST_SECONDS = 5  # of a slow step: a stop takes two, and torchrun kills after 30 s


@dataclass(frozen=True)
class Change:
    """When `steps` further steps are logged, kill these nodes and start these."""

    steps: int
    kills: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()


# A node dies and returns; two die at once, so that one of the others is a spare; and the node that
# has the store dies, after which the job starts again.
CHANGES = [Change(3, kills=(2,)), Change(2, returns=(2,)), Change(3, kills=(1, 3)),
           Change(2, kills=(0,))]  # fmt: skip
STEPS = 40


class Cluster:
    """The nodes of one run."""

    def __init__(self, folder: Path, config: str) -> None:
        self.folder, self.config, self.run = folder, config, folder / "run"
        self.agents: dict[int, subprocess.Popen] = {}
        self.requeues = 0
        self.set_target(10**9)

    def __enter__(self) -> "Cluster":
        self.start_all()
        return self

    def __exit__(self, *exception: object) -> None:
        for node in list(self.agents):
            self.kill(node)

    def start_all(self) -> None:
        """Start all nodes as a new job, with a rendezvous of its own."""
        self.endpoint = f"127.0.0.1:{free_port()}"
        for node in range(NODES):
            self.start(node)

    def start(self, node: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{NODES}",
                   "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint={self.endpoint}",
                   f"--rdzv-conf={RENDEZVOUS},is_host={int(node == 0)}",
                   f"--rdzv-id={self.requeues}", "--local-addr=127.0.0.1", "-m",
                   "tests.drills.test_elastic_drill", self.config]  # fmt: skip
        environment = {
            **os.environ,
            **ON_THIS_MACHINE,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/elastic.md
            "LATTICE_NODE": f"node{node}",  # each is another machine
            "DRILL_TARGET": str(self.folder / "target"),
        }
        with open(self.folder / f"node{node}.log", "ab") as log:
            self.agents[node] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def set_target(self, step: int) -> None:
        """From this step on, each takes seconds longer: the drill makes a change then, and a fast
        machine must not finish meanwhile."""
        write_whole(self.folder / "target", str(step))

    def kill(self, node: int) -> None:
        """Kill the agent and its ranks at once, as when a machine dies."""
        agent = self.agents.pop(node)
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            process = psutil.Process(agent.pid)
            process.suspend()  # so that it starts no further rank
            for each in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        agent.wait()

    def starts(self) -> list[dict[str, Any]]:
        return runs.events_of(self.run, "start")

    @property
    def step(self) -> int:
        return max(metrics(self.run), default=0)

    @property
    def ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents.values())

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`; fail if the job ends before, or after PATIENCE seconds."""
        wait_until(lambda: condition() or self.ended, PATIENCE, found=self.last_words)
        assert condition(), f"no {what}: {self.last_words()}"

    def last_words(self) -> str:
        logs = sorted(self.folder.glob("node*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def carry_out(self, change: Change) -> tuple[int, int]:
        """Make a change when its step is reached, and wait for the start that follows. Returns this
        step, and the one from which that start continues."""
        target = self.step + change.steps
        self.set_target(target)
        self.wait(lambda: self.step >= target, f"step {target}")
        starts = len(self.starts())
        for node in change.kills:
            self.kill(node)
        for node in change.returns:
            self.start(node)
        if 0 in change.kills:  # the other agents must end, and then the job is requeued
            self.wait(lambda: self.ended, "end of the agents without the store")
            self.requeues += 1
            self.agents.clear()
            self.start_all()
        self.wait(lambda: len(self.starts()) > starts, "next start")
        return target, self.starts()[-1]["step"]


def configured(folder: Path, data: Path, seed: int = 0) -> str:
    folder.mkdir()
    return runs.write_config(
        folder, data, model={"num_layers": 2}, run={"log_interval": 1},
        parallel={"zero_stage": 1, "layouts": LAYOUTS},
        train={"steps": STEPS, "seed": seed, "global_batch_size": 12, "dtype": "float64"},
        # with 1e-8, AdamW makes rounding visible where gradients are about as small
        optimizer={"adamw": {"eps": 1e-5}}, checkpoint={"interval": 5, "keep_last": 3},
    )  # fmt: skip


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Step → the line of metrics.jsonl."""
    return {record["step"]: record for record in read_records(run)}


def differences(drilled: Path, alone: Path) -> dict[str, float]:
    """The largest relative differences between a drilled run and the undisturbed one: in loss,
    gradient norm and tokens over all steps, and in each tensor of the last checkpoint."""
    found, expected = metrics(drilled / "run"), metrics(alone / "run")
    worst = {
        key: max(abs(found[step][key] / line[key] - 1) for step, line in expected.items())
        for key in ("loss", "grad_norm", "tokens")
    }
    ours, theirs = (
        runs.stored_tensors(complete_checkpoints(folder / "run" / "checkpoints")[-1])
        for folder in (drilled, alone)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        largest = tensor.abs().max().clamp_min(1e-300)
        worst[name] = float((ours[name] - tensor).abs().max() / largest)
    return worst


@pytest.mark.slow  # two minutes
def test_a_run_whose_nodes_die_and_return(ranks, data, tmp_path):
    alone, drilled, other = (tmp_path / name for name in ("alone", "drilled", "other"))
    runs.run(ranks, NODES, configured(alone, data))
    with Cluster(drilled, configured(drilled, data)) as cluster:
        cluster.wait(lambda: cluster.step > 0, "first step")
        happened = [cluster.carry_out(change) for change in CHANGES]
        cluster.set_target(10**9)
        cluster.wait(lambda: cluster.ended, "end")
        codes = [agent.wait() for agent in cluster.agents.values()]
        assert read_status(cluster.run)["state"] == "finished", cluster.last_words()
        assert not any(codes), f"agents ended with {codes}: {cluster.last_words()}"
    assert [start["world_size"] for start in cluster.starts()] == [4, 3, 4, 1, 4]
    for change, (at_step, restarts_from) in zip(CHANGES, happened, strict=True):
        # the return of a node is a planned stop: no step is lost
        assert change.kills or restarts_from >= at_step
    assert max(differences(drilled, alone).values()) <= TOLERANCE
    runs.run(ranks, NODES, configured(other, data, seed=1))  # control: other samples are noticed
    assert differences(other, alone)["loss"] > TOLERANCE


@planted(Run, "next_batch")
def slow_steps(next_batch: Callable[[Run], Any], run: Run) -> Any:
    """Steps from the one in the file DRILL_TARGET on take seconds."""
    if (beyond := run.step - int(Path(os.environ["DRILL_TARGET"]).read_text())) >= 0:
        time.sleep(min(1 + beyond, LONGEST_SECONDS))
    return next_batch(run)


if __name__ == "__main__":
    with slow_steps():
        train.main(sys.argv[1:], listening)
