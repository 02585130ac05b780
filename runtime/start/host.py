"""What a rank sets on its host before it computes: its CPUs and threads, the queues to its GPU, the
allocators, how many files it may open.

A rank runs on the CPUs next to its GPU. A host with two sockets has at least two NUMA nodes, each
with its own CPUs, memory and GPUs. A rank on the other node's CPUs launches kernels and copies to
the device across the link between the sockets, and Linux moves it back and forth. Linux allocates
memory on the node of the CPU that first touches it, so binding the CPUs also places the memory: the
pinned copies of a save, and batches.

torch has `torchrun --numa-binding`; it binds only what torchrun starts, and needs the command
numactl. The rule here is the same as its `node`, except that a GPU whose node the system does not
know is not taken to be on node 0: Linux then says that all CPUs are near.

    /sys/bus/pci/devices/0000:1b:00.0/local_cpulist     0-47,96-143
"""

import contextlib
import ctypes
import os
import resource
import socket
from pathlib import Path
from typing import Any

import torch

from errors import UserError
from parallel.config import ParallelConfig
from runtime.output import log
from settings.config import Config
from settings.layouts import choose_layout

SYSTEM = Path("/sys")
# The least that a rank needs: threads that train, run backward, serve NCCL, read data and save.
CPUS_PER_RANK = 4
OTHER_FILES = 512  # libraries, data, logs, devices, NCCL's own sockets
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def use_gpu(gpu: int, rank: int, processes: int) -> None:
    """Apply settings for one of `processes` ranks of this machine that compute on its GPUs."""
    # PyTorch's allocator extends its segments instead of reserving new ones for tensors that do not
    # fit between others; experts, whose rows vary, fragment most. It reads these variables when it
    # first allocates. torch takes some options from one name and some from the other, so a value
    # that the user has given one of them stays the only one.
    if not os.environ.get("PYTORCH_ALLOC_CONF"):
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which makes float32 products TF32.
    torch.set_float32_matmul_precision("highest")
    threads, why_not = bind_to_gpu(gpu, processes)
    if why_not:
        log(f"rank {rank} is not bound to the CPUs next to its GPU: {why_not}")
    if "OMP_NUM_THREADS" not in os.environ:  # by default each rank would use all CPUs
        torch.set_num_threads(threads)
    torch.cuda.set_device(gpu)
    # A collective's kernel must get its few multiprocessors while a matrix product runs that would
    # fill all of them, or communication in backward is not overlapped.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")


def share_cores(processes: int) -> None:
    """Apply settings for `processes` processes that compute on the cores of this machine; they do
    no harm to a single process."""
    if processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # one process per core is enough
    # By default glibc returns the memory of activations to the kernel, and mapping fresh pages in
    # every step costs a tenth of its CPU time.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent on macOS and with musl
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
    # Linux: a rank that receives a message does not preempt one that computes, so caches stay warm;
    # saves 5 %.
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        # inherited by threads that are started later
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def stay_on_this_machine() -> None:
    """Let gloo and NCCL listen only on the loopback interface, which other machines cannot reach.
    For runs on a single machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    for library in ("GLOO", "NCCL") if loopback else ():
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


# --- files and sockets ----------------------------------------------------------------------------


def open_files_needed(world_size: int) -> int:
    """An upper bound of the files and sockets that one process of a run has open.

    gloo connects every rank of a group with every other, and listens at one more socket. Three
    groups have all ranks: the default one, and those of saving (checkpoint/save.py) and stopping
    (stop.py). The groups of the mesh, one for each of its views (parallel/mesh.py), need at most
    three more of them.

    TORCH_GLOO_LAZY_INIT=1 would open only the sockets that are used. It is left unset: in torch
    2.11 to 2.13, a rank whose peer dies before their first connection may wait for it forever,
    beyond the group's timeout (github.com/pytorch/gloo issue 520).
    """
    return 6 * world_size + OTHER_FILES


def raise_open_files(world_size: int) -> str:
    """Raise this process's limit of open files to what the run needs, as far as the system lets it:
    the usual 1,024 are too few from some 85 ranks on. Returns what is wrong if that is too few: a
    problem for tools/preflight, while training may get by with fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(world_size)
    enough = hard == resource.RLIM_INFINITY or hard >= needed
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if enough else hard, hard))
    if enough:
        return ""
    return (
        f"a process may open {hard:,} files, but a rank of {world_size:,} needs up to {needed:,}: "
        "raise the hard limit of open files (ulimit -Hn; nofile in limits.conf, LimitNOFILE of "
        "slurmd)"
    )


