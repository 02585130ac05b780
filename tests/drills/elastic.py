"""Kills and returns nodes of a run.

Four nodes on this machine, each a torchrun agent with one rank or two (`--nnodes 1:4`), train a
tiny model in float64 over gloo. `parallel.layouts` has layouts for four, three and one node; with
two, one node is a spare. When the run reaches given steps, whole nodes are killed (SIGKILL to the
agent and its ranks) or dead ones are started again. If it is the first node, which has the
rendezvous' store, all agents must end by themselves, and all of them are started again, as a
requeued Slurm job would. Every rank records the rows that it reads (elastic_rank.py).
"""

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoint.folder import complete_checkpoints
from runtime.log.events import read_events
from runtime.log.log_lines import read_records
from runtime.log.status import read_status
from tests import ROOT
from tests.runs import global_state, write_config

NODES = 4
# by the number of ranks of a node: for four nodes, three nodes, and one node
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"pp": 2, "dp_shard": 1, "tp": 2, "micro_batch_size": 6},
        {"pp": 1, "dp_shard": 3, "tp": 1, "micro_batch_size": 2},
        {"pp": 1, "dp_shard": 1, "tp": 1, "micro_batch_size": 12},
    ],
    2: [
        {"pp": 2, "dp_shard": 2, "tp": 2, "micro_batch_size": 3},
        {"pp": 1, "dp_shard": 3, "tp": 2, "micro_batch_size": 4},
        {"pp": 2, "dp_shard": 1, "tp": 1, "micro_batch_size": 6},
    ],
}
# so that a death is noticed after 12 s, not 15, and a restart waits 5 s for others, not 30
RENDEZVOUS = "keep_alive_interval=3,keep_alive_max_attempt=4,last_call_timeout=5"
TOLERANCE = 1e-9
PATIENCE = 900  # seconds for one start; only a hang takes so long


@dataclass(frozen=True)
class Change:
    """When `steps` further steps are logged, kill these nodes and start these."""

    steps: int
    kills: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()


