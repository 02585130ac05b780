"""Compares the nodes' reports: finds deviating and slow nodes, and chooses those to train on."""

import statistics
from collections import Counter
from collections.abc import Collection
from typing import Any

from tools.command import table

SLOW = 0.75  # a link below this fraction of the median is slow

# A node's report: see look_at_node; and `within`, `across` in bytes/s.
Report = dict[str, Any]


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
    names: list[str],
    failed: Collection[int],
    excluded: Collection[int],
    slow: Collection[int],
    needed: int,
) -> list[int]:
    """Chooses `needed` nodes, in order: no failed ones, slow ones only if there are too few others,
    and excluded ones only if there are too few with these. Returns [] if too few nodes are fit."""
    fit = sorted(
        (node for node in range(len(names)) if node not in failed),
        key=lambda node: (node in excluded, node in slow, node),
    )
    return sorted(fit[:needed]) if len(fit) >= needed else []


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
