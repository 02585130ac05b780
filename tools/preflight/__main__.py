"""Are all nodes of a job fit to train? One process on each node, under a minute:

    srun --ntasks-per-node=1 python -m tools.preflight --meet node1:10100 --ranks-per-node 8
    CONFIG.yaml [section.key=value …]

Each node looks at itself (node.py), all meet at the first one, those that are fit measure their
links (links.py), and the first one compares and decides (verdict.py):

    failed  a GPU is missing, in use, or reports errors; no room for a checkpoint; other code or
            packages than most nodes have; the node did not come in time, or its ranks could not
            talk
    slow    links below three quarters of the median of the job
    warned  a clock is off, little room, an address that is reachable from outside

--spare-nodes of them are left out: the failed first, then the slow, then the last. The report goes
to standard error. To standard output goes the answer, one line: the nodes to train on, with commas,
and the run folder. The exit status is 0; 1 where fewer nodes are fit than are needed; 2 where the
configuration is refused, as training would refuse it.

Under Slurm the number of this node and of all comes from SLURM_NODEID and SLURM_NNODES; without,
this is the only one.
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from errors import UserError
from runtime.preconditions import check_writable, open_train_and_heldout
from tools.preflight.links import Links
from tools.preflight.node import look_at_node
from tools.preflight.verdict import SKEW_SECONDS, Report, choose, odd_ones, slow_ones, table
from training.config import Config
from training.load_config import load_config


class Meeting:
    """All nodes, at a store on the first one. What one writes, any reads."""

    def __init__(self, address: str, node: int, num_nodes: int, deadline: float) -> None:
        host, _, port = address.rpartition(":")
        self.node, self.num_nodes, self.deadline = node, num_nodes, deadline
        patience = timedelta(seconds=deadline - time.monotonic())
        self.store = dist.TCPStore(
            host, int(port), is_master=node == 0, wait_for_workers=False, timeout=patience
        )

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str, until: float) -> Any:
        """What was written there, or None if nothing is by then."""
        try:
            self.store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.01)))
        except RuntimeError:  # DistStoreError: in time, or because the first node has left
            return None
        return json.loads(self.store.get(key))

    def gather(self, key: str, members: list[int], until: float) -> dict[int, Any]:
        """What these nodes wrote; those that did not in time are not in it."""
        found = {member: self.read(f"{key}/{member}", until) for member in members}
        return {member: value for member, value in found.items() if value is not None}

    def leave(self) -> None:
        """The first node last: the store is its."""
        self.write(f"left/{self.node}", True)
        if self.node == 0:
            self.gather("left", list(range(self.num_nodes)), time.monotonic() + 3)


def judge(
    meeting: Meeting, reports: dict[int, Report], names: list[str], needed: int, started: float
) -> list[int]:
    """On the first node: say what was found, and choose the nodes to train on."""
    problems = {node: list(report["problems"]) for node, report in reports.items()}
    for node in set(range(meeting.num_nodes)) - reports.keys():
        problems[node] = ["it did not come"]
    warnings = [
        f"{report['name']}: {warning}"
        for report in reports.values()
        for warning in report["warnings"]
    ]
    for report in reports.values():
        report["skew"] = report.get("clock", 0.0) - reports[0]["clock"]
        if "clock" in report and abs(report["skew"]) > SKEW_SECONDS:
            warnings.append(
                f"{report['name']}: its clock differs by {report['skew']:+.1f} s from {names[0]}'s"
            )
    slow = slow_ones(reports)
    failed = {node for node, found in problems.items() if found}
    chosen = choose(names, failed, set(slow), needed)

    say(f"preflight of {meeting.num_nodes} nodes, {time.monotonic() - started:.0f} s")
    say(table(reports))
    for node in sorted(failed):
        say(f"  FAILED   {names[node]}: {'; '.join(problems[node])}")
    for node, why in sorted(slow.items()):
        say(f"  SLOW     {names[node]}: {why}")
    for warning in warnings:
        say(f"  warning  {warning}")
    left_out = [names[node] for node in range(meeting.num_nodes) if node not in chosen]
    if not chosen:
        bad = ",".join(names[node] for node in sorted(failed))
        say(
            f"preflight failed: {needed} nodes are needed. Without the bad ones: "
            f"sbatch --exclude={bad} …"
        )
    else:
        without = f", without {', '.join(left_out)}" if left_out else ""
        say(f"preflight passed: {needed} nodes{without}")
    return chosen


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_config(options: argparse.Namespace, num_nodes: int) -> Config:
    """The configuration, refused as training would refuse it."""
    needed = num_nodes - options.spare_nodes
    if not 1 <= needed <= num_nodes:
        why = f"the job has {num_nodes} nodes"
        raise UserError("--spare-nodes", options.spare_nodes, why, "leave one to train on")
    config = load_config(options.config, options.overrides)
    config.validate(needed * options.ranks_per_node)
    return config


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.preflight",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--meet", required=True, metavar="HOST:PORT", help="a free port of the first node"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--spare-nodes", type=int, default=0)
    parser.add_argument(
        "--node-names", default="", metavar="A,B,…", help="of all, to name those that do not come"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=55,
        help="of all, from the import of torch on; half of it to come",
    )
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    deadline = started + options.seconds
    node, num_nodes = int(os.environ.get("SLURM_NODEID", 0)), int(os.environ.get("SLURM_NNODES", 1))
    name = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    try:
        config = read_config(options, num_nodes)
    except UserError as error:
        if node == 0:
            say(f"error: {error}")
        return 2

    # Forked before this process has threads; they wait until it says who measures.
    with Links(options.device, options.ranks_per_node, options.meet, deadline) as links:
        report = look_at_node(name, config, options.device, options.ranks_per_node)
        try:
            meeting = Meeting(options.meet, node, num_nodes, deadline)
        except RuntimeError as error:
            say(
                f"preflight: {name} does not reach {options.meet}: "
                f"{str(error).partition(chr(10))[0]}; {report['problems']}"
            )
            return 1
        return carry_out(meeting, links, report, options, config, started)


def carry_out(
    meeting: Meeting,
    links: Links,
    report: Report,
    options: argparse.Namespace,
    config: Config,
    started: float,
) -> int:
    """Between nodes: report, hear who measures, measure, report that, hear the answer."""
    node, everyone = meeting.node, list(range(meeting.num_nodes))
    needed = meeting.num_nodes - options.spare_nodes
    meeting.write(f"report/{node}", report)
    reports: dict[int, Report] = {}
    refused = False
    if node == 0:
        try:  # what lies on the shared disk is looked at once
            open_train_and_heldout(config)
            check_writable(config)
        except UserError as error:
            say(f"error: {error}")
            refused = True
    if refused:
        meeting.write("members", [])
        meeting.write("passed", False)
    elif node == 0:
        reports = meeting.gather("report", everyone, started + options.seconds / 2)
        for what in ("code", "packages"):
            for odd, names in odd_ones(reports, what).items():
                reports[odd]["problems"].append(f"other {what} than most nodes: {names}")
        meeting.write("members", [other for other in reports if not reports[other]["problems"]])

    members = meeting.read("members", meeting.deadline)
    clock = time.time()  # all nodes are woken by the same message
    if members is None:
        say(f"preflight: {report['name']} hears nothing of the first node")
        return 1
    meeting.write(
        f"measured/{node}",
        {"clock": clock, **(links.measure(members, node) if node in members else {})},
    )

    if node == 0 and not refused:
        for other, measured in meeting.gather("measured", list(reports), meeting.deadline).items():
            reports[other]["problems"] += measured.pop("problems", [])
            reports[other].update(measured)
        names = (
            options.node_names.split(",")
            if options.node_names
            else [f"node {other} of the job" for other in everyone]
        )
        for other, known in reports.items():
            names[other] = known["name"]
        chosen = judge(meeting, reports, names, needed, started)
        meeting.write("passed", bool(chosen))
        if chosen:
            print(",".join(names[other] for other in chosen), config.run.dir, flush=True)
    passed = meeting.read("passed", meeting.deadline)
    meeting.leave()
    return 2 if refused else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
