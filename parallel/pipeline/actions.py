"""The vocabulary of pipeline schedules: what one rank does to one micro-batch on one stage. No
torch here.

A schedule is data: for each rank, the ordered list of its actions. A stage is on the rank whose
list contains its actions. The checker, the simulator, the drawings and the runner read only these
lists.

Code spells the kinds of actions out; pictures, traces and messages abbreviate them to the letters
of torch.distributed.pipelining. In formulas a letter is the time of the action; B = I + W.

    F   FORWARD
    B   BACKWARD          both gradients at once
    I   BACKWARD_INPUT    the gradient of the stage's input
    W   BACKWARD_WEIGHT   the gradients of its weights, at any time after I
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kind of an action; the value is its letter. A backward may be whole or split in two; the
    stage before waits only for the first half (Qi et al. 2023, https://arxiv.org/abs/2401.10241,
    section 2, where I is called B)."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """A `kind` of work on micro-batch `microbatch` by global stage `stage` (0: the first)."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
Schedule = Sequence[Sequence[Action]]  # one list per rank


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
    """The schedule of an evaluation, without backwards: each rank runs all micro-batches through
    its first stage, then through the next (breadth first)."""
    ranks: list[list[Action]] = [[] for _ in range(max(ranks_of_stages) + 1)]
    for stage, rank in enumerate(ranks_of_stages):
        ranks[rank] += [Action(FORWARD, stage, m) for m in range(num_microbatches)]
    return ranks
