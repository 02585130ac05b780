"""A node's report for the preflight: GPUs, disk, addresses, code, packages."""

import contextlib
import csv
import fcntl
import hashlib
import ipaddress
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from errors import UserError
from parallel.disk import DiskMemory
from runtime.checkpoint.folder import named_checkpoints
from runtime.start.host import open_files_needed
from runtime.trainer_state import state_bytes
from settings.config import Config

ROOT = Path(__file__).parent.parent.parent
SIOCGIFADDR = 0x8915  # returns an interface's address (Linux's sockios.h)
SMI_SECONDS = 15  # time limit, because a faulty GPU can make nvidia-smi wait forever
RATE_BYTES = 1 << 30  # written and read to measure a disk
IDLE_BYTES = 2 * 2**30  # a GPU with more in use is not idle; the driver uses some hundred MiB
GPU_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.used",
    "clocks.sm",
    "clocks.max.sm",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)


def look_at_node(
    name: str, config: Config, device: str, ranks_per_node: int, world_size: int
) -> dict[str, Any]:
    """This node's report: `name`; `gpus`, a description; `free_bytes` on the run folder's disk;
    `disk`, with parallel.offload=disk, its bytes per second; `code`, path → checksum; `packages`,
    name → version; `problems`, which exclude the node from training; and `warnings`."""
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
        report["disk"] = _disk_rate(config.parallel.offload_dir, report["problems"])
    report["problems"] += judge_open_files(world_size)
    report["warnings"] += judge_addresses(addresses())
    report["code"] = {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(_sources())
    }
    report["packages"] = {"python": platform.python_version()} | {
        str(package.metadata["Name"]): package.version for package in metadata.distributions()
    }
    return report


def addresses() -> list[tuple[str, str]]:
    """Every (interface, address): each interface's first IPv4 and all its IPv6 addresses (Linux
    only)."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            found.append((name, socket.inet_ntoa(answer[20:24])))
    try:
        rows = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        return found
    return found + [
        (row.split()[-1], str(ipaddress.IPv6Address(int(row.split()[0], 16))))
        for row in rows
        if row
    ]


def judge_open_files(world_size: int) -> list[str]:
    """A problem if a rank may not open as many sockets as a run of `world_size` ranks needs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(world_size)
    if most == resource.RLIM_INFINITY or most >= needed:
        return []
    return [
        f"a process may open {most:,} files, but a rank of {world_size:,} needs up to {needed:,}: "
        "raise the hard limit of open files (ulimit -Hn; nofile in limits.conf, LimitNOFILE of "
        "slurmd)"
    ]


def judge_addresses(found: list[tuple[str, str]]) -> list[str]:
    """A warning if torchrun's port, open on all addresses, may be reachable from outside."""
    public = [
        f"{address} ({name})" for name, address in found if ipaddress.ip_address(address).is_global
    ]
    if not public:
        return []
    return [
        f"{', '.join(public)} can be reached from outside, unless a firewall prevents it; "
        "anyone who can reach torchrun's port"
        " can run code as you (docs/running.md)"
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
    """Judges nvidia-smi's rows: `gpus` has GPU_FIELDS, and `users` has process and memory.

    Clocks are in MHz and memory in MiB; "[N/A]" where a GPU does not support a field. The current
    clock is only reported, because an idle GPU's clock is low and rises under load; a clock that
    stays low would show in the measured bandwidth, and in training.
    """
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
    for field, what in (
        ("name", "GPU models"),
        ("ecc.mode.current", "ECC settings"),
        ("clocks.max.sm", "maximum clocks"),
    ):
        found = Counter(row[field] for row in rows)
        if len(found) > 1:
            warnings.append(f"different {what}: {dict(found)}")
    text = "none"
    if rows:
        name, ecc = rows[0]["name"].removeprefix("NVIDIA "), rows[0]["ecc.mode.current"].lower()
        clocks = sorted({row["clocks.sm"] for row in rows})
        between = "–".join({clocks[0]: 1, clocks[-1]: 1})
        text = f"{len(rows)} {name}, {between} of {rows[0]['clocks.max.sm']} MHz, ECC {ecc}"
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
    # what a start that was killed has left unfinished, the next one deletes (checkpoint/lease.py)
    free = shutil.disk_usage(existing).free
    for left in (folder / "checkpoints").glob("partial-*"):
        for path, _, names in os.walk(left):  # passes over folders that have moved
            for name in names:
                with contextlib.suppress(OSError):  # a run that still writes moves its files
                    free += os.path.getsize(os.path.join(path, name))
    one = state_bytes(config)
    kept = len(named_checkpoints(folder / "checkpoints"))
    missing = max(config.checkpoint.keep_last + 1 - kept, 1) * one
    saves = config.checkpoint.interval != "never"
    if saves and free < one:
        report["problems"].append(
            f"{existing} has {free / 1e9:,.0f} GB free, but a checkpoint needs {one / 1e9:,.0f}"
        )
    elif saves and free < missing:
        report["warnings"].append(
            f"{existing} has {free / 1e9:,.0f} GB free, but checkpoints will need "
            f"{missing / 1e9:,.0f} more"
        )
    return free


def _disk_rate(folder: str, problems: list[str]) -> float:
    """Bytes per second that this node writes to and reads from parallel.offload_dir, half of each;
    0 if it cannot, which is a problem."""
    try:
        file = DiskMemory(folder, RATE_BYTES)
        file.new_zeros(torch.zeros((), dtype=torch.uint8), (RATE_BYTES,)).fill_(1)
        began = time.perf_counter()
        file.write()
        file.read()
        return 2 * RATE_BYTES / (time.perf_counter() - began)
    except (UserError, OSError) as error:
        problems.append(" ".join(str(error).split()))
        return 0.0


def _sources() -> list[Path]:
    rooms = ("costs", "data", "model", "parallel", "runtime", "settings", "tools", "training")
    found = [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    # Emacs locks a file by a link to nowhere, .#NAME.py
    return [path for path in found if path.is_file()]
