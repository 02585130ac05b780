"""Check what a launcher or a person has set in the environment, as settings are checked."""

import os
import re

from errors import UserError

LARGEST = 2**31 - 1
OF_RANK = {  # whole number → least, most
    "WORLD_SIZE": (1, LARGEST),
    "RANK": (0, LARGEST),
    "LOCAL_WORLD_SIZE": (1, LARGEST),
    "LOCAL_RANK": (0, LARGEST),
    "MASTER_PORT": (1, 65535),
}
OF_JOB = {"SLURM_RESTART_COUNT": (0, LARGEST), "CUDA_DEVICE_MAX_CONNECTIONS": (1, 32)}
TEXTS = ("MASTER_ADDR", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID", "SLURMD_NODENAME",
         "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
         "TORCH_NCCL_HIGH_PRIORITY", "TORCHELASTIC_RUN_ID")  # fmt: skip


def check_environment(is_rank: bool = True) -> None:
    """Raise UserError if a variable that this process reads is wrong. An empty one counts as unset,
    and is removed, so that all that read it later agree.

    is_rank: whether this process is a rank of a world, not the launcher of one.
    """
    for name in (*OF_RANK, *OF_JOB, *TEXTS):
        if not os.environ.get(name, "unset").strip():
            del os.environ[name]
    if is_rank:
        found = {name: check_number(name, *bounds) for name, bounds in OF_RANK.items()}
        rank, world = found["RANK"], found["WORLD_SIZE"] or 1
        remedy = "start the ranks with torchrun or `python -m tools.launch`; for one, unset it"
        if rank is None and world > 1:
            raise UserError("WORLD_SIZE", world, "RANK is not set: which of them is this?", remedy)
        if (rank or 0) >= world:
            raise UserError("RANK", rank, f"is not below WORLD_SIZE, {world}", remedy)
    if not is_rank or os.environ.get("RANK", "0") == "0":  # the same for all ranks: one says so
        for name, bounds in OF_JOB.items():
            check_number(name, *bounds)


def check_number(name: str, least: int, most: int, why: str = "") -> int | None:
    """The value of a variable; None if it is not set."""
    text = os.environ.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text.strip()) or not least <= int(text) <= most:
        why = why or f"is not a whole number from {least} to {most}"
        raise UserError(name, text, why, "set this variable of the environment so, or unset it")
    return int(text)


def local_world(world: int) -> int:
    """The number of ranks on this node, of `world` in all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))
