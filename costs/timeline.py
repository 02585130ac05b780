"""The timeline of a step in a pipeline: its time, its bubble, and the activations that ranks hold.
No torch here."""

from dataclasses import dataclass
from itertools import accumulate

from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from parallel.pipeline.simulate import Event

NAMES = {  # in legends and traces
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "input gradient",
    BACKWARD_WEIGHT: "weight gradient",
}
MICROSECONDS = 1000.0  # of a trace, per unit of a measured timeline, a millisecond


@dataclass(frozen=True)
class Timeline:
    """When each rank ran each action: simulated, or measured (runtime/profiling/trace.py)."""

    ranks: list[list[Event]]

    @property
    def start(self) -> float:
        return min(events[0].start for events in self.ranks if events)

    @property
    def step_time(self) -> float:
        """The time from the start of the first action on any rank to the end of the last."""
        return max(events[-1].end for events in self.ranks if events) - self.start

    def busy(self, rank: int) -> float:
        return sum(event.end - event.start for event in self.ranks[rank])

    @property
    def bubble_fraction(self) -> float:
        """The part of the step, averaged over ranks, in which a rank is idle."""
        return 1 - sum(map(self.busy, range(len(self.ranks)))) / (len(self.ranks) * self.step_time)

    @property
    def bubble(self) -> float:
        """The bubble as papers define it: the time that a rank waits between its own first and last
        action, for the rank that waits longest.

        (Ranks that begin late also end late: if the optimizer step need not wait for all ranks,
        only this time is lost.)
        """
        return max(e[-1].end - e[0].start - self.busy(rank) for rank, e in enumerate(self.ranks))

    def peak_live(self, rank: int) -> int:
        """The most activations that a rank holds at once: one for each stage and micro-batch, from
        its forward to its weight gradient."""
        changes = (
            1 if event.action.kind is FORWARD else -(event.action.kind is not BACKWARD_INPUT)
            for event in self.ranks[rank]
        )
        return max(accumulate(changes), default=0)
