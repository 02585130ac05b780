"""Join the world that a launcher describes, and make the settings of a rank's CPUs and GPU."""

import ctypes
import functools
import gc
import os
import resource
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.messages import log
from runtime.signals import Signals
from runtime.start.environment import check_environment, check_number
from runtime.start.numa import bind_to_gpu
from runtime.start.parts import parts
from runtime.start.rendezvous import fresh_store

# gloo is for tensors and objects on the host: CPU offload, checkpoint planning
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
# How long a collective of NCCL waits for the other ranks of a step: torch's default, but for NCCL
# beside gloo, as here, that would be gloo's 30 minutes.
NCCL_TIMEOUT = timedelta(minutes=10)
OTHER_FILES = 512  # libraries, data, logs, devices, NCCL's own sockets
_CACHED = type(functools.cache(lambda: None))  # functools has no public name for it
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


@parts(before="import", inside="join")
def init_distributed(signals: Signals | None = None, store: dist.Store | None = None) -> str:
    """Join the world that the launcher describes, or form a world of one process. Returns the
    device type, "cuda" or "cpu".

    Args:
        signals: the signals received so far; after one, the wait for other ranks is limited.
        store: where the ranks find each other; None: torchrun's store, or a local one if there is
            no launcher.
    """
    check_environment(store=store)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if device == "cuda":
        gpus = torch.cuda.device_count()
        why = f"this process sees {gpus} GPUs, numbered from 0"
        use_gpu(check_number("LOCAL_RANK", 0, gpus - 1, why) or 0, rank, processes)
    else:
        share_cores(processes)
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        stay_on_this_machine()
    raise_open_files(world_size)
    if store is None:
        store = next(dist.rendezvous("env://"))[0] if "RANK" in os.environ else dist.HashStore()
    heard = signals.heard if signals is not None else {}
    _join(BACKENDS[device], fresh_store(store, rank, world_size, heard), rank, world_size)
    return device


def _join(backend: str, store: dist.Store, rank: int, world_size: int) -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def limit_waits() -> None:
    """Give NCCL's part of all groups its timeout; call it when the groups exist and the checkpoint
    is loaded. gloo keeps its 30 minutes: a file's checksum, or a save, may take longer than 10."""
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        if backend == BACKENDS["cuda"]:
            group._get_backend(torch.device("cuda"))._set_default_timeout(NCCL_TIMEOUT)


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


def raise_open_files(world_size: int) -> None:
    """Raise this process's limit of open files to what the run needs, as far as the system lets it:
    the usual 1,024 are too few from some 85 ranks on. tools/preflight compares the two before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_needed(world_size)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def stay_on_this_machine() -> None:
    """Let gloo and NCCL listen only on the loopback interface, which other machines cannot reach.
    For runs on a single machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    for library in ("GLOO", "NCCL"):
        if loopback is not None:
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


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
    share = bind_to_gpu(gpu, processes)
    if share.why_not:
        log(f"rank {rank} is not bound to the CPUs next to its GPU: {share.why_not}")
    if "OMP_NUM_THREADS" not in os.environ:  # by default each rank would use all CPUs
        torch.set_num_threads(share.threads)
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


def join_again(signals: Signals) -> None:
    """End this world and join it again, on the store of the first time: all process groups are new,
    as after a restart."""
    store = dist.distributed_c10d._get_default_store()
    backend = dist.get_backend()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # no rank may tear its connections down while another still uses them
    dist.destroy_process_group()
    forget_meshes()
    gc.collect()  # process groups are in reference cycles, and so may be the model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    again = fresh_store(store, rank, world_size, signals.heard)
    _join(backend, again, rank, world_size)


def forget_meshes() -> None:
    """Clear torch's caches that are keyed by meshes. Meshes of the same shape compare equal, so a
    cached result could contain a mesh whose process groups no longer exist, or belong to another
    world under the same name. A mesh that a cache keeps also keeps its groups' threads, of which
    gloo wakes one in three every 10 ms."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.") and module is not None:
            values = list(vars(module).values())
            # not isinstance: it makes torch warn of a deprecated object
            classes = [value for value in values if issubclass(type(value), type)]
            values += [value for each in classes for value in vars(each).values()]
            for value in values:
                function = value.__func__ if type(value) is staticmethod else value
                if type(function) is _CACHED:
                    function.cache_clear()
