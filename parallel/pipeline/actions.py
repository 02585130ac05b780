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


class Fault(ValueError):
    """An error in a schedule or in the programs that it is lowered to."""


class Message(NamedTuple):
    """A tensor for another stage: the hidden states of a micro-batch for the next one, or their
    gradient for the one before."""

    is_gradient: bool
    stage: int  # the stage that needs it
    microbatch: int

    @property
    def sender(self) -> int:
        """The stage that makes it."""
        return self.stage + 1 if self.is_gradient else self.stage - 1


def stage_ranks(schedule: Schedule) -> list[int]:
    """The rank of each stage, first to last.

    Raises:
        Fault: a stage is on two ranks, or on none.
    """
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(schedule):
        for stage in {action.stage for action in actions}:
            if stage in ranks:
                raise Fault(f"stage {stage} is on rank {ranks[stage]} and on rank {rank}")
            ranks[stage] = rank
    if sorted(ranks) != list(range(len(ranks))):
        raise Fault(f"no rank has stage {min(set(range(max(ranks) + 1)) - set(ranks))}")
    return [ranks[stage] for stage in range(len(ranks))]


def result_of(action: Action, num_stages: int) -> Message | None:
    """The message that an action produces for another stage; None for a weight gradient, the loss,
    and the input gradient of the first stage."""
    if action.kind is BACKWARD_WEIGHT:
        return None
    forward = action.kind is FORWARD
    stage = action.stage + 1 if forward else action.stage - 1
    return Message(not forward, stage, action.microbatch) if 0 <= stage < num_stages else None


def need_of(action: Action, num_stages: int) -> Message | None:
    """The message that an action needs from another stage, if any."""
    if action.kind is BACKWARD_WEIGHT:
        return None
    need = Message(action.kind is not FORWARD, action.stage, action.microbatch)
    return need if 0 <= need.sender < num_stages else None


def forward_only(ranks_of_stages: Sequence[int], num_microbatches: int) -> list[list[Action]]:
    """The schedule of an evaluation, without backwards: each rank runs all micro-batches through
    its first stage, then through the next (breadth first)."""
    ranks: list[list[Action]] = [[] for _ in range(max(ranks_of_stages) + 1)]
    for stage, rank in enumerate(ranks_of_stages):
        ranks[rank] += [Action(FORWARD, stage, m) for m in range(num_microbatches)]
    return ranks
