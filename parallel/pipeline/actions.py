"""The vocabulary of pipeline schedules: what one rank does to one micro-batch on one stage. No
torch here.

A schedule is data: for each rank the list of its actions, in order. Where a stage lives follows
from whose list it is in. The checker, the simulator, the drawing and the runner all read these
lists and nothing else.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What is done. A backward may be whole, or split in two: only its first half is waited for by
    the stage before (Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 2, where I is called
    B)."""

    FORWARD = "F"
    BACKWARD = "B"  # both gradients at once
    INPUT_GRAD = "I"  # the gradient of the stage's input
    WEIGHT_GRAD = "W"  # the gradient of its weights, some time after I


class Action(NamedTuple):
    """`kind` of micro-batch `microbatch` on global stage `stage` (0 holds the embedding)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741 - the letters of the papers
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
    return any(action.kind is I for actions in schedule for action in actions)


def forward_only(ranks_of_stages: Sequence[int], num_microbatches: int) -> list[list[Action]]:
    """Evaluation: every micro-batch through every stage, each rank its stages in order (breadth
    first), no backward."""
    num_ranks = max(ranks_of_stages) + 1
    return [
        [
            Action(F, s, m)
            for s, owner in enumerate(ranks_of_stages)
            if owner == rank
            for m in range(num_microbatches)
        ]
        for rank in range(num_ranks)
    ]
