"""Counts bytes by category, and their peak."""

from collections import defaultdict
from collections.abc import Mapping

from costs.recorder import Effect
from parallel.memory import GATHERING
from parallel.pipeline.actions import Action


class Account:
    """Bytes that are allocated now, and their `peak`, also by category. `peak_action` is the action
    in which the peak occurred, or None if it was between actions or after the last."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.total = self.peak = 0
        self.action: Action | None = None
        self.peak_action: Action | None = None
        self.at_peak: dict[str, int] = {}

    def add(self, category: str, size: int) -> None:
        self.now[category] += size
        self.total += size
        self.reach({})

    def free(self, category: str, size: int) -> None:
        self.now[category] -= size
        self.total -= size

    def reach(self, more: Mapping[str, int]) -> None:
        """Update the peak for a moment at which these bytes are alive in addition."""
        height = sum(more.values())
        if self.total + height > self.peak:
            self.peak, self.peak_action = self.total + height, self.action
            self.at_peak = {c: self.now[c] + more.get(c, 0) for c in {**self.now, **more}}

    def apply(self, effect: Effect, buffer: int = 0) -> None:
        """Apply the effect of a recorded piece of work, beside a buffer of gathers."""
        self.add(GATHERING, buffer)
        self.reach(effect.at_height)
        for category, size in effect.changes.items():
            self.now[category] += size
            self.total += size
        self.free(GATHERING, buffer)
