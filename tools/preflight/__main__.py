"""Checks that all nodes of a job are fit to train. Run one process on each node; it takes less than
a minute:

    srun --ntasks-per-node=1 python -m tools.preflight --meet node1:10100 --ranks-per-node 8
    CONFIG.yaml [section.key=value …]

Each node inspects itself (node.py) and reports to the first one. The nodes that are fit measure
their links (links.py), and the first node compares the results and decides:

    failed    a GPU is missing, in use, or reports errors; there is no space for a checkpoint; code,
              packages, or the folders of data and run that exist, differ from those of most
              nodes; the node did not report in time, or its ranks could not communicate
    excluded  an earlier start found that the node is slow or computes wrongly (excluded.json)
    slow      a link is below three quarters of the job's median
    warned    space is scarce, the GPUs differ, an address can be reached from outside

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
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from errors import UserError
from runtime.health.excluded import excluded_nodes, node_name
from runtime.output import log
from runtime.start.checks import check_writable, open_data_stages
from runtime.start.environment import LARGEST, check_environment, check_number
from runtime.start.host import raise_open_files
from settings.config import Config
from settings.layouts import layout_sizes, valid_layout
from settings.load import load_config
from tools.command import CommandParser, reports_errors, run_command, table
from tools.preflight.links import Links, judge_links, rounds_of, store_at
from tools.preflight.node import look_at_node

SLOW = 0.75  # a link below this fraction of the median is slow

# A node's report: see look_at_node; and `within`, `across` in bytes/s.
Report = dict[str, Any]


class Meeting:
    """Exchange of messages between all nodes through a store on the first one."""

    def __init__(self, address: str, node: int, num_nodes: int, deadline: float) -> None:
        self.node, self.num_nodes, self.deadline = node, num_nodes, deadline
        self.store = store_at(address, deadline, is_master=node == 0)

    def write(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def gather(self, key: str, numbers: Iterable[int], until: float) -> dict[int, Any]:
        """Number → value of `key/NUMBER`, for those that are written by `until`."""
        keys = {number: f"{key}/{number}" for number in numbers}
        left = timedelta(seconds=max(until - time.monotonic(), 0.01))
        with contextlib.suppress(RuntimeError):  # DistStoreError: the time is over
            self.store.wait([*keys.values()], left)
        written = {number: name for number, name in keys.items() if self.store.check([name])}
        return {number: json.loads(self.store.get(name)) for number, name in written.items()}

    def leave(self) -> None:
        """Reports that this node is done. The first node waits for the others: it has the store."""
        with contextlib.suppress(RuntimeError):  # the first node has exited
            self.write(f"left/{self.node}", True)
        if self.node == 0:
            self.gather("left", range(1, self.num_nodes), time.monotonic() + 3)


def follow(meeting: Meeting, report: Report) -> int:
    """What the other nodes do: report, and learn the verdict. Returns the exit status."""
    meeting.write(f"report/{meeting.node}", report)
    try:
        passed = meeting.store.get("passed")
    except RuntimeError:  # DistStoreError: the time is over, or the first node has exited
        log(f"preflight: {report['name']} received no answer from the first node")
        return 1
    return 0 if json.loads(passed) else 1


def lead(
    meeting: Meeting, report: Report, options: argparse.Namespace, config: Config, ranks: range
) -> int:
    """What the first node does: gather the reports, say which nodes measure, gather the results of
    their ranks, and decide. Returns the exit status."""
    started = meeting.deadline - options.seconds
    others, halfway = range(1, meeting.num_nodes), started + options.seconds / 2
    reports: dict[int, Report] = {0: report, **meeting.gather("report", others, halfway)}
    for what in ("code", "packages", "folders"):
        for odd, names in odd_ones(reports, what).items():
            reports[odd]["problems"].append(f"other {what} than most nodes: {names}")
    if 0 not in odd_ones(reports, "folders"):  # else it is left out, and the others have the data
        open_data_stages(config)  # the shared disk is checked by this node only
    check_writable(config)
    members = [node for node, found in reports.items() if not found["problems"]]
    until = meeting.deadline - 2
    meeting.write("members", [members, until - time.monotonic()])
    for node in members:
        keys = [f"link/{node}/{number}" for number in rounds_of(node, members)]
        answers = [meeting.gather(key, ranks, until) for key in keys]
        reports[node] |= judge_links(len(ranks), answers)

    names = [f"node {node} of the job" for node in range(meeting.num_nodes)]
    if options.node_names:
        names = options.node_names.split(",")
    for node, found in reports.items():
        names[node] = found["name"]
    log(f"preflight of {meeting.num_nodes} nodes, {time.monotonic() - started:.0f} s")
    log(describe(reports))
    chosen = judge(reports, names, options, config)
    meeting.write("passed", bool(chosen))
    if chosen:
        print(",".join(names[node] for node in chosen), config.run.dir, flush=True)
    return 0 if chosen else 1


# --- the verdict ----------------------------------------------------------------------------------


def odd_ones(reports: dict[int, Report], key: str) -> dict[int, str]:
    """Nodes whose `key`, a dict, differs from that of most nodes → the differing entries' names."""
    found = {node: frozenset(report[key].items()) for node, report in reports.items()}
    most, _ = Counter(found.values()).most_common(1)[0]
    odd = {}
    for node, entries in found.items():
        if names := sorted({name for name, _ in most ^ entries}):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            odd[node] = ", ".join(names[:3]) + more
    return odd


