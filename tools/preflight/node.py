"""A node's report for the preflight: GPUs, disk, addresses, code, packages."""

import contextlib
import csv
import hashlib
import ipaddress
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime.checkpoint.folder import named_checkpoints, replaceable
from runtime.start.host import raise_open_files
from runtime.trainer_state import state_bytes
from settings.config import Config
from settings.data_stages import data_stages

ROOT = Path(__file__).parent.parent.parent
SMI_SECONDS = 15  # time limit, because a faulty GPU can make nvidia-smi wait forever
IDLE_BYTES = 2 * 2**30  # a GPU with more in use is not idle; the driver uses some hundred MiB
GPU_FIELDS = ("index", "name", "memory.used", "clocks.max.sm", "ecc.mode.current",
              "ecc.errors.uncorrected.volatile.total")  # fmt: skip


def look_at_node(
    name: str, config: Config, device: str, ranks_per_node: int, world_size: int
) -> dict[str, Any]:
    """This node's report: `name`; `gpus`, a description; `free_bytes` on the run folder's disk;
    `code`, path → checksum; `packages`, name → version; `folders`, what exists of data and run;
    `problems`, which exclude the node from training; and `warnings`."""
    report = {"gpus": "none requested", "problems": [], "warnings": []}
    if device == "cuda":
        report = look_at_gpus(ranks_per_node)
    report["name"] = name
    try:
        report["free_bytes"] = _look_at_disk(config, report)
    except OSError as error:  # a stale mount; if it is so on all nodes, the first one says more
        report["free_bytes"] = 0
        report["problems"].append(f"run.dir cannot be read: {error}")
    if config.parallel.offload == "disk":
        try:
            tempfile.TemporaryFile(dir=config.parallel.offload_dir).close()
        except OSError as error:
            report["problems"].append(f"parallel.offload_dir cannot be written: {error}")
    report["problems"] += filter(None, [raise_open_files(world_size)])
    report["warnings"] += judge_addresses(addresses())
    report["code"] = {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(_sources())
    }
    report["packages"] = {"python": platform.python_version()} | {
        str(package.metadata["Name"]): package.version for package in metadata.distributions()
    }
    run = Path(config.run.dir).absolute()  # may be created later, so its parents show a lost mount
    paths = [run, *run.parents]
    for stage in data_stages(config):  # a mount point without its mount is an empty folder
        paths += [Path(folder, "index.json") for folder in stage.config.data.weights()]
    report["folders"] = {str(path): "" for path in paths if os.path.exists(path)}
    return report


def addresses() -> list[str]:
    """This machine's IPv4 and IPv6 addresses (Linux only)."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        routes = Path("/proc/net/fib_trie").read_text()
        found += {*re.findall(r"\|-- (\S+)\n(?: +/\d+ .*\n)*? +/32 host LOCAL", routes)}
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
        found += [str(ipaddress.IPv6Address(int(row.split()[0], 16))) for row in rows]
    return found


def judge_addresses(found: list[str]) -> list[str]:
    """A warning if torchrun's port, open on all addresses, may be reachable from outside."""
    public = [address for address in found if ipaddress.ip_address(address).is_global]
    if not public:
        return []
    return [
        f"{', '.join(public)} can be reached from outside, unless a firewall prevents it; "
        "anyone who can reach torchrun's port can run code as you (docs/running.md)"
    ]


def look_at_gpus(expected: int) -> dict[str, Any]:
    """`gpus`, `problems` and `warnings` of the report, from nvidia-smi."""
    try:
        gpus = _smi(f"--query-gpu={','.join(GPU_FIELDS)}")
        users = _smi("--query-compute-apps=pid,used_memory")
    except (OSError, subprocess.SubprocessError) as error:
        return {"gpus": "unknown", "problems": [f"nvidia-smi failed: {error}"], "warnings": []}
    return judge_gpus(gpus, users, expected)


def judge_gpus(gpus: list[list[str]], users: list[list[str]], expected: int) -> dict[str, Any]:
    """Judges nvidia-smi's rows: `gpus` has GPU_FIELDS, and `users` has process and memory. Memory
    is in MiB; "[N/A]" where a GPU does not support a field. A clock that stays low shows in the
    measured bandwidth, and in training; that of an idle GPU is low anyway."""
    rows = [dict(zip(GPU_FIELDS, row, strict=True)) for row in gpus]
    problems, warnings = [], []
    if len(rows) < expected:
        problems.append(f"{len(rows)} of {expected} GPUs are visible")
    for row in rows:
        gpu = f"GPU {row['index']}"
        errors = row["ecc.errors.uncorrected.volatile.total"]
        if errors.isdigit() and int(errors) > 0:
            problems.append(f"{gpu} has {errors} uncorrected memory errors since it was last reset")
        used = row["memory.used"]
        if used.isdigit() and int(used) * 2**20 > IDLE_BYTES:
            problems.append(f"{gpu} is not idle: {int(used):,} MiB are in use")
    if users:
        problems.append(f"GPUs are in use by processes {', '.join(user[0] for user in users)}")
    for field in ("name", "ecc.mode.current", "clocks.max.sm"):
        found = Counter(row[field] for row in rows)
        if len(found) > 1:
            warnings.append(f"the GPUs differ in {field}: {dict(found)}")
    text = f"{len(rows)} {rows[0]['name'].removeprefix('NVIDIA ')}" if rows else "none"
    return {"gpus": text, "problems": problems, "warnings": warnings}


def _smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True
    ).stdout
    return [row for row in csv.reader(answer.splitlines(), skipinitialspace=True) if row]


def _look_at_disk(config: Config, report: dict[str, Any]) -> int:
    """The free bytes on the disk of the checkpoints. Adds a problem to `report` if one checkpoint
    does not fit, and a warning if those kept plus the one being written do not fit."""
    folder = Path(config.run.dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    # the next start deletes what a killed one has left unfinished, and what is beyond keep_last
    free, saved, keep = shutil.disk_usage(existing).free, folder / "checkpoints", config.checkpoint
    old = replaceable(saved, keep.keep_last, keep.keep_every)
    for left in (*saved.glob("partial-*"), *old):
        for path, _, names in os.walk(left):  # passes over folders that have moved
            for name in names:
                with contextlib.suppress(OSError):  # a run that still writes moves its files
                    free += os.path.getsize(os.path.join(path, name))
    if keep.interval == "never":
        return free
    one, kept = state_bytes(config), len(named_checkpoints(saved))
    missing = max(keep.keep_last + 1 - kept, 1) * one
    has = f"{existing} has {free / 1e9:,.0f} GB free, but"
    if free < one:
        report["problems"].append(f"{has} a checkpoint needs {one / 1e9:,.0f}")
    elif free < missing:
        report["warnings"].append(f"{has} checkpoints will need {missing / 1e9:,.0f} more")
    return free


def _sources() -> list[Path]:
    rooms = ("costs", "data", "model", "parallel", "runtime", "settings", "tools", "training")
    found = [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    # Emacs locks a file by a link to nowhere, .#NAME.py
    return [path for path in found if path.is_file()]
