"""Simulate a schedule without running it: when each rank runs each action. No torch here.

An action starts when its rank has finished the previous one and the inputs of the action have
arrived. Nothing else is modelled: lists of actions, one clock per rank, and messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Fault,
    Kind,
    Message,
    Schedule,
    need_of,
    result_of,
    stage_ranks,
)

# Of the same stage and micro-batch, what a rank must have run before.
AFTER = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}


@dataclass(frozen=True)
class Costs:
    """The seconds (or any other unit) that each kind of action takes, by stage, and that a message
    between two ranks takes."""

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    # from the end of an action to the arrival of its result on another rank
    communication: float = 0.0
    # when each stage has gathered its weights; its first forward cannot end earlier
    weights_at: Sequence[float] = ()

    @classmethod
    def equal(
        cls,
        num_stages: int,
        forward: float = 1,
        input_grad: float = 1,
        weight_grad: float = 1,
        communication: float = 0,
    ) -> "Costs":
        """The same costs for every stage."""
        n = num_stages
        return cls([forward] * n, [input_grad] * n, [weight_grad] * n, communication)

    def of(self, kind: Kind, stage: int) -> float:
        if kind is FORWARD:
            return self.forward[stage]
        if kind is BACKWARD_INPUT:
            return self.input_grad[stage]
        if kind is BACKWARD_WEIGHT:
            return self.weight_grad[stage]
        return self.input_grad[stage] + self.weight_grad[stage]


class Event(NamedTuple):
    """An action, from `start` to `end`."""

    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, costs: Costs) -> list[list[Event]]:
    """Compute when each action starts and ends, for each rank.

    Raises:
        Fault: no rank can continue; the message names the action at which each one waits.
    """
    where = stage_ranks(schedule)
    timeline: list[list[Event]] = [[] for _ in schedule]
    ran: set[Action] = set()
    made: dict[Message, float] = {}  # when each is ready on the rank that makes it
    waiting: dict[Message, int] = {}  # the rank that waits for it
    awake = list(range(len(schedule)))
    while awake:
        rank = awake.pop()
        actions, events = schedule[rank], timeline[rank]
        start = events[-1].end if events else 0.0
        while len(events) < len(actions):
            action = actions[len(events)]
            kind, stage, microbatch = action
            if kind in AFTER and (AFTER[kind], stage, microbatch) not in ran:
                break  # it comes later in this list: this rank waits forever
            need = need_of(action, len(where))
            if need is not None:
                if need not in made:
                    waiting[need] = rank
                    break
                on_the_way = costs.communication if where[need.sender] != rank else 0.0
                start = max(start, made[need] + on_the_way)
            end = start + costs.of(kind, stage)
            if kind is FORWARD and microbatch == 0 and costs.weights_at:
                end = max(end, costs.weights_at[stage])
            events.append(Event(action, start, end))
            ran.add(action)
            result = result_of(action, len(where))
            if result is not None:
                made[result] = end
                if result in waiting:
                    awake.append(waiting.pop(result))
            start = end
    left = [actions[len(events) :] for actions, events in zip(schedule, timeline, strict=True)]
    stuck = [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(left) if actions]
    if stuck:
        raise Fault(f"ranks cannot continue: {', '.join(stuck)}")
    return timeline
