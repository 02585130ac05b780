"""excluded.json: the nodes of a run that are to be left out of its next start.

    {"gpu-017": {"time": 1790000000.0, "reason": "slow: 1.32 times its peers since step 4,120"}}

Whoever finds a node faulty adds it; the next start gives its ranks no part of the model, as long as
enough other nodes remain (spares.py). An operator removes the entry, or the file, once the node is
repaired.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from runtime.status import write_whole

FILE = "excluded.json"


def node_name() -> str:
    """This machine's name, as Slurm knows it if a Slurm job runs here."""
    override = os.environ.get("LATTICE_NODE")  # for tests: several nodes on one machine
    return override or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def exclude(folder: Path, node: str, reason: str) -> bool:
    """Add `node` to those that the next start leaves out; called by only one process. Returns
    whether it was not there: the first reason stays."""
    found = excluded_nodes(folder)
    if node in found:
        return False
    found[node] = {"time": time.time(), "reason": reason}
    _write(folder, found)
    return True


def include(folder: Path, node: str) -> None:
    """Take back that `node` is left out; called by the process that excluded it."""
    found = excluded_nodes(folder)
    if found.pop(node, None) is not None:
        _write(folder, found)


def _write(folder: Path, nodes: dict[str, dict[str, Any]]) -> None:
    write_whole(folder / FILE, json.dumps(nodes, indent=1) + "\n")


def excluded_nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """The excluded nodes by name, each with the time and the reason; empty if there are none or the
    file cannot be read."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {node: about for node, about in found.items() if isinstance(about, dict)}
