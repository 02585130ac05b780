"""What a node says about itself, for the preflight: GPUs, disk, addresses, code, packages."""

import csv
import fcntl
import hashlib
import io
import ipaddress
import platform
import shutil
import socket
import struct
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from model.transformer import num_parameters
from training.config import Config
from training.optimizers import state_bytes

ROOT = Path(__file__).parent.parent.parent
SIOCGIFADDR = 0x8915  # of Linux's sockios.h: an interface's address
SMI_SECONDS = 15  # a sick GPU makes nvidia-smi wait forever
IDLE_BYTES = 2 * 2**30  # the driver itself keeps some hundred MiB
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


def look_at_node(name: str, config: Config, device: str, ranks_per_node: int) -> dict[str, Any]:
    """`name`; `gpus`, in words; `free_bytes` where the run folder will be; `code` and `packages`,
    each name → checksum or version; `problems`, which forbid training, and `warnings`."""
    report: dict[str, Any] = {
        "name": name,
        "gpus": "none asked for",
        "problems": [],
        "warnings": [],
    }
    if device == "cuda":
        report |= look_at_gpus(ranks_per_node)
    report["free_bytes"] = _look_at_disk(config, report)
    report["warnings"] += judge_addresses(addresses())
    report["code"] = {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(_sources())
    }
    report["packages"] = {"python": platform.python_version()} | {
        package.metadata["Name"]: package.version for package in metadata.distributions()
    }
    return report


def addresses() -> list[tuple[str, str]]:
    """Interface and address, of each interface: its first of IPv4, all of IPv6 (Linux only)."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
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


def judge_addresses(found: list[tuple[str, str]]) -> list[str]:
    """A warning where somebody outside may reach torchrun's port, which listens on all of them."""
    public = [
        f"{address} ({name})" for name, address in found if ipaddress.ip_address(address).is_global
    ]
    if not public:
        return []
    return [
        f"{', '.join(public)} can be reached from outside, unless a firewall forbids it; "
        "whoever reaches the port of torchrun"
        " can run code as you (docs/slurm.md)"
    ]


def look_at_gpus(expected: int) -> dict[str, Any]:
    """`gpus`, `problems` and `warnings`, by nvidia-smi."""
    try:
        gpus = _smi(f"--query-gpu={','.join(GPU_FIELDS)}")
        users = _smi("--query-compute-apps=pid,used_memory")
    except (OSError, subprocess.SubprocessError) as error:
        return {
            "gpus": "unknown",
            "problems": [f"nvidia-smi does not answer: {error}"],
            "warnings": [],
        }
    return judge_gpus(gpus, users, expected)


def judge_gpus(gpus: list[list[str]], users: list[list[str]], expected: int) -> dict[str, Any]:
    """What rows of GPU_FIELDS, and of process and memory, say.

    Clocks are in MHz and memory in MiB; "[N/A]" where a GPU has no such thing. An idle GPU's clock
    is low, and rises with work: it is reported, and a clock that stays low shows in the bandwidth,
    and in training.
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
        ("name", "kinds of GPU"),
        ("ecc.mode.current", "settings of ECC"),
        ("clocks.max.sm", "top clocks"),
    ):
        found = Counter(row[field] for row in rows)
        if len(found) > 1:
            warnings.append(f"several {what}: {dict(found)}")
    if not rows:
        return {"gpus": "none", "problems": problems, "warnings": warnings}
    first = rows[0]
    clocks = sorted({row["clocks.sm"] for row in rows})
    gpus_text = (
        f"{len(rows)} {first['name'].removeprefix('NVIDIA ')}, "
        f"{'–'.join({clocks[0]: 1, clocks[-1]: 1})} of "
    )
    gpus_text += f"{first['clocks.max.sm']} MHz, ECC {first['ecc.mode.current'].lower()}"
    return {"gpus": gpus_text, "problems": problems, "warnings": warnings}


def _smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True
    ).stdout
    return [[field.strip() for field in row] for row in csv.reader(io.StringIO(answer)) if row]


def _look_at_disk(config: Config, report: dict[str, Any]) -> int:
    """Bytes free where checkpoints will be; the one being written and those kept must have room."""
    folder = Path(config.run.dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    one = num_parameters(config.model) * state_bytes(config)
    kept = len(list((folder / "checkpoints").glob("step-????????")))
    missing = max(config.checkpoint.keep_last + 1 - kept, 1) * one
    if config.checkpoint.interval and free < one:
        report["problems"].append(
            f"{existing} has {free / 1e9:,.0f} GB free, and one checkpoint takes {one / 1e9:,.0f}"
        )
    elif config.checkpoint.interval and free < missing:
        report["warnings"].append(
            f"{existing} has {free / 1e9:,.0f} GB free; checkpoints will take {missing / 1e9:,.0f} "
            "more"
        )
    return free


def _sources() -> list[Path]:
    rooms = ("data", "model", "parallel", "tools", "training")
    return [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
