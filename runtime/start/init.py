"""Join the world that a launcher describes, and join it again.

torchrun uses one rendezvous store for all starts of a run and never clears it. After a restart, a
rank would read the addresses of dead processes there and wait for them (torch 2.13). A prefix made
from TORCHELASTIC_RESTART_COUNT does not help, because each node's agent counts separately. So the
ranks of each start agree on a prefix that no other start has:

    rank r  posts a random name of its own       →  join/3 = 9f2c…
    rank 0  answers each name with the prefix    →  9f2c…  = 41d8…      (dead ranks never read it)
    rank r  confirms that it has joined          →  41d8…/joined += 1   (rank 0 waits for all)
"""

import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist

from errors import UserError
from runtime import signals as received
from runtime.signals import Signals
from runtime.start.environment import check_environment, check_number, local_world
from runtime.start.host import raise_open_files, share_cores, stay_on_this_machine, use_gpu

# gloo is for tensors and objects on the host: CPU offload, what ranks agree on
BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "cpu": "gloo"}
# How long a collective of NCCL waits for the other ranks of a step: torch's default, but for NCCL
# beside gloo, as here, that would be gloo's 30 minutes.
NCCL_TIMEOUT = timedelta(minutes=10)
WAIT_SECONDS = 1.0  # timeout of one wait for another rank; waits are repeated
# for all ranks to join: thousands may import the program from one file system; but one that hangs
# there would keep the others forever
JOIN_SECONDS = 1800.0
NOT_JOINED = "not all ranks joined in the time that is allowed for it"

_CACHED = type(functools.cache(lambda: None))  # functools has no public name for it


def init_distributed(signals: Signals | None = None, store: dist.Store | None = None) -> str:
    """Join the world that the launcher describes, or form a world of one process. Returns the
    device type, "cuda" or "cpu".

    Args:
        signals: the signals received so far; after one, the wait for other ranks is limited.
        store: where the ranks find each other; None: torchrun's store, or a local one if there is
            no launcher.
    """
    check_environment()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    processes = local_world(world_size)
    gpus = torch.cuda.device_count()
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    # A node that has lost its GPUs since the start before sees none, but has the driver's module.
    # Without restarts it may be a laptop or a login node that can use none: it trains on the CPU.
    lost = restarts and torch.version.cuda and os.path.exists("/proc/driver/nvidia/version")
    lost = lost and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1", "NoDevFiles")
    if device == "cpu" and (gpus or lost):  # the CPU must not take over: others would wait for it
        there = f"there are {gpus} GPUs" if gpus else "NVIDIA's driver is loaded"
        why = f"CUDA does not work here, but {there}"
        sys.exit(f"rank {rank}: {why}; to train on the CPU, set CUDA_VISIBLE_DEVICES=")
    if device == "cuda":
        why = f"this process sees {gpus} GPUs, numbered from 0"
        try:
            gpu = check_number("LOCAL_RANK", 0, gpus - 1, why) or 0
        except UserError as error:
            if not restarts:
                raise
            # The start before may have had this GPU, which has then failed. That is no mistake of
            # the user's, for which the job would end. (The count of restarts does not tell: an
            # agent counts only what its own ranks have caused.)
            sys.exit(f"rank {rank}: {error}")
        use_gpu(gpu, rank, processes)
    else:
        share_cores(processes)
    # a process without a launcher has no such variable
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == str(world_size):
        stay_on_this_machine()
    raise_open_files(world_size)
    if store is None:
        store = next(dist.rendezvous("env://"))[0] if "RANK" in os.environ else dist.HashStore()
    heard = signals.heard if signals is not None else {}
    store = fresh_store(store, rank, world_size, heard)
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=world_size)
    return device


def limit_waits() -> None:
    """Give NCCL's part of all groups its timeout; call it when the groups exist and the checkpoint
    is loaded. gloo keeps its 30 minutes: a file's checksum, or a save, may take longer than 10."""
    for group, (backend, _) in dist.distributed_c10d._world.pg_map.items():
        if backend == BACKENDS["cuda"]:
            group._get_backend(torch.device("cuda"))._set_default_timeout(NCCL_TIMEOUT)


def join_again(signals: Signals) -> None:
    """End this world and join it again, on the store of the first time: all process groups are new,
    as after a restart."""
    store = dist.distributed_c10d._get_default_store()
    backend = dist.get_backend()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # no rank may tear its connections down while another still uses them
    dist.destroy_process_group()
    forget_meshes()
    torch.compiler.reset()  # else other sizes become symbolic, and each recompilation counts
    gc.collect()  # process groups are in reference cycles, and so may be the model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    again = fresh_store(store, rank, world_size, signals.heard)
    dist.init_process_group(backend, store=again, rank=rank, world_size=world_size)


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


# --- how the ranks of one start find each other ---------------------------------------------------


def fresh_store(
    store: dist.Store, rank: int, world_size: int, heard: Mapping[int, float]
) -> dist.Store:
    """Return a view of `store` that only this start's ranks use; see the module docstring.

    heard: signals received so far, as in `Signals.heard`.
    """
    mine = uuid4().hex
    patience = Patience(heard)
    if rank > 0:
        store.set(f"join/{rank}", mine)
        while not comes(store, mine):
            patience.look()
        start = store.get(mine).decode()
        store.add(f"{start}/joined", 1)
        return dist.PrefixStore(start, store)

    def unheard() -> str:  # in this start or an earlier one
        absent = [other for other in range(1, world_size) if not store.check([f"join/{other}"])]
        return f"; nothing was heard of ranks {absent[:20]}" if absent else ""

    answered: set[bytes] = set()
    while store.add(f"{mine}/joined", 0) < world_size - 1:
        for other in range(1, world_size):
            asking = f"join/{other}"
            if store.check([asking]) and (name := store.get(asking)) not in answered:
                store.set(name.decode(), mine)
                answered.add(name)
        time.sleep(0.01)
        patience.look(unheard)
    return dist.PrefixStore(mine, store)


def comes(store: dist.Store, name: str) -> bool:
    """Whether `name` is set within WAIT_SECONDS; blocks in the store, without polling."""
    try:
        store.wait([name], timedelta(seconds=WAIT_SECONDS))
    except RuntimeError:  # a timeout; a FileStore raises no more specific error
        # If the store itself is lost, `check` raises.
        return bool(store.check([name]))
    return True


class Patience:
    """Limits the wait for other ranks, much more once a signal was received: torchrun sends SIGTERM
    when a rank has died."""

    def __init__(self, heard: Mapping[int, float]) -> None:
        self.heard, self.began = heard, time.monotonic()

    def look(self, more: Callable[[], str] = str) -> None:
        """Exit if the time is over, and say `more`."""
        if time.monotonic() - self.began > JOIN_SECONDS:
            sys.exit(NOT_JOINED + more())
        if not self.heard:
            return
        since = max(self.began, min(self.heard.values()))
        if time.monotonic() - since > received.PATIENCE_SECONDS:
            names = ", ".join(signal.Signals(number).name for number in self.heard)
            sys.exit(
                f"{names} was received, and not all ranks joined in {received.PATIENCE_SECONDS} s"
            )
