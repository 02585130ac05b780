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
import contextlib
import json
import math
import time
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from errors import UserError
from runtime.health.excluded import excluded_nodes, node_name
from runtime.output import log
from runtime.start.attention import describe_attention
from runtime.start.checks import check_writable, open_data_stages
from runtime.start.environment import LARGEST, check_environment, check_number
from settings.config import Config
from settings.layouts import layout_sizes, valid_layout
from settings.load import load_config
from tools.command import CommandParser, add_overrides, reports_errors, run_command
from tools.preflight.links import measure, start_links
from tools.preflight.node import look_at_node
from tools.preflight.verdict import SKEW_SECONDS, Report, choose, describe, odd_ones, slow_ones


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

    def gather(self, key: str, nodes: Iterable[int], until: float) -> dict[int, Any]:
        """Node → value, for those of `nodes` that wrote one by `until`."""
        found = {node: self.read(f"{key}/{node}", until) for node in nodes}
        return {node: value for node, value in found.items() if value is not None}

    def leave(self) -> None:
        """Reports that this node is done. The first node waits for the others: it has the store."""
        with contextlib.suppress(RuntimeError):  # the first node has exited
            self.write(f"left/{self.node}", True)
        if self.node == 0:
            self.gather("left", range(1, self.num_nodes), time.monotonic() + 3)


def measured(meeting: Meeting, pipes: list[Connection], members: list[int]) -> dict[str, Any]:
    """This node's clock, and the bandwidths of its links if it is one of `members`."""
    clock = time.time()  # on all nodes at the same moment, because the same message wakes them
    if meeting.node not in members:
        return {"clock": clock}
    return {"clock": clock, **measure(pipes, members, meeting.node, meeting.deadline)}


def follow(meeting: Meeting, pipes: list[Connection], report: Report) -> int:
    """What the other nodes do: report, measure, and learn the verdict. Returns the exit status."""
    meeting.write(f"report/{meeting.node}", report)
    members = meeting.read("members", meeting.deadline)
    if members is None:
        log(f"preflight: {report['name']} received no answer from the first node")
        return 1
    meeting.write(f"measured/{meeting.node}", measured(meeting, pipes, members))
    return 0 if meeting.read("passed", meeting.deadline) else 1


def lead(
    meeting: Meeting,
    pipes: list[Connection],
    report: Report,
    options: argparse.Namespace,
    config: Config,
    started: float,
) -> int:
    """What the first node does: gather the reports, say which nodes measure, gather the results,
    and decide. Returns the exit status."""
    open_data_stages(config)  # the shared disk is checked by this node only
    check_writable(config)
    others, halfway = range(1, meeting.num_nodes), started + options.seconds / 2
    reports: dict[int, Report] = {0: report, **meeting.gather("report", others, halfway)}
    for what in ("code", "packages"):
        for odd, names in odd_ones(reports, what).items():
            reports[odd]["problems"].append(f"other {what} than most nodes: {names}")
    members = [node for node, found in reports.items() if not found["problems"]]
    meeting.write("members", members)
    results = {0: measured(meeting, pipes, members)}
    results |= meeting.gather("measured", [*reports][1:], meeting.deadline)
    for node in reports.keys() - results.keys():
        reports[node]["problems"].append("it sent no measurement in time")
    for node, found in results.items():
        reports[node]["problems"] += found.pop("problems", [])
        reports[node] |= found
        reports[node]["skew"] = skew = found["clock"] - results[0]["clock"]
        if abs(skew) > SKEW_SECONDS:
            why = f"its clock differs by {skew:+.1f} s from {report['name']}'s"
            reports[node]["warnings"].append(why)

    attention = attention_of(config, options.device)
    names = [f"node {node} of the job" for node in range(meeting.num_nodes)]
    if options.node_names:
        names = options.node_names.split(",")
    for node, found in reports.items():
        names[node] = found["name"]
    log(f"preflight of {meeting.num_nodes} nodes, {time.monotonic() - started:.0f} s")
    log(describe(reports))
    log(f"  {attention}")
    chosen = judge(reports, names, options, config)
    meeting.write("passed", bool(chosen))
    if chosen:
        print(",".join(names[node] for node in chosen), config.run.dir, flush=True)
    return 0 if chosen else 1


