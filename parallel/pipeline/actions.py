"""The vocabulary of pipeline schedules: what one rank does to one micro-batch on one stage. No
torch here.

A schedule is data: for each rank the list of its actions, in order. Where a stage lives follows
from whose list it is in. The checker, the simulator, the drawing and the runner all read these
lists and nothing else.

Code spells actions out; pictures, traces and messages have room for a letter, and print those of
torch.distributed.pipelining. In formulas the letter is the time of the action, B = I + W.

    F   FORWARD
    B   BACKWARD          both gradients at once
    I   BACKWARD_INPUT    the gradient of the stage's input
    W   BACKWARD_WEIGHT   the gradient of its weights, some time after I
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What is done; the value is its letter. A backward may be whole, or split in two: only its
    first half is waited for by the stage before (Qi et al. 2023, https://arxiv.org/abs/2401.10241,
    section 2, where I is called B)."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """`kind` of micro-batch `microbatch` on global stage `stage` (0 holds the embedding)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
Schedule = Sequence[Sequence[Action]]  # of each rank


def stage_ranks(schedule: Schedule) -> list[int]:
    """The rank of each stage, first to last.

    Raises:
        ValueError: a stage is on two ranks, or on none.
    """
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for stage in {action.stage for action in actions}:
            if stage in ranks:
                raise ValueError(f"stage {stage} is on rank {ranks[stage]} and on rank {rank}")
            ranks[stage] = rank
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"no rank has stage {min(set(range(max(ranks) + 1)) - set(ranks))}")
    return [ranks[stage] for stage in range(len(ranks))]


def num_microbatches(schedule: Schedule) -> int:
    return 1 + max(action.microbatch for actions in schedule for action in actions)


def splits_backward(schedule: Schedule) -> bool:
    """Whether some backward is split in two."""
    return any(action.kind is BACKWARD_INPUT for actions in schedule for action in actions)


def forward_only(ranks_of_stages: Sequence[int], num_microbatches: int) -> list[list[Action]]:
    """Evaluation: every micro-batch through every stage, each rank its stages in order (breadth
    first), no backward."""
    ranks: list[list[Action]] = [[] for _ in range(max(ranks_of_stages) + 1)]
    for stage, rank in enumerate(ranks_of_stages):
        ranks[rank] += [Action(FORWARD, stage, m) for m in range(num_microbatches)]
    return ranks
