"""Bind a rank to the CPUs next to its GPU.

A host with two sockets has at least two NUMA nodes, each with its own CPUs, memory and GPUs. A
rank on the other node's CPUs launches kernels and copies to the device across the link between the
sockets, and Linux moves it back and forth. Linux allocates memory on the node of the CPU that first
touches it, so binding the CPUs also places the memory: the pinned copies of a save, and batches.

torch has `torchrun --numa-binding`; it binds only what torchrun starts, and needs the command
numactl. The rules here are the same as its `node`, except that a GPU whose node the system does not
know (-1) is not taken to be on node 0.

    /sys/bus/pci/devices/0000:1b:00.0/numa_node     0
    /sys/devices/system/node/node0/cpulist          0-47,96-143
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

SYSTEM = Path("/sys")
# The least that a rank needs: threads that train, run backward, serve NCCL, read data and save.
CPUS_PER_RANK = 4


class Share(NamedTuple):
    """The CPUs of a rank, and with how many others it shares them."""

    cpus: set[int]
    ranks: int  # of this machine, that run on these CPUs, this one included
    why_not: str = ""  # why these are all that are allowed; "": they are near, or there is one node

    @property
    def threads(self) -> int:
        """A rank's part of the CPUs."""
        return max(1, len(self.cpus) // self.ranks)


def bind_to_gpu(gpu: int, ranks: int, system: Path = SYSTEM) -> Share:
    """Bind the calling thread, and all threads that it starts later, to the CPUs of a GPU's NUMA
    node, as far as they are allowed. Call it before the device's context exists, whose threads
    and host memory then follow.

    ranks: the number of this machine's ranks; rank i of them has GPU i.
    """
    mine = pci_address(gpu)  # raises if there is no such GPU
    if ranks <= torch.cuda.device_count():
        everyone = [pci_address(each) for each in sorted({*range(ranks), gpu})]
    else:  # each sees only its own GPU; the others may be beside it
        everyone = [mine] * ranks
    share = cpus_near(mine, everyone, os.sched_getaffinity(0), system)
    os.sched_setaffinity(0, share.cpus)
    return share


def pci_address(gpu: int) -> str:
    """As in sysfs: 0000:1b:00.0."""
    found: Any = torch.cuda.get_device_properties(gpu)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def cpus_near(gpu: str, gpus: Sequence[str], allowed: set[int], system: Path = SYSTEM) -> Share:
    """The CPUs on which the rank of a GPU should run.

    Args:
        gpu: its PCI address. gpus: those of all ranks of the host.
        allowed: the CPUs that Slurm's --cpu-bind, a container or taskset leave to this process. No
            others are chosen.
        system: where sysfs is mounted.
    """
    nodes = {
        int(folder.name.removeprefix("node")): _cpus_of(folder)
        for folder in (system / "devices/system/node").glob("node[0-9]*")
    }
    if len([node for node, cpus in nodes.items() if cpus]) < 2:
        return Share(allowed, len(gpus))
    node = _node_of(gpu, system)
    if node not in nodes:
        return Share(allowed, len(gpus), f"the system does not know the NUMA node of {gpu}")
    near = allowed & nodes[node]
    ranks = [_node_of(each, system) for each in gpus].count(node)
    if len(near) < CPUS_PER_RANK * ranks:
        why = (
            f"it may use {len(near)} CPUs of NUMA node {node}, too few for the {ranks} ranks there"
        )
        return Share(allowed, len(gpus), why)
    return Share(near, ranks)


def _cpus_of(node: Path) -> set[int]:
    """The CPUs of a node; some nodes have only memory."""
    try:
        ranges = (node / "cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    ends = [[int(end) for end in each.split("-")] for each in ranges if each]
    return {cpu for end in ends for cpu in range(end[0], end[-1] + 1)}


def _node_of(address: str, system: Path) -> int:
    """The NUMA node of a PCI device; -1 if the system does not say."""
    try:
        return int((system / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return -1
