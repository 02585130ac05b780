"""When a suspicion is not examined, because the examination might end the run.

An error of one rank in the middle of an examination ends the run: the others wait for it in
collectives. And if the suspicion comes again after the restart, so does the error. So there is none
if a GPU has too little memory left, or if an examination of the same step did not end before.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from runtime.health.verdicts import NOT_EXAMINED
from runtime.log.events import read_events
from runtime.messages import from_rank_0

MORE_BYTES = 512 << 20  # that an examination takes beyond a step, for hashes and repeatable sums


def refusal(folder: Path, step: int, device: str) -> str:
    """Why the examination after `step` must not be made, the same on every rank; or the empty
    string. Every rank calls it, between steps."""
    lacking = torch.tensor(_lacking_bytes(device), device=device)
    dist.all_reduce(lacking, op=dist.ReduceOp.MAX)  # one int64, over the world
    if lacking.item() > 0:
        return f"a rank lacks {lacking.item() / 2**20:,.0f} MiB of GPU memory to compute it again"
    if from_rank_0(lambda: _did_not_end(folder, step), device):
        return "an examination of this step was begun before, and did not end"
    return ""


def _lacking_bytes(device: str) -> int:
    """What a GPU lacks to compute as much as in the steps so far, and MORE_BYTES; ≤ 0: nothing."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    wanted = torch.cuda.max_memory_allocated() - held + MORE_BYTES
    return wanted - (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - held)


def _did_not_end(folder: Path, step: int) -> bool:
    """Whether the last examination that was begun was of this step, and found nothing."""
    last = None
    for event in read_events(folder):
        if event["event"] in ("examining", "suspicion"):
            last = last if event.get("verdict") == NOT_EXAMINED else event
    return last is not None and last["event"] == "examining" and last.get("step") == step
