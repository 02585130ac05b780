"""Pipeline schedules as data: pure functions from sizes to each rank's list of actions. No torch here.

A schedule is a function `(num_ranks, stages_per_rank, num_microbatches) → list of actions for each rank`. To add one, write
the function and name it in `SCHEDULES`; the runner carries out whatever it returns.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from errors import UserError


class Kind(Enum):
    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """`kind` of micro-batch `microbatch` on global stage `stage` (0 holds the embedding)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


def gpipe(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2019, https://arxiv.org/abs/1811.06965). Four stages, four micro-batches:

        rank 0 ▏F0 F1 F2 F3                   B0 B1 B2 B3
        rank 1 ▏   F0 F1 F2 F3             B0 B1 B2 B3
        rank 2 ▏      F0 F1 F2 F3       B0 B1 B2 B3
        rank 3 ▏         F0 F1 F2 F3 B0 B1 B2 B3

    Every rank holds the activations of all micro-batches at once. Bubble (p − 1) / m of the compute time.
    """
    _one_stage_per_rank("gpipe", stages_per_rank)
    return [
        [Action(Kind.FORWARD, rank, m) for m in range(num_microbatches)]
        + [Action(Kind.BACKWARD, rank, m) for m in range(num_microbatches)]
        for rank in range(num_ranks)
    ]


def one_forward_one_backward(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[Action]]:
    """1F1B (PipeDream-flush: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2). Four stages:

        rank 0 ▏F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
        rank 1 ▏   F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
        rank 2 ▏      F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
        rank 3 ▏         F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    The bubble is GPipe's, but rank r never holds more than p − r micro-batches' activations.
    """
    _one_stage_per_rank("1f1b", stages_per_rank)
    ranks = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_microbatches)
        actions = [Action(Kind.FORWARD, rank, m) for m in range(warmup)]
        for m in range(warmup, num_microbatches):  # steady state: one forward, one backward
            actions += [Action(Kind.FORWARD, rank, m), Action(Kind.BACKWARD, rank, m - warmup)]
        actions += [Action(Kind.BACKWARD, rank, m) for m in range(num_microbatches - warmup, num_microbatches)]
        ranks.append(actions)
    return ranks


def _one_stage_per_rank(name: str, stages_per_rank: int) -> None:
    if stages_per_rank != 1:
        raise UserError(
            "parallel.stages_per_rank",
            stages_per_rank,
            f"schedule {name} runs one stage per rank",
            "set parallel.stages_per_rank=1",
        )


Schedule = Callable[[int, int, int], list[list[Action]]]

SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def rank_of_stage(stage: int, num_ranks: int) -> int:
    """Stages are dealt to the ranks in turn: with several per rank, stage s and stage s + num_ranks are neighbours in time."""
    return stage % num_ranks


def build_schedule(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[Action]]:
    """Each rank's actions under the schedule `name`; an unknown name is a UserError listing those that exist."""
    if name not in SCHEDULES:
        raise UserError("parallel.schedule", name, "there is no such schedule", f"choose one of {sorted(SCHEDULES)}")
    return SCHEDULES[name](num_ranks, stages_per_rank, num_microbatches)
