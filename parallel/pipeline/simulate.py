"""Simulate a schedule without running it: when each rank runs each action. No torch here.

An action starts when its rank has finished the previous one and the inputs of the action have
arrived. Nothing else is modelled: lists of actions, one clock per rank, and messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.pipeline.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
    Schedule,
    num_microbatches,
    stage_ranks,
)


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


class Stuck(ValueError):
    """Ranks wait for each other forever."""


def simulate(schedule: Schedule, costs: Costs) -> list[list[Event]]:
    """Compute when each action starts and ends, for each rank.

    Raises:
        Stuck: no rank can continue; the message names the action at which each one waits.
    """
    where, m = stage_ranks(schedule), num_microbatches(schedule)
    last = len(where) - 1
    # When the result of each (stage, micro-batch) is ready on its own rank; None: not yet.
    forward: list[list[float | None]] = [[None] * m for _ in where]
    gradient: list[list[float | None]] = [[None] * m for _ in where]
    clock = [0.0] * len(schedule)
    position = [0] * len(schedule)
    timeline: list[list[Event]] = [[] for _ in schedule]
    ready = list(range(len(schedule)))
    # (is a gradient, stage, micro-batch) → the rank that waits for it
    waiting: dict[tuple[bool, int, int], int] = {}
    while ready:
        rank = ready.pop()
        actions, events, now = schedule[rank], timeline[rank], clock[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            kind, s, i = action
            # The result of another stage that it needs, as a key of `waiting`.
            source: tuple[bool, int, int] | None = None
            if kind is FORWARD:
                source = (False, s - 1, i) if s else None
            elif kind is not BACKWARD_WEIGHT:
                if forward[s][i] is None:
                    break  # its own forward comes later in this list: it waits forever
                source = (True, s + 1, i) if s < last else None
            elif gradient[s][i] is None:
                break
            start = now
            if source is not None:
                arrived = (gradient if source[0] else forward)[source[1]][i]
                if arrived is None:
                    waiting[source] = rank
                    break
                if where[source[1]] != rank:
                    arrived += costs.communication
                start = max(now, arrived)
            now = start + costs.of(kind, s)
            if kind is FORWARD and i == 0 and costs.weights_at:
                now = max(now, costs.weights_at[s])
            events.append(Event(action, start, now))
            position[rank] += 1
            if kind is FORWARD:
                forward[s][i] = now
                woken = waiting.pop((False, s, i), None)
            elif kind is not BACKWARD_WEIGHT:
                gradient[s][i] = now
                woken = waiting.pop((True, s, i), None)
            else:
                woken = None
            if woken is not None:
                ready.append(woken)
        clock[rank] = now
    left = [(r, schedule[r][at:]) for r, at in enumerate(position)]
    stuck = [f"rank {r} at {actions[0]}" for r, actions in left if actions]
    if stuck:
        raise Stuck(f"ranks cannot continue: {', '.join(stuck)}")
    return timeline
