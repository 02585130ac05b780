"""Checks that all nodes of a job are fit to train. Run one process on each node; it takes less than
a minute:

    srun --ntasks-per-node=1 python -m tools.preflight --meet node1:10100 --ranks-per-node 8
    CONFIG.yaml [section.key=value …]

Each node inspects itself (node.py) and reports to the first one. The nodes that are fit measure
their links (links.py), and the first node compares the results and decides (verdict.py):

    failed    a GPU is missing, in use, or reports errors; there is no space for a checkpoint; code
              or packages differ from those of most nodes; the node did not report in time, or its
              ranks could not communicate
    excluded  an earlier start found that the node is slow or computes wrongly (excluded.json)
    slow      a link is below three quarters of the job's median
    warned    a clock is off, space is scarce, an address can be reached from outside

--spare-nodes nodes are left out: first failed ones, then excluded, slow and the last ones. If
`parallel.layouts` has a layout for fewer nodes, all failed ones are left out. The report
goes to standard error. The answer goes to standard output as one line: the nodes to train on,
separated by commas, and the run folder. The exit status is 0; or 1 if too few nodes are fit; or 2
if the configuration is refused, as it would be by training.

Under Slurm, this node's number and the number of nodes come from SLURM_NODEID and SLURM_NNODES.
Otherwise this is the only node.
"""

import argparse
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from errors import UserError
from runtime.health.excluded import excluded_nodes
from runtime.messages import log
from runtime.start.attention import describe_attention
from runtime.start.environment import LARGEST, check_environment, check_number
from runtime.start.preconditions import check_writable, open_stages
from tools.command import CommandParser, add_overrides, run_command
from tools.preflight.links import Links
from tools.preflight.node import look_at_node
from tools.preflight.verdict import SKEW_SECONDS, Report, choose, describe, odd_ones, slow_ones
from training.config import Config
from training.layouts import layout_sizes, valid_layout
from training.load_config import load_config


class Meeting:
    """Exchange of messages between all nodes through a store on the first one."""

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
        """Waits for the value of `key`; returns None if it is not written by `until`."""
        try:
            self.store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.01)))
        except RuntimeError:  # DistStoreError: the time is over, or the first node has exited
            return None
        return json.loads(self.store.get(key))

    def gather(self, key: str, members: list[int], until: float) -> dict[int, Any]:
        """Node → value, for those of `members` that wrote one by `until`."""
        found = {member: self.read(f"{key}/{member}", until) for member in members}
        return {member: value for member, value in found.items() if value is not None}

    def leave(self) -> None:
        """Reports that this node is done. The first node waits for the others: it has the store."""
        self.write(f"left/{self.node}", True)
        if self.node == 0:
            self.gather("left", list(range(self.num_nodes)), time.monotonic() + 3)


def judge(
    meeting: Meeting,
    reports: dict[int, Report],
    names: list[str],
    options: argparse.Namespace,
    config: Config,
    started: float,
    attention: str,
) -> list[int]:
    """Prints the findings, and chooses the nodes to train on. Runs on the first node."""
    problems = {node: list(report["problems"]) for node, report in reports.items()}
    for node in set(range(meeting.num_nodes)) - reports.keys():
        problems[node] = ["it sent no report in time"]
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
    excluded = {
        names.index(node): f"excluded.json excludes it: {about.get('reason')}"
        for node, about in excluded_nodes(Path(config.run.dir)).items()
        if node in names
    }
    failed = {node for node, found in problems.items() if found}
    needed = meeting.num_nodes - options.spare_nodes
    if config.parallel.layouts:  # with fewer nodes, a smaller layout fits
        least = math.ceil(min(layout_sizes(config)) / options.ranks_per_node)
        needed = max(least, min(needed, meeting.num_nodes - len(failed)))
    chosen = choose(names, failed, set(excluded), set(slow), needed)

    log(f"preflight of {meeting.num_nodes} nodes, {time.monotonic() - started:.0f} s")
    log(describe(reports))
    log(f"  {attention}")
    for node in sorted(failed):
        log(f"  FAILED   {names[node]}: {'; '.join(problems[node])}")
    for node, why in sorted(slow.items()):
        log(f"  SLOW     {names[node]}: {why}")
    for node, why in sorted(excluded.items()):
        log(f"  EXCLUDED {names[node]}: {why}")
    for warning in warnings:
        log(f"  warning  {warning}")
    left_out = [names[node] for node in range(meeting.num_nodes) if node not in chosen]
    if not chosen:
        bad = ",".join(names[node] for node in sorted(failed))
        log(
            f"preflight failed: {needed} nodes are needed. Without the bad ones: "
            f"sbatch --exclude={bad} …"
        )
    else:
        without = f", without {', '.join(left_out)}" if left_out else ""
        log(f"preflight passed: {needed} nodes{without}")
    return chosen