def slow_ones(reports: dict[int, Report]) -> dict[int, str]:
    """Nodes with a link below SLOW times the job's median → a description of that link."""
    slow = {}
    for key in ("within", "across"):
        speeds = {node: report[key] for node, report in reports.items() if report.get(key)}
        median = statistics.median(speeds.values()) if speeds else 0.0
        for node, speed in speeds.items():
            if speed < SLOW * median:
                slow[node] = f"all-reduce {key} nodes at {speed / median:.0%} of the job's median"
    return slow


def choose(
    fit: Iterable[int], excluded: Collection[int], slow: Collection[int], needed: int
) -> list[int]:
    """Chooses `needed` of the nodes that are fit: slow ones only if there are too few others, and
    excluded ones only if there are too few with these. Returns [] if there are too few in all."""
    order = sorted(fit, key=lambda node: (node in excluded, node in slow, node))
    return sorted(order[:needed]) if len(order) >= needed else []


def describe(reports: dict[int, Report]) -> str:
    """A line for each node."""
    rows = [("  node", "GPUs", "within GB/s", "across GB/s", "run GB free")]
    for report in reports.values():
        within, across = (
            f"{report[key] / 1e9:.2f}" if report.get(key) else "–" for key in ("within", "across")
        )
        free = f"{report['free_bytes'] / 1e9:,.0f}"
        rows.append((f"  {report['name']}", report["gpus"], within, across, free))
    return table(rows, left=(0, 1))


def judge(
    reports: dict[int, Report], names: list[str], options: argparse.Namespace, config: Config
) -> list[int]:
    """Prints the findings, and chooses the nodes to train on."""
    failed = dict.fromkeys(range(len(names)), "it sent no report in time")
    failed |= {node: "; ".join(report["problems"]) for node, report in reports.items()}
    failed = {node: why for node, why in failed.items() if why}
    slow, excluded = slow_ones(reports), excluded_nodes(Path(config.run.dir))
    out = {n: str(excluded[name].get("reason")) for n, name in enumerate(names) if name in excluded}
    needed = len(names) - options.spare_nodes
    if config.parallel.layouts:  # with fewer nodes, a smaller layout fits
        least = math.ceil(min(layout_sizes(config)) / options.ranks_per_node)
        needed = max(least, min(needed, len(names) - len(failed)))
    chosen = choose({*range(len(names))} - failed.keys(), out, slow, needed)

    for verdict, found in (("FAILED", failed), ("SLOW", slow), ("EXCLUDED", out)):
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
        log(f"preflight failed: {needed} nodes are needed; sbatch --exclude={bad} …")
    return chosen


# --- the command ----------------------------------------------------------------------------------


def read_config(options: argparse.Namespace, num_nodes: int) -> Config:
    """Loads and validates the configuration. Raises UserError where training would."""
    if not 0 <= options.spare_nodes < num_nodes:
        why = f"the job has {num_nodes} nodes"
        raise UserError("--spare-nodes", options.spare_nodes, why, "leave at least one to train on")
    world = (num_nodes - options.spare_nodes) * options.ranks_per_node
    loaded = load_config(options.config, options.overrides)
    if options.min_nodes is not None:
        least = math.ceil(min(layout_sizes(loaded) or [world]) / options.ranks_per_node)
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
    parser.configuration("CONFIG.yaml", "what to train")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds
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

    raise_open_files(num_nodes * options.ranks_per_node)  # each rank has a socket to the store
    # Forked before this process has threads.
    links = Links(options.device, options.ranks_per_node, options.meet, node, deadline)
    with links.running():
        world = (num_nodes - options.spare_nodes) * options.ranks_per_node
        report = look_at_node(name, config, options.device, options.ranks_per_node, world)
        try:
            meeting = Meeting(options.meet, node, num_nodes, deadline)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            log(f"preflight: {name} cannot reach {options.meet}: {why}; {report['problems']}")
            return 1
        try:
            if node:
                return follow(meeting, report)
            return lead(meeting, report, options, config, range(links.num_ranks))
        except (UserError, OSError):
            meeting.write("passed", False)  # they end, and with them their ranks
            raise
        finally:
            meeting.leave()


if __name__ == "__main__":
    run_command(main)
