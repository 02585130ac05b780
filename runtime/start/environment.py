"""Check what a launcher or a person has set in the environment, as settings are checked."""

import os
import re
from typing import Any

from errors import UserError
from runtime.checkpoint.lease_holder import JOB_ID

LARGEST = 2**31 - 1
OF_RANK = {  # whole number → least, most
    "WORLD_SIZE": (1, LARGEST),
    "RANK": (0, LARGEST),
    "LOCAL_WORLD_SIZE": (1, LARGEST),
    "LOCAL_RANK": (0, LARGEST),
    "MASTER_PORT": (1, 65535),
}
OF_JOB = {
    "SLURM_RESTART_COUNT": (0, LARGEST),
    "CUDA_DEVICE_MAX_CONNECTIONS": (1, 32),
}
TEXTS = ("MASTER_ADDR", "SLURM_NNODES", "SLURM_NODEID", "SLURM_JOB_ID", "SLURMD_NODENAME",
         "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
         "TORCH_NCCL_HIGH_PRIORITY", "TORCHELASTIC_RUN_ID")  # fmt: skip


def check_environment(is_rank: bool = True, store: Any = None) -> None:
    """Raise UserError if a variable that this process reads is wrong. An empty one counts as unset,
    and is removed, so that all that read it later agree.

    Args:
        is_rank: whether this process is a rank of a world, not the launcher of one.
        store: where the ranks find each other; None: where the variables say.
    """
    for name in (*OF_RANK, *OF_JOB, *TEXTS):
        if not os.environ.get(name, "unset").strip():
            del os.environ[name]
    if is_rank:
        _check_rank(store)
    if not is_rank or os.environ.get("RANK", "0") == "0":  # the same for all ranks: one says so
        for name, bounds in OF_JOB.items():
            check_number(name, *bounds)
        job = os.environ.get("SLURM_JOB_ID", "")
        if not re.fullmatch(JOB_ID, job):
            raise UserError("SLURM_JOB_ID", job, "is not the id of a job", "unset it")


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


def _check_rank(store: Any) -> None:
    found = {name: check_number(name, *bounds) for name, bounds in OF_RANK.items()}
    world, processes = found["WORLD_SIZE"] or 1, found["LOCAL_WORLD_SIZE"]
    remedy = "start the ranks with torchrun or `python -m tools.launch`; for one process, unset it"
    if found["RANK"] is None and world > 1:
        raise UserError("WORLD_SIZE", world, "RANK is not set: which of them is this?", remedy)
    if (found["RANK"] or 0) >= world:
        raise UserError("RANK", found["RANK"], f"is not below WORLD_SIZE, {world}", remedy)
    if found["WORLD_SIZE"] is not None and (processes or 0) > world:
        raise UserError("LOCAL_WORLD_SIZE", processes, f"is above WORLD_SIZE, {world}", remedy)
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if found["RANK"] is not None and store is None and name not in os.environ:
            raise UserError("RANK", found["RANK"], f"{name} is not set beside it", remedy)