def attention_of(config: Config, device: str) -> str:
    """The line about attention that training on this node would log. Called last: it is the first
    use of a GPU by this process, and a faulty GPU may not answer. Raises UserError."""
    try:
        return describe_attention(config, device)
    except RuntimeError as error:  # from CUDA; the node is then named for another reason
        return f"attention: unknown, because CUDA failed: {str(error).partition(chr(10))[0]}"


def read_config(options: argparse.Namespace, num_nodes: int) -> Config:
    """Loads and validates the configuration. Raises UserError where training would."""
    needed = num_nodes - options.spare_nodes
    if not 1 <= needed <= num_nodes:
        why = f"the job has {num_nodes} nodes"
        raise UserError("--spare-nodes", options.spare_nodes, why, "leave at least one to train on")
    world = needed * options.ranks_per_node
    loaded = load_config(options.config, options.overrides)
    if options.min_nodes:
        sizes = layout_sizes(loaded) or [world]
        least = math.ceil(min(sizes) / options.ranks_per_node)
        if options.min_nodes < least:
            why = f"the smallest layout needs {least} nodes, so the ranks of fewer are refused"
            raise UserError("MIN_NODES", options.min_nodes, why, f"give MIN_NODES={least} or more")
    return valid_layout(loaded, world)[0]


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.preflight", description=__doc__)
    parser.required("--meet", str, "HOST:PORT", "a free port of the first node")
    parser.option("--device", "cuda", None, "what to train on", choices=["cuda", "cpu"])
    parser.required("--ranks-per-node", int, "N", "the processes that train on each node")
    parser.option("--spare-nodes", 0, "N", "nodes to leave out")
    fewer = "after a node has died, torchrun goes on with this many; 0: it does not"
    parser.option("--min-nodes", 0, "N", fewer)
    names = "names of all nodes, for those that send no report"
    parser.option("--node-names", str, "A,B,…", names, default="")
    limit = "time limit after the import of torch; reports are due after half of it"
    parser.option("--seconds", 55.0, "S", limit)
    parser.option("config", str, "CONFIG.yaml", "what to train")
    add_overrides(parser)
    options = parser.parse_args(arguments)
    started = time.monotonic()
    deadline = started + options.seconds
    check_environment(is_rank=False)
    node, num_nodes = (
        check_number("SLURM_NODEID", 0, LARGEST) or 0,
        check_number("SLURM_NNODES", 1, LARGEST) or 1,
    )
    name = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    try:
        config = read_config(options, num_nodes)
    except UserError as error:
        if node == 0:
            log(f"error: {error}")
        return 2

    # Forked before this process has threads. They wait until `measure` sends them the members.
    with Links(options.device, options.ranks_per_node, options.meet, deadline) as links:
        world_size = (num_nodes - options.spare_nodes) * options.ranks_per_node
        report = look_at_node(name, config, options.device, options.ranks_per_node, world_size)
        try:
            meeting = Meeting(options.meet, node, num_nodes, deadline)
        except RuntimeError as error:
            log(
                f"preflight: {name} cannot reach {options.meet}: "
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
    """The exchange between nodes: sends this node's report, receives the members that measure,
    measures, sends the result, and receives the verdict. Returns the exit status."""
    node, everyone = meeting.node, list(range(meeting.num_nodes))
    meeting.write(f"report/{node}", report)
    reports: dict[int, Report] = {}
    refused = False
    if node == 0:
        try:  # the shared disk is checked by one node only
            open_stages(config)
            check_writable(config)
        except UserError as error:
            log(f"error: {error}")
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
    clock = time.time()  # on all nodes at the same moment, because the same message wakes them
    if members is None:
        log(f"preflight: {report['name']} received no answer from the first node")
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
        try:
            attention = attention_of(config, options.device)
        except UserError as error:
            log(f"error: {error}")
            meeting.write("passed", False)
            meeting.leave()
            return 2
        chosen = judge(meeting, reports, names, options, config, started, attention)
        meeting.write("passed", bool(chosen))
        if chosen:
            print(",".join(names[other] for other in chosen), config.run.dir, flush=True)
    passed = meeting.read("passed", meeting.deadline)
    meeting.leave()
    return 2 if refused else 0 if passed else 1


if __name__ == "__main__":
    run_command(main)
