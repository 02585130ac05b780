"""Starts a run on this machine, on what it has: `python -m tools.launch CONFIG [section.key=value …]`. `make train` calls it.

Without a GPU: 8 processes over gloo, one thread each, laid out as the file says. With GPUs: one process for each of as many as
are a power of two, at most 8, over NCCL, in bfloat16, with the axes as large as they allow. Overrides that you give come last,
so they win. To start a run of your own layout, call torchrun yourself (README, "More GPUs, more machines"). This is torchrun's
own launcher, but for one thing: its processes are forked from one that has imported everything, and share that memory and the
time that it took.
"""

import logging
import multiprocessing
import os
import sys
import uuid
from collections.abc import Callable

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PRELOAD = ["train", "torch._dynamo"]  # the second is imported when the first DTensor is used
MAX_PROCESSES = 8  # the smallest world in which tensor, pipeline and data parallelism all have two ranks


def layout(num_gpus: int) -> tuple[int, list[str]]:
    """How many processes to start, and the overrides that fit the configuration to them.

    GPUs are used in powers of two, which divide the batch and the heads; the doublings go to tp, then pp, then dp_shard.
    """
    if num_gpus == 0:
        return MAX_PROCESSES, []
    processes = 1 << (min(num_gpus, MAX_PROCESSES).bit_length() - 1)
    tp = min(processes, 2)
    pp = min(processes // tp, 2)
    return processes, [f"parallel.tp={tp}", f"parallel.pp={pp}", "parallel.dp_shard=-1", "train.dtype=bfloat16"]


def share_cores() -> None:
    """Settings for more processes than cores, which those that are started inherit."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes share the cores already
    # glibc gives the memory of activations back to the kernel, and every step pays for fresh pages: a tenth of its CPU time.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 30))
    # A rank that has got a message does not interrupt the one that computes, and the caches stay warm: 5 % (Linux only).
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def start_processes(processes: int, function: Callable[..., None], *arguments: object) -> int:
    """`function(*arguments)` as ranks of one world on this machine; the first failure's exit status, or 0."""
    if not torch.cuda.device_count():
        share_cores()
    # Everything stays on this machine: gloo talks over loopback, and nobody looks the host's name up.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    multiprocessing.set_forkserver_preload(PRELOAD)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port
        local_addr="localhost",
        max_restarts=0,
        start_method="forkserver",
    )
    # It logs a traceback of its own where a process ends with another status than 0. The process has said why.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, function)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say anything
            print(f"rank {rank} was killed by signal {-failure.exitcode}; the others were stopped", file=sys.stderr, flush=True)
        return max(1, failure.exitcode)
    except SignalException as error:  # passed on to the processes, which have saved
        return 128 + error.sigval
    return 0


def run_rank(arguments: list[str]) -> None:
    """A rank's life, as train.py begins it."""
    from training import signals

    signals.hold()
    import train

    train.main(arguments)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    config, *given = sys.argv[1:]
    num_gpus = torch.cuda.device_count()
    processes, overrides = layout(num_gpus)
    arguments = [config, *overrides, *given]
    print(f"+ torchrun --standalone --nproc-per-node {processes} train.py", *arguments, flush=True)
    sys.exit(start_processes(processes, run_rank, arguments))


if __name__ == "__main__":
    main()
