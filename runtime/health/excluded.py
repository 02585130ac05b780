"""excluded.json: the nodes of a run that are to be left out of its next start.

    {"gpu-017": {"time": 1790000000.0, "reason": "slow: 1.32 times its peers since step 4,120"}}

Whoever finds a node faulty adds it; the next start gives its ranks no part of the model, as long as
enough other nodes remain (start/elastic.py). An operator removes the entry, or the file, once the
node is repaired.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from runtime.files import write_or_warn
from runtime.output import log
from settings import yaml_text

FILE = "excluded.json"


def node_name() -> str:
    """This machine's name, as Slurm knows it if a Slurm job runs here."""
    override = os.environ.get("LATTICE_NODE")  # for tests: several nodes on one machine
    return override or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def exclude(folder: Path, node: str, reason: str) -> bool:
    """Add `node` to those that the next start leaves out; called by only one process. Returns
    whether it was added: the first reason stays."""
    found, problem = _read(folder)
    if node in found:
        return False
    if problem:  # what a person wrote is kept
        with suppress(OSError):
            (folder / FILE).replace(folder / f"{FILE}.unreadable")
    found[node] = {"time": time.time(), "reason": reason}
    return write_or_warn(folder / FILE, json.dumps(found, indent=1) + "\n")


def include(folder: Path, node: str, reason: str) -> bool:
    """Take back what `exclude` has written for `node`, with this reason; called by the process that
    did. Returns whether it was taken back."""
    found, _ = _read(folder)
    if found.get(node, {}).get("reason") != reason:
        return False
    del found[node]
    return write_or_warn(folder / FILE, json.dumps(found, indent=1) + "\n")


def excluded_nodes(folder: Path) -> dict[str, dict[str, Any]]:
    """The excluded nodes by name, each with its reason, and the time if a run has added it. Warns,
    and returns none, if the file cannot be read."""
    found, problem = _read(folder)
    if problem:
        log(f"warning: no node is excluded, because {folder / FILE} {problem}")
    return found


def _read(folder: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """The nodes, and why the file cannot be read. People edit it, so it is read as YAML (all JSON
    is): a comma after the last entry is allowed, and an entry that is only a reason."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8").replace("\t", " ")  # YAML has no tabs
        found = yaml_text.parse(text) or {}
        if not isinstance(found, dict):
            raise ValueError("has no nodes: write node: reason")
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError) as error:  # also: no text, no YAML
        return {}, f"cannot be read: {error}"
    return {
        str(node): about if isinstance(about, dict) else {"reason": str(about)}
        for node, about in found.items()
    }, ""
