"""Chooses how many queues the host has to a GPU, by the layout: CUDA_DEVICE_MAX_CONNECTIONS.

Every stream's work reaches the GPU through one of these queues; CUDA has 8 unless the variable
says otherwise, and takes 1 to 32 (CUDA C++ programming guide, "CUDA environment variables").

1   All kernels begin in the order in which the host launched them. With tensor parallelism, a
    layer launches a collective and then the matrix product that hides it. If the product began
    first, it would fill the multiprocessors, and the collective would start when it ends.
    Megatron-LM requires 1 for tp > 1 on GPUs before Blackwell (megatron/training/arguments.py).
32  Streams share no queue, so that none waits for another. FSDP keeps several in flight: its
    gathers, its reductions and the copies for both, beside those of NCCL and of the model. In one
    queue, a reduction that waits for a gradient would hold up the kernels launched after it.
    torchtitan recommends the number of streams, 16 or 32 (pytorch/torchtitan issue 1147).

Where both apply, the larger cost decides. With zero_stage 0 and 1, FSDP communicates once in a
step, and tp several times in each layer and micro-batch. With 2 and 3, FSDP communicates in each
layer and micro-batch too, and Megatron-LM refuses 1 with FSDP.
"""

import contextlib
import os

from errors import UserError
from parallel.config import ParallelConfig
from settings.layouts import choose_layout
from settings.load import load_config

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def advised_connections(parallel: ParallelConfig) -> int:
    """The number of queues that suits a layout; the module's docstring has the reasons."""
    return 1 if parallel.tp > 1 and parallel.zero_stage <= 1 else 32


def set_connections(arguments: list[str]) -> None:
    """Set the variable for a run with these arguments of train.py, unless it is set already.

    CUDA reads it when it is initialized, and each rank initializes CUDA before the ranks can agree
    that the configuration is valid. So this reads the layout first. It is not left to a
    launcher, because there are several, and all of them start train.py.

    arguments: a configuration file, then section.key=value overrides.
    """
    # train.py reads the configuration again, and then one rank reports what is wrong with it
    with contextlib.suppress(UserError, IndexError):
        config = load_config(arguments[0], arguments[1:])
        config = choose_layout(config, int(os.environ.get("WORLD_SIZE", 1)))
        os.environ.setdefault(VARIABLE, str(advised_connections(config.parallel)))


def connections_notice(parallel: ParallelConfig) -> list[str]:
    """A line for the log if the user's value is not the advised one; otherwise nothing."""
    value, advised = os.environ.get(VARIABLE), str(advised_connections(parallel))
    if value in (None, advised):
        return []
    return [
        f"{VARIABLE} is {value}, as it was set; with parallel.tp={parallel.tp} and "
        f"parallel.zero_stage={parallel.zero_stage}, {advised} is usually faster "
        "(runtime/start/connections.py)"
    ]