def judge(
    reports: dict[int, Report], names: list[str], options: argparse.Namespace, config: Config
) -> list[int]:
    """Prints the findings, and chooses the nodes to train on."""
    silent: Report = {"problems": ["it sent no report in time"]}
    problems = {node: reports.get(node, silent)["problems"] for node in range(len(names))}
    failed = {node: "; ".join(found) for node, found in problems.items() if found}
    slow = slow_ones(reports)
    excluded = {
        names.index(node): f"excluded.json excludes it: {about.get('reason')}"
        for node, about in excluded_nodes(Path(config.run.dir)).items()
        if node in names
    }
    needed = len(names) - options.spare_nodes
    if config.parallel.layouts:  # with fewer nodes, a smaller layout fits
        least = least_nodes(layout_sizes(config), options.ranks_per_node)
        needed = max(least, min(needed, len(names) - len(failed)))
    chosen = choose(names, failed, excluded, slow, needed)

    for verdict, found in (("FAILED", failed), ("SLOW", slow), ("EXCLUDED", excluded)):
        for node, why in sorted(found.items()):
            log(f"  {verdict:8} {names[node]}: {why}")
    for report in reports.values():
        for warning in report["warnings"]:
            log(f"  warning  {report['name']}: {warning}")
    if chosen:
        left_out = [name for node, name in enumerate(names) if node not in chosen]
        without = f", without {', '.join(left_out)}" if left_out else ""
        log(f"preflight passed: {needed} nodes{without}")
    else:
        bad = ",".join(names[node] for node in sorted(failed))
        log(
            f"preflight failed: {needed} nodes are needed. Without the bad ones: "
            f"sbatch --exclude={bad} …"
        )
    return chosen


def attention_of(config: Config, device: str) -> str:
    """The line about attention that training on this node would log. Called last: it is the first
    use of a GPU by this process, and a faulty GPU may not answer. Raises UserError."""
    try:
        return describe_attention(config, device)
    except RuntimeError as error:  # from CUDA; the node is then named for another reason
        return f"attention: unknown, because CUDA failed: {str(error).partition(chr(10))[0]}"


def least_nodes(sizes: list[int], ranks_per_node: int) -> int:
    """How many nodes the smallest layout needs."""
    return math.ceil(min(sizes) / ranks_per_node)


def read_config(options: argparse.Namespace, num_nodes: int) -> Config:
    """Loads and validates the configuration. Raises UserError where training would."""
    needed = num_nodes - options.spare_nodes
    if not 1 <= needed <= num_nodes:
        why = f"the job has {num_nodes} nodes"
        raise UserError("--spare-nodes", options.spare_nodes, why, "leave at least one to train on")
    world = needed * options.ranks_per_node
    loaded = load_config(options.config, options.overrides)
    if options.min_nodes is not None:
        least = least_nodes(layout_sizes(loaded) or [world], options.ranks_per_node)
        if options.min_nodes < least:
            why = f"the smallest layout needs {least} nodes, so the ranks of fewer are refused"
            raise UserError("MIN_NODES", options.min_nodes, why, f"give MIN_NODES={least} or more")
    return valid_layout(loaded, world)[0]


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.preflight", description=__doc__)
    parser.required("--meet", str, "HOST:PORT", "a free port of the first node")
    parser.option("--device", "cuda", None, "what to train on", choices=["cuda", "cpu"])
    parser.required("--ranks-per-node", int, "N", "the processes that train on each node")
    parser.option("--spare-nodes", 0, "N", "nodes to leave out")
    fewer = "after a node has died, torchrun goes on with this many; without it, it does not"
    parser.option("--min-nodes", int, "N", fewer)
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
    node = check_number("SLURM_NODEID", 0, LARGEST) or 0
    num_nodes = check_number("SLURM_NNODES", 1, LARGEST) or 1
    name = node_name()
    try:
        config = read_config(options, num_nodes)
    except UserError:
        if node:  # the first one says why
            return 2
        raise

    # Forked before this process has threads. They wait until `measure` sends them the members.
    with start_links(options.device, options.ranks_per_node, options.meet) as pipes:
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
        try:
            if node:
                return follow(meeting, pipes, report)
            return lead(meeting, pipes, report, options, config, started)
        except UserError:
            meeting.write("members", [])
            meeting.write("passed", False)
            raise
        finally:
            meeting.leave()


if __name__ == "__main__":
    run_command(main)
