"""Starts a run on this machine, on what it has: `python -m tools.launch CONFIG [section.key=value …]`. `make train` calls it.

Without a GPU: 8 processes over gloo, one thread each, laid out as the file says. With GPUs: one process per GPU over NCCL, in
bfloat16, with the axes as large as the GPUs allow. Overrides that you give come last, so they win. To start a run of your own
layout, call torchrun yourself (README, "More GPUs, more machines").
"""

import os
import sys

import torch

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


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    config, *given = sys.argv[1:]
    num_gpus = torch.cuda.device_count()
    processes, overrides = layout(num_gpus)
    if num_gpus == 0:
        os.environ["OMP_NUM_THREADS"] = "1"  # eight processes share the cores already
    # Everything stays on this machine: gloo talks over loopback, and nobody looks the host's name up.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    command = [*torchrun, "--nproc-per-node", str(processes), "train.py", config, *overrides, *given]
    print("+", " ".join(command[1:]), flush=True)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