# --- the host's queues to a GPU -------------------------------------------------------------------


def advised_connections(parallel: ParallelConfig) -> int:
    """How many queues the host should have to a GPU, CUDA_DEVICE_MAX_CONNECTIONS. Every stream's
    work reaches the GPU through one of them; CUDA has 8 unless the variable says otherwise, and
    takes 1 to 32 (CUDA C++ programming guide, "CUDA environment variables").

    1   All kernels begin in the order in which the host launched them. With tensor parallelism, a
        layer launches a collective and then the matrix product that hides it. If the product began
        first, it would fill the multiprocessors, and the collective would start when it ends.
        Megatron-LM requires 1 for tp > 1 on GPUs before Blackwell (megatron/training/arguments.py).
    32  Streams share no queue, so that none waits for another. FSDP keeps several in flight: its
        gathers, its reductions and the copies for both, beside those of NCCL and of the model. In
        one queue, a reduction that waits for a gradient would hold up the kernels launched after
        it. torchtitan recommends the number of streams, 16 or 32 (pytorch/torchtitan issue 1147).

    Where both apply, the larger cost decides. With zero_stage 0 and 1, FSDP communicates once in a
    step, and tp several times in each layer and micro-batch. With 2 and 3, FSDP communicates in
    each layer and micro-batch too, and Megatron-LM refuses 1 with FSDP.
    """
    return 1 if parallel.tp > 1 and parallel.zero_stage <= 1 else 32


def set_connections(config: Config | UserError) -> None:
    """Set the variable for a run, unless it is set already or the configuration is wrong. CUDA
    reads it when it is initialized, and each rank initializes CUDA before the ranks can agree that
    the configuration is valid. It is not left to a launcher, because there are several, and all of
    them start train.py."""
    if isinstance(config, UserError):
        return
    with contextlib.suppress(UserError):  # no layout fits: the ranks agree on that later
        config = choose_layout(config, int(os.environ.get("WORLD_SIZE", 1)))
        os.environ.setdefault(CONNECTIONS, str(advised_connections(config.parallel)))


# --- the CPUs next to a GPU -----------------------------------------------------------------------


def bind_to_gpu(gpu: int, ranks: int) -> tuple[int, str]:
    """Bind the calling thread, and all threads that it starts later, to the CPUs next to a GPU, as
    far as Slurm's --cpu-bind, a container or taskset allow them. Call it before the device's
    context exists, whose threads and host memory then follow.

    ranks: the number of this machine's ranks; rank i of them has GPU i.

    Returns: the rank's part of these CPUs, as a number of threads; and why they are all that are
        allowed, if there are too few next to the GPU.
    """
    allowed, why_not = os.sched_getaffinity(0), ""
    near = _cpus_near(gpu, allowed)  # raises if there is no such GPU
    if ranks <= torch.cuda.device_count():
        of_ranks = [_cpus_near(each, allowed) for each in sorted({*range(ranks), gpu})]
    else:  # each sees only its own GPU; the others may be beside it
        of_ranks = [near] * ranks
    sharing = sum(not near.isdisjoint(each) for each in of_ranks)
    if near != allowed and len(near) < CPUS_PER_RANK * max(sharing, 1):
        why_not = f"it may use {len(near)} of these CPUs, too few for the {sharing} ranks there"
        near, sharing = allowed, len(of_ranks)
    os.sched_setaffinity(0, near)
    return max(1, len(near) // sharing), why_not


def _cpus_near(gpu: int, allowed: set[int]) -> set[int]:
    """Those of the allowed CPUs that are next to a GPU; all if the system does not say."""
    found: Any = torch.cuda.get_device_properties(gpu)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    file = SYSTEM / "bus/pci/devices" / address / "local_cpulist"
    try:
        ends = [[int(end) for end in each.split("-")] for each in file.read_text().split(",")]
    except (OSError, ValueError):
        return allowed
    return {cpu for cpu in allowed if any(end[0] <= cpu <= end[-1] for end in ends)}
