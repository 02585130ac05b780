"""Kills and returns nodes of a run at random: `python -m benchmarks.elastic_drill`

Four nodes on this machine, each a torchrun agent with one rank or two (`--nnodes 1:4`), train a
tiny model in float64 over gloo. `parallel.layouts` has layouts for four, three and one node; with
two, one node is a spare. When the run reaches random steps, whole nodes are killed (SIGKILL to the
agent and its ranks) or dead ones are started again. Twice it is the first node, which has the
rendezvous' store: then all agents must end by themselves, and the drill starts all of them again,
as a requeued Slurm job would. The same run is also made undisturbed on the largest layout, and

- every rank records the rows that it reads: in the end, every step must have trained on exactly the
  rows of the undisturbed run, each row once;
- losses, gradient norms, weights and moments must equal those of the undisturbed run within 1e-9,
  relative: layouts differ in the order of float64 sums;
- nothing but a death of the first node may end the job.
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
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.about import about
from benchmarks.elastic_compare import compare, metrics
from runtime.records.events import read_events
from runtime.records.status import read_status
from tools.command import CommandParser, run_command

ROOT = Path(__file__).parent.parent
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

    def __init__(self, folder: Path, config: Path, ranks: int) -> None:
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
                   "benchmarks.elastic_rank", str(self.config)]  # fmt: skip
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
        if not (self.run / "events.jsonl").exists():
            return []
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


def write_drill(folder: Path, base: dict[str, Any], steps: int, ranks: int) -> Path:
    """Write the configuration of a drill in `folder`."""
    folder.mkdir()
    raw = {**base, "parallel": {"zero_stage": 1, "layouts": LAYOUTS[ranks]}}
    raw["model"] = base["model"] | {"dim": 32, "num_layers": 2, "ffn_dim": 64, "num_kv_heads": 2}
    raw["train"] = {"steps": steps, "seq_len": 32, "global_batch_size": 12, "micro_batch_size": 2,
                    "dtype": "float64"}  # fmt: skip
    raw["train"]["seed"] = base["train"].get("seed", 0)
    # With 1e-8, AdamW makes rounding visible where gradients are about as small: after 300 steps,
    # two runs of one process, in micro-batches of 12 and of 3 samples, differ by 1.3e-8 in the
    # embedding; with 1e-5, by 2.7e-12.
    raw["optimizer"] = base["optimizer"] | {"eps": 1e-5}
    raw["checkpoint"] = {"interval": 5, "keep_last": 3}
    raw["run"] = {"dir": str(folder / "run"), "log_interval": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


def make_run(
    folder: Path, base: dict[str, Any], steps: int, changes: list[Change], ranks: int
) -> dict[str, Any]:
    """Make a run with these changes on nodes of `ranks` ranks; returns what happened."""
    config = write_drill(folder, base, steps, ranks)
    with Cluster(folder, config, ranks) as cluster:
        cluster.wait(lambda: cluster.step > 0, "the first step")
        happened = []
        for change in changes:
            happened.append(carry_out(cluster, change))
            print(json.dumps(happened[-1]), flush=True)
        cluster.set_target(10**9)
        cluster.wait(lambda: cluster.ended, "the end")
        codes = [agent.wait() for agent in cluster.agents.values()]
        worlds = [event["world_size"] for event in cluster.events("start")]
        assert read_status(cluster.run)["state"] == "finished", cluster.last_words()
        assert not any(codes), f"agents ended with {codes}: {cluster.last_words()}"
    sizes = sum(a != b for a, b in itertools.pairwise(worlds))
    return {"changes": happened, "starts": len(worlds), "changes_of_size": sizes, "worlds": worlds,
            "requeues": cluster.requeues}  # fmt: skip


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=26)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, choices=sorted(LAYOUTS), default=1, help="of a node")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/elastic_drill.json")
    options = parser.parse_args()
    base = yaml.safe_load((ROOT / "configs/laptop.yaml").read_text())
    if not (ROOT / base["data"]["path"]).exists():
        sys.exit("the data is missing: run `make data` first")
    longest = options.steps // options.changes - 4
    changes = plan(options.seed, options.changes, longest, host_deaths=2)
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        began = time.monotonic()
        make_run(Path(folder) / "alone", base, options.steps, [], options.ranks)
        found = make_run(Path(folder) / "drilled", base, options.steps, changes, options.ranks)
        found |= compare(Path(folder) / "drilled", Path(folder) / "alone")
    found["seconds"] = round(time.monotonic() - began)
    print(json.dumps({key: value for key, value in found.items() if key != "changes"}, indent=1))
    head = {**about(), "nodes": NODES, "ranks_per_node": options.ranks, "seed": options.seed}
    worst = max(found["worst_relative_difference"].values())
    if not found["rows_equal"] or not found["tokens_equal"] or worst > TOLERANCE:
        sys.exit("the drill failed")
    if options.steps >= 300 and found["changes_of_size"] < 20:
        sys.exit("too few changes of size")
    options.json.write_text(json.dumps(head | found, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