def plan(seed: int, count: int, longest: int, host_deaths: int) -> list[Change]:
    """`count` random changes, after at most `longest` steps each. Node 0, which has the store, dies
    `host_deaths` times; the last change returns all nodes."""
    draw = random.Random(seed)
    hosts = {(number + 1) * count // (host_deaths + 1) for number in range(host_deaths)}
    dead: set[int] = set()
    changes = []
    for number in range(count - 1):
        steps = draw.randint(2, longest)
        alive = sorted(set(range(1, NODES)) - dead)
        if number in hosts:
            changes.append(Change(steps, kills=(0,)))
            dead.clear()  # a requeued job starts all
            continue
        kills, returns = set(), set()
        if alive and (not dead or draw.random() < 0.5):
            kills = set(draw.sample(alive, draw.randint(1, min(2, len(alive)))))
        if dead and (not kills or draw.random() < 0.3):
            returns = set(draw.sample(sorted(dead), draw.randint(1, len(dead))))
        dead = dead - returns | kills
        changes.append(Change(steps, tuple(sorted(kills)), tuple(sorted(returns))))
    return [*changes, Change(2, returns=tuple(sorted(dead)))]


class Cluster:
    """The nodes of one run."""

    def __init__(self, folder: Path, config: str, ranks: int) -> None:
        self.folder, self.config, self.run = folder, config, folder / "run"
        self.agents: dict[int, subprocess.Popen] = {}
        self.ranks, self.requeues = ranks, 0
        (folder / "rows").mkdir()
        self.set_target(10**9)

    def __enter__(self) -> "Cluster":
        self.start_all()
        return self

    def __exit__(self, *exception: object) -> None:
        for node in list(self.agents):
            self.kill(node)

    def start_all(self) -> None:
        """Start all nodes as a new job, with a rendezvous of its own."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        for node in range(NODES):
            self.start(node)

    def start(self, node: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{NODES}",
                   f"--nproc-per-node={self.ranks}", "--max-restarts=100", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint={self.endpoint}",
                   f"--rdzv-conf={RENDEZVOUS},is_host={int(node == 0)}",
                   f"--rdzv-id={self.requeues}", "--local-addr=127.0.0.1", "-m",
                   "tests.drills.elastic_rank", self.config]  # fmt: skip
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": loopback,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/elastic.md
            "LATTICE_NODE": self.name(node),
            "DRILL_ROWS": str(self.folder / "rows"),
        }
        with open(self.folder / f"node{node}.log", "ab") as log:
            self.agents[node] = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def set_target(self, step: int) -> None:
        """Slow the run down from this step on (elastic_rank.py)."""
        partial = self.folder / "rows" / "target.partial"
        partial.write_text(str(step))
        partial.rename(partial.with_name("target"))

    def name(self, node: int) -> str:
        return f"{self.folder.name}-node{node}"

    def kill(self, node: int) -> None:
        """Kill the agent and its ranks at once, as when a machine dies."""
        end = time.monotonic() + 60
        while pids := self.processes(node):
            assert time.monotonic() < end, f"processes of node {node} do not end: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.agents[node].poll()  # so that it is no zombie
        self.agents.pop(node).wait()

    def processes(self, node: int) -> list[int]:
        """All processes of a node: they have its name in their environment."""
        mark, found = f"LATTICE_NODE={self.name(node)}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run) if event["event"] == name]

    @property
    def step(self) -> int:
        return max(metrics(self.run), default=0)

    @property
    def ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents.values())

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`; raise if the job ends before, or after PATIENCE seconds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if self.ended and not condition():
                raise RuntimeError(f"the job ended before {what}: {self.last_words()}")
            if time.monotonic() > end:
                raise RuntimeError(f"no {what} in {PATIENCE} s: {self.last_words()}")
            time.sleep(0.05)

    def last_words(self) -> str:
        logs = sorted(self.folder.glob("node*.log"))
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs
        )


def carry_out(cluster: Cluster, change: Change) -> dict[str, Any]:
    """Make a change when its step is reached, and wait for the start that follows. Returns what
    happened."""
    target = cluster.step + change.steps
    cluster.set_target(target)
    cluster.wait(lambda: cluster.step >= target, f"step {target}")
    starts, spares = len(cluster.events("start")), cluster.events("spares")
    idle = spares[-1]["ranks"] if spares and spares[-1]["step"] == last_start(cluster) else {}
    began = time.monotonic()
    for node in change.kills:
        cluster.kill(node)
    for node in change.returns:
        cluster.start(node)
    if 0 in change.kills:  # the other agents must end, and then the job is requeued
        end = time.monotonic() + PATIENCE
        while not cluster.ended:
            assert time.monotonic() < end, "agents live on without the store"
            time.sleep(0.05)
        noticed = time.monotonic() - began
        cluster.requeues += 1
        cluster.agents.clear()
        cluster.start_all()
    training = [node for node in change.kills if cluster.name(node) not in idle]
    if change.returns or training:
        cluster.wait(lambda: len(cluster.events("start")) > starts, "the next start")
    seen = cluster.events("start")[-1]
    happened = {"at_step": target, "kills": change.kills, "returns": change.returns}
    happened |= {"restarts_from": seen["step"], "world": seen["world_size"]}
    happened |= {"seconds": round(time.monotonic() - began, 1)}
    return happened | ({"all_ended_after": round(noticed, 1)} if 0 in change.kills else {})


def last_start(cluster: Cluster) -> int:
    return int(cluster.events("start")[-1]["step"])


def write_drill(folder: Path, data: Path, steps: int, ranks: int, seed: int = 0) -> str:
    """Write the configuration of a drill in `folder`."""
    folder.mkdir()
    return write_config(
        folder, data, model={"num_layers": 2}, run={"log_interval": 1},
        parallel={"zero_stage": 1, "layouts": LAYOUTS[ranks]},
        train={"steps": steps, "seed": seed, "global_batch_size": 12, "dtype": "float64"},
        # With 1e-8, AdamW makes rounding visible where gradients are about as small: after 300
        # steps, two runs of one process, in micro-batches of 12 and of 3 samples, differ by 1.3e-8
        # in the embedding; with 1e-5, by 2.7e-12.
        optimizer={"eps": 1e-5}, checkpoint={"interval": 5, "keep_last": 3},
    )  # fmt: skip


def make_run(
    folder: Path, data: Path, steps: int, changes: list[Change], seed: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """Make a run with these changes on nodes of `ranks` ranks; returns what happened."""
    config = write_drill(folder, data, steps, ranks, seed)
    with Cluster(folder, config, ranks) as cluster:
        cluster.wait(lambda: cluster.step > 0, "the first step")
        happened = []
        for change in changes:
            happened.append(carry_out(cluster, change))
        cluster.set_target(10**9)
        cluster.wait(lambda: cluster.ended, "the end")
        codes = [agent.wait() for agent in cluster.agents.values()]
        worlds = [event["world_size"] for event in cluster.events("start")]
        assert read_status(cluster.run)["state"] == "finished", cluster.last_words()
        assert not any(codes), f"agents ended with {codes}: {cluster.last_words()}"
    sizes = sum(a != b for a, b in itertools.pairwise(worlds))
    return {"changes": happened, "starts": len(worlds), "changes_of_size": sizes, "worlds": worlds,
            "requeues": cluster.requeues}  # fmt: skip


# --- two runs compared ----------------------------------------------------------------------------


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Step → the line of metrics.jsonl."""
    return {record["step"]: record for record in read_records(run)}


def rows_of(folder: Path) -> dict[tuple[int, int], str]:
    """(step, place in the global batch) → the row that the step was trained on last."""
    lines = [
        json.loads(line)
        for file in (folder / "rows").glob("*.jsonl")
        for line in file.read_text().splitlines()
        if line.endswith("}")
    ]
    found = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        for place, row in enumerate(line["rows"], line["first"]):
            found[line["step"], place] = row
    return found


def state_of(config: Path, run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, whole, read by one process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        single = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1", "parallel.layouts=[]"]
        newest = complete_checkpoints(run / "checkpoints")[-1]
        return global_state([str(config), *single], str(newest))
    finally:
        dist.destroy_process_group()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if a.numel() else 0.0


def compare(drilled: Path, alone: Path) -> dict[str, Any]:
    """What differs between a drilled run and the undisturbed one, in two folders of `make_run`."""
    found, expected = metrics(drilled / "run"), metrics(alone / "run")
    rows, honest = rows_of(drilled), rows_of(alone)
    worst = {
        key: max(abs(found[step][key] / line[key] - 1) for step, line in expected.items())
        for key in ("loss", "grad_norm")
    }
    states = [state_of(folder / "config.yaml", folder / "run") for folder in (drilled, alone)]
    assert states[0].keys() == states[1].keys()
    return {
        "steps": len(found),
        "rows": len(rows),
        "rows_equal": rows == honest,
        "rows_distinct": len(set(rows.values())),
        "tokens_equal": all(found[s]["tokens"] == line["tokens"] for s, line in expected.items()),
        "worst_relative_difference": worst
        | {"state": max(difference(t, states[1][name]) for name, t in states[0].items())},
    }
